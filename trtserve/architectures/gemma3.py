"""Gemma 3, its text model: a Gemma 2 with normed queries and keys, and another rotation in the layers with a window."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trtserve.architectures import gemma
from trtserve.architectures.base import CheckpointConfig, Decoder, HfConfig, Target, require_sizes
from trtserve.architectures.gemma import NORM_OFFSET, gemma_config, unused
from trtserve.architectures.llama_tensors import Parts, llama_targets
from trtserve.architectures.rope import inverse_frequencies, rotary
from trtserve.architectures.windows import layer_kinds
from trtserve.errors import UnsupportedModelError

__all__ = ["BASE_PREFIX", "HF_ARCHITECTURES", "TIED", "checkpoint_config", "decoder", "targets", "unused"]

HF_ARCHITECTURES: tuple[str, ...] = ("Gemma3ForCausalLM",)
BASE_PREFIX = "model."
TIED = True

_BASE, _LOCAL_BASE = 1_000_000.0, 10_000.0
_PATTERN = 6
# The second one is what releases before 1.1 call it.
_PATTERN_KEYS = ("_sliding_window_pattern", "sliding_window_pattern")


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Family part of the checkpoint's config: keys of TensorRT-LLM 1.2's GemmaConfig.

    Upstream always leaves `rotary_scaling` null, which is wrong for the models of 4 billion parameters and more: they
    scale the layers without a window. Ours has what the model says.
    """
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
        "rotary_scaling": scaling,
        "inter_layernorms": True,
        "query_pre_attn_scalar": hf.get("query_pre_attn_scalar", 256),
        "final_logit_softcapping": hf.get("final_logit_softcapping"),
        **dict.fromkeys(_PATTERN_KEYS, _pattern(hf)),
        "rope_local_base_freq": local_base,
        **window,
    }


def _rotary(hf: HfConfig) -> tuple[float, dict[str, Any] | None, float]:
    """Base and scaling of the layers without a window, and the base of those with one."""
    nested: Mapping[str, Any] = hf.get("rope_parameters") or {}
    full = {"rope_parameters": nested["full_attention"]} if nested.get("full_attention") else hf
    local = nested.get("sliding_attention") or {"rope_theta": hf.get("rope_local_base_freq") or _LOCAL_BASE}
    local_base, local_scaling = rotary({"rope_parameters": local}, default_base=_LOCAL_BASE)
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


def decoder(config: CheckpointConfig) -> Decoder:
    """What the decoder is made of."""
    local_base = config.get("rope_local_base_freq") or _LOCAL_BASE
    pattern = next((config[key] for key in _PATTERN_KEYS if config.get(key)), _PATTERN)
    return replace(
        gemma.decoder(config),
        block="sandwich",
        qk_norm=True,
        attention_scale=1 / math.sqrt(config["query_pre_attn_scalar"]),
        local_rope_inv_freq=inverse_frequencies(config["head_size"], local_base, None),
        windows=(*[config["sliding_window"]] * (pattern - 1), None),
        logits_softcap=config.get("final_logit_softcapping"),
    )
