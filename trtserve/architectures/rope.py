"""Rotary embeddings: how Hugging Face configs declare base and scaling, and the frequencies that follow."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from typing import Any

from trtserve.architectures.base import HfConfig, require_numbers
from trtserve.errors import UnsupportedModelError

SCALINGS = ("linear", "dynamic", "llama3")

_NUMBERS = (
    *("rope_theta", "factor", "low_freq_factor", "high_freq_factor"),
    *("original_max_position_embeddings", "partial_rotary_factor"),
)


def rotary(hf: HfConfig, *, default_base: float = 10000.0) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling of a model, from `rope_theta` and `rope_scaling`, or `rope_parameters` of transformers 5.

    The scaling is what TensorRT-LLM calls `rotary_scaling`; None when positions are not scaled.
    UnsupportedModelError names a scaling other than linear, dynamic and llama3.
    """
    parameters = rope_parameters(hf)
    require_numbers(hf, "rope_theta")
    base = float(parameters.pop("rope_theta", None) or hf.get("rope_theta") or default_base)
    kind = scaling_type(parameters)
    if kind == "default":
        return base, None
    if kind not in SCALINGS:
        raise UnsupportedModelError(
            f"The model scales its rotary embedding by {kind!r}; supported are {', '.join(SCALINGS)}.",
            hint="Choose a model without this scaling, for example the base length of the same family.",
        )
    # transformers 4 puts it beside `type` before TensorRT-LLM's converters see it.
    return base, {**parameters, "rope_type": kind}


def rope_parameters(hf: HfConfig) -> dict[str, Any]:
    """What a config says about its rotary embedding; UnsupportedModelError for what is no object, or no numbers."""
    parameters = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if not isinstance(parameters, Mapping):
        raise UnsupportedModelError(
            f"config.json gives {parameters!r} for the scaling of the rotary embedding; expected an object.",
            hint="Take config.json from where the weights are from.",
        )
    require_numbers(parameters, *_NUMBERS)
    return dict(parameters)


def scaling_type(scaling: Mapping[str, Any] | None) -> str:
    """Type of a rotary scaling, read from `type`, else from `rope_type`."""
    return str((scaling or {}).get("type") or (scaling or {}).get("rope_type") or "default")


def inverse_frequencies(size: int, base: float, scaling: Mapping[str, Any] | None) -> tuple[float, ...]:
    """The size / 2 inverse frequencies 1 / base^(2i / size), rounded to float32 step by step as transformers does.

    dynamic: none is changed up to max_position_embeddings, which `longest_sequence` makes the limit (transformers
    `_compute_dynamic_ntk_parameters`).
    linear: all are divided by `factor` (position interpolation, arXiv:2306.15595).
    llama3: wavelengths beyond original_max_position_embeddings / low_freq_factor are divided by `factor`, those below
    original_max_position_embeddings / high_freq_factor are kept, those between are interpolated (Meta's
    `apply_scaling` of Llama 3.1; transformers `_compute_llama3_parameters`).
    """
    values = [_inverse(_float32(base ** _float32(number / size))) for number in range(0, size, 2)]
    kind = scaling_type(scaling)
    if scaling is None or kind in ("default", "dynamic"):
        return tuple(values)
    if kind == "linear":
        factor = float(scaling.get("factor", 1.0))
        return tuple(value / factor for value in values)
    if kind == "llama3":
        return tuple(_llama3(value, scaling) for value in values)
    raise UnsupportedModelError(f"Rotary scaling {kind!r} has no frequencies here; supported: {', '.join(SCALINGS)}.")


def _float32(value: float) -> float:
    """The nearest float32; without NumPy, which a conversion that only copies never loads."""
    return ctypes.c_float(value).value


def _inverse(power: float) -> float:
    """1 / power as float32; infinite for one that float32 cannot tell from 0."""
    return _float32(1.0 / power) if power else math.inf


def _llama3(frequency: float, scaling: Mapping[str, Any]) -> float:
    """Defaults of absent keys: TensorRT-LLM's (convert-and-build, rotary_scaling)."""
    factor = float(scaling.get("factor", 8.0))
    low = float(scaling.get("low_freq_factor", 1.0))
    high = float(scaling.get("high_freq_factor", 4.0))
    original = float(scaling.get("original_max_position_embeddings", 8192))
    wavelength = 2 * math.pi / frequency
    if wavelength > original / low:
        return frequency / factor
    if wavelength < original / high:
        return frequency
    smooth = (original / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / factor + smooth * frequency


def unscaled_base(hf: HfConfig, *, default: float = 10000.0) -> float:
    """Base of a family whose checkpoints have no place for a scaling; UnsupportedModelError when there is one."""
    base, scaling = rotary(hf, default_base=default)
    if scaling is not None:
        raise UnsupportedModelError(
            f"The model scales its rotary embedding ({scaling_type(scaling)}), which a TensorRT-LLM checkpoint of "
            f"{hf.get('model_type', 'this family')} cannot express.",
            hint="Choose a model without this scaling, for example the base length of the same family.",
        )
    return base


def rotary_fraction(hf: HfConfig, *, default: float = 1.0) -> float:
    """The part of a head that is rotated: `partial_rotary_factor`, wherever a config has it, or `rotary_pct`."""
    parameters = rope_parameters(hf)
    require_numbers(hf, "partial_rotary_factor", "rotary_pct")
    for value in (parameters.get("partial_rotary_factor"), hf.get("partial_rotary_factor"), hf.get("rotary_pct")):
        if value is not None:
            return float(value)
    return default


def require_whole_heads(hf: HfConfig) -> None:
    """UnsupportedModelError when a part of each head only is to be rotated, in a family that rotates all of it.

    Releases of transformers do not agree on what such a config means for a Llama: some ignore it, others fail.
    """
    if (part := rotary_fraction(hf)) != 1:
        raise UnsupportedModelError(
            f"config.json rotates a part of each head only (partial_rotary_factor {part:g}), which a TensorRT-LLM "
            f"checkpoint of {hf.get('model_type', 'this family')} cannot express.",
            hint="Take config.json from where the weights are from.",
        )
