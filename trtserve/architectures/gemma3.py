"""Gemma 3, its text model: a Gemma 2 with normed queries and keys, and another rotation in the layers with a window.

Models that see images too (4 billion parameters and more) have its config as `text_config`, its tensors behind a
prefix, and others beside them (`vision_tower`, `multi_modal_projector`) that are left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from trtserve.architectures import gemma
from trtserve.architectures.base import CheckpointConfig, Decoder, HfConfig, Target, require_sizes
from trtserve.architectures.gemma import NORM_OFFSET, gemma_config
from trtserve.architectures.llama_tensors import Parts, llama_targets, llama_unused
from trtserve.architectures.rope import (
    inverse_frequencies,
    require_whole_heads,
    rope_parameters,
    rotary,
    scaling_type,
)
from trtserve.architectures.source import VISION
from trtserve.architectures.windows import layer_kinds
from trtserve.errors import UnsupportedModelError

WITH_VISION = "Gemma3ForConditionalGeneration"
_TEXT = "Gemma3ForCausalLM"
BASE_PREFIX = "model."
TIED = True

FULL_ATTENTION_SCALING = "full_attention_rotary_scaling"
"""Key of ours for the scaling of the layers without a window; TensorRT-LLM's `rotary_scaling` is one of all layers."""

# transformers' Gemma3TextConfig: the published `text_config` of 4b leaves out what is the same.
_SIZES = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
}

_BASE, _LOCAL_BASE = 1_000_000.0, 10_000.0
_PATTERN = 6
# The second one is what releases before 1.1 call it.
_PATTERN_KEYS = ("_sliding_window_pattern", "sliding_window_pattern")


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Family part of the checkpoint's config: keys of TensorRT-LLM 1.2's GemmaConfig.

    `rotary_scaling` is null as upstream writes it, also for the models of 4 billion parameters and more, which scale
    the layers without a window: TensorRT-LLM would scale those with one too. `FULL_ATTENTION_SCALING` has it.
    """
    hf = {**_SIZES, **hf}
    if hf.get("attn_logit_softcapping"):
        raise UnsupportedModelError(
            "This Gemma 3 sets attn_logit_softcapping, which a TensorRT-LLM checkpoint of Gemma 3 cannot express."
        )
    base, scaling, local_base = _rotary(hf)
    window = {"sliding_window": hf.get("sliding_window", 4096)}
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
    }


def text_config(hf: HfConfig) -> dict[str, Any]:
    """The config of the text model in that of a model `WITH_VISION`; UnsupportedModelError when it has none.

    What is said of the whole model counts for its part: types, tied embeddings, quantisation.
    """
    text = hf.get("text_config")
    if not isinstance(text, Mapping):
        raise UnsupportedModelError(
            f"config.json of this {WITH_VISION} gives text_config = {text!r}; expected an object.",
            hint="Take config.json from the model's own repository.",
        )
    keys = ("torch_dtype", "dtype", "tie_word_embeddings", "quantization_config")
    whole = {key: hf[key] for key in keys if hf.get(key) is not None}
    return {**text, **whole, "architectures": [_TEXT], "model_type": "gemma3_text"}


def _rotary(hf: HfConfig) -> tuple[float, dict[str, Any] | None, float]:
    """Base and scaling of the layers without a window, and the base of those with one."""
    nested = rope_parameters({"rope_parameters": hf.get("rope_parameters")})
    full = {**hf, "rope_parameters": nested.get("full_attention")}
    local = {"rope_theta": hf.get("rope_local_base_freq"), "rope_parameters": nested.get("sliding_attention")}
    for each in (full, local):
        require_whole_heads(each)
    local_base, local_scaling = rotary(local, default_base=_LOCAL_BASE)
    if local_scaling is not None:
        raise UnsupportedModelError("This Gemma 3 scales the rotary embedding of its layers with a window.")
    base, scaling = rotary(full, default_base=_BASE)
    return base, scaling, local_base


def _pattern(hf: HfConfig) -> int:
    """Every how many layers one has no window; UnsupportedModelError when `layer_types` follows no such pattern."""
    pattern = int(hf.get("sliding_window_pattern") or hf.get("_sliding_window_pattern") or _PATTERN)
    kinds = layer_kinds(hf)
    if kinds is None or kinds == _kinds(pattern, len(kinds)):
        return pattern
    pattern = kinds.index("full_attention") + 1 if "full_attention" in kinds else len(kinds) + 1
    if kinds != _kinds(pattern, len(kinds)):
        raise UnsupportedModelError(
            "layer_types of config.json has layers without a window at irregular distances, "
            "which a TensorRT-LLM checkpoint cannot express."
        )
    return pattern


def _kinds(pattern: int, layers: int) -> list[str]:
    return ["sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in range(layers)]


def targets(config: CheckpointConfig) -> list[Target]:
    """Every tensor of the checkpoint of the whole model, in file order."""
    return llama_targets(config, Parts(head_norms=True, feedforward_norms=True, norm_offset=NORM_OFFSET))


def unused(config: CheckpointConfig) -> Sequence[str]:
    """What a Llama has and does not need, and all that is for images."""
    return (*llama_unused(config), *VISION)


def full_attention_scaling(config: CheckpointConfig) -> dict[str, Any] | None:
    """Scaling of the layers without a window, by a checkpoint's config; None when they are not scaled.

    Only other tools can have put it under `rotary_scaling`, and no Gemma 3 scales its other layers.
    """
    scaling: dict[str, Any] | None = config.get(FULL_ATTENTION_SCALING) or config.get("rotary_scaling")
    return scaling


def engine_problem(config: CheckpointConfig) -> str | None:
    """Why an engine of TensorRT-LLM would calculate another model; None when it calculates this one.

    It makes the rotary tables of layers with and without a window by one scaling (Attention.register_rope_params).
    """
    if config["architecture"] not in (WITH_VISION, _TEXT) or not (scaling := full_attention_scaling(config)):
        return None
    return (
        f"this Gemma 3 scales the rotary embedding ({scaling_type(scaling)}) of its layers without a window only, and "
        "an engine of TensorRT-LLM scales all layers or none"
    )


def decoder(config: CheckpointConfig) -> Decoder:
    """What the decoder is made of."""
    scaling = full_attention_scaling(config)
    local_base = config.get("rope_local_base_freq") or _LOCAL_BASE
    pattern = next((config[key] for key in _PATTERN_KEYS if config.get(key)), _PATTERN)
    return replace(
        gemma.decoder(config),
        block="sandwich",
        qk_norm=True,
        attention_scale=1 / math.sqrt(config["query_pre_attn_scalar"]),
        rope_inv_freq=inverse_frequencies(config["head_size"], config["rotary_base"], scaling),
        local_rope_inv_freq=inverse_frequencies(config["head_size"], local_base, None),
        windows=(*[config["sliding_window"]] * (pattern - 1), None),
        logits_softcap=config.get("final_logit_softcapping"),
    )
