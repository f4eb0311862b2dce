"""Hunyuan dense (0.5B to 7B): Llama whose queries and keys are normalised after rotation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import llama
from trtserve.checkpoint.architectures.base import Decoder, HfConfig, SourceNames
from trtserve.checkpoint.architectures.parts.positions import rope_parameters, rotary, scaling_type

_HEAD_NORMS = {
    "attention.q_layernorm": "self_attn.query_layernorm",
    "attention.k_layernorm": "self_attn.key_layernorm",
}


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return Llama's config. Scaling "dynamic" with an `alpha` means a larger base, whatever the length."""
    scaling = rope_parameters(hf)
    if scaling_type(scaling) == "dynamic" and scaling.get("alpha"):
        base, _ = rotary({**hf, "rope_scaling": None, "rope_parameters": {"rope_theta": scaling.get("rope_theta")}})
        size = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
        base *= float(scaling["alpha"]) ** (size / max(size - 2, 1))
        hf = {**hf, "rope_scaling": None, "rope_parameters": {"rope_theta": base}}
    return llama.own_config({**hf, "mlp_bias": False}, "Hunyuan", defaults={"rms_norm_eps": 1e-5})


def names(config: CheckpointConfig) -> SourceNames:
    return replace(llama.names(config), head_norms=_HEAD_NORMS)


def decoder(config: CheckpointConfig) -> Decoder:
    return replace(llama.decoder(config), qk_norm="rotated")
