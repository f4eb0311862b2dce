"""GLM-4 and GLM-4-0414: a part of each head is rotated, in neighbouring pairs; 0414 has norms on both sides."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import llama
from trtserve.checkpoint.architectures.base import Decoder, HfConfig, SourceNames

_SANDWICH = {
    "input_layernorm": "input_layernorm",
    "post_layernorm": "post_self_attn_layernorm",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "post_mlp_layernorm",
}
_DEFAULTS = {
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-07,
}


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
