"""FP8 matrices whose codes a checkpoint keeps, with a scale for each output or for blocks of 128 × 128.

The runtime torch rounds their inputs with scales of each token. TensorRT-LLM's checkpoints have one scale for a matrix
(see `repacking`), and every other reader gets floats (see `encodings`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures.base import Target
from trtserve.checkpoint.encodings import Scaled, floats_of
from trtserve.checkpoint.placement import Packed, Placement
from trtserve.checkpoint.quantized import FP8_BLOCK, FP8_BLOCKS, FP8_ROWS
from trtserve.checkpoint.quantized_tensors import excluded_modules, is_packed
from trtserve.checkpoint.repacking import row_blocks, spans
from trtserve.checkpoint.sharding import Shard, shard
from trtserve.checkpoint.source import SourceTensor
from trtserve.checkpoint.streaming import write_at
from trtserve.errors import ConversionError, UsageError

_MULTIPLE = 16  # PyTorch's products with FP8 codes take matrices whose sizes are multiples of this
_NO_NUMBER = 0x7F  # codes that are not numbers, without their sign


@dataclass(frozen=True, kw_only=True)
class KeptFp8(Packed):
    """A checkpoint matrix [out, in] of FP8 codes, and their scales: f32[out] or f32[⌈out / 128⌉, ⌈in / 128⌉]."""

    sources: Mapping[str, SourceTensor]
    blocks: bool

    @property
    def source_sizes(self) -> list[int]:
        """Those of the codes, without the scales."""
        return [_scaled(tensor).codes.entry.size for tensor in self.sources.values()]

    @property
    def memory_bytes(self) -> int:
        """The scales of the matrix, and two blocks of codes."""
        return sum(4 * _scaled(tensor).scales.entry.size for tensor in self.sources.values()) + (16 << 20)

    def shapes(self, held: tuple[int, ...], dtype: str) -> dict[str, tuple[tuple[int, ...], str]]:
        del dtype
        outputs, inputs = held
        scales = (-(-outputs // FP8_BLOCK), -(-inputs // FP8_BLOCK)) if self.blocks else (outputs,)
        return {self.target.name: (held, "float8_e4m3"), self._scales_name: (scales, "float32")}

    def write(self, placement: Placement, files: Sequence[int]) -> None:
        for rank, tp_rank in placement.ranks(self.target):
            held = placement.shard(self.target, tp_rank)
            offset = placement.place(rank, self.target, self.target.name)
            scales = []
            for name, rows, columns in spans(self.target, held.pieces):
                matrix = _scaled(self.sources[name])
                for part in row_blocks(rows, slice(0, matrix.shape[1])):
                    codes = matrix.codes.rows(part.start, part.stop - part.start)[:, columns]
                    if (codes & _NO_NUMBER == _NO_NUMBER).any():
                        raise _no_numbers(matrix.codes.where)
                    write_at(files[rank], np.ascontiguousarray(codes), offset)
                    offset += codes.size
                scales.append(self._scales(matrix, rows, columns))
            write_at(files[rank], np.concatenate(scales), placement.place(rank, self.target, self._scales_name))

    @property
    def _scales_name(self) -> str:
        return f"{self.target.name.removesuffix('weight')}weights_scaling_factor"

    def _scales(self, matrix: Scaled, rows: slice, columns: slice) -> npt.NDArray[np.float32]:
        if self.blocks:
            low, high = rows.start // FP8_BLOCK, -(-rows.stop // FP8_BLOCK)
            found = floats_of(matrix.scales, low, high - low)
            found = found[:, columns.start // FP8_BLOCK : -(-columns.stop // FP8_BLOCK)]
        elif matrix.block[0] > 1:  # one for the matrix
            found = np.repeat(floats_of(matrix.scales, 0, 1)[:, 0], rows.stop - rows.start)
        else:
            found = floats_of(matrix.scales, rows.start, rows.stop - rows.start)[:, 0]
        if not np.isfinite(found).all():
            raise _no_numbers(matrix.scales.where)
        return np.ascontiguousarray(found)


def keep_fp8(
    targets: Sequence[Target], sources: Mapping[str, SourceTensor], config: CheckpointConfig, pp_size: int
) -> tuple[list[Target], list[KeptFp8], dict[str, SourceTensor], CheckpointConfig]:
    """Return the targets of floats, the matrices whose codes are kept, the sources of the former, and the config.

    A matrix is widened where its parts have scales of other forms than the config says, or ranks would cut its blocks.
    Raises UsageError when that leaves nothing.
    """
    tp_size, ep_size, algorithm = config.mapping.tp_size, config.mapping.moe_ep_size, config.quantization.algorithm
    kept, floats = list[KeptFp8](), list[Target]()
    for target in targets:
        shards = [shard(target, tp_size, rank, ep_size) for rank in range(tp_size)]
        if _form(target, sources) == algorithm and all(_fits(target, held, algorithm) for held in shards):
            parts = {name: sources[name] for name in target.sources}
            kept.append(KeptFp8(target=target, sources=parts, blocks=algorithm == FP8_BLOCKS))
        else:
            floats.append(target)
    if not kept:
        raise UsageError(
            "--keep-fp8: no matrix of the model has FP8 codes whose scales and sizes can be kept.",
            hint="Use --no-keep-fp8, or a smaller --tp-size.",
        )
    excluded = excluded_modules(floats, config.num_hidden_layers, pp_size)
    config = config.changed(quantization={**config.content["quantization"], "exclude_modules": excluded})
    used = {name for matrix in kept for name in matrix.sources}
    return floats, kept, {name: tensor for name, tensor in sources.items() if name not in used}, config


def _form(target: Target, sources: Mapping[str, SourceTensor]) -> str | None:
    """Return the algorithm that describes a matrix whose parts are FP8 codes with the same form of scales."""
    if not is_packed(target) or len(target.shape) != 2 or target.transpose or target.offset or target.factor:
        return None
    found = {_form_of(sources[name]) if name in sources else None for name in target.sources}
    return found.pop() if len(found) == 1 else None


def _form_of(tensor: SourceTensor) -> str | None:
    matrix = tensor.encoding
    if not isinstance(matrix, Scaled) or matrix.codes.entry.code != "F8_E4M3" or matrix.first_row:
        return None
    outputs, inputs = matrix.shape
    if matrix.block in ((1, inputs), (outputs, inputs)):
        return FP8_ROWS
    return FP8_BLOCKS if matrix.block == (FP8_BLOCK, FP8_BLOCK) else None


def _fits(target: Target, held: Shard, algorithm: str | None) -> bool:
    """Return whether a rank's part has whole blocks, but for the last one, and sizes that PyTorch multiplies."""
    if any(size % _MULTIPLE for size in held.shape):
        return False
    if algorithm == FP8_ROWS:
        return True
    parts, inputs = list(spans(target, held.pieces)), target.shape[1]
    starts = [start for _, rows, columns in parts for start in (rows.start, columns.start)]
    ends = [*(rows.stop - rows.start for _, rows, _ in parts[:-1]), *(columns.stop % inputs for _, _, columns in parts)]
    return not any(place % FP8_BLOCK for place in (*starts, *ends))


def _scaled(tensor: SourceTensor) -> Scaled:
    assert isinstance(tensor.encoding, Scaled)
    return tensor.encoding


def _no_numbers(where: str) -> ConversionError:
    return ConversionError(f"{where} has values that are not numbers.", hint="Fetch the model again.")
