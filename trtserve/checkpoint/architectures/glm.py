"""GLM-4, dense and with experts, and Solar Open."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import llama
from trtserve.checkpoint.architectures.base import Decoder, HfConfig, SourceNames, superset
from trtserve.checkpoint.architectures.parts.expert_tensors import DEEPSEEK_EXPERTS, deepseek_experts

# GLM-4 and GLM-4-0414: a part of each head is rotated, in neighbouring pairs; 0414 has norms on both sides.

_SANDWICH = {
    "input_layernorm": "input_layernorm",
    "post_layernorm": "post_self_attn_layernorm",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "post_mlp_layernorm",
}
_DEFAULTS = {
    "partial_rotary_factor": 0.5, "attention_bias": True, "max_position_embeddings": 131072,
    "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-07,
}  # fmt: skip


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return Llama's config; biases are those of queries, keys and values."""
    both = hf["architectures"][0] == "Glm4ForCausalLM"
    config = llama.own_config(
        {**hf, "mlp_bias": False}, "GLM-4-0414" if both else "GLM-4", defaults=_DEFAULTS, partial=True
    )
    return config | {"inter_layernorms": both}


def names(config: CheckpointConfig) -> SourceNames:
    return replace(
        llama.NAMES,
        norms=_SANDWICH if config.own("inter_layernorms", False) else llama.NAMES.norms,
        biases=frozenset({"qkv"} if config.own("attn_bias", True) else ()),
        fc="mlp.gate_up_proj",
        gate=None,
        gate_up=True,
    )


def decoder(config: CheckpointConfig) -> Decoder:
    return replace(
        llama.decoder(config),
        mlp="fused",
        block="sandwich" if config.own("inter_layernorms", False) else "sequential",
        rope_interleaved=True,
    )


# GLM-4.5 – 4.7 and Solar Open: sigmoid routers with corrections, a shared expert; GLM rotates a part of each head.

# transformers' defaults for absent keys. All layers of Solar Open have experts.
_GLM: dict[str, Any] = {"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5}
_SOLAR: dict[str, Any] = {
    "head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "n_routed_experts": 128,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 1280,
}  # fmt: skip


def glm4_moe_checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return Llama's sizes, the experts, and what the attention has."""
    if solar := hf["architectures"][0] == "SolarOpenForCausalLM":
        hf = {**_SOLAR, **hf, "first_k_dense_replace": 0, "use_qk_norm": False}
        hf.setdefault("intermediate_size", hf["moe_intermediate_size"])
    else:
        hf = {**_GLM, **hf}
    common = llama.common_config(hf, longest=131072, partial=not solar)
    return {
        **common,
        **deepseek_experts(hf),
        "attn_bias": bool(hf.get("attention_bias", False)),
        "use_qk_norm": bool(hf.get("use_qk_norm", False)),
        **superset(*common.get("superset", ()), "sigmoid routers"),
    }


def glm4_moe_names(config: CheckpointConfig) -> SourceNames:
    """Return the names of the source tensors; the layer after the last one predicts more tokens and is not used."""
    return replace(
        llama.NAMES,
        biases=frozenset({"qkv"} if config.own("attn_bias", False) else ()),
        head_norms=llama.HEAD_NORMS if config.own("use_qk_norm", False) else {},
        experts=DEEPSEEK_EXPERTS,
        unused=(*llama.NAMES.unused, f"model.layers.{config.num_hidden_layers}.*"),
    )


def glm4_moe_decoder(config: CheckpointConfig) -> Decoder:
    return replace(llama.expert_decoder(config), qk_norm="heads" if config.own("use_qk_norm", False) else None)
