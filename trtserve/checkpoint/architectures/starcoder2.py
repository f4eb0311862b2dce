"""StarCoder2: layer norms, rotary positions, grouped-query attention, plain MLP; TensorRT-LLM treats it as a GPT."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures.base import Decoder, HfConfig, Target, dense_moe, require_activation, required
from trtserve.checkpoint.architectures.parts.named_tensors import SourceNames, named_targets
from trtserve.checkpoint.architectures.parts.positions import (
    attention_windows,
    inverse_frequencies,
    uniform_window,
    unscaled_base,
)

BASE_PREFIX = "model."
TIED = True

_NAMES = SourceNames(
    embedding="model.embed_tokens",
    layer="model.layers.{}.",
    norms={"input_layernorm": "input_layernorm", "post_layernorm": "post_attention_layernorm"},
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    dense="self_attn.o_proj",
    fc="mlp.c_fc",
    proj="mlp.c_proj",
    head="lm_head",
    final_norm="model.norm",
    biases=frozenset(("qkv", "dense", "fc", "proj")),
)


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return the family's part of the checkpoint's config: the keys of TensorRT-LLM 1.2's GPTConfig and the window.

    `gelu`, which upstream writes for every StarCoder2, means the tanh approximation.
    """
    sizes = required(hf, "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    require_activation(hf.get("hidden_act", "gelu_pytorch_tanh"), "gelu_tanh")
    longest = hf.get("max_position_embeddings", 4096)
    return {
        **sizes,
        "num_key_value_heads": hf.get("num_key_value_heads") or sizes["num_attention_heads"],
        "head_size": sizes["hidden_size"] // sizes["num_attention_heads"],
        "hidden_act": "gelu",
        "norm_epsilon": hf.get("norm_epsilon", 1e-5),
        "position_embedding_type": "rope_gpt_neox",
        "max_position_embeddings": longest,
        "rotary_embedding_dim": sizes["hidden_size"] // sizes["num_attention_heads"],
        "bias": bool(hf.get("use_bias", True)),
        "rotary_base": unscaled_base(hf),
        **_constants(),
        **uniform_window(hf, hf.get("sliding_window")),
    }


def _constants() -> dict[str, Any]:
    """Return the GPTConfig keys that are equal for all models of this family."""
    return {
        "gpt_variant": "starcoder2",
        "q_scaling": 1,
        "embedding_scale": None,
        "apply_query_key_layer_scaling": False,
        "rotary_pct": 1.0,
        "rotary_scaling": None,
        "inner_layernorm": False,
        "norm_before_bmm1": False,
        "moe": dense_moe(normalization_mode=1),
    }


def targets(config: CheckpointConfig) -> list[Target]:
    """Return every tensor of the unsharded checkpoint, in file order."""
    names = _NAMES if config.own("bias", True) else replace(_NAMES, biases=frozenset())
    return named_targets(config, names, tied=config.own("tie_word_embeddings", TIED))


def unused(config: CheckpointConfig) -> Sequence[str]:
    """Return position tables of old exports, and the head when embeddings are tied."""
    patterns = ["model.layers.*.self_attn.rotary_emb.inv_freq"]
    return [*patterns, "lm_head.weight"] if config.own("tie_word_embeddings", TIED) else patterns


def decoder(config: CheckpointConfig) -> Decoder:
    """Describe the decoder from the checkpoint's config."""
    bias = config.own("bias", True)
    return Decoder(
        norm="layer",
        positions="rope",
        mlp="plain",
        activation="gelu_tanh",
        attention_bias=bias,
        dense_bias=bias,
        mlp_bias=bias,
        attention_scale=1 / (config.own("q_scaling", 1.0) * math.sqrt(config.head_size)),
        rope_inv_freq=inverse_frequencies(config.head_size, config.rotary_base, None),
        windows=attention_windows(config),
    )
