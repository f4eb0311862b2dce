"""Llama 1 – 3.x: RMS norms, rotary positions, grouped-query attention, gated MLP."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures.base import (
    Decoder,
    HfConfig,
    Part,
    SourceNames,
    moe_object,
    require_activation,
    required,
    superset,
)
from trtserve.checkpoint.architectures.parts.expert_tensors import experts_of
from trtserve.checkpoint.architectures.parts.positions import (
    attention_windows,
    beyond_rotary,
    inverse_frequencies,
    require_whole_heads,
    rotary,
    rotary_fraction,
    rotary_scale,
    uniform_window,
    window_keys,
)

Windows = Sequence[int | None]  # of each layer in tokens; None: full attention


NAMES = SourceNames(
    embedding="model.embed_tokens",
    layer="model.layers.{}.",
    norms={"input_layernorm": "input_layernorm", "post_layernorm": "post_attention_layernorm"},
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    dense="self_attn.o_proj",
    fc="mlp.gate_proj",
    gate="mlp.up_proj",
    proj="mlp.down_proj",
    final_norm="model.norm",
    norm_biases=False,
    # Position tables of old exports.
    unused=("model.layers.*.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq", "rope.freqs"),
)

HEAD_NORMS = {"attention.q_layernorm": "self_attn.q_norm", "attention.k_layernorm": "self_attn.k_norm"}

# LLaMAConfig's keys that are equal for all models of this family.
_CONSTANTS: dict[str, Any] = {
    "residual_mlp": False,
    "disable_weight_only_quant_plugin": False,
    "moe": moe_object(normalization_mode=None),
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


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return the family's part of the checkpoint's config: the keys of TensorRT-LLM 1.2's LLaMAConfig."""
    return {
        **common_config(hf, longest=2048),
        "attn_bias": bool(hf.get("attention_bias", False)),
        "mlp_bias": bool(hf.get("mlp_bias", False)),
        **_CONSTANTS,
        **uniform_window(hf, None),
    }


def own_config(
    hf: HfConfig, family: str, *, defaults: Mapping[str, Any], partial: bool = False, windows: Windows | None = None
) -> dict[str, Any]:
    """Return the config of a family like Llama that is not in TensorRT-LLM's format.

    `family` is its name for users; `defaults` are those of its transformers config for absent keys. With `partial` a
    part of each head may be rotated. `windows` are those of the layers; None: the family has none.
    """
    hf = {**defaults, **hf}
    config = common_config(hf, longest=2048, partial=partial)
    return {
        **config,
        "attn_bias": bool(hf.get("attention_bias", False)),
        "mlp_bias": bool(hf.get("mlp_bias", False)),
        **(uniform_window(hf, None) if windows is None else window_keys(windows)),
        **superset(f"the family {family}", *config.get("superset", ())),
    }


def common_config(hf: HfConfig, *, longest: int, partial: bool = False) -> dict[str, Any]:
    """Return what the configs of Llama and of families like it have in common.

    `longest` is transformers' default of max_position_embeddings; with `partial` a part of each head may be rotated.
    """
    sizes = required(hf, "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    heads = sizes["num_attention_heads"]
    head_size = hf.get("head_dim") or sizes["hidden_size"] // heads
    base, scaling = rotary(hf)
    part = rotary_fraction(hf)
    if not partial:
        require_whole_heads(hf)
    require_activation(hf.get("hidden_act", "silu"))
    return {
        **sizes,
        "num_key_value_heads": hf.get("num_key_value_heads") or heads,
        "head_size": head_size,
        "hidden_act": hf.get("hidden_act", "silu"),
        "norm_epsilon": hf.get("rms_norm_eps", 1e-6),
        "position_embedding_type": "rope_gpt_neox",
        "max_position_embeddings": hf.get("max_position_embeddings", longest),
        "rotary_embedding_dim": int(head_size * part),
        **({} if part == 1 else {"rotary_pct": part}),
        "rotary_base": base,
        "rotary_scaling": scaling,
        "tie_word_embeddings": bool(hf.get("tie_word_embeddings", False)),
        **superset(*beyond_rotary(scaling)),
    }


def names(config: CheckpointConfig) -> SourceNames:
    biases: set[Part] = set()
    if config.own("attn_bias", False):
        biases |= {"qkv", "dense"}
    if config.own("mlp_bias", False):
        biases |= {"fc", "gate", "proj"}
    return replace(NAMES, biases=frozenset(biases))


def decoder(config: CheckpointConfig) -> Decoder:
    rotated = int(config.head_size * config.own("rotary_pct", 1.0))
    turns = not config.unrotated_layers or not all(config.unrotated_layers)
    return Decoder(
        norm="rms",
        positions="rope",
        mlp="gated",
        activation=require_activation(config.hidden_act),
        attention_scale=1 / math.sqrt(config.head_size),
        rope_inv_freq=inverse_frequencies(rotated, config.rotary_base, config.rotary_scaling) if turns else None,
        rope_scale=rotary_scale(config.rotary_scaling),
        unrotated=config.unrotated_layers,
        windows=attention_windows(config),
    )


def decoder_with(*, experts: bool = False, **fields: Any) -> Callable[[CheckpointConfig], Decoder]:
    """Return the `decoder` of a family that is a Llama but for these fields."""
    return lambda config: replace((expert_decoder if experts else decoder)(config), **fields)


def expert_decoder(config: CheckpointConfig) -> Decoder:
    """Describe the decoder of a Llama with experts, whose checkpoint has `swiglu` as its activation."""
    plain = decoder(replace(config, hidden_act="silu") if config.hidden_act == "swiglu" else config)
    return replace(plain, mlp="experts", experts=experts_of(config))
