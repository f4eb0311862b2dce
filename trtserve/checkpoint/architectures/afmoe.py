"""Arcee's Trinity (AFMoE): gated attention, norms on both sides, sigmoid routers; only layers with a window rotate."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import llama
from trtserve.checkpoint.architectures.base import Decoder, HfConfig, SourceNames, required
from trtserve.checkpoint.architectures.glm4_moe import EXPERTS
from trtserve.checkpoint.architectures.parts.expert_tensors import deepseek_experts
from trtserve.checkpoint.architectures.parts.positions import attention_kinds, windows_of
from trtserve.checkpoint.architectures.qwen3 import HEAD_NORMS

_NORMS = {
    "input_layernorm": "input_layernorm",
    "post_layernorm": "post_attention_layernorm",
    "pre_feedforward_layernorm": "pre_mlp_layernorm",
    "post_feedforward_layernorm": "post_mlp_layernorm",
}
# transformers' defaults for absent keys.
_DEFAULTS: dict[str, Any] = {
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 16384,
    "moe_intermediate_size": 1408,
    "num_dense_layers": 1,
    "num_experts": 64,
    "num_experts_per_tok": 6,
    "num_shared_experts": 2,
    "route_scale": 1.0,
    "global_attn_every_n_layers": 4,
    "sliding_window": 1024,
}
# DeepSeek V3's keys for these.
_RENAMED = {
    "n_routed_experts": "num_experts",
    "n_shared_experts": "num_shared_experts",
    "routed_scaling_factor": "route_scale",
    "first_k_dense_replace": "num_dense_layers",
}


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return Llama's config, the windows, the experts, and whether embeddings are scaled."""
    hf = {**_DEFAULTS, **hf}
    every = required(hf, "global_attn_every_n_layers")["global_attn_every_n_layers"]
    kinds = attention_kinds(hf, lambda layer: (layer + 1) % every)
    windows = windows_of(kinds, hf["sliding_window"])
    renamed = {ours: hf[theirs] for ours, theirs in _RENAMED.items()}
    one_group = {"n_group": 1, "topk_group": 1, "norm_topk_prob": True, "scoring_func": "sigmoid"}
    return {
        **llama.own_config({**hf, "mlp_bias": False}, "Trinity", defaults={}, windows=windows),
        **deepseek_experts({**hf, **renamed, **one_group}),
        "unrotated_layers": [kind == "full_attention" for kind in kinds],
        "embedding_multiplier": math.sqrt(hf["hidden_size"]) if hf.get("mup_enabled") else 1.0,
    }


def names(config: CheckpointConfig) -> SourceNames:
    shared = EXPERTS.shared if config.moe_shared_expert_intermediate_size else None
    return replace(
        llama.names(config),
        norms=_NORMS,
        head_norms=HEAD_NORMS,
        attention_gate="self_attn.gate_proj",
        experts=replace(EXPERTS, router="mlp.router.gate", shared=shared, correction="mlp.expert_bias"),
    )


def decoder(config: CheckpointConfig) -> Decoder:
    return replace(
        llama.expert_decoder(config),
        block="sandwich",
        qk_norm="heads",
        attention_gate=True,
        embedding_scale=config.own("embedding_multiplier", 1.0),
    )
