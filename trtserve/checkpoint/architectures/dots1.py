"""dots.llm1: the attention of Qwen 3 with the experts of DeepSeek V3."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import llama
from trtserve.checkpoint.architectures.base import Decoder, HfConfig, SourceNames, superset
from trtserve.checkpoint.architectures.glm4_moe import EXPERTS
from trtserve.checkpoint.architectures.parts.expert_tensors import deepseek_experts
from trtserve.checkpoint.architectures.parts.positions import attention_kinds, window_keys, windows_of
from trtserve.checkpoint.architectures.qwen3 import HEAD_NORMS


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return Llama's sizes, the experts and the windows, from layer `max_window_layers` on."""
    window, first = hf.get("sliding_window", 4096), hf.get("max_window_layers", 62)
    common = llama.common_config(hf, longest=2048)
    kinds = attention_kinds(hf, lambda layer: layer >= first)
    return {
        **common,
        **deepseek_experts({"norm_topk_prob": False, "first_k_dense_replace": 0, **hf}),
        "attn_bias": bool(hf.get("attention_bias", False)),
        **window_keys(windows_of(kinds, window)),
        **superset(*common.get("superset", ()), "sigmoid routers"),
    }


def names(config: CheckpointConfig) -> SourceNames:
    shared = EXPERTS.shared if config.moe_shared_expert_intermediate_size else None
    return replace(llama.names(config), head_norms=HEAD_NORMS, experts=replace(EXPERTS, shared=shared))


def decoder(config: CheckpointConfig) -> Decoder:
    return replace(llama.expert_decoder(config), qk_norm="heads")
