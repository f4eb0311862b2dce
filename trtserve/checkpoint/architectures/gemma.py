"""Gemma 1 to 3 and VaultGemma."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import llama
from trtserve.checkpoint.architectures.base import (
    Decoder,
    HfConfig,
    WrongConfigError,
    require_activation,
    require_sizes,
    required,
    superset,
)
from trtserve.checkpoint.architectures.parts.positions import (
    beyond_rotary,
    inverse_frequencies,
    layer_kinds,
    require_whole_heads,
    rope_parameters,
    rotary,
    rotary_scale,
    scaling_type,
    window_keys,
    windows_of,
)
from trtserve.errors import UnsupportedModelError

# Gemma: RMS norms that multiply by 1 + weight, scaled embeddings, a gated MLP with GELU, an explicit head size.

# Both mean the tanh form: Gemma configs say "gelu", but the models were trained with tanh (transformers' GemmaConfig).
_ACTIVATIONS = ("gelu", "gelu_pytorch_tanh")
_HEAD_SIZE = 256


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return the family's part of the checkpoint's config: the keys of TensorRT-LLM 1.2's GemmaConfig."""
    base, scaling = rotary(hf)
    return {
        **gemma_config(hf, activation=hf.get("hidden_act", "gelu_pytorch_tanh"), kv_heads=16, longest=8192),
        "rotary_base": base,
        "rotary_scaling": scaling,
        **superset(*beyond_rotary(scaling)),
        "inter_layernorms": False,
    }


def gemma_config(hf: HfConfig, *, activation: str, kv_heads: int, longest: int) -> dict[str, Any]:
    """Return the keys of every Gemma; `kv_heads` and `longest` are transformers' defaults for absent keys.

    GemmaConfig always splits the embedding over tensor-parallel ranks. Upstream refuses a vocabulary that does not
    divide; we pad it, as TensorRT-LLM's embedding and head expect.
    """
    sizes = required(hf, "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    _refuse_variants(hf)
    require_whole_heads(hf)
    head_size = hf.get("head_dim") or _HEAD_SIZE
    return {
        **sizes,
        "num_key_value_heads": hf.get("num_key_value_heads") or kv_heads,
        "head_size": head_size,
        "hidden_act": activation,
        "norm_epsilon": hf.get("rms_norm_eps", 1e-6),
        "position_embedding_type": "rope_gpt_neox",
        "max_position_embeddings": hf.get("max_position_embeddings", longest),
        "rotary_embedding_dim": head_size,
        "attn_bias": False,
        "mlp_bias": False,
        "use_parallel_embedding": True,
    }


def _refuse_variants(hf: HfConfig) -> None:
    for key in ("attention_bias", "use_bidirectional_attention"):
        if hf.get(key):
            raise UnsupportedModelError(f"This Gemma sets {key}, which a TensorRT-LLM checkpoint cannot express.")
    # The newer key means what it says: with "gelu" transformers computes the exact function.
    for key, allowed in (("hidden_act", _ACTIVATIONS), ("hidden_activation", _ACTIVATIONS[1:])):
        if (hf.get(key) or allowed[0]) not in allowed:
            raise UnsupportedModelError(
                f"config.json has {key} = {hf[key]!r:.80}, which is not supported; supported: {', '.join(allowed)}."
            )


# The checkpoint stores 1 + weight of the norms, so that TensorRT-LLM's plain RMS norm applies.
names = replace(llama.NAMES, norm_offset=1.0)


def decoder(config: CheckpointConfig) -> Decoder:
    plain = llama.decoder(replace(config, hidden_act="gelu_pytorch_tanh"))
    return replace(plain, embedding_scale=math.sqrt(config.hidden_size))


# Gemma 2: Gemma with norms on both sides of each block, soft-caps, and a window in every other layer.

_FEEDFORWARD_NORMS = ("pre_feedforward_layernorm", "post_feedforward_layernorm")


def gemma2_checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return the family's part of the checkpoint's config: keys of TensorRT-LLM 1.2's GemmaConfig and the windows."""
    base, scaling = rotary(hf)
    kinds = layer_kinds(hf) or ["sliding_attention", "full_attention"]
    return {
        **gemma_config(hf, activation=hf.get("hidden_act", "gelu_pytorch_tanh"), kv_heads=4, longest=8192),
        "rotary_base": base,
        "rotary_scaling": scaling,
        **superset(*beyond_rotary(scaling)),
        "inter_layernorms": True,
        "query_pre_attn_scalar": hf.get("query_pre_attn_scalar", 256),
        "final_logit_softcapping": hf.get("final_logit_softcapping", 30.0),
        "attn_logit_softcapping": hf.get("attn_logit_softcapping", 50.0),
        **window_keys(windows_of(kinds, hf.get("sliding_window", 4096))),
    }


gemma2_names = replace(names, norms={**names.norms, **{name: name for name in _FEEDFORWARD_NORMS}})


def gemma2_decoder(config: CheckpointConfig) -> Decoder:
    return replace(
        decoder(config),
        block="sandwich",
        attention_scale=1 / math.sqrt(config.own("query_pre_attn_scalar", float(config.head_size))),
        attention_softcap=config.own_or_none("attn_logit_softcapping", float),
        logits_softcap=config.own_or_none("final_logit_softcapping", float),
    )


# Gemma 3 (text model): Gemma 2 with normalised queries and keys, and a separate rotation in layers with a window.
# In models with images (4B and larger) it is the text half (`parts/text_halves.py`).

FULL_ATTENTION_SCALING = "full_attention_rotary_scaling"
"""Key of ours for the scaling of the layers without a window; TensorRT-LLM's `rotary_scaling` is one of all layers."""

# Defaults of transformers' Gemma3TextConfig; the published `text_config` of 4B omits default values.
_SIZES = {
    "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8,
}  # fmt: skip

_BASE, _LOCAL_BASE = 1_000_000.0, 10_000.0
_PATTERN, _WINDOW = 6, 4096
_PATTERN_KEYS = ("_sliding_window_pattern", "sliding_window_pattern")  # releases before 1.1 use the second name


def gemma3_checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return the family's part of the checkpoint's config: the keys of TensorRT-LLM 1.2's GemmaConfig.

    `rotary_scaling` stays null, as upstream writes it, even for 4B and larger models, which scale only the layers
    without a window: TensorRT-LLM would scale all layers. `FULL_ATTENTION_SCALING` records the scaling.
    """
    hf = {**_SIZES, **hf}
    if hf.get("attn_logit_softcapping"):
        raise UnsupportedModelError(
            "This Gemma 3 sets attn_logit_softcapping, which a TensorRT-LLM checkpoint of Gemma 3 cannot express."
        )
    base, scaling, local_base = rotations(hf)
    window = {"sliding_window": hf.get("sliding_window", _WINDOW)}
    require_sizes(window, "sliding_window")
    return {
        **gemma_config(hf, activation=hf.get("hidden_act", "gelu"), kv_heads=4, longest=131072),
        "rotary_base": base,
        "rotary_scaling": None,
        "inter_layernorms": True,
        "query_pre_attn_scalar": hf.get("query_pre_attn_scalar", 256),
        "final_logit_softcapping": hf.get("final_logit_softcapping"),
        **dict.fromkeys(_PATTERN_KEYS, _pattern(hf)),
        "rope_local_base_freq": local_base,
        **window,
        **({FULL_ATTENTION_SCALING: scaling} if scaling else {}),
        **superset(*beyond_rotary(scaling)),
    }


def rotations(hf: HfConfig) -> tuple[float, dict[str, Any] | None, float]:
    """Return base and scaling of the layers without a window, and the base of the layers with one."""
    nested = rope_parameters({"rope_parameters": hf.get("rope_parameters")})
    common = {key: value for key, value in nested.items() if not isinstance(value, Mapping)}
    merged = dict[str, Any]()
    for part in (common, nested.get("full_attention"), hf.get("rope_scaling")):  # the last wins, as in transformers
        merged |= rope_parameters({"rope_parameters": part})
    full = {**hf, "rope_parameters": merged, "rope_scaling": None}
    local = {"rope_theta": hf.get("rope_local_base_freq"), "rope_parameters": nested.get("sliding_attention")}
    for each in (full, local):
        require_whole_heads(each)
    _require_named_kinds(hf, common)
    local_base, local_scaling = rotary(local, default_base=_LOCAL_BASE)
    if local_scaling is not None:
        raise UnsupportedModelError(
            "This model scales the rotary embedding of layers with a window, which a checkpoint cannot express."
        )
    base, scaling = rotary(full, default_base=_BASE)
    return base, scaling, local_base


def _require_named_kinds(hf: HfConfig, common: Mapping[str, Any]) -> None:
    """Raise UnsupportedModelError for rotations of which transformers ignores a part without a word."""
    if any(value is not None for value in common.values()):
        raise WrongConfigError(
            f"config.json has rope_parameters = {dict(common)!r:.200}; expected full_attention and sliding_attention, "
            "with an object each."
        )
    scaling = hf.get("rope_scaling") or {}
    if scaling_type(scaling) != "default" and "rope_type" not in scaling:
        raise WrongConfigError(
            f"config.json has rope_scaling with type = {scaling_type(scaling)!r:.80}; expected the key rope_type. "
            "Releases of transformers differ in whether they read type here."
        )


def _pattern(hf: HfConfig) -> int:
    """Return n when every n-th layer has no window. Raises UnsupportedModelError when `layer_types` is irregular."""
    pattern = int(hf.get("sliding_window_pattern") or hf.get("_sliding_window_pattern") or _PATTERN)
    kinds = layer_kinds(hf)
    if kinds is None or kinds == _kinds(pattern, len(kinds)):
        return pattern
    pattern = kinds.index("full_attention") + 1 if "full_attention" in kinds else len(kinds) + 1
    if kinds != _kinds(pattern, len(kinds)):
        raise UnsupportedModelError(
            "config.json's layer_types has layers without a window at irregular intervals, "
            "which a TensorRT-LLM checkpoint cannot express."
        )
    return pattern


def _kinds(pattern: int, layers: int) -> list[str]:
    return ["sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in range(layers)]


gemma3_names = replace(gemma2_names, head_norms=llama.HEAD_NORMS)


def full_attention_scaling(config: CheckpointConfig) -> Mapping[str, Any] | None:
    """Return the rotary scaling of layers without a window, or None.

    Other tools may record it as `rotary_scaling`; no Gemma 3 scales its other layers.
    """
    return config.full_attention_rotary_scaling or config.rotary_scaling


def engine_problem(config: CheckpointConfig) -> str | None:
    """Return why a TensorRT-LLM engine would compute a different model, or None.

    TensorRT-LLM builds the rotary tables of all layers from one scaling (Attention.register_rope_params).
    """
    scaling = full_attention_scaling(config)
    if not config.architecture.startswith("Gemma3For") or not scaling:
        return None
    return (
        f"this Gemma 3 scales the rotary embedding ({scaling_type(scaling)}) only in layers without a window, and "
        "a TensorRT-LLM engine scales all layers or none"
    )


def gemma3_decoder(config: CheckpointConfig) -> Decoder:
    scaling = full_attention_scaling(config)
    local_base = config.own("rope_local_base_freq", _LOCAL_BASE)
    pattern = next((found for key in _PATTERN_KEYS if (found := config.own(key, 0))), _PATTERN)
    return replace(
        decoder(config),
        block="sandwich",
        qk_norm="heads",
        attention_scale=1 / math.sqrt(config.own("query_pre_attn_scalar", float(config.head_size))),
        rope_inv_freq=inverse_frequencies(config.head_size, config.rotary_base, scaling),
        rope_scale=rotary_scale(scaling),
        local_rope_inv_freq=inverse_frequencies(config.head_size, local_base, None),
        windows=(*[config.own("sliding_window", _WINDOW)] * (pattern - 1), None),
        logits_softcap=config.own_or_none("final_logit_softcapping", float),
    )


# VaultGemma: Gemma 2 without the norms after attention and MLP.


def vaultgemma_checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return Gemma 2's config; `hidden_activation` is the only key of the activation."""
    activation = hf.get("hidden_activation") or "gelu_pytorch_tanh"
    require_activation(activation, "gelu_tanh")
    config = gemma2_checkpoint_config({**hf, "hidden_act": "gelu_pytorch_tanh"})
    return {**config, "inter_layernorms": False, **superset("the family VaultGemma", *config.get("superset", ()))}


vaultgemma_names = replace(
    names, norms={"input_layernorm": "input_layernorm", "post_layernorm": "pre_feedforward_layernorm"}
)


def vaultgemma_decoder(config: CheckpointConfig) -> Decoder:
    return replace(gemma2_decoder(config), block="sequential")
