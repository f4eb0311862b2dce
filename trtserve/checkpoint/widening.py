"""What the quantisation config of a model says of matrices that are read as floats, and what is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from trtserve.errors import UnsupportedModelError

# How quantisation configs name what is read as floats.
_COMPRESSED = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "nvfp4-pack-quantized")
_MODELOPT = ("FP8", "FP8_PB_WO", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "NVFP4_AWQ", "W4A16_NVFP4")
_STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")
_LARGEST_BLOCK = 1 << 16
# What compressed-tensors can do besides: weights that are still floats, sparse ones, rotations of activations.
_PLAIN = {"quantization_status": "compressed", "sparsity_config": "dense", "transform_config": None}


@dataclass(frozen=True, kw_only=True)
class Widening:
    """What a quantisation config says of matrices that are read as floats.

    `block`: rows and columns of one scale (FP8). `bits`, `group` and `stored_zero`: GPTQ and AWQ; `group` −1 is a scale
    per output.
    """

    method: Literal["mxfp4", "gguf", "gptq", "awq", "fp8", "modelopt", "compressed-tensors", "bitsandbytes"]
    bits: int = 8
    group: int = -1
    stored_zero: int = 0
    block: tuple[int, int] | None = None


_SWITCHES = ("zero_point", "desc_act", "is_marlin_format", "load_in_4bit", "load_in_8bit")


def widening(config: Mapping[str, Any]) -> Widening:
    """Return how a quantisation config's matrices are read. Raises UnsupportedModelError naming what is not."""
    method = str(config.get("quant_method", "unknown method"))
    for key in _SWITCHES:
        if not isinstance(config.get(key), bool | None):
            raise refused(f"{method} with {key} = {config[key]!r:.80}; expected true or false")
    if method in ("mxfp4", "gguf"):
        return Widening(method="mxfp4" if method == "mxfp4" else "gguf")
    if method == "gptq":
        return _gptq(config)
    if method == "awq":
        return _awq(config)
    if method in ("fp8", "fbgemm_fp8"):
        return _fp8(config)
    if method == "modelopt":
        return _modelopt(config)
    if method == "compressed-tensors":
        return _compressed(config)
    if method == "bitsandbytes" and (config.get("load_in_4bit") or config.get("load_in_8bit")):
        return Widening(method="bitsandbytes")
    raise refused(f"quantised ({method})")


def _gptq(config: Mapping[str, Any]) -> Widening:
    layout, bits = str(config.get("checkpoint_format", "gptq")), config.get("bits")
    if layout not in ("gptq", "gptq_v2") or config.get("is_marlin_format"):
        raise refused(f"GPTQ in the format {layout if layout != 'gptq' else 'marlin'}")
    if bits not in (2, 3, 4, 8) or isinstance(bits, bool):
        raise refused(f"GPTQ with {bits!r} bits; 2, 3, 4 and 8 are supported")
    if config.get("dynamic"):
        raise refused("GPTQ with other settings for some modules (dynamic)")
    group = _group("GPTQ", config.get("group_size", 128))
    return Widening(method="gptq", bits=bits, group=group, stored_zero=1 if layout == "gptq" else 0)


def _awq(config: Mapping[str, Any]) -> Widening:
    version, backend = str(config.get("version", "gemm")).lower(), str(config.get("backend", "autoawq"))
    bits = config.get("bits", config.get("w_bit", 4))
    if version != "gemm" or backend != "autoawq":
        raise refused(f"AWQ version {version} ({backend}); only AutoAWQ's gemm is supported")
    if not config.get("zero_point", True):
        raise refused("AWQ without zero points")
    if bits != 4:
        raise refused(f"AWQ with {bits!r} bits; only 4 is supported")
    return Widening(
        method="awq", bits=4, group=_group("AWQ", config.get("group_size", config.get("q_group_size", 128)))
    )


def _group(method: str, size: object) -> int:
    if not isinstance(size, int) or isinstance(size, bool) or (size < 1 and size != -1):
        raise refused(f"{method} with group size {size!r}; expected inputs per scale, or -1 for a scale per output")
    return size


def _fp8(config: Mapping[str, Any]) -> Widening:
    block = config.get("weight_block_size")
    if str(config.get("fmt", "e4m3")) not in ("e4m3", "float8_e4m3fn"):
        raise refused(f"FP8 in the format {config['fmt']}; only e4m3 is supported")
    if config.get("activation_scheme", "dynamic") not in ("static", "dynamic"):
        raise refused(f"FP8 with activation_scheme {config['activation_scheme']!r}; expected static or dynamic")
    return Widening(method="fp8", block=None if block is None else _block(block))


def _modelopt(config: Mapping[str, Any]) -> Widening:
    inner = config.get("quantization")
    named = config.get("quant_algo") or (inner.get("quant_algo") if isinstance(inner, Mapping) else None)
    if named not in _MODELOPT:
        raise refused(f"quantised by ModelOpt with {named}")
    return Widening(method="modelopt", block=(128, 128) if named == "FP8_PB_WO" else None)


def _block(block: object) -> tuple[int, int]:
    sizes = block if isinstance(block, list) else []
    if len(sizes) != 2 or not all(type(size) is int and 0 < size <= _LARGEST_BLOCK for size in sizes):
        raise refused(f"scales for blocks of {block!r}; expected two sizes, such as [128, 128]")
    return sizes[0], sizes[1]


def _compressed(config: Mapping[str, Any]) -> Widening:
    groups, layout = config.get("config_groups"), config.get("format")
    if (
        not isinstance(groups, Mapping)
        or not groups
        or not all(isinstance(group, Mapping) for group in groups.values())
    ):
        raise refused("compressed-tensors whose config_groups is not an object of groups")
    for key, plain in _PLAIN.items():
        found = config.get(key)
        named = found.get("format", "") if isinstance(found, Mapping) else found
        if found and named != plain:
            raise refused(f"compressed-tensors with {key} = {str(found)[:100]}")
    widths, blocks = set[int](), set[tuple[int, int]]()
    for name, group in groups.items():
        weights, kind = group.get("weights"), group.get("format") or layout
        if not isinstance(weights, Mapping):
            raise refused(f"compressed-tensors whose weights ({name}) are not quantised")
        _require_scheme(name, kind, weights)
        if group.get("output_activations"):
            raise refused(f"compressed-tensors whose outputs ({name}) are quantised")
        if kind == "pack-quantized":
            widths.add(weights["num_bits"])
        if weights["strategy"] == "block":
            blocks.add(_block(weights.get("block_structure")))
    if len(widths) > 1 or len(blocks) > 1:
        raise refused("compressed-tensors with packed weights of 4 and of 8 bits, or with blocks of several sizes")
    return Widening(method="compressed-tensors", bits=widths.pop() if widths else 8, block=next(iter(blocks), None))


def _require_scheme(name: str, kind: object, weights: Mapping[str, Any]) -> None:
    if kind not in _COMPRESSED:
        raise refused(f"compressed-tensors in format {kind}; supported: {', '.join(_COMPRESSED)}")
    bits, strategy = weights.get("num_bits"), weights.get("strategy")
    expected = {"pack-quantized": (4, 8), "nvfp4-pack-quantized": (4,)}.get(str(kind), (8,))
    if bits not in expected or strategy not in _STRATEGIES or weights.get("dynamic"):
        dynamic = ", dynamic" if weights.get("dynamic") else ""
        raise refused(f"compressed-tensors whose weights ({name}) are {bits} bits by {strategy}{dynamic} in {kind}")


def refused(what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"The model has an unsupported quantisation: {what}.",
        hint="Choose the original model and quantise with --quantize, or convert with --converter upstream.",
    )
