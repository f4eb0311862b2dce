"""Checkpoint tensors that are the product of two source tensors: embeddings that the model projects for each token.

TensorRT-LLM's converter does this for OPT-350m, whose embeddings are narrower than its layers: both tensors are rounded
to the checkpoint's type, multiplied in float32, and the product is rounded again. The table is read in blocks of rows
to bound memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trtserve.checkpoint.architectures.base import Factor, Target
from trtserve.checkpoint.placement import Packed, Placement, refuse_weights
from trtserve.checkpoint.sharding import Piece
from trtserve.checkpoint.source import SourceTensor
from trtserve.checkpoint.streaming import write_at
from trtserve.checkpoint.tensor_files import CODES, numpy_dtype, read_into
from trtserve.errors import ConversionError

_BLOCK_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True)
class Product(Packed):
    """`table` [rows, n] times `factor` [n, columns] (stored transposed when its Factor says so)."""

    table: SourceTensor
    factor: SourceTensor
    transposed: bool

    @property
    def source_sizes(self) -> list[int]:
        return [self.table.entry.size, self.factor.entry.size]

    @property
    def memory_bytes(self) -> int:
        """The factor in two types, and a block of rows and of products in three."""
        return 4 * self.factor.entry.size + 6 * _BLOCK_BYTES

    def shapes(self, held: tuple[int, ...], dtype: str) -> dict[str, tuple[tuple[int, ...], str]]:
        return {self.target.name: (held, dtype)}

    def write(self, placement: Placement, files: Sequence[int]) -> None:
        wanted = numpy_dtype(CODES[placement.dtype])
        places = [place for held in placement.ranks(self.target) for place in self._places(placement, *held)]
        for first, rows in self._blocks(wanted):
            for rank, offset, piece in places:
                low, high = max(first, piece.first_row), min(first + len(rows), piece.first_row + piece.rows)
                if low < high:
                    part = rows[low - first : high - first, piece.first_column : piece.first_column + piece.columns]
                    skipped = (low - piece.first_row) * piece.columns * wanted.itemsize
                    write_at(files[rank], part, offset + skipped)

    def _places(self, placement: Placement, rank: int, tp_rank: int) -> Iterator[tuple[int, int, Piece]]:
        """Return rank, file offset and piece; every split gives a rank at most one piece of a table."""
        for piece in placement.shard(self.target, tp_rank).pieces:
            yield rank, placement.place(rank, self.target, self.target.name), piece

    def _blocks(self, wanted: np.dtype[Any]) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """Yield consecutive rows of the product, each block with its first row."""
        factor = _rounded(self.factor.name, self.factor.file.stored(self.factor.entry), wanted).astype(np.float32)
        factor = factor.T if self.transposed else factor
        rows, width = self.table.entry.shape
        kind, row_bytes = numpy_dtype(self.table.entry.code), self.table.entry.size // rows
        step = max(1, _BLOCK_BYTES // (4 * max(width, factor.shape[1])))
        with self.table.file.opened() as descriptor:
            for first in range(0, rows, step):
                part = np.empty((min(step, rows - first), width), dtype=kind)
                read_into(descriptor, part, self.table.entry.begin + first * row_bytes)
                product = _rounded(self.table.name, part, wanted).astype(np.float32) @ factor
                yield first, _rounded(f"{self.table.name} × {self.factor.name}", product, wanted)


def _rounded(name: str, values: npt.NDArray[Any], wanted: np.dtype[Any]) -> npt.NDArray[Any]:
    with np.errstate(over="ignore", invalid="ignore"):
        cast: npt.NDArray[Any] = values.astype(wanted)
    if not np.isfinite(cast.astype(np.float32)).all():
        raise ConversionError(
            f"{name} has values that are not finite in {wanted.name}.",
            hint="Convert with --dtype bfloat16 or float32, or fetch the model again.",
        )
    return cast


def split_products(
    targets: Sequence[Target], sources: Mapping[str, SourceTensor]
) -> tuple[list[Target], list[Product], dict[str, SourceTensor]]:
    """Return the targets that are not products, the products, and the sources left for the former.

    ConversionError lists missing tensors and wrong shapes.
    """
    others = [target for target in targets if target.factor is None]
    wanted = {target.name: _source_shapes(target, target.factor) for target in targets if target.factor is not None}
    needed = {name: shape for shapes in wanted.values() for name, shape in shapes.items()}
    refuse_weights([f"missing: {name}" for name in needed if name not in sources])
    refuse_weights(
        f"{name} is {list(sources[name].entry.shape)}, expected {list(shape)}"
        for name, shape in needed.items()
        if sources[name].entry.shape != shape
    )
    products = [
        Product(
            target=target,
            table=sources[target.sources[0]],
            factor=sources[target.factor.name],
            transposed=target.factor.transposed,
        )
        for target in targets
        if target.factor is not None
    ]
    return others, products, {name: tensor for name, tensor in sources.items() if name not in needed}


def _source_shapes(target: Target, factor: Factor) -> dict[str, tuple[int, ...]]:
    rows, columns = target.shape
    shape = (columns, factor.width) if factor.transposed else (factor.width, columns)
    return {target.sources[0]: (rows, factor.width), factor.name: shape}
