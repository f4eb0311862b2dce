"""Falcon and Falcon-H1."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import llama
from trtserve.checkpoint.architectures.base import (
    Decoder,
    HfConfig,
    Part,
    SourceNames,
    decoder_sizes,
    require_activation,
    require_numbers,
    required,
)
from trtserve.checkpoint.architectures.parts.positions import (
    alibi_slopes,
    inverse_frequencies,
    own_rotary,
    rotary_scale,
)
from trtserve.checkpoint.architectures.parts.state_space import (
    FACTORS,
    MAMBA_DEFAULTS,
    mamba_keys,
    state_space,
    state_space_tensors,
)
from trtserve.errors import UnsupportedModelError

# Falcon: multi-query or grouped attention, parallel to the MLP or before it; rotary positions or ALiBi.

_ONE_NORM = {"input_layernorm": "input_layernorm"}
_MATRICES: frozenset[Part] = frozenset(("qkv", "dense", "fc", "proj"))
# Size keys of the first models (RefinedWeb), before transformers supported them.
_SPELLINGS = {"hidden_size": "n_embed", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return the family's part of the checkpoint's config: the keys of TensorRT-LLM 1.2's FalconConfig."""
    spelled = dict(hf) | {name: hf[other] for name, other in _SPELLINGS.items() if hf.get(other) is not None}
    sizes = decoder_sizes(spelled)
    # The layers are those of 40B and later; RefinedWeb is the model type of the first 40B.
    new = bool(hf.get("new_decoder_architecture")) or hf.get("model_type") == "RefinedWeb"
    parallel = bool(hf.get("parallel_attn", True))
    if new and not parallel:
        raise UnsupportedModelError(
            "This Falcon combines new_decoder_architecture with parallel_attn = false, which no published model does."
        )
    require_activation(hf.get("activation", "gelu"), "gelu")
    base, scaling = own_rotary(hf)
    return {
        "architecture": "FalconForCausalLM",
        **sizes,
        "num_key_value_heads": _kv_heads(hf, sizes["num_attention_heads"], new=new),
        "intermediate_size": hf.get("ffn_hidden_size") or 4 * sizes["hidden_size"],
        "hidden_act": "gelu",
        "norm_epsilon": hf.get("layer_norm_epsilon", 1e-5),
        "position_embedding_type": "alibi_with_scale" if hf.get("alibi") else "rope_gpt_neox",
        "max_position_embeddings": hf.get("max_position_embeddings", 2048),
        "bias": bool(hf.get("bias", False)),
        "parallel_attention": parallel,
        "num_ln_in_parallel_attn": hf.get("num_ln_in_parallel_attn"),
        "new_decoder_architecture": new,
        "rotary_base": base,
        **scaling,
    }


def _kv_heads(hf: HfConfig, heads: int, *, new: bool) -> int:
    """Return the number of key/value heads; 180B sets multi_query although its heads are grouped."""
    if hf.get("multi_query", True) and not new:
        return 1
    return int(hf.get("num_kv_heads") or hf.get("n_head_kv") or heads)


def _norms(config: CheckpointConfig) -> dict[str, str]:
    """Return a layer's norms, keyed by checkpoint name; the new architecture has two parallel ones."""
    if config.own("new_decoder_architecture", False) and config.own("num_ln_in_parallel_attn", 2) == 2:
        return {"input_layernorm": "ln_attn", "mlp_layernorm": "ln_mlp"}
    if config.own("new_decoder_architecture", False) or config.own("parallel_attention", False):
        return _ONE_NORM
    return _ONE_NORM | {"post_layernorm": "post_attention_layernorm"}


def names(config: CheckpointConfig) -> SourceNames:
    return SourceNames(
        embedding="transformer.word_embeddings",
        layer="transformer.h.{}.",
        norms=_norms(config),
        qkv=("self_attention.query_key_value",),
        dense="self_attention.dense",
        fc="mlp.dense_h_to_4h",
        proj="mlp.dense_4h_to_h",
        final_norm="transformer.ln_f",
        biases=_MATRICES if config.own("bias", True) else frozenset(),
        grouped=True,
        unused=("transformer.h.*.self_attention.rotary.inv_freq", "transformer.h.*.self_attention.rotary_emb.inv_freq"),
    )


def decoder(config: CheckpointConfig) -> Decoder:
    """Describe the decoder from the checkpoint's config.

    The slopes of alibi are scaled like the scores. transformers rounds slopes × positions to bfloat16; TensorRT-LLM
    does not, and neither do engines made from this.
    """
    norms, scale = _norms(config), 1 / math.sqrt(config.head_size)
    alibi = config.position_embedding_type.startswith("alibi")
    slopes = tuple(slope * scale for slope in alibi_slopes(config.num_attention_heads))
    frequencies = inverse_frequencies(config.head_size, config.rotary_base, config.rotary_scaling)
    return Decoder(
        norm="layer",
        positions="alibi" if alibi else "rope",
        mlp="plain",
        activation=require_activation(config.hidden_act),
        attention_scale=scale,
        rope_inv_freq=None if alibi else frequencies,
        rope_scale=rotary_scale(config.rotary_scaling),
        alibi_slopes=slopes if alibi else None,
        block="sequential" if "post_layernorm" in norms else "parallel",
        mlp_norm=next((name for name in norms if name != "input_layernorm"), None),
    )


# Falcon-H1: every layer has attention and a state space side by side, and nearly everything has a factor.

# transformers' defaults for absent keys.
_DEFAULTS: dict[str, Any] = {
    **MAMBA_DEFAULTS,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "mamba_d_ssm": 1024,
    "mamba_norm_before_gate": True,
    "mamba_rms_norm": False,
    "projectors_bias": False,
}
_SCALARS = ("embedding", "lm_head", "key", "attention_in", "attention_out", "ssm_in", "ssm_out")
_LISTS = {"mlp_multipliers": ("gate", "down"), "ssm_multipliers": FACTORS}


def falcon_h1_checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return Llama's config, the state spaces, and the factors."""
    hf = {**_DEFAULTS, **hf}
    required(hf, "num_hidden_layers", "hidden_size", "mamba_expand")
    require_activation(hf.get("hidden_act", "silu"), "silu")  # of the convolutions too
    own = None if hf["mamba_d_ssm"] is None else required(hf, "mamba_d_ssm")["mamba_d_ssm"]
    inner = own or hf["mamba_expand"] * hf["hidden_size"]
    factors = _factors(hf)
    biased = {key: bool(hf[key]) for key in ("mamba_proj_bias", "projectors_bias")}
    if len(set(biased.values())) > 1 or (biased["mamba_proj_bias"] and factors["ssm_in"] != 1):
        raise UnsupportedModelError("config.json gives some products of the state spaces biases, and others none.")
    if hf.get("attention_bias") and factors["attention_in"] != 1:
        raise UnsupportedModelError("config.json has attention_bias = true and a factor of attention's inputs.")
    return {
        **llama.own_config(hf, "Falcon-H1", defaults={}, windows=()),
        "mixer_layers": list(range(hf["num_hidden_layers"])),
        "mixer_beside": True,
        **mamba_keys(
            hf,
            inner,
            norm_groups=hf["mamba_n_groups"] if hf["mamba_rms_norm"] else 0,
            norm_first=bool(hf["mamba_norm_before_gate"]),
        ),
        **{f"ssm_{part}_factor": factors["ssm_in"] * factors[part] for part in FACTORS},
        "ssm_out_multiplier": factors["ssm_out"],
        "mlp_gate_multiplier": factors["mlp_gate"],
        "mlp_down_multiplier": factors["mlp_down"],
        "embedding_multiplier": factors["embedding"],
        "lm_head_multiplier": factors["lm_head"],
        # The factor of attention's inputs meets queries, keys and values.
        "key_multiplier": factors["key"] * factors["attention_in"] ** 2,
        "attention_out_multiplier": factors["attention_out"] * factors["attention_in"],
    }


def _factors(hf: HfConfig) -> dict[str, float]:
    """Return all factors. Raises UnsupportedModelError for one that is not a positive number."""
    found = {part: hf.get(f"{part}_multiplier") for part in _SCALARS}
    for key, parts in _LISTS.items():
        values = hf.get(key) or [1.0] * len(parts)
        if not isinstance(values, list) or len(values) != len(parts):
            raise UnsupportedModelError(f"config.json has {key} = {values!r:.80}; expected {len(parts)} numbers.")
        found |= {
            f"mlp_{part}" if key.startswith("mlp") else part: each for part, each in zip(parts, values, strict=True)
        }
    require_numbers(found, *found)
    return {key: 1.0 if value is None else float(value) for key, value in found.items()}


def falcon_h1_names(config: CheckpointConfig) -> SourceNames:
    parts = {part: f"feed_forward.{name}_proj" for part, name in {"fc": "gate", "gate": "up", "proj": "down"}.items()}
    return replace(
        llama.names(config),
        norms={"input_layernorm": "input_layernorm", "post_layernorm": "pre_ff_layernorm"},
        fc=parts["fc"],
        gate=parts["gate"],
        proj=parts["proj"],
        final_norm="model.final_layernorm",
        mixer=state_space_tensors(config, "mamba."),
    )


def falcon_h1_decoder(config: CheckpointConfig) -> Decoder:
    plain = llama.decoder(config)
    return replace(
        plain,
        attention_scale=plain.attention_scale * config.own("key_multiplier", 1.0),
        attention_factor=config.own("attention_out_multiplier", 1.0),
        gate_factor=config.own("mlp_gate_multiplier", 1.0),
        mlp_factor=config.own("mlp_down_multiplier", 1.0),
        embedding_scale=config.own("embedding_multiplier", 1.0),
        logits_scale=config.own("lm_head_multiplier", 1.0),
        mixer=state_space(config),
        mixer_layers=frozenset(config.mixer_layers),
        mixer_beside=True,
    )
