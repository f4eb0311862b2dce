"""Quantised Hugging Face matrices: repacked to TensorRT-LLM's layout and sharded, or as the floats that they stand for.

A matrix is processed in blocks of outputs, so memory holds one packed source and a few megabytes. The numerical check
compares a converted checkpoint with the floats, so they do not pass through a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trtserve.checkpoint.architectures.base import Target
from trtserve.checkpoint.encodings import unpacked, unpacked_awq
from trtserve.checkpoint.placement import Packed, Placement, runs
from trtserve.checkpoint.quantized import EXPERTS_GPU_SM, to_kernel
from trtserve.checkpoint.sharding import Piece, Shard
from trtserve.checkpoint.source import SourceTensor
from trtserve.checkpoint.streaming import write_at
from trtserve.checkpoint.supported import SourceQuantization
from trtserve.checkpoint.tensor_files import CODES, DTYPES, LazyModule, numpy_dtype
from trtserve.errors import ConversionError, UnsupportedModelError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
else:
    np = LazyModule("numpy")

_BLOCK_BYTES = 4 << 20
_OTHER_WEIGHTS = "Fetch the model again, or choose another copy of it."


@dataclass(frozen=True, kw_only=True)
class Repack(Packed):
    """A quantised checkpoint matrix: the tensors of each source, keyed by suffix.

    `gpu_sm` is the compute capability (× 10) whose layout 4-bit weights get.
    """

    sources: Mapping[str, Mapping[str, SourceTensor]]
    quantization: SourceQuantization
    gpu_sm: int

    @property
    def source_sizes(self) -> list[int]:
        return [tensor.entry.size for parts in self.sources.values() for tensor in parts.values()]

    @property
    def memory_bytes(self) -> int:
        """The packed sources, and one block of codes in several widths."""
        return sum(self.source_sizes) + 12 * _BLOCK_BYTES

    def shapes(self, held: tuple[int, ...], dtype: str) -> dict[str, tuple[tuple[int, ...], str]]:
        *experts, outputs, inputs = held
        name = self.target.name
        if self.quantization.method == "fp8":
            return {
                name: (held, "float8_e4m3"),
                _beside(name, "activation_scaling_factor"): ((1,), "float32"),
                _beside(name, "weights_scaling_factor"): ((*experts, 1), "float32"),
            }
        groups = inputs // self.quantization.group_size
        return {
            name: ((*experts, inputs, outputs // 4), dtype),
            _beside(name, "weights_scaling_factor"): ((*experts, groups, outputs), dtype),
            _beside(name, "zero"): ((*experts, groups, outputs), dtype),
        }

    def write(self, placement: Placement, files: Sequence[int]) -> None:
        for rank, tp_rank in placement.ranks(self.target):
            held = placement.shard(self.target, tp_rank)
            names = self.shapes(held.shape, placement.dtype)
            places = {name: placement.place(rank, self.target, name) for name in names}
            if self.quantization.method == "fp8":
                _write_fp8(self, held, places, files[rank])
            else:
                _write_int4(self, held, places, files[rank], placement.dtype)


def _beside(name: str, ending: str) -> str:
    return f"{name.removesuffix('weight')}{ending}"


def _write_int4(work: Repack, held: Shard, places: Mapping[str, int], file: int, dtype: str) -> None:
    wanted, name = numpy_dtype(CODES[dtype]), work.target.name
    scales, zeros = [], []
    offset = places[name]
    gpu_sm = work.gpu_sm if len(held.shape) == 2 else EXPERTS_GPU_SM
    for source, rows, columns in spans(work.target, held.pieces):
        matrix = _Int4Source(work.sources[source], work.quantization)
        for block in row_blocks(rows, columns):
            packed = to_kernel(matrix.codes(block, columns).astype(np.int8).T - np.int8(8), gpu_sm)
            write_at(file, packed, offset)
            offset += packed.nbytes
        scale = _rounded(matrix.scales(rows, columns), wanted, work)
        scales.append(scale)
        zeros.append(_rounded((8 - matrix.zeros(rows, columns)) * scale.astype(np.float32), wanted, work))
    for ending, parts in (("weights_scaling_factor", scales), ("zero", zeros)):
        # Experts repeat their parts one after another; any other matrix has them all at once.
        each = len(parts) // (held.shape[0] if len(held.shape) > 2 else 1)
        joined = [np.concatenate(parts[first : first + each], axis=1) for first in range(0, len(parts), each)]
        write_at(file, np.stack(joined), places[_beside(name, ending)])


def _rounded(values: npt.NDArray[Any], wanted: np.dtype[Any], work: Repack) -> npt.NDArray[Any]:
    with np.errstate(over="ignore", invalid="ignore"):
        cast: npt.NDArray[Any] = values.astype(wanted)
    if not np.isfinite(cast.astype(np.float32)).all():
        finite = np.isfinite(values.astype(np.float32)).all()
        raise ConversionError(
            f"The scales of {work.target.name}, or their products with zero points, are not finite in {wanted.name}.",
            hint="Convert with --dtype bfloat16." if finite else _OTHER_WEIGHTS,
        )
    return cast


def _write_fp8(work: Repack, held: Shard, places: Mapping[str, int], file: int) -> None:
    """Write FP8 codes; fused matrices share their largest scale, and the other codes are requantised."""
    name = work.target.name
    own = {source: _scale(parts["weight_scale"]) for source, parts in work.sources.items()}
    # Every source gets the largest scale within its expert.
    sources = list(work.target.sources)
    each = len(sources) // (work.target.shape[0] if len(work.target.shape) > 2 else 1)
    largest = [max(own[name] for name in sources[first : first + each]) for first in range(0, len(sources), each)]
    shared = {name: (number // each, largest[number // each]) for number, name in enumerate(sources)}
    offset = places[name]
    written: dict[int, float] = {}
    for source, rows, columns in spans(work.target, held.pieces):
        expert, scale = shared[source]
        codes = _values(work.sources[source]["weight"])[rows, columns]
        part = _rescaled(np.ascontiguousarray(codes), own[source], scale)
        write_at(file, part, offset)
        offset += part.nbytes
        written[expert] = scale
    activations = max(_scale(parts["input_scale"]) for parts in work.sources.values())
    write_at(file, np.array([*written.values()], np.float32), places[_beside(name, "weights_scaling_factor")])
    write_at(file, np.array([activations], np.float32), places[_beside(name, "activation_scaling_factor")])


def _rescaled(codes: npt.NDArray[np.uint8], own: float, scale: float) -> npt.NDArray[np.uint8]:
    import ml_dtypes

    if own == scale:
        return codes
    values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * np.float32(own) / np.float32(scale)
    cast: npt.NDArray[np.uint8] = np.ascontiguousarray(values.astype(ml_dtypes.float8_e4m3fn)).view(np.uint8)
    return cast


def spans(target: Target, pieces: Sequence[Piece]) -> Iterator[tuple[str, slice, slice]]:
    """Return source, rows and columns in the order in which a rank stores them."""
    for piece in pieces:
        first = 0
        for name, start, count in runs(target):
            low, high = max(first, piece.first_row), min(first + count, piece.first_row + piece.rows)
            if low < high:
                columns = slice(piece.first_column, piece.first_column + piece.columns)
                yield name, slice(start + low - first, start + high - first), columns
            first += count


def row_blocks(rows: slice, columns: slice) -> Iterator[slice]:
    """Yield runs of a few megabytes of codes at most; AWQ packs 8 outputs per integer, a kernel tile has 4."""
    step = max(8, _BLOCK_BYTES // (columns.stop - columns.start) // 8 * 8)
    for first in range(rows.start, rows.stop, step):
        yield slice(first, min(first + step, rows.stop))


class _Int4Source:
    """The packed tensors of one AWQ or GPTQ matrix."""

    def __init__(self, parts: Mapping[str, SourceTensor], quantization: SourceQuantization) -> None:
        self._quantization = quantization
        self._awq = quantization.method == "awq"
        self._weight, self._zeros = (_values(parts[name]) for name in ("qweight", "qzeros"))
        self._scales = _values(parts["scales"])

    def codes(self, rows: slice, columns: slice) -> npt.NDArray[np.uint8]:
        """Return codes 0 … 15 [out, in] of these outputs and inputs."""
        if self._awq:
            return unpacked_awq(self._weight[columns], rows).T
        part = self._weight[columns.start // 8 : columns.stop // 8, rows]
        return unpacked(part.T, 4)

    def zeros(self, rows: slice, columns: slice) -> npt.NDArray[Any]:
        """Return zero points 0 … 16 [in / group, out] as signed integers."""
        part = self._zeros[self._groups(columns)]
        codes = unpacked_awq(part, rows) if self._awq else unpacked(part, 4)[:, rows]
        return codes.astype(np.int32) + self._quantization.stored_zero

    def scales(self, rows: slice, columns: slice) -> npt.NDArray[Any]:
        """Return scales [in / group, out]."""
        return self._scales[self._groups(columns), rows]

    def floats(self) -> npt.NDArray[np.float32]:
        """Return (codes − zero points) × scales of the whole matrix [out, in]."""
        groups, outputs = self._scales.shape
        rows, columns = slice(0, outputs), slice(0, groups * self._quantization.group_size)
        codes = self.codes(rows, columns).T.reshape(groups, -1, outputs).astype(np.float32)
        steps = codes - self.zeros(rows, columns).astype(np.float32)[:, None]
        whole = (steps * self._scales.astype(np.float32)[:, None]).reshape(-1, outputs)
        return np.ascontiguousarray(whole.T)

    def _groups(self, columns: slice) -> slice:
        size = self._quantization.group_size
        return slice(columns.start // size, columns.stop // size)


def _values(tensor: SourceTensor) -> npt.NDArray[Any]:
    return tensor.file.stored(tensor.entry)


def _scale(tensor: SourceTensor) -> float:
    """Return the single scale of an FP8 matrix or of its inputs."""
    values = _values(tensor).reshape(-1)
    if len(values) != 1:
        raise UnsupportedModelError(
            f"{tensor.name} holds {len(values)} scales; only FP8 with one scale per matrix is supported.",
            hint="Convert with --converter upstream.",
        )
    scale = float(values[0])
    if not 0 < scale < math.inf:
        raise ConversionError(f"{tensor.name} is {scale}, which cannot be a scale.", hint=_OTHER_WEIGHTS)
    return scale


# Companions of a quantised matrix that are not weights.
_FP8_SCALES = ("weight_scale", "input_scale", "q_scale", "k_scale", "v_scale", "kv_scale", "output_scale")
_MASKS = ("BOOL", "U8")
_BESIDE = ("qzeros", "scales", "g_idx", *_FP8_SCALES)


def quantised_names(sources: Mapping[str, SourceTensor]) -> frozenset[str]:
    """Return the names (`….weight`) of the matrices stored as codes."""
    packed = {name.removesuffix("qweight") + "weight" for name in sources if name.endswith(".qweight")}
    return frozenset(packed | {name for name, tensor in sources.items() if tensor.entry.code == "F8_E4M3"})


def float_types(sources: Mapping[str, SourceTensor]) -> set[str]:
    """Return the model's float types, including scales of 4-bit codes but not of FP8, which are always float32."""
    return {
        DTYPES.get(tensor.entry.code, tensor.entry.code)
        for name, tensor in sources.items()
        if tensor.entry.code not in ("I32", "I64", "F8_E4M3") and name.rpartition(".")[2] not in _FP8_SCALES
    }


def dequantized(
    sources: Mapping[str, SourceTensor], quantization: SourceQuantization | None
) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """Yield every weight of the model as float32."""
    import ml_dtypes

    for name, tensor in sources.items():
        stem, _, ending = name.rpartition(".")
        if tensor.encoding is not None:
            shape = tensor.entry.shape
            yield name, tensor.encoding.rows(0, math.prod(shape[:-1] or shape)).reshape(shape)
            continue
        if ending in _BESIDE or tensor.entry.code in _MASKS:
            continue
        if quantization is not None and ending == "qweight":
            parts = {part: sources[f"{stem}.{part}"] for part in ("qweight", "qzeros", "scales")}
            yield f"{stem}.weight", _Int4Source(parts, quantization).floats()
        elif tensor.entry.code == "F8_E4M3":
            step = _values(sources[f"{stem}.weight_scale"]).astype(np.float32).reshape(-1)[0]
            yield name, _values(tensor).view(ml_dtypes.float8_e4m3fn).astype(np.float32) * step
        else:
            yield name, _values(tensor).astype(np.float32)
