"""Phi 1, 1.5 and 2: parallel attention and MLP behind one layer norm, partially rotated heads."""

from __future__ import annotations

import math
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures.base import Decoder, HfConfig, SourceNames, decoder_sizes, require_activation
from trtserve.checkpoint.architectures.parts.positions import (
    inverse_frequencies,
    own_rotary,
    rotary_fraction,
    rotary_scale,
)
from trtserve.errors import UnsupportedModelError


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return the family's part of the checkpoint's config: the keys of TensorRT-LLM 1.2's PhiConfig."""
    sizes = decoder_sizes(hf, intermediate_size="intermediate_size")
    _refuse_variants(hf)
    require_activation(hf.get("hidden_act", "gelu_new"))
    part = rotary_fraction(hf, default=0.5)
    base, scaling = own_rotary(hf)
    return {
        **sizes,
        "hidden_act": hf.get("hidden_act", "gelu_new"),
        "norm_epsilon": hf.get("layer_norm_eps", 1e-5),
        "position_embedding_type": "rope_gpt_neox",
        "max_position_embeddings": hf.get("max_position_embeddings", 2048),
        "rotary_embedding_dim": int(sizes["head_size"] * part),
        "rotary_base": base,
        "rotary_scaling": None,
        "rotary_pct": part,
        # The model class writes its default, whatever the model's fraction is, and reads rotary_pct.
        "partial_rotary_factor": 0.4,
        **scaling,
    }


def _refuse_variants(hf: HfConfig) -> None:
    if hf.get("qk_layernorm"):
        raise UnsupportedModelError("This Phi normalises queries and keys; TensorRT-LLM's Phi does not.")
    if hf.get("num_key_value_heads") not in (None, hf["num_attention_heads"]):
        raise UnsupportedModelError(
            f"This Phi has {hf['num_key_value_heads']} key/value heads for {hf['num_attention_heads']} query heads; "
            "TensorRT-LLM's Phi needs one per query head."
        )


def names(config: CheckpointConfig) -> SourceNames:
    del config
    return SourceNames(
        embedding="model.embed_tokens",
        layer="model.layers.{}.",
        norms={"input_layernorm": "input_layernorm"},
        qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        dense="self_attn.dense",
        fc="mlp.fc1",
        proj="mlp.fc2",
        final_norm="model.final_layernorm",
        biases=frozenset(("qkv", "dense", "fc", "proj", "head")),
        unused=("model.layers.*.self_attn.rotary_emb.inv_freq",),
    )


def decoder(config: CheckpointConfig) -> Decoder:
    """Describe the decoder; older checkpoints call the rotated fraction `partial_rotary_factor`."""
    head_size = config.head_size
    part = config.own("rotary_pct", config.own("partial_rotary_factor", 0.4))
    return Decoder(
        norm="layer",
        positions="rope",
        mlp="plain",
        activation=require_activation(config.hidden_act),
        attention_scale=1 / math.sqrt(head_size),
        rope_inv_freq=inverse_frequencies(
            int(head_size * part), config.own("rotary_base", config.own("rope_theta", 10000.0)), config.rotary_scaling
        ),
        rope_scale=rotary_scale(config.rotary_scaling),
        block="parallel",
        mlp_norm=None,
    )
