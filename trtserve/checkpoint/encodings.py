"""Quantised matrices as they are published, read a few rows at a time as the floats that they stand for.

| Class      | Tensors of a matrix `X` [out, in]                                 | Published by                        |
|------------|-------------------------------------------------------------------|-------------------------------------|
| Scaled     | `weight` FP8 or int8; `weight_scale`, `weight_scale_inv` or `SCB` | DeepSeek, Qwen, fbgemm, ModelOpt,   |
|            | for the matrix, per row, per group of inputs, or per block        | compressed-tensors, bitsandbytes    |
| PackedRows | `weight_packed` I32 [out, words], `weight_scale` [out, groups]    | compressed-tensors (pack-quantized) |
| Columns    | `qweight` I32, `qzeros`, `scales` [groups, out], `g_idx`          | GPTQ [words, out], AWQ [in, words]  |
| Fp4        | `weight` or `weight_packed` U8 [out, in / 2], scales per 16 or 32 | ModelOpt, compressed-tensors, MXFP4 |
| Codebook   | `weight` U8 [n, 1], `weight.absmax`, `weight.quant_map`           | bitsandbytes (nf4, fp4)             |

Values are calculated in float32 as the tools do: bfloat16 or float16 checkpoints round them once. Sources: the formats'
published descriptions, and the READMEs of AutoAWQ, AutoGPTQ, compressed-tensors and bitsandbytes.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from trtserve.checkpoint.tensor_files import Entry, TensorFile, read_into, stored_dtype
from trtserve.errors import ConversionError, CorruptFileError, UnsupportedModelError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Floats = npt.NDArray[np.float32]

_AGAIN = "Fetch the model again, or choose another copy of it."
_FLOATS = frozenset({"F32", "F16", "BF16"})
_FP8 = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
# Powers of two with 127 as zero; 255 is no number.
_EXPONENTS = frozenset({"F8_E8M0", "U8"})
_SCALE_BIAS, _NO_NUMBER = 127, 255
# e2m1: a sign, two bits of exponent, one of mantissa.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# AWQ: the output of each nibble of a word.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_LARGEST_STATE = 1 << 16


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor as it lies in a file."""

    name: str
    file: TensorFile
    entry: Entry

    @property
    def where(self) -> str:
        return f"{self.file.path}, within {self.name},"

    def values(self) -> npt.NDArray[Any]:
        """Read all values as they are stored; FP8 as bits."""
        return self.file.stored(self.entry)

    def rows(self, first: int, count: int) -> npt.NDArray[Any]:
        """Read rows of the tensor, seen as a matrix [all others, last dimension]."""
        import numpy as np

        entry, columns = self.entry, self.entry.shape[-1]
        kind = stored_dtype(entry.code)
        values = np.empty((count, columns), dtype=kind)
        with self.file.opened() as descriptor:
            read_into(descriptor, values, entry.begin + first * columns * kind.itemsize, self.where)
        return values

    def mapped(self) -> npt.NDArray[Any]:
        """Map the tensor into memory, for reads of columns."""
        import numpy as np

        entry = self.entry
        return np.memmap(self.file.path, stored_dtype(entry.code), mode="r", offset=entry.begin, shape=entry.shape)

    def seen_as(self, *shape: int) -> StoredTensor:
        """Return the same bytes in another shape."""
        return replace(self, entry=replace(self.entry, shape=shape))


@dataclass(frozen=True, kw_only=True)
class Encoding(ABC):
    """How a stored matrix becomes floats; `first_row` is the stored row that is row 0 of this matrix."""

    codes: StoredTensor
    first_row: int = 0

    code = "F32"
    """The narrowest type that holds the values: a safetensors type."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the matrix as stored, experts first."""

    @abstractmethod
    def _rows(self, first: int, count: int) -> Floats: ...

    def rows(self, first: int, count: int) -> Floats:
        """Return rows f32[count, in]. Raises ConversionError for values that are no numbers."""
        import numpy as np

        with np.errstate(over="ignore", invalid="ignore"):
            values = self._rows(self.first_row + first, count)
        if not np.isfinite(values).all():
            raise ConversionError(f"{self.codes.where} has values that are no numbers.", hint="Fetch the model again.")
        return values


@dataclass(frozen=True, kw_only=True)
class Scaled(Encoding):
    """FP8 or int8 [out, in], (codes − zeros) × scales × `factor`; `block` is the rows and columns of one scale."""

    scales: StoredTensor
    block: tuple[int, int]
    zeros: StoredTensor | None = None
    factor: float = 1.0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.entry.shape

    def _rows(self, first: int, count: int) -> Floats:
        import numpy as np

        values = _floats(self.codes, first, count)
        height, width = self.block
        low, high = first // height, -(-(first + count) // height)

        def spread(tensor: StoredTensor) -> Floats:
            tall = np.repeat(_floats(tensor, low, high - low), height, 0)[first - low * height :][:count]
            return np.repeat(tall, width, 1)[:, : values.shape[1]] if tall.shape[1] > 1 else tall

        if self.zeros is not None:
            values -= spread(self.zeros)
        values *= spread(self.scales)
        return values if self.factor == 1 else values * np.float32(self.factor)


@dataclass(frozen=True, kw_only=True)
class PackedRows(Encoding):
    """Words [out, in · bits / 32], lowest bits first; zero points [out · bits / 32, groups] are packed along `out`."""

    scales: StoredTensor
    bits: int
    zeros: StoredTensor | None
    order: StoredTensor | None

    @property
    def shape(self) -> tuple[int, ...]:
        outputs, words = self.codes.entry.shape
        return outputs, words * 32 // self.bits

    def _rows(self, first: int, count: int) -> Floats:
        import numpy as np

        codes = unpacked(self.codes.rows(first, count), self.bits).astype(np.float32)
        scales = _floats(self.scales, first, count)
        columns, groups = self.shape[1], scales.shape[1]
        if self.zeros is None:
            points: Floats = np.full_like(scales, 1 << (self.bits - 1))
        else:
            each = 32 // self.bits
            low, high = first // each, -(-(first + count) // each)
            whole = unpacked(self.zeros.rows(low, high - low).T, self.bits).T
            points = whole[first - low * each :][:count].astype(np.float32)
        if self.order is None:
            spread = slice(None) if groups == columns else np.arange(columns) // (columns // groups)
        else:
            spread = _order(self.order, columns, groups)
        values: Floats = (codes - points[:, spread]) * scales[:, spread]
        return values


@dataclass(frozen=True, kw_only=True)
class Columns(Encoding):
    """GPTQ: words [in · bits / 32, out]; AWQ: words [in, out / 8]. Scales are [groups, out], zeros words as wide.

    `stored_zero` is added to zero points; `order` I32 [in] names the group of each input.
    """

    scales: StoredTensor
    zeros: StoredTensor
    bits: int
    stored_zero: int
    order: StoredTensor | None
    awq: bool

    @property
    def shape(self) -> tuple[int, ...]:
        inputs, outputs = self.codes.entry.shape
        return (outputs * 32 // self.bits, inputs) if self.awq else (outputs, inputs * 32 // self.bits)

    def _rows(self, first: int, count: int) -> Floats:
        import numpy as np

        words, zeros = self.codes.mapped(), self.zeros.mapped()
        rows = slice(first, first + count)
        if self.awq:
            codes = self._awq(words, rows).T
            points = self._awq(zeros, rows).T
        else:
            codes = unpacked(np.ascontiguousarray(words[:, rows]).T, self.bits)
            points = unpacked(np.asarray(zeros), self.bits)[:, rows].T
        inputs, scales = self.shape[1], np.asarray(self.scales.mapped()[:, rows]).T.astype(np.float32)
        groups = scales.shape[1]
        spread = np.arange(inputs) // -(-inputs // groups) if self.order is None else _order(self.order, inputs, groups)
        steps = codes.astype(np.float32) - (points[:, spread].astype(np.float32) + self.stored_zero)
        return np.ascontiguousarray(steps * scales[:, spread])

    def _awq(self, words: npt.NDArray[Any], rows: slice) -> npt.NDArray[np.uint8]:
        import numpy as np

        low, high = rows.start // 8, -(-rows.stop // 8)
        mixed = unpacked(np.ascontiguousarray(words[:, low:high]), self.bits).reshape(len(words), -1, 8)
        codes: npt.NDArray[np.uint8] = mixed[:, :, np.argsort(_AWQ_ORDER)].reshape(len(words), -1)
        return codes[:, rows.start - low * 8 : rows.stop - low * 8]


@dataclass(frozen=True, kw_only=True)
class Fp4(Encoding):
    """e2m1 codes, two in a byte, low first, × scales of `group` inputs × `overall` (NVFP4) or 1 / `overall`."""

    scales: StoredTensor
    group: int
    overall: StoredTensor | None = None
    divides: bool = False

    @property
    def code(self) -> str:  # type: ignore[override]
        """MXFP4 fits into bfloat16."""
        return "F32" if self.overall is not None else "BF16"

    @property
    def shape(self) -> tuple[int, ...]:
        return *self.scales.entry.shape[:-1], self.scales.entry.shape[-1] * self.group

    def _rows(self, first: int, count: int) -> Floats:
        import numpy as np

        groups = self.scales.entry.shape[-1]
        packed = self.codes.seen_as(-1, groups * self.group // 2).rows(first, count)
        codes = np.stack([packed & 15, packed >> 4], -1).reshape(count, groups, self.group)
        scales = _floats(self.scales, first, count)
        if self.overall is not None:
            overall = np.float32(self.overall.values().reshape(-1)[0])
            scales = scales / overall if self.divides else scales * overall
        values: Floats = np.asarray(E2M1, np.float32)[codes] * scales[:, :, None]
        return values.reshape(count, -1)


@dataclass(frozen=True, kw_only=True)
class Codebook(Encoding):
    """bitsandbytes: two codes in a byte, high first, that index `values`, × the largest number of their block."""

    largest: StoredTensor
    values: StoredTensor
    size: tuple[int, int]
    block: int
    nested: tuple[StoredTensor, StoredTensor, int, float] | None  # largest numbers, their values, block and offset

    @property
    def shape(self) -> tuple[int, ...]:
        return self.size

    def _rows(self, first: int, count: int) -> Floats:
        import numpy as np

        columns = self.size[1]
        begin, end = first * columns, (first + count) * columns
        packed = self.codes.seen_as(-1, 1).rows(begin // 2, -(-end // 2) - begin // 2).reshape(-1)
        codes = np.stack([packed >> 4, packed & 15], -1).reshape(-1)[begin % 2 :][: end - begin]
        low, high = begin // self.block, -(-end // self.block)
        largest = self.largest.seen_as(-1, 1).rows(low, high - low).reshape(-1)
        if self.nested is not None:
            outer, numbers, block, offset = self.nested
            each = outer.values().astype(np.float32)[np.arange(low, high) // block]
            largest = numbers.values().astype(np.float32)[largest] * each + np.float32(offset)
        scales = largest.astype(np.float32)[np.arange(begin, end) // self.block - low]
        values: Floats = self.values.values().astype(np.float32)[codes] * scales
        return values.reshape(count, columns)


def unpacked(words: npt.NDArray[Any], bits: int) -> npt.NDArray[np.uint8]:
    """Unpack [n, m] 32-bit integers to codes [n, 32 m / bits], lowest bits first; codes may cross words."""
    import numpy as np

    little: npt.NDArray[np.uint8] = np.ascontiguousarray(words).astype("<u4", copy=False).view(np.uint8)
    if bits == 8:
        return little
    if bits == 4:
        codes: npt.NDArray[np.uint8] = np.stack([little & 15, little >> 4], -1)
    else:
        each = np.unpackbits(little, axis=-1, bitorder="little").reshape(len(words), -1, bits)
        codes = np.packbits(each, axis=-1, bitorder="little")
    return codes.reshape(len(words), -1)


def _order(order: StoredTensor, columns: int, groups: int) -> npt.NDArray[Any]:
    """Return the group of each input."""
    import numpy as np

    found = order.values()
    if found.shape != (columns,) or found.dtype.kind != "i" or ((found < 0) | (found >= groups)).any():
        raise CorruptFileError(
            f"{order.where} does not name one of {groups} groups for each of {columns} inputs.", hint=_AGAIN
        )
    return np.asarray(found)


def _floats(tensor: StoredTensor, first: int, count: int) -> Floats:
    """Read rows of floats, FP8, exponents or int8 as float32."""
    import ml_dtypes
    import numpy as np

    values, code = tensor.rows(first, count), tensor.entry.code
    if code in _FP8:
        values = values.view(getattr(ml_dtypes, _FP8[code]))
    elif code in _EXPONENTS:
        return np.where(
            values == _NO_NUMBER, np.float32(np.nan), np.ldexp(np.float32(1), values.astype(np.int32) - _SCALE_BIAS)
        )
    return values.astype(np.float32)


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


def widening(config: Mapping[str, Any]) -> Widening:
    """Return how a quantisation config's matrices are read. Raises UnsupportedModelError naming what is not."""
    method = str(config.get("quant_method", "unknown method"))
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
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        raise refused("compressed-tensors whose config_groups is not an object")
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


# Tensors beside a matrix that change no weight: scales of its inputs, and sizes that its shape says too.
_BESIDE = ("input_scale", "input_global_scale", "input_zero_point", "weight_shape", "weight_format", "input_scale_ub")
# Scales of an 8-bit KV cache.
_CACHE = (".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".output_scale")


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
            raise CorruptFileError(f"{self.codes.where} is quantised but has no {' or '.join(endings)}.", hint=_AGAIN)
        return found


def _mxfp4(parts: _Parts) -> tuple[str, Encoding] | None:
    codes, name = parts.codes, parts.ending.removesuffix("_blocks")
    scales = parts.get(f"{name}_scales") if name != parts.ending else None
    if scales is None:
        return None
    *outer, groups, size = codes.entry.shape
    kinds = {codes.entry.code, scales.entry.code}
    if (*outer, groups) != scales.entry.shape or size != 16 or kinds - _EXPONENTS:
        wanted = ", ".join(map(str, (*outer, groups, 16)))
        raise CorruptFileError(
            f"{codes.file.path}: {codes.name} is {list(codes.entry.shape)} and {scales.name} "
            f"{list(scales.entry.shape)}; expected bytes [{wanted}] and one scale for each group.",
            hint=_AGAIN,
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
        if code in _FP8:
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
            hint=_AGAIN,
        )


def _misfit(tensor: StoredTensor, *shapes: tuple[int, ...]) -> CorruptFileError:
    expected = " or ".join(str(list(shape)) for shape in shapes)
    return CorruptFileError(
        f"{tensor.where} is {list(tensor.entry.shape)}; its matrix and the quantisation config call for {expected}.",
        hint=_AGAIN,
    )


def _scaled(codes: StoredTensor, scales: StoredTensor, zeros: StoredTensor | None, config: Widening) -> Scaled:
    """Find out what one scale belongs to: the block of the config, or the matrix, a row, or a group of its inputs."""
    outputs, inputs = codes.entry.shape
    _require(codes, {codes.entry.code}, 2)

    def spread(tensor: StoredTensor, kinds: frozenset[str]) -> tuple[StoredTensor, tuple[int, int]]:
        shape = tensor.entry.shape
        if tensor.entry.code not in kinds:
            raise CorruptFileError(f"{tensor.where} is {tensor.entry.code}; expected {sorted(kinds)}.", hint=_AGAIN)
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
            f"{tensor.where} is not the state of a quantised matrix: {str(content)[:200]}.", hint=_AGAIN
        )
    if not isinstance(offset, float | int):
        raise CorruptFileError(f"{tensor.where} has nested_offset = {str(offset)[:100]}.", hint=_AGAIN)
    return numbers[0], numbers[1], numbers[2], numbers[3] if "nested_blocksize" in found else 0, float(offset)
