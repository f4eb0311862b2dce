"""Mixtral: Mistral with experts instead of the MLP."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import llama
from trtserve.checkpoint.architectures.base import ExpertNames, HfConfig, SourceNames, moe_object, require_activation
from trtserve.checkpoint.architectures.parts.expert_tensors import RENORMALIZED, expert_counts
from trtserve.checkpoint.architectures.parts.positions import uniform_window

EXPERTS = ExpertNames(
    router="block_sparse_moe.gate",
    gate="block_sparse_moe.experts.{}.w1",
    up="block_sparse_moe.experts.{}.w3",
    down="block_sparse_moe.experts.{}.w2",
)
# transformers' defaults for absent keys that differ from Llama's.
_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "max_position_embeddings": 131072,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
decoder = llama.expert_decoder


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return Llama's config, the experts and the window."""
    hf = {**_DEFAULTS, **hf}
    require_activation(hf.get("hidden_act", "silu"), "silu")
    experts, chosen = expert_counts(hf, "num_local_experts")
    return {
        **llama.checkpoint_config({**hf, "layer_types": None}),
        "hidden_act": "swiglu",
        "moe": moe_object(num_experts=experts, top_k=chosen, normalization_mode=RENORMALIZED),
        **uniform_window(hf, hf.get("sliding_window")),
    }


def names(config: CheckpointConfig) -> SourceNames:
    del config
    return replace(llama.NAMES, experts=EXPERTS)
