"""Qwen3-MoE: Qwen3 with experts instead of the MLP."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import llama, qwen3
from trtserve.checkpoint.architectures.base import Decoder, HfConfig, SourceNames
from trtserve.checkpoint.architectures.qwen2_moe import EXPERTS, qwen_moe_config


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return the family's part of the checkpoint's config: keys of TensorRT-LLM 1.2's QWenConfig and the window."""
    window = hf.get("sliding_window", 4096) if hf.get("use_sliding_window") else None
    biased = bool(hf.get("attention_bias"))
    config = qwen_moe_config(hf, qwen_type="qwen3_moe", attn_bias=biased, shared_size=0, windows=[window])
    return qwen3.with_biases(config, biased=biased)


def names(config: CheckpointConfig) -> SourceNames:
    return replace(qwen3.names(config), experts=EXPERTS)


def decoder(config: CheckpointConfig) -> Decoder:
    return replace(llama.expert_decoder(config), qk_norm="heads")
