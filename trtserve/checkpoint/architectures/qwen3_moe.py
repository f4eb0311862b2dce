"""Qwen3-MoE: Qwen3 with experts instead of the MLP."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import qwen3
from trtserve.checkpoint.architectures.base import Decoder, HfConfig, Target
from trtserve.checkpoint.architectures.llama import unused
from trtserve.checkpoint.architectures.parts.expert_tensors import experts_of
from trtserve.checkpoint.architectures.parts.llama_tensors import Parts, llama_targets
from trtserve.checkpoint.architectures.qwen2_moe import NAMES, qwen_moe_config
from trtserve.errors import UnsupportedModelError

__all__ = ["BASE_PREFIX", "TIED", "checkpoint_config", "decoder", "targets", "unused"]

BASE_PREFIX = "model."
TIED = False


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return the family's part of the checkpoint's config: keys of TensorRT-LLM 1.2's QWenConfig and the window."""
    if hf.get("attention_bias"):
        raise UnsupportedModelError("This Qwen3 sets attention_bias, which a TensorRT-LLM checkpoint cannot express.")
    window = hf.get("sliding_window", 4096) if hf.get("use_sliding_window") else None
    return qwen_moe_config(hf, qwen_type="qwen3_moe", attn_bias=False, shared_size=0, windows=[window])


def targets(config: CheckpointConfig) -> list[Target]:
    """Return every tensor of the unsharded checkpoint, in file order."""
    return llama_targets(config, Parts(head_norms=True, experts=NAMES))


def decoder(config: CheckpointConfig) -> Decoder:
    """Describe the decoder from the checkpoint's config."""
    return replace(qwen3.decoder(config.changed(hidden_act="silu")), mlp="experts", experts=experts_of(config))
