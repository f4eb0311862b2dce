"""Hunyuan 3: Llama with normalised queries and keys, and DeepSeek V3's experts without groups."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import llama
from trtserve.checkpoint.architectures.base import Decoder, HfConfig, SourceNames
from trtserve.checkpoint.architectures.glm4_moe import EXPERTS
from trtserve.checkpoint.architectures.parts.expert_tensors import deepseek_experts, layers_without_experts
from trtserve.checkpoint.architectures.qwen3 import HEAD_NORMS
from trtserve.errors import UnsupportedModelError

# transformers' defaults for absent keys.
_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "rope_theta": 11158840.0,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "moe_intermediate_size": 1536,
    "router_scaling_factor": 2.826,
}


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return Llama's config and the experts, which all layers but the first have unless `mlp_layer_types` says more."""
    hf = {**_DEFAULTS, **hf}
    if hf.get("mlp_bias"):
        raise UnsupportedModelError("config.json has mlp_bias = true; expected a Hunyuan 3 without these biases.")
    experts = deepseek_experts(
        {
            **hf,
            "n_routed_experts": hf.get("num_experts") or hf.get("num_local_experts", 192),
            "n_shared_experts": hf["num_shared_experts"],
            "routed_scaling_factor": hf["router_scaling_factor"],
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "scoring_func": "sigmoid",
        }
    )
    return {**llama.own_config(hf, "Hunyuan 3", defaults={}, windows=()), **experts, **layers_without_experts(hf)}


def names(config: CheckpointConfig) -> SourceNames:
    """Return the names of the source tensors; the layer after the last one predicts more tokens and is not used."""
    plain = llama.names(config)
    shared = "mlp.shared_mlp" if config.moe_shared_expert_intermediate_size else None
    return replace(
        plain,
        head_norms=HEAD_NORMS,
        experts=replace(EXPERTS, router="mlp.router.gate", correction="mlp.expert_bias", shared=shared),
        unused=(*plain.unused, f"model.layers.{config.num_hidden_layers}.*"),
    )


def decoder(config: CheckpointConfig) -> Decoder:
    return replace(llama.expert_decoder(config), qk_norm="heads")
