"""Mistral: a Llama with a sliding window."""

from __future__ import annotations

from typing import Any

from trtserve.architectures import llama
from trtserve.architectures.base import HfConfig, runtime_windows
from trtserve.architectures.llama import decoder, targets, unused

__all__ = ["BASE_PREFIX", "HF_ARCHITECTURES", "checkpoint_config", "decoder", "targets", "unused"]

HF_ARCHITECTURES: tuple[str, ...] = ("MistralForCausalLM",)
BASE_PREFIX = llama.BASE_PREFIX

# transformers' default of an absent key; null in the config switches the window off.
_DEFAULT_WINDOW = 4096


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Llama's config; the window goes where TensorRT-LLM's runtime looks for it, a checkpoint has no other place."""
    config = llama.checkpoint_config(hf)
    window = hf.get("sliding_window", _DEFAULT_WINDOW)
    return config | {"runtime_defaults": runtime_windows([window], config["max_position_embeddings"])}
