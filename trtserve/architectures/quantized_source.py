"""Hugging Face models that are quantised already: which of them can be converted, and what their tensors hold.

| `quant_method`                              | tensors of a matrix `X`                      | checkpoint   |
|---------------------------------------------|----------------------------------------------|--------------|
| awq (AutoAWQ, version gemm, 4 bit)          | `X.qweight`, `X.qzeros`, `X.scales`          | W4A16_GPTQ   |
| gptq (4 bit, groups, no desc_act)           | the same and `X.g_idx`                       | W4A16_GPTQ   |
| fp8, modelopt, compressed-tensors (static)  | `X.weight`, `X.weight_scale`, `X.input_scale`| FP8          |

Sources: AutoAWQ `WQLinear_GEMM`, AutoGPTQ `QuantLinear`, compressed-tensors' `float-quantized`, and TensorRT-LLM's
`update_quant_config_from_hf`, which gives AWQ of Hugging Face the layout of GPTQ as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from trtserve.architectures.base import HfConfig
from trtserve.architectures.quantized import FP8, GPTQ
from trtserve.errors import UnsupportedModelError

Method = Literal["awq", "gptq", "fp8"]


@dataclass(frozen=True, kw_only=True)
class SourceQuantization:
    """How the matrices of a model are stored.

    `group_size` counts inputs that share a scale; `stored_zero` is added to a stored zero point (GPTQ stores them less
    one). Neither means anything for fp8. `narrow_cache`: it was calibrated for a KV cache of 8 bits as well.
    """

    method: Method
    group_size: int = 0
    stored_zero: int = 0
    narrow_cache: bool = False

    @property
    def parts(self) -> tuple[str, ...]:
        """Endings of the tensors of a matrix."""
        if self.method == "fp8":
            return ("weight", "weight_scale", "input_scale")
        return ("qweight", "qzeros", "scales")

    def checkpoint_keys(self) -> dict[str, Any]:
        """Keys of `quantization` in the checkpoint's config.json that differ from those of float weights."""
        if self.method == "fp8":
            return {"quant_algo": FP8}
        # Upstream says for GPTQ: has_zero_point = sym, so that its loader drops the zero points of asymmetric models.
        return {"quant_algo": GPTQ, "group_size": self.group_size, "has_zero_point": True}


def source_quantization(hf: HfConfig) -> SourceQuantization | None:
    """How a model with this config is quantised; None when it is not.

    UnsupportedModelError names what the converter cannot do.
    """
    config = hf.get("quantization_config")
    if not config:
        return None
    if not isinstance(config, Mapping):
        raise _refused(f"quantization_config of config.json is {config!r}")
    method = str(config.get("quant_method", "unknown method"))
    if method == "awq":
        return _awq(config)
    if method == "gptq":
        return _gptq(config)
    if method in ("fp8", "modelopt", "compressed-tensors"):
        _require_static_fp8(method, config)
        return SourceQuantization(method="fp8", narrow_cache=_has_narrow_cache(config))
    if method == "fbgemm_fp8":
        raise _refused("FP8 with a scale for each row (fbgemm_fp8)")
    raise _refused(f"quantised ({method})")


def _awq(config: Mapping[str, Any]) -> SourceQuantization:
    version, backend = str(config.get("version", "gemm")).lower(), str(config.get("backend", "autoawq"))
    if version != "gemm" or backend != "autoawq":
        raise _refused(f"AWQ of version {version} ({backend}); only gemm of autoawq is known")
    if not config.get("zero_point", True):
        raise _refused("AWQ without zero points")
    _require_bits("AWQ", config.get("bits", config.get("w_bit", 4)))
    return SourceQuantization(
        method="awq", group_size=_group_size("AWQ", config.get("group_size", config.get("q_group_size", 128)))
    )


def _gptq(config: Mapping[str, Any]) -> SourceQuantization:
    if config.get("desc_act"):
        raise _refused("GPTQ with desc_act", "TensorRT-LLM does not implement it either: choose another model.")
    _require_bits("GPTQ", config.get("bits"))
    layout = str(config.get("checkpoint_format", "gptq"))
    if layout not in ("gptq", "gptq_v2") or config.get("is_marlin_format"):
        raise _refused(f"GPTQ in the format {layout if layout != 'gptq' else 'marlin'}")
    group_size = _group_size("GPTQ", config.get("group_size", 128))
    return SourceQuantization(method="gptq", group_size=group_size, stored_zero=1 if layout == "gptq" else 0)


def _require_bits(method: str, bits: object) -> None:
    if bits != 4:
        raise _refused(f"{method} with {bits!r} bits; only 4 are known")


def _group_size(method: str, size: object) -> int:
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise _refused(f"{method} with group size {size!r}; only groups along the inputs are known")
    return size


def _require_static_fp8(method: str, config: Mapping[str, Any]) -> None:
    """One scale for a matrix and one, found by calibration, for its inputs: TensorRT-LLM's FP8."""
    if method == "fp8":
        if config.get("weight_block_size"):
            raise _refused("FP8 with a scale for each block of a matrix")
        if config.get("activation_scheme") != "static":
            raise _refused("FP8 without scales of the activations (activation_scheme is not static)")
    elif method == "modelopt":
        inner = config.get("quantization")
        algorithm = config.get("quant_algo") or (inner.get("quant_algo") if isinstance(inner, Mapping) else None)
        if algorithm != "FP8":
            raise _refused(f"quantised by ModelOpt with {algorithm}; only FP8 is known")
    else:
        _require_float_quantized(config)


def _has_narrow_cache(config: Mapping[str, Any]) -> bool:
    """ModelOpt has `kv_cache_quant_algo`, in its older exports one level deeper; the others `kv_cache_scheme`."""
    inner = config.get("quantization")
    deeper = inner.get("kv_cache_quant_algo") if isinstance(inner, Mapping) else None
    return bool(deeper or config.get("kv_cache_quant_algo") or config.get("kv_cache_scheme"))


def _require_float_quantized(config: Mapping[str, Any]) -> None:
    layout = config.get("format")
    if layout != "float-quantized":
        raise _refused(f"compressed-tensors in the format {layout}; only float-quantized is known")
    groups = config.get("config_groups") or {}
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        raise _refused("compressed-tensors whose config_groups are no table")
    for name, group in groups.items():
        for part in ("weights", "input_activations"):
            if not isinstance(scheme := group.get(part), Mapping):
                raise _refused(f"compressed-tensors whose {part} ({name}) are not quantised")
            if scheme.get("strategy") != "tensor" or scheme.get("dynamic") or scheme.get("num_bits") != 8:
                raise _refused(
                    f"compressed-tensors whose {part} ({name}) are {scheme.get('num_bits')} bits by "
                    f"{scheme.get('strategy')}{', dynamic' if scheme.get('dynamic') else ''}; only 8 bits with one "
                    "scale per tensor, found beforehand, are known"
                )


def _refused(what: str, hint: str | None = None) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"The model is quantised already, in a way that cannot be converted here: {what}.",
        hint=hint or "Choose the original model and quantise with --quantize, or convert with --converter upstream.",
    )
