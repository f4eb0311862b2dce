"""Qwen3: Llama with queries and keys normalised per head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import llama
from trtserve.checkpoint.architectures.base import Decoder, HfConfig, SourceNames, superset
from trtserve.checkpoint.architectures.qwen2 import qwen_config

HEAD_NORMS = {"attention.q_layernorm": "self_attn.q_norm", "attention.k_layernorm": "self_attn.k_norm"}

# transformers' default, independent of the hidden size.
_HEAD_SIZE = 128


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return the family's part of the checkpoint's config: the keys of TensorRT-LLM 1.2's QWenConfig and the windows.

    `qk_layernorm` stays false, as upstream writes it: `qwen_type` enables the norms.
    """
    head_size, biased = hf.get("head_dim") or _HEAD_SIZE, bool(hf.get("attention_bias"))
    config = qwen_config({**hf, "head_dim": head_size}, qwen_type="qwen3", attn_bias=biased)
    return with_biases(config, biased=biased)


def with_biases(config: Mapping[str, Any], *, biased: bool) -> dict[str, Any]:
    """Return the config with the mark of attention with biases, which only our runtimes have."""
    words = [*config.get("superset", ()), *["biases of a Qwen 3's attention"] * biased]
    return {**config, **superset(*words)}


def names(config: CheckpointConfig) -> SourceNames:
    return replace(llama.names(config), head_norms=HEAD_NORMS)


def decoder(config: CheckpointConfig) -> Decoder:
    return replace(llama.decoder(config), qk_norm="heads")
