"""GPT-NeoX and Pythia: parallel attention and MLP with a layer norm each, partially rotated heads."""

from __future__ import annotations

import math
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures.base import (
    Decoder,
    HfConfig,
    Part,
    SourceNames,
    decoder_sizes,
    require_activation,
    superset,
)
from trtserve.checkpoint.architectures.parts.positions import (
    inverse_frequencies,
    own_rotary,
    rotary_fraction,
    rotary_scale,
)

_SWITCHES = ("use_parallel_residual", "attention_bias")


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return the family's part of the checkpoint's config: the keys of TensorRT-LLM 1.2's converter and loader."""
    sizes = decoder_sizes(hf, intermediate_size="intermediate_size")
    disabled = [key for key in _SWITCHES if not hf.get(key, True)]
    require_activation(hf.get("hidden_act", "gelu"), "gelu", "gelu_tanh", "relu")
    # transformers goes by these keys alone, unless the rotary parameters say more.
    own = {**hf, "rope_theta": hf.get("rotary_emb_base"), "partial_rotary_factor": hf.get("rotary_pct")}
    part = rotary_fraction(own, default=0.25)
    base, scaling = own_rotary(own)
    return {
        **sizes,
        "hidden_act": hf.get("hidden_act", "gelu"),
        "norm_epsilon": hf.get("layer_norm_eps", 1e-5),
        "position_embedding_type": "rope_gpt_neox",
        "max_position_embeddings": hf.get("max_position_embeddings", 2048),
        "rotary_embedding_dim": int(sizes["head_size"] * part),
        # An integer where the model's config has one, as upstream copies it.
        "rotary_emb_base": int(base) if base == hf.get("rotary_emb_base", 10000) == int(base) else base,
        "rotary_pct": part,
        **scaling,
        **dict.fromkeys(disabled, False),
        **superset(*scaling.get("superset", ()), *(f"a GPT-NeoX that disables {key}" for key in disabled)),
    }


def names(config: CheckpointConfig) -> SourceNames:
    attention: tuple[Part, ...] = ("qkv", "dense") if config.own("attention_bias", True) else ()
    return SourceNames(
        embedding="gpt_neox.embed_in",
        layer="gpt_neox.layers.{}.",
        norms={"input_layernorm": "input_layernorm", "post_attention_layernorm": "post_attention_layernorm"},
        qkv=("attention.query_key_value",),
        dense="attention.dense",
        fc="mlp.dense_h_to_4h",
        proj="mlp.dense_4h_to_h",
        head="embed_out",
        final_norm="gpt_neox.final_layer_norm",
        biases=frozenset((*attention, "fc", "proj")),
        grouped=True,
        # Causal masks and position tables of old exports.
        unused=tuple(f"gpt_neox.layers.*.attention.{name}" for name in ("bias", "masked_bias", "rotary_emb.inv_freq")),
    )


def decoder(config: CheckpointConfig) -> Decoder:
    head_size = config.head_size
    return Decoder(
        norm="layer",
        positions="rope",
        mlp="plain",
        activation=require_activation(config.hidden_act),
        attention_scale=1 / math.sqrt(head_size),
        rope_inv_freq=inverse_frequencies(
            int(head_size * config.own("rotary_pct", 0.25)),
            config.own("rotary_emb_base", 10000.0),
            config.rotary_scaling,
        ),
        rope_scale=rotary_scale(config.rotary_scaling),
        block="parallel" if config.own("use_parallel_residual", True) else "sequential",
        mlp_norm="post_attention_layernorm",
    )
