"""Quantised matrices that are read as floats: what config.json says of them, and which tensors are one matrix.

What is not read is refused by name. Tensors are found by their names, and checked against each other.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

from trtserve.checkpoint.encodings import (
    AGAIN,
    EXPONENTS,
    FP8_TYPES,
    Codebook,
    Columns,
    Encoding,
    Fp4,
    PackedRows,
    Scaled,
    StoredTensor,
)
from trtserve.errors import CorruptFileError, UnsupportedModelError

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


_FLOATS = frozenset({"F32", "F16", "BF16"})
_LARGEST_STATE = 1 << 16
# Tensors beside a matrix that change no weight: scales of its inputs, and sizes that its shape says too.
_BESIDE = ("input_scale", "input_global_scale", "input_zero_point", "weight_shape", "weight_format", "input_scale_ub")
_CACHE = (".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".output_scale")  # scales of an 8-bit KV cache


def encoded(
    tensors: Mapping[str, StoredTensor], config: Widening | None
) -> tuple[dict[str, tuple[str, Encoding]], frozenset[str]]:
    """Return name and encoding of each quantised matrix by the name of its codes, and all names that this uses up.

    MXFP4 (`…_blocks`, `…_scales`) needs no config. Raises CorruptFileError for tensors that do not fit together.
    """
    found, used = dict[str, tuple[str, Encoding]](), set[str]()
    for name, tensor in tensors.items():
        parts = _Parts(tensors, tensor, used)
        made = _mxfp4(parts) or (None if config is None else _matrix(parts, config))
        if made is not None:
            found[name] = made
            used |= {name, *(parts.stem + each for each in _BESIDE)}
    if config is not None:
        used |= {name for name in tensors if name.endswith(_CACHE)}
    return found, frozenset(used)


class _Parts:
    """A tensor that may hold codes, and those with the same stem; what is asked for counts as used."""

    def __init__(self, tensors: Mapping[str, StoredTensor], codes: StoredTensor, used: set[str]) -> None:
        self.codes = codes
        self.stem, self.ending = codes.name[: codes.name.rfind(".") + 1], codes.name.rpartition(".")[2]
        self._tensors, self._used = tensors, used

    def get(self, *endings: str) -> StoredTensor | None:
        """Return the first of these that the model has."""
        for name in (self.stem + each for each in endings):
            if name in self._tensors:
                self._used.add(name)
                return self._tensors[name]
        return None

    def need(self, *endings: str) -> StoredTensor:
        """Return the first of these, or raise CorruptFileError."""
        if (found := self.get(*endings)) is None:
            raise CorruptFileError(f"{self.codes.where} is quantised but has no {' or '.join(endings)}.", hint=AGAIN)
        return found


def _mxfp4(parts: _Parts) -> tuple[str, Encoding] | None:
    codes, name = parts.codes, parts.ending.removesuffix("_blocks")
    scales = parts.get(f"{name}_scales") if name != parts.ending else None
    if scales is None:
        return None
    *outer, groups, size = codes.entry.shape
    kinds = {codes.entry.code, scales.entry.code}
    if (*outer, groups) != scales.entry.shape or size != 16 or kinds - EXPONENTS:
        wanted = ", ".join(map(str, (*outer, groups, 16)))
        raise CorruptFileError(
            f"{codes.file.path}: {codes.name} is {list(codes.entry.shape)} and {scales.name} "
            f"{list(scales.entry.shape)}; expected bytes [{wanted}] and one scale for each group.",
            hint=AGAIN,
        )
    return parts.stem + name, Fp4(codes=codes, scales=scales, group=32)


def _matrix(parts: _Parts, config: Widening) -> tuple[str, Encoding] | None:
    codes, code, method = parts.codes, parts.codes.entry.code, config.method
    made: Encoding | None = None
    if parts.ending == "qweight" and method in ("gptq", "awq"):
        made = _columns(codes, parts, config)
    elif parts.ending == "weight_packed" and method == "compressed-tensors":
        overall = parts.need("weight_global_scale") if code == "U8" else None
        made = _packed(codes, parts, config) if overall is None else _fp4(codes, parts, overall, divides=True)
    elif parts.ending == "weight" and len(codes.entry.shape) == 2:
        if code in FP8_TYPES:
            made = _scaled(codes, parts.need("weight_scale_inv", "weight_scale"), None, config)
        elif code == "I8" and method == "bitsandbytes":
            made = replace(_scaled(codes, parts.need("SCB"), None, config), factor=1 / 127)
        elif code == "I8" and method == "compressed-tensors":
            made = _scaled(codes, parts.need("weight_scale"), parts.get("weight_zero_point"), config)
        elif code == "U8" and method == "modelopt":
            made = _fp4(codes, parts, parts.need("weight_scale_2"), divides=False)
        elif code == "U8" and method == "bitsandbytes":
            made = _codebook(codes, parts)
    return None if made is None else (f"{parts.stem}weight", made)


def _require(tensor: StoredTensor, codes: frozenset[str] | set[str], dimensions: int) -> None:
    if tensor.entry.code not in codes or len(tensor.entry.shape) != dimensions or not math.prod(tensor.entry.shape):
        raise CorruptFileError(
            f"{tensor.where} is {tensor.entry.code} {list(tensor.entry.shape)}; expected {' or '.join(sorted(codes))} "
            f"with {dimensions} dimensions.",
            hint=AGAIN,
        )


def _misfit(tensor: StoredTensor, *shapes: tuple[int, ...]) -> CorruptFileError:
    expected = " or ".join(str(list(shape)) for shape in shapes)
    return CorruptFileError(
        f"{tensor.where} is {list(tensor.entry.shape)}; its matrix and the quantisation config call for {expected}.",
        hint=AGAIN,
    )


def _scaled(codes: StoredTensor, scales: StoredTensor, zeros: StoredTensor | None, config: Widening) -> Scaled:
    """Find out what one scale belongs to: the block of the config, or the matrix, a row, or a group of its inputs."""
    outputs, inputs = codes.entry.shape
    _require(codes, {codes.entry.code}, 2)

    def spread(tensor: StoredTensor, kinds: frozenset[str]) -> tuple[StoredTensor, tuple[int, int]]:
        shape = tensor.entry.shape
        if tensor.entry.code not in kinds:
            raise CorruptFileError(f"{tensor.where} is {tensor.entry.code}; expected {sorted(kinds)}.", hint=AGAIN)
        if shape in ((), (1,), (1, 1)):
            return tensor.seen_as(1, 1), (outputs, inputs)
        if shape in ((outputs,), (outputs, 1)):
            return tensor.seen_as(outputs, 1), (1, inputs)
        if config.block is not None:
            height, width = config.block
            blocks = -(-outputs // height), -(-inputs // width)
            if shape == blocks:
                return tensor, config.block
            raise _misfit(tensor, blocks)
        if len(shape) == 2 and shape[0] == outputs and shape[1] and not inputs % shape[1]:
            return tensor, (1, inputs // shape[1])
        raise _misfit(tensor, (1,), (outputs, 1))

    held, block = spread(scales, _FLOATS | {"F8_E8M0"})
    points = None if zeros is None else spread(zeros, _FLOATS | {"I8"})
    if points is not None and points[1] != block:
        raise _misfit(points[0], held.entry.shape)
    return Scaled(codes=codes, scales=held, block=block, zeros=None if points is None else points[0])


def _packed(codes: StoredTensor, parts: _Parts, config: Widening) -> PackedRows:
    scales, zeros, order = parts.need("weight_scale"), parts.get("weight_zero_point"), parts.get("weight_g_idx")
    _require(codes, {"I32"}, 2)
    _require(scales, _FLOATS, 2)
    outputs, words = codes.entry.shape
    groups = scales.entry.shape[1]
    bits = config.bits
    if scales.entry.shape[0] != outputs or words * 32 // bits % groups:
        raise _misfit(scales, (outputs, groups))
    if zeros is not None and zeros.entry.shape != (-(-outputs * bits // 32), groups):
        raise _misfit(zeros, (-(-outputs * bits // 32), groups))
    return PackedRows(codes=codes, scales=scales, bits=bits, zeros=zeros, order=order)


def _columns(codes: StoredTensor, parts: _Parts, config: Widening) -> Columns:
    zeros, scales, order = parts.need("qzeros"), parts.need("scales"), parts.get("g_idx")
    _require(codes, {"I32"}, 2)
    _require(zeros, {"I32"}, 2)
    _require(scales, _FLOATS, 2)
    if order is not None and not math.prod(order.entry.shape):
        order = None  # AutoGPTQ writes an empty one where it means nothing
    made = Columns(
        codes=codes,
        scales=scales,
        zeros=zeros,
        bits=config.bits,
        stored_zero=config.stored_zero,
        order=order,
        awq=config.method == "awq",
    )
    outputs, inputs = made.shape
    groups = 1 if config.group == -1 else -(-inputs // config.group)
    if scales.entry.shape != (groups, outputs):
        raise _misfit(scales, (groups, outputs))
    if zeros.entry.shape != (groups, outputs * config.bits // 32):
        raise _misfit(zeros, (groups, outputs * config.bits // 32))
    return made


def _fp4(codes: StoredTensor, parts: _Parts, overall: StoredTensor, *, divides: bool) -> Fp4:
    scales = parts.need("weight_scale")
    _require(codes, {"U8"}, 2)
    outputs, half = codes.entry.shape
    group = 16
    if scales.entry.code != "F8_E4M3" or scales.entry.shape != (outputs, half * 2 // group):
        raise _misfit(scales, (outputs, half * 2 // group))
    if math.prod(overall.entry.shape) != 1 or overall.entry.code not in _FLOATS:
        raise _misfit(overall, (1,))
    return Fp4(codes=codes, scales=scales, group=group, overall=overall, divides=divides)


def _codebook(codes: StoredTensor, parts: _Parts) -> Codebook:
    rows, columns, block, nested, offset = _state(
        parts.need("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")
    )
    largest, values = parts.need("weight.absmax"), parts.need("weight.quant_map")
    blocks = -(-rows * columns // block)
    for tensor, count in ((codes, -(-rows * columns // 2)), (largest, blocks), (values, 16)):
        if math.prod(tensor.entry.shape) != count:
            raise _misfit(tensor, (count,))
    if not nested:
        return Codebook(codes=codes, largest=largest, values=values, size=(rows, columns), block=block, nested=None)
    outer, inner = parts.need("weight.nested_absmax"), parts.need("weight.nested_quant_map")
    for tensor, count in ((outer, -(-blocks // nested)), (inner, 256)):
        if math.prod(tensor.entry.shape) != count:
            raise _misfit(tensor, (count,))
    return Codebook(
        codes=codes,
        largest=largest,
        values=values,
        size=(rows, columns),
        block=block,
        nested=(outer, inner, nested, offset),
    )


def _state(tensor: StoredTensor) -> tuple[int, int, int, int, float]:
    """Return rows, columns, block, outer block (0 without) and offset from the JSON that bitsandbytes stores."""
    content: Any = None
    if tensor.entry.code == "U8" and math.prod(tensor.entry.shape) <= _LARGEST_STATE:
        with suppress(ValueError, RecursionError):
            content = json.loads(bytes(tensor.values()))
    found = content if isinstance(content, dict) else {}
    shape, block, nested = found.get("shape"), found.get("blocksize"), found.get("nested_blocksize", 1)
    offset = found.get("nested_offset", 0.0)
    numbers = [*shape, block, nested] if isinstance(shape, list) else []
    if len(numbers) != 4 or not all(type(number) is int and 0 < number < 1 << 31 for number in numbers):
        raise CorruptFileError(
            f"{tensor.where} is not the state of a quantised matrix: {str(content)[:200]}.", hint=AGAIN
        )
    if not isinstance(offset, float | int):
        raise CorruptFileError(f"{tensor.where} has nested_offset = {str(offset)[:100]}.", hint=AGAIN)
    return numbers[0], numbers[1], numbers[2], numbers[3] if "nested_blocksize" in found else 0, float(offset)
