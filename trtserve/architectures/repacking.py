"""Quantised matrices of a Hugging Face model → TensorRT-LLM's layout, cut for all ranks.

A matrix is worked on in blocks of outputs, so that besides one packed source only a few megabytes are held.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trtserve.architectures.base import Target
from trtserve.architectures.kernel_layout import EXPERTS_GPU_SM, to_kernel
from trtserve.architectures.placement import Placement, runs
from trtserve.architectures.quantized_source import SourceQuantization
from trtserve.architectures.sharding import Piece, Shard
from trtserve.architectures.source import SourceTensor
from trtserve.architectures.streaming import RankFiles, write_at
from trtserve.architectures.tensor_files import CODES, numpy_dtype
from trtserve.errors import ConversionError, UnsupportedModelError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_BLOCK_BYTES = 4 << 20
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_OTHER_WEIGHTS = "Fetch the model again, or choose another copy of it."


@dataclass(frozen=True, kw_only=True)
class Repack:
    """A quantised matrix of the checkpoint: the tensors of each of its sources by their endings.

    `gpu_sm` is the compute capability (× 10) of the GPU that is to read 4-bit weights.
    """

    target: Target
    sources: Mapping[str, Mapping[str, SourceTensor]]
    quantization: SourceQuantization
    gpu_sm: int

    @property
    def source_bytes(self) -> int:
        """Bytes that are read."""
        return sum(tensor.entry.size for parts in self.sources.values() for tensor in parts.values())

    @property
    def largest_source(self) -> int:
        """Bytes of the largest source tensor."""
        return max(tensor.entry.size for parts in self.sources.values() for tensor in parts.values())

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory at most: the packed sources, and one block as codes of several widths."""
        return self.source_bytes + 12 * _BLOCK_BYTES

    def shapes(self, held: tuple[int, ...], dtype: str) -> dict[str, tuple[tuple[int, ...], str]]:
        """Names (of the whole model), shapes and types of the tensors of a rank that holds this shape of floats."""
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

    def write(self, placement: Placement, files: RankFiles) -> None:
        """Write its tensors into the files of all ranks that hold a part of it."""
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


def _write_int4(
    work: Repack,
    held: Shard,
    places: Mapping[str, int],
    file: int,
    dtype: str,
) -> None:
    import numpy as np

    wanted, name = numpy_dtype(CODES[dtype]), work.target.name
    scales, zeros = [], []
    offset = places[name]
    gpu_sm = work.gpu_sm if len(held.shape) == 2 else EXPERTS_GPU_SM
    for source, rows, columns in _spans(work.target, held.pieces):
        matrix = _Int4Source(work.sources[source], work.quantization)
        for block in _blocks(rows, columns):
            packed = to_kernel(matrix.codes(block, columns).astype(np.int8).T - np.int8(8), gpu_sm)
            write_at(file, packed, offset)
            offset += packed.nbytes
        scale = _rounded(matrix.scales(rows, columns), wanted, work)
        scales.append(scale)
        zeros.append(_rounded((8 - matrix.zeros(rows, columns)) * scale.astype(np.float32), wanted, work))
    for ending, parts in (("weights_scaling_factor", scales), ("zero", zeros)):
        # As many parts follow each other for each expert; another matrix has all of them.
        each = len(parts) // (held.shape[0] if len(held.shape) > 2 else 1)
        joined = [np.concatenate(parts[first : first + each], axis=1) for first in range(0, len(parts), each)]
        write_at(file, np.stack(joined), places[_beside(name, ending)])


def _rounded(values: npt.NDArray[Any], wanted: np.dtype[Any], work: Repack) -> npt.NDArray[Any]:
    import numpy as np

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
    """Matrices that are fused share the largest of their scales, and the codes of the others are rounded anew."""
    import numpy as np

    name = work.target.name
    own = {source: _scale(parts["weight_scale"]) for source, parts in work.sources.items()}
    shared = _shared_scales(work.target, own)
    offset = places[name]
    written: dict[int, float] = {}
    for source, rows, columns in _spans(work.target, held.pieces):
        expert, scale = shared[source]
        codes = _values(work.sources[source]["weight"])[rows, columns]
        part = _rescaled(np.ascontiguousarray(codes), own[source], scale)
        write_at(file, part, offset)
        offset += part.nbytes
        written[expert] = scale
    activations = max(_scale(parts["input_scale"]) for parts in work.sources.values())
    write_at(file, np.array([*written.values()], np.float32), places[_beside(name, "weights_scaling_factor")])
    write_at(file, np.array([activations], np.float32), places[_beside(name, "activation_scaling_factor")])


def _shared_scales(target: Target, own: Mapping[str, float]) -> dict[str, tuple[int, float]]:
    """Of each source the number of its expert, and the largest scale of what this expert is made of."""
    sources = list(target.sources)
    each = len(sources) // (target.shape[0] if len(target.shape) > 2 else 1)
    largest = [max(own[name] for name in sources[first : first + each]) for first in range(0, len(sources), each)]
    return {name: (number // each, largest[number // each]) for number, name in enumerate(sources)}


def _rescaled(codes: npt.NDArray[np.uint8], own: float, scale: float) -> npt.NDArray[np.uint8]:
    import ml_dtypes
    import numpy as np

    if own == scale:
        return codes
    values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * np.float32(own) / np.float32(scale)
    cast: npt.NDArray[np.uint8] = np.ascontiguousarray(values.astype(ml_dtypes.float8_e4m3fn)).view(np.uint8)
    return cast


def _spans(target: Target, pieces: Sequence[Piece]) -> Iterator[tuple[str, slice, slice]]:
    """Source, its rows and its columns, in the order in which a rank holds them."""
    for piece in pieces:
        first = 0
        for name, start, count in runs(target):
            low, high = max(first, piece.first_row), min(first + count, piece.first_row + piece.rows)
            if low < high:
                columns = slice(piece.first_column, piece.first_column + piece.columns)
                yield name, slice(start + low - first, start + high - first), columns
            first += count


def _blocks(rows: slice, columns: slice) -> Iterator[slice]:
    """Runs of at most a few megabytes of codes; 8 outputs share a number of AWQ, 4 a tile of the kernels."""
    step = max(8, _BLOCK_BYTES // (columns.stop - columns.start) // 8 * 8)
    for first in range(rows.start, rows.stop, step):
        yield slice(first, min(first + step, rows.stop))


class _Int4Source:
    """The packed tensors of one matrix of AWQ or GPTQ."""

    def __init__(self, parts: Mapping[str, SourceTensor], quantization: SourceQuantization) -> None:
        self._quantization = quantization
        self._awq = quantization.method == "awq"
        self._weight, self._zeros = (_values(parts[name]) for name in ("qweight", "qzeros"))
        self._scales = _values(parts["scales"])

    def codes(self, rows: slice, columns: slice) -> npt.NDArray[np.uint8]:
        """Codes 0 … 15 [out, in] of these outputs and inputs."""
        if self._awq:
            return unpacked_awq(self._weight[columns], rows).T
        part = self._weight[columns.start // 8 : columns.stop // 8, rows]
        return unpacked_gptq(part.T)

    def zeros(self, rows: slice, columns: slice) -> npt.NDArray[Any]:
        """Zero points 0 … 16 [in / group, out], signed numbers."""
        import numpy as np

        part = self._zeros[self._groups(columns)]
        codes = unpacked_awq(part, rows) if self._awq else unpacked_gptq(part)[:, rows]
        return codes.astype(np.int32) + self._quantization.stored_zero

    def scales(self, rows: slice, columns: slice) -> npt.NDArray[Any]:
        """Scales [in / group, out]."""
        return self._scales[self._groups(columns), rows]

    def _groups(self, columns: slice) -> slice:
        size = self._quantization.group_size
        return slice(columns.start // size, columns.stop // size)


def unpacked_gptq(packed: npt.NDArray[np.int32]) -> npt.NDArray[np.uint8]:
    """[n, m] numbers of 32 bits as [n, 8 m] codes, the lowest four bits first."""
    import numpy as np

    words = np.ascontiguousarray(packed).view(np.uint32)[:, :, None]
    codes: npt.NDArray[np.uint8] = (words >> np.arange(0, 32, 4, dtype=np.uint32) & 15).astype(np.uint8)
    return codes.reshape(len(packed), -1)


def unpacked_awq(packed: npt.NDArray[np.int32], outputs: slice) -> npt.NDArray[np.uint8]:
    """[n, m] numbers of 32 bits as codes [n, outputs]: four bits hold outputs 0, 2, 4, 6, 1, 3, 5, 7 of 8."""
    import numpy as np

    first, last = outputs.start // 8, -(-outputs.stop // 8)
    mixed = unpacked_gptq(packed[:, first:last]).reshape(len(packed), -1, 8)
    codes: npt.NDArray[np.uint8] = mixed[:, :, np.argsort(_AWQ_ORDER)].reshape(len(packed), -1)
    return codes[:, outputs.start - first * 8 : outputs.stop - first * 8]


def _values(tensor: SourceTensor) -> npt.NDArray[Any]:
    return tensor.file.stored(tensor.entry)


def _scale(tensor: SourceTensor) -> float:
    """The one scale of an FP8 matrix or of its inputs."""
    values = _values(tensor).reshape(-1)
    if len(values) != 1:
        raise UnsupportedModelError(
            f"{tensor.name} holds {len(values)} scales; only FP8 with one scale for a matrix can be converted here.",
            hint="Convert with --converter upstream.",
        )
    scale = float(values[0])
    if not 0 < scale < math.inf:
        raise ConversionError(f"{tensor.name} is {scale}, which cannot be a scale.", hint=_OTHER_WEIGHTS)
    return scale
