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
`encoded_tensors` says which tensors of a model are one matrix.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from trtserve.checkpoint.tensor_files import Entry, LazyModule, TensorFile, read_into, stored_dtype
from trtserve.errors import ConversionError, CorruptFileError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Floats = npt.NDArray[np.float32]
else:
    np = LazyModule("numpy")

AGAIN = "Fetch the model again, or choose another copy of it."
FP8_TYPES = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
# Powers of two with 127 as zero; 255 is not a number.
EXPONENTS = frozenset({"F8_E8M0", "U8"})
_SCALE_BIAS, _NO_NUMBER = 127, 255
# e2m1: a sign, two bits of exponent, one of mantissa.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # AWQ: the output of each nibble of a word


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
        entry, columns = self.entry, self.entry.shape[-1]
        kind = stored_dtype(entry.code)
        values = np.empty((count, columns), dtype=kind)
        with self.file.opened() as descriptor:
            read_into(descriptor, values, entry.begin + first * columns * kind.itemsize, self.where)
        return values

    def mapped(self) -> npt.NDArray[Any]:
        """Map the tensor into memory, for reads of columns."""
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

    code = "F32"  # the narrowest type that holds the values: a safetensors type

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the matrix as stored, experts first."""

    @abstractmethod
    def _rows(self, first: int, count: int) -> Floats: ...

    def rows(self, first: int, count: int) -> Floats:
        """Return rows f32[count, in]. Raises ConversionError for values that are not numbers."""
        with np.errstate(over="ignore", invalid="ignore"):
            values = self._rows(self.first_row + first, count)
        if not np.isfinite(values).all():
            raise ConversionError(f"{self.codes.where} has values that are not numbers.", hint="Fetch the model again.")
        return values


@dataclass(frozen=True, kw_only=True)
class Turned(Encoding):
    """Floats [experts, in, out] that are read as [experts, out, in]."""

    @property
    def code(self) -> str:  # type: ignore[override]
        """The type of the floats."""
        return self.codes.entry.code

    @property
    def shape(self) -> tuple[int, ...]:
        experts, inputs, outputs = self.codes.entry.shape
        return experts, outputs, inputs

    def _rows(self, first: int, count: int) -> Floats:
        _, outputs, inputs = self.shape
        values, read = np.empty((count, inputs), np.float32), 0
        while read < count:
            expert, row = divmod(first + read, outputs)
            rows = min(count - read, outputs - row)
            values[read : read + rows] = self.codes.mapped()[expert, :, row : row + rows].T
            read += rows
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
        values = floats_of(self.codes, first, count)
        height, width = self.block
        low, high = first // height, -(-(first + count) // height)

        def spread(tensor: StoredTensor) -> Floats:
            tall = np.repeat(floats_of(tensor, low, high - low), height, 0)[first - low * height :][:count]
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
        codes = unpacked(self.codes.rows(first, count), self.bits).astype(np.float32)
        scales = floats_of(self.scales, first, count)
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
        words, zeros = self.codes.mapped(), self.zeros.mapped()
        rows = slice(first, first + count)
        if self.awq:
            codes = unpacked_awq(words, rows).T
            points = unpacked_awq(zeros, rows).T
        else:
            codes = unpacked(np.ascontiguousarray(words[:, rows]).T, self.bits)
            points = unpacked(np.asarray(zeros), self.bits)[:, rows].T
        inputs, scales = self.shape[1], np.asarray(self.scales.mapped()[:, rows]).T.astype(np.float32)
        groups = scales.shape[1]
        spread = np.arange(inputs) // -(-inputs // groups) if self.order is None else _order(self.order, inputs, groups)
        steps = codes.astype(np.float32) - (points[:, spread].astype(np.float32) + self.stored_zero)
        return np.ascontiguousarray(steps * scales[:, spread])


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
        groups = self.scales.entry.shape[-1]
        packed = self.codes.seen_as(-1, groups * self.group // 2).rows(first, count)
        codes = np.stack([packed & 15, packed >> 4], -1).reshape(count, groups, self.group)
        scales = floats_of(self.scales, first, count)
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
    little: npt.NDArray[np.uint8] = np.ascontiguousarray(words).astype("<u4", copy=False).view(np.uint8)
    if bits == 8:
        return little
    if bits == 4:
        codes: npt.NDArray[np.uint8] = np.stack([little & 15, little >> 4], -1)
    else:
        each = np.unpackbits(little, axis=-1, bitorder="little").reshape(len(words), -1, bits)
        codes = np.packbits(each, axis=-1, bitorder="little")
    return codes.reshape(len(words), -1)


def unpacked_awq(words: npt.NDArray[Any], outputs: slice) -> npt.NDArray[np.uint8]:
    """Unpack [n, m] 32-bit integers to 4-bit codes [n, outputs]; nibbles hold outputs 0, 2, 4, 6, 1, 3, 5, 7 of 8."""
    low, high = outputs.start // 8, -(-outputs.stop // 8)
    mixed = unpacked(words[:, low:high], 4).reshape(len(words), -1, 8)
    codes: npt.NDArray[np.uint8] = mixed[:, :, np.argsort(_AWQ_ORDER)].reshape(len(words), -1)
    return codes[:, outputs.start - low * 8 : outputs.stop - low * 8]


def _order(order: StoredTensor, columns: int, groups: int) -> npt.NDArray[Any]:
    """Return the group of each input."""
    found = order.values()
    if found.shape != (columns,) or found.dtype.kind != "i" or ((found < 0) | (found >= groups)).any():
        raise CorruptFileError(
            f"{order.where} does not name one of {groups} groups for each of {columns} inputs.", hint=AGAIN
        )
    return np.asarray(found)


def floats_of(tensor: StoredTensor, first: int, count: int) -> Floats:
    """Read rows of floats, FP8, exponents or int8 as float32."""
    import ml_dtypes

    values, code = tensor.rows(first, count), tensor.entry.code
    if code in FP8_TYPES:
        values = values.view(getattr(ml_dtypes, FP8_TYPES[code]))
    elif code in EXPONENTS:
        return np.where(
            values == _NO_NUMBER, np.float32(np.nan), np.ldexp(np.float32(1), values.astype(np.int32) - _SCALE_BIAS)
        )
    return values.astype(np.float32)
