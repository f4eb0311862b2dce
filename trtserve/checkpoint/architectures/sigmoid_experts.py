"""Families that are Llama with experts behind sigmoid routers: Trinity, dots.llm1, MiniMax M2."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import llama
from trtserve.checkpoint.architectures.base import Decoder, HfConfig, SourceNames, moe_object, required, superset
from trtserve.checkpoint.architectures.mistral import MIXTRAL_EXPERTS
from trtserve.checkpoint.architectures.parts.expert_tensors import (
    DEEPSEEK_EXPERTS,
    RENORMALIZED,
    deepseek_experts,
    expert_counts,
)
from trtserve.checkpoint.architectures.parts.positions import attention_kinds, window_keys, windows_of

# Arcee's Trinity (AFMoE): gated attention, norms on both sides, sigmoid routers; only layers with a window rotate.

_NORMS = {
    "input_layernorm": "input_layernorm",
    "post_layernorm": "post_attention_layernorm",
    "pre_feedforward_layernorm": "pre_mlp_layernorm",
    "post_feedforward_layernorm": "post_mlp_layernorm",
}
# transformers' defaults for absent keys.
_AFMOE: dict[str, Any] = {
    "head_dim": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 16384, "moe_intermediate_size": 1408,
    "num_dense_layers": 1, "num_experts": 64, "num_experts_per_tok": 6, "num_shared_experts": 2, "route_scale": 1.0,
    "global_attn_every_n_layers": 4, "sliding_window": 1024,
}  # fmt: skip
# DeepSeek V3's keys for these.
_RENAMED = {
    "n_routed_experts": "num_experts",
    "n_shared_experts": "num_shared_experts",
    "routed_scaling_factor": "route_scale",
    "first_k_dense_replace": "num_dense_layers",
}


def afmoe_checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return Llama's config, the windows, the experts, and whether embeddings are scaled."""
    hf = {**_AFMOE, **hf}
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


def afmoe_names(config: CheckpointConfig) -> SourceNames:
    shared = DEEPSEEK_EXPERTS.shared if config.moe_shared_expert_intermediate_size else None
    return replace(
        llama.names(config),
        norms=_NORMS,
        head_norms=llama.HEAD_NORMS,
        attention_gate="self_attn.gate_proj",
        experts=replace(DEEPSEEK_EXPERTS, router="mlp.router.gate", shared=shared, correction="mlp.expert_bias"),
    )


def afmoe_decoder(config: CheckpointConfig) -> Decoder:
    return replace(
        llama.expert_decoder(config),
        block="sandwich",
        qk_norm="heads",
        attention_gate=True,
        embedding_scale=config.own("embedding_multiplier", 1.0),
    )


# dots.llm1: the attention of Qwen 3 with the experts of DeepSeek V3.


def dots1_checkpoint_config(hf: HfConfig) -> dict[str, Any]:
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


def dots1_names(config: CheckpointConfig) -> SourceNames:
    shared = DEEPSEEK_EXPERTS.shared if config.moe_shared_expert_intermediate_size else None
    return replace(llama.names(config), head_norms=llama.HEAD_NORMS, experts=replace(DEEPSEEK_EXPERTS, shared=shared))


dots1_decoder = llama.decoder_with(experts=True, qk_norm="heads")


# MiniMax M2: sigmoid routers with corrections, norms over all heads of queries and keys, half of each head rotated.

# transformers' defaults for absent keys that differ from Llama's.
_MINIMAX_M2: dict[str, Any] = {
    "head_dim": 128, "num_key_value_heads": 8, "rope_theta": 5e6, "num_local_experts": 256, "num_experts_per_tok": 8,
}  # fmt: skip


def minimax_m2_checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return Llama's sizes and the experts."""
    hf = {**_MINIMAX_M2, **hf}
    if hf.get("rotary_dim") is not None:  # what published models say instead of a fraction
        required(hf, "head_dim")
        hf = {"partial_rotary_factor": hf["rotary_dim"] / hf["head_dim"], **hf}
    experts, chosen = expert_counts(hf, "num_local_experts")
    common = llama.common_config(hf, longest=196608, partial=True)
    return {
        **common,
        "moe": moe_object(num_experts=experts, top_k=chosen, normalization_mode=RENORMALIZED),
        "scoring_func": "sigmoid",
        **superset(*common.get("superset", ()), "sigmoid routers", "norms over all heads"),
    }


minimax_m2_names = replace(
    llama.NAMES,
    head_norms=llama.HEAD_NORMS,
    head_norm_weights="row",
    experts=replace(MIXTRAL_EXPERTS, correction="block_sparse_moe.e_score_correction_bias"),
)
minimax_m2_decoder = llama.decoder_with(experts=True, qk_norm="all")
