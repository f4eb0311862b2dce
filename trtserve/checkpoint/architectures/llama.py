"""Llama 1 – 3.x: RMS norms, rotary positions, grouped-query attention, gated MLP."""

from __future__ import annotations

import math
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures.base import Decoder, HfConfig, Target, dense_moe, require_activation, required
from trtserve.checkpoint.architectures.parts.llama_tensors import Parts, llama_targets
from trtserve.checkpoint.architectures.parts.llama_tensors import llama_unused as unused
from trtserve.checkpoint.architectures.parts.positions import (
    attention_windows,
    inverse_frequencies,
    require_whole_heads,
    rotary,
    uniform_window,
)

__all__ = ["BASE_PREFIX", "TIED", "checkpoint_config", "decoder", "targets", "unused"]

BASE_PREFIX = "model."
TIED = False


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return the family's part of the checkpoint's config: the keys of TensorRT-LLM 1.2's LLaMAConfig."""
    sizes = required(hf, "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    heads = sizes["num_attention_heads"]
    head_size = hf.get("head_dim") or sizes["hidden_size"] // heads
    base, scaling = rotary(hf)
    require_whole_heads(hf)
    require_activation(hf.get("hidden_act", "silu"))
    return {
        **sizes,
        "num_key_value_heads": hf.get("num_key_value_heads") or heads,
        "head_size": head_size,
        "hidden_act": hf.get("hidden_act", "silu"),
        "norm_epsilon": hf.get("rms_norm_eps", 1e-6),
        "position_embedding_type": "rope_gpt_neox",
        "max_position_embeddings": hf.get("max_position_embeddings", 2048),
        "rotary_embedding_dim": head_size,
        "rotary_base": base,
        "rotary_scaling": scaling,
        "attn_bias": bool(hf.get("attention_bias", False)),
        "mlp_bias": bool(hf.get("mlp_bias", False)),
        "tie_word_embeddings": bool(hf.get("tie_word_embeddings", False)),
        **_constants(),
        **uniform_window(hf, None),
    }


def _constants() -> dict[str, Any]:
    """Return the LLaMAConfig keys that are equal for all models of this family."""
    return {
        "residual_mlp": False,
        "disable_weight_only_quant_plugin": False,
        "moe": dense_moe(normalization_mode=None),
        "remove_duplicated_kv_heads": False,
        "fc_after_embed": False,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "layer_idx_offset": 0,
        "embedding_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "output_multiplier_scale": 1.0,
        "has_partial_lora_mask": False,
    }


def targets(config: CheckpointConfig) -> list[Target]:
    """Return every tensor of the unsharded checkpoint, in file order."""
    bias = config.own("attn_bias", False)
    return llama_targets(config, Parts(qkv_bias=bias, dense_bias=bias, mlp_bias=config.own("mlp_bias", False)))


def decoder(config: CheckpointConfig) -> Decoder:
    """Describe the decoder from the checkpoint's config."""
    return Decoder(
        norm="rms",
        positions="rope",
        mlp="gated",
        activation=require_activation(config.hidden_act),
        attention_bias=config.own("attn_bias", False),
        dense_bias=config.own("attn_bias", False),
        mlp_bias=config.own("mlp_bias", False),
        attention_scale=1 / math.sqrt(config.head_size),
        rope_inv_freq=inverse_frequencies(config.head_size, config.rotary_base, config.rotary_scaling),
        windows=attention_windows(config),
    )
