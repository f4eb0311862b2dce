"""Positions and windows: rotary embeddings with their scalings, the slopes of ALiBi, sliding attention windows.

TensorRT-LLM's converters drop windows, so users must repeat them at start (`max_attention_window_size`). Upstream's
place for them, `runtime_defaults`, does not work: its builder fails to save such an engine (TensorRT-LLM issue 2912).
Our checkpoints record windows in an extra key, `max_attention_window`; TensorRT-LLM's loader ignores unknown keys."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures.base import (
    HfConfig,
    WrongConfigError,
    require_numbers,
    require_sizes,
    required,
    superset,
)
from trtserve.errors import UnsupportedModelError

_REQUIRED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
SCALINGS = tuple(_REQUIRED)
_BEYOND = ("yarn",)  # what TensorRT-LLM's checkpoints do not record
_UNSCALED = ("rope_theta", "partial_rotary_factor")  # keys of the rotary embedding that do not scale it

_NUMBERS = (
    *("rope_theta", "factor", "low_freq_factor", "high_freq_factor"),
    *("original_max_position_embeddings", "partial_rotary_factor"),
    *("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "alpha"),
)


def rotary(hf: HfConfig, *, default_base: float = 10000.0) -> tuple[float, dict[str, Any] | None]:
    """Return base and scaling, read from `rope_scaling` or transformers 5's `rope_parameters`, and from `rope_theta`.

    The scaling is TensorRT-LLM's `rotary_scaling`, or None. Raises UnsupportedModelError for any scaling other than
    `SCALINGS`.
    """
    parameters = rope_parameters(hf)
    base = float(parameters.pop("rope_theta", None) or hf.get("rope_theta") or default_base)
    kind = scaling_type(parameters)
    if kind == "yarn":
        parameters = _complete_yarn(hf, parameters)
        if base <= 1:
            raise WrongConfigError(
                f"config.json has rope_theta = {base:g} beside rotary scaling 'yarn'; expected more than 1."
            )
    if kind == "default":
        if not (parameters.get("type") or parameters.get("rope_type")) and parameters.keys() - {*_UNSCALED}:
            raise UnsupportedModelError(
                f"config.json has rope_scaling = {dict(parameters)} without a type; supported: {', '.join(SCALINGS)}.",
                hint="Add the type that the model was trained with, or use the config.json that was published with the "
                "weights.",
            )
        return base, None
    if kind not in SCALINGS:
        raise UnsupportedModelError(
            f"The model uses rotary scaling {kind!r}; supported: {', '.join(SCALINGS)}.",
            hint="Choose a model without this scaling, such as the base length of the same family.",
        )
    if missing := [key for key in _REQUIRED[kind] if parameters.get(key) is None]:
        raise WrongConfigError(f"config.json's rotary scaling {kind!r} lacks {', '.join(missing)}.")
    # TensorRT-LLM reads `type` first. Its converters find both, because transformers 4 adds `rope_type`.
    return base, {**parameters, **({"type": kind} if "type" in parameters else {}), "rope_type": kind}


def _complete_yarn(hf: HfConfig, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return yarn's parameters with those that transformers 5 takes from other keys of config.json."""
    positions, inner = hf.get("max_position_embeddings"), parameters.get("original_max_position_embeddings")
    original = hf.get("original_max_position_embeddings") or inner or positions
    factor = parameters.get("factor") or (positions / original if positions and original else None)
    return {**parameters, "factor": factor, "original_max_position_embeddings": original}


def beyond_rotary(scaling: Mapping[str, Any] | None) -> list[str]:
    """Return the words for `superset` of a rotary scaling."""
    kind = scaling_type(scaling)
    return [f"rotary scaling {kind!r}"] if kind in _BEYOND else []


def rope_parameters(hf: HfConfig) -> dict[str, Any]:
    """Return the rotary embedding's parameters; as in transformers, `rope_scaling` wins over `rope_parameters`.

    Raises UnsupportedModelError when they are not an object of numbers.
    """
    for key in ("rope_scaling", "rope_parameters"):
        if hf.get(key) is not None and not isinstance(hf[key], Mapping):
            raise WrongConfigError(f"config.json has {key} = {hf[key]!r:.80}; expected an object.")
    parameters = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    require_numbers(parameters, *_NUMBERS)
    return dict(parameters)


def scaling_type(scaling: Mapping[str, Any] | None) -> str:
    """Return the scaling's `rope_type`, or its older name `type`; "default" without either."""
    return str((scaling or {}).get("rope_type") or (scaling or {}).get("type") or "default")


def inverse_frequencies(size: int, base: float, scaling: Mapping[str, Any] | None) -> tuple[float, ...]:
    """Return the size / 2 inverse frequencies 1 / base^(2i / size), rounded to float32 at each step like transformers.

    dynamic: unchanged up to max_position_embeddings, which engines do not exceed (transformers'
    `_compute_dynamic_ntk_parameters`).
    linear: all are divided by `factor` (position interpolation, arXiv:2306.15595).
    llama3: frequencies with wavelengths above original_max_position_embeddings / low_freq_factor are divided by
    `factor`, those below original_max_position_embeddings / high_freq_factor are kept, the ones between are
    interpolated (Meta's `apply_scaling` for Llama 3.1; transformers' `_compute_llama3_parameters`).
    yarn: fast frequencies are kept, slow ones divided by `factor`, and a ramp lies between (arXiv:2309.00071,
    transformers' `_compute_yarn_parameters`); see `rotary_scale`.
    """
    powers = [_float32(base ** _float32(number / size)) for number in range(0, size, 2)]
    values = [_inverse(power) for power in powers]
    kind = scaling_type(scaling)
    if scaling is None or kind in ("default", "dynamic"):
        return tuple(values)
    if kind == "linear":
        factor = float(scaling.get("factor", 1.0))
        return tuple(value / factor for value in values)
    if kind == "llama3":
        return tuple(_llama3(value, scaling) for value in values)
    if kind == "yarn":
        return _yarn(powers, base, scaling)
    raise UnsupportedModelError(f"Rotary scaling {kind!r} is not supported; supported: {', '.join(SCALINGS)}.")


def _float32(value: float) -> float:
    """Round to float32 without NumPy, which a conversion that only copies never loads."""
    return ctypes.c_float(value).value


def _inverse(power: float) -> float:
    return _float32(1.0 / power) if power else math.inf


def _llama3(frequency: float, scaling: Mapping[str, Any]) -> float:
    # Defaults for absent keys are TensorRT-LLM's.
    factor = float(scaling.get("factor", 8.0))
    low = float(scaling.get("low_freq_factor", 1.0))
    high = float(scaling.get("high_freq_factor", 4.0))
    original = float(scaling.get("original_max_position_embeddings", 8192))
    # Reciprocals, and rounded after each step, as transformers does: late positions multiply the difference.
    wavelength = _float32(_float32(2 * math.pi) * _inverse(frequency))
    if wavelength > original / low:
        return frequency / factor
    if wavelength < original / high:
        return frequency
    smooth = _float32(_float32(_float32(original * _inverse(wavelength)) - low) / _float32(high - low))
    slow = _float32(_float32(_float32(1 - smooth) * frequency) / factor)
    return _float32(slow + _float32(smooth * frequency))


def _yarn(powers: Sequence[float], base: float, scaling: Mapping[str, Any]) -> tuple[float, ...]:
    factor, original = float(scaling["factor"]), float(scaling["original_max_position_embeddings"])
    size = 2 * len(powers)

    def pair_of(turns: object, default: float) -> float:
        """Return the pair of numbers, counted with fractions, that turns so often over the original positions."""
        often = float(turns) if isinstance(turns, int | float) and turns else default
        return size * math.log(original / (often * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair_of(scaling.get("beta_fast"), 32.0), pair_of(scaling.get("beta_slow"), 1.0)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    low, width = _float32(low), _float32(high - low or 0.001)

    def frequency(index: int, power: float) -> float:
        kept = _float32(1 - min(max(_float32(_float32(index - low) / width), 0.0), 1.0))
        slow = _float32(_inverse(_float32(factor * power)) * _float32(1 - kept))
        return _float32(slow + _float32(_inverse(power) * kept))

    return tuple(frequency(index, power) for index, power in enumerate(powers))


def rotary_scale(scaling: Mapping[str, Any] | None) -> float:
    """Return the factor of the rotated values: yarn's `attention_factor`, or what its factor implies; 1 for others."""
    if scaling is None or scaling_type(scaling) != "yarn":
        return 1.0
    if (given := scaling.get("attention_factor")) is not None:
        return float(given)
    factor = float(scaling["factor"])

    def share(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    one, all_dimensions = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return share(float(one)) / share(float(all_dimensions)) if one and all_dimensions else share(1.0)


def own_rotary(hf: HfConfig) -> tuple[float, dict[str, Any]]:
    """Return the base, and the keys of a scaling for a family whose checkpoints in TensorRT-LLM's format have none."""
    base, scaling = rotary(hf)
    if scaling is None:
        return base, {}
    words = f"rotary scaling {scaling_type(scaling)!r} of the family {hf.get('model_type', 'of this model')}"
    return base, {"rotary_scaling": scaling, **superset(words)}


def rotary_fraction(hf: HfConfig, *, default: float = 1.0) -> float:
    """Return the rotated fraction of each head: `partial_rotary_factor`, which may be in the rotary parameters."""
    parameters = rope_parameters(hf)
    for value in (parameters.get("partial_rotary_factor"), hf.get("partial_rotary_factor")):
        if value is not None and value > 1:
            raise WrongConfigError(
                f"config.json rotates {value:g} of each head (partial_rotary_factor); expected at most 1."
            )
        if value is not None:
            return float(value)
    return default


def require_whole_heads(hf: HfConfig) -> None:
    """Raise UnsupportedModelError for partial rotation in a family that rotates full heads.

    transformers releases disagree on such a config of a Llama: some ignore it, others fail.
    """
    if (part := rotary_fraction(hf)) != 1:
        raise WrongConfigError(
            f"config.json has partial_rotary_factor = {part:g}, which a TensorRT-LLM checkpoint of "
            f"{hf.get('model_type', 'this family')} cannot express."
        )


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """Return one slope per head: 2^(-8i / n) for i = 1 … n, where n is the largest power of two ≤ `heads`.

    The remaining heads take every second slope of 2n heads, starting with the first (as BLOOM and TensorRT-LLM do).
    """
    power = 1 << (heads.bit_length() - 1)
    slopes = [math.pow(2.0, -8.0 * index / power) for index in range(1, power + 1)]
    return (*slopes, *(math.pow(2.0, -4.0 * index / power) for index in range(1, 2 * (heads - power), 2)))


_KEY = "max_attention_window"
_KINDS = ("sliding_attention", "full_attention")


def window_keys(windows: Sequence[int | None]) -> dict[str, Any]:
    """Return the checkpoint config's keys for `windows` (see Decoder.windows), or empty without windows.

    Raises UnsupportedModelError when a window is not a positive number of tokens.
    """
    for window in windows:
        if window is not None:
            require_sizes({"sliding_window": window}, "sliding_window")
    return {} if all(window is None for window in windows) else {_KEY: list(windows)}


def uniform_window(hf: HfConfig, window: int | None) -> dict[str, Any]:
    """Return the keys for a family with one window for all layers, as transformers computes it.

    Other programs follow a `layer_types` there, so one that says otherwise raises UnsupportedModelError.
    """
    kinds = set(layer_kinds(hf) or ())
    if kinds - {"full_attention" if window is None else "sliding_attention"}:
        raise UnsupportedModelError(
            f"config.json has sliding_window = {window} and, in layer_types, {' and '.join(sorted(kinds))}. For "
            f"{hf.get('model_type', 'this family')} transformers ignores layer_types, and other programs follow it.",
            hint="Make the two agree: remove layer_types, or set sliding_window to null if no layer has a window.",
        )
    return window_keys([window])


def attention_windows(config: CheckpointConfig) -> tuple[int | None, ...]:
    """Return the windows (see Decoder.windows) in a checkpoint's config or in its `runtime_defaults`."""
    if config.max_attention_window:
        return config.max_attention_window
    longest = config.max_position_embeddings or math.inf
    windows = config.runtime_defaults.max_attention_window
    return tuple(window if window < longest else None for window in windows)


def layer_kinds(hf: HfConfig, known: Sequence[str] = _KINDS) -> list[str] | None:
    """Return `layer_types` of a Hugging Face config, one of `known` per layer, or None."""
    kinds = hf.get("layer_types")
    if kinds is None:
        return None
    layers = required(hf, "num_hidden_layers")["num_hidden_layers"]
    unknown = sorted(set(kinds) - set(known))
    if unknown or len(kinds) != layers:
        raise UnsupportedModelError(
            f"config.json's layer_types has {len(kinds)} entries ({', '.join(sorted(set(kinds)))}); "
            f"expected {layers} entries, {' or '.join(known)}."
        )
    return list(kinds)


def attention_kinds(hf: HfConfig, slides: Callable[[int], object]) -> list[str]:
    """Return `layer_types`, by default sliding attention in the layers for which `slides` is true."""
    if (kinds := layer_kinds(hf)) is not None:
        return kinds
    layers = range(required(hf, "num_hidden_layers")["num_hidden_layers"])
    return ["sliding_attention" if slides(layer) else "full_attention" for layer in layers]


def layer_flags(hf: HfConfig, key: str) -> list[bool] | None:
    """Return a list of one 0 or 1 for each layer, or None; longer lists are cut, as in transformers."""
    flags, layers = hf.get(key), int(hf["num_hidden_layers"])
    if flags is None:
        return None
    if not isinstance(flags, list) or len(flags) < layers or any(flag not in (0, 1) for flag in flags):
        raise WrongConfigError(
            f"config.json has {key} = {flags!r:.80}; expected a list with 0 or 1 for each of {layers} layers."
        )
    return [bool(flag) for flag in flags[:layers]]


def windows_of(kinds: Sequence[str], window: int | None) -> list[int | None]:
    """Return one window per layer: `window` for sliding attention, None for full attention."""
    return [window if kind == "sliding_attention" else None for kind in kinds]
