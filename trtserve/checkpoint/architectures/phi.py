"""Phi 1 to 4."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures.base import (
    Decoder,
    HfConfig,
    LongRope,
    SourceNames,
    WrongConfigError,
    decoder_sizes,
    is_number,
    require_activation,
    required,
)
from trtserve.checkpoint.architectures.parts.positions import (
    attention_windows,
    inverse_frequencies,
    own_rotary,
    rope_parameters,
    rotary_fraction,
    rotary_scale,
    scaling_type,
    uniform_window,
)
from trtserve.errors import UnsupportedModelError

# Phi 1, 1.5 and 2: parallel attention and MLP behind one layer norm, partially rotated heads.


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


names = SourceNames(
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


# Phi 3, 3.5 and 4: Llama with fused query, key and value, fused gate and up, and LongRoPE.

# Other names for LongRoPE in early models; transformers' Phi3Config accepts them too.
_LONG_ROPE = ("longrope", "su", "yarn")


def phi3_checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return the family's part of the checkpoint's config: the keys of TensorRT-LLM 1.2's Phi3Config and the window.

    Upstream writes LongRoPE's keys when max_position_embeddings is 128000 or more, which holds for every such model.
    """
    sizes = required(hf, "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    require_activation(hf.get("hidden_act", "silu"), "silu")
    head_size, part = sizes["hidden_size"] // sizes["num_attention_heads"], rotary_fraction(hf)
    if hf.get("head_dim") not in (None, head_size):
        raise UnsupportedModelError(
            f"config.json has head_dim = {hf['head_dim']!r:.40}, and hidden_size / num_attention_heads is {head_size}: "
            "TensorRT-LLM's Phi 3 has heads of that size only.",
            hint="Is it a config.json of another model? The published Phi 3 and Phi 4 have no head_dim.",
        )
    longest = hf.get("max_position_embeddings", 4096)
    scaled = scaling_type(rope_parameters(hf)) in _LONG_ROPE
    return {
        **sizes,
        "num_key_value_heads": hf.get("num_key_value_heads") or sizes["num_attention_heads"],
        "head_size": head_size,
        "hidden_act": "swiglu",
        "norm_epsilon": hf.get("rms_norm_eps", 1e-5),
        "position_embedding_type": "long_rope" if scaled else "rope_gpt_neox",
        "max_position_embeddings": longest,
        "rotary_embedding_dim": int(head_size * part),
        "rotary_pct": part,
        "rotary_base": float(rope_parameters(hf).get("rope_theta") or hf.get("rope_theta") or 10000.0)
        if scaled
        else _unscaled_base(hf),
        "rotary_scaling": None,
        "tie_word_embeddings": bool(hf.get("tie_word_embeddings", False)),
        **(_long_rope_keys(hf, int(head_size * part) // 2) if scaled else {}),
        **uniform_window(hf, hf.get("sliding_window")),
    }


def _unscaled_base(hf: HfConfig) -> float:
    base, scaling = own_rotary(hf)
    if scaling:
        raise WrongConfigError(
            f"The model uses rotary scaling {scaling_type(rope_parameters(hf))!r}; a Phi 3 has longrope or none."
        )
    return base


def _long_rope_keys(hf: HfConfig, pairs: int) -> dict[str, Any]:
    scaling = rope_parameters(hf)
    original = hf.get("original_max_position_embeddings") or scaling.get("original_max_position_embeddings")
    factors = (scaling.get(key) for key in ("short_factor", "long_factor"))
    short, long = (each if isinstance(each, list) else [] for each in factors)
    sound = len(short) == len(long) == pairs and all(map(is_number, (*short, *long)))
    if not isinstance(original, int) or original < 2 or not sound:
        raise WrongConfigError(
            f"config.json has {len(short)} short and {len(long)} long rotary factors and original_max_position_"
            f"embeddings = {original!r}; expected {pairs} positive numbers of each, and a number."
        )
    for key in ("attention_factor", "short_mscale", "long_mscale"):
        if scaling.get(key) is not None:
            raise UnsupportedModelError(f"This Phi 3 sets {key}, which a TensorRT-LLM checkpoint of it cannot express.")
    factor, longest = scaling.get("factor"), hf.get("max_position_embeddings", 4096)
    if factor is not None and factor != longest / original:
        raise WrongConfigError(
            f"config.json has the rotary factor {factor:g} and {longest} positions for {original}; expected "
            f"{longest / original:g}, which is what other programs read."
        )
    return {
        "original_max_position_embeddings": original,
        "longrope_scaling_short_factors": short,
        "longrope_scaling_long_factors": long,
    }


phi3_names = SourceNames(
    embedding="model.embed_tokens",
    layer="model.layers.{}.",
    norms={"input_layernorm": "input_layernorm", "post_layernorm": "post_attention_layernorm"},
    qkv=("self_attn.qkv_proj",),
    dense="self_attn.o_proj",
    fc="mlp.gate_up_proj",
    proj="mlp.down_proj",
    final_norm="model.norm",
    norm_biases=False,
    gate_up=True,
    unused=("model.layers.*.self_attn.rotary_emb.inv_freq",),
)


def phi3_decoder(config: CheckpointConfig) -> Decoder:
    head_size = config.head_size
    plain = inverse_frequencies(int(head_size * config.own("rotary_pct", 1.0)), config.rotary_base, None)
    short, long = config.longrope_scaling_short_factors, config.longrope_scaling_long_factors
    return Decoder(
        norm="rms",
        positions="rope",
        mlp="fused",
        activation="silu",
        attention_scale=1 / math.sqrt(head_size),
        rope_inv_freq=_stretched(plain, short) if short else plain,
        long_rope=LongRope(inv_freq=_stretched(plain, long), beyond=config.original_max_position_embeddings)
        if long
        else None,
        rope_scale=_rope_scale(config) if long else 1.0,
        windows=attention_windows(config),
    )


def _stretched(frequencies: Sequence[float], factors: Sequence[float]) -> tuple[float, ...]:
    return tuple(frequency / factor for frequency, factor in zip(frequencies, factors, strict=True))


def _rope_scale(config: CheckpointConfig) -> float:
    """Return LongRoPE's √(1 + ln(factor) / ln(original positions)), factor = all / original positions."""
    original = config.original_max_position_embeddings
    factor = config.max_position_embeddings / original
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
