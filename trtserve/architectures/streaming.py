"""Moving tensors from source files into rank files: one pass over each source, memory bounded by a chunk.

Bytes that need no change are copied inside the kernel. Others pass through a buffer of `CHUNK` bytes; only a
transposed tensor (Conv1D) is held whole.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtserve.architectures.source import SourceTensor
from trtserve.architectures.tensor_files import CODES, numpy_dtype, read_into
from trtserve.errors import ConversionError, CorruptFileError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# Small enough for the allocator to reuse its buffers and for the cache: 4 MiB took 40 % more CPU time, in page faults.
CHUNK = 512 << 10
_KERNEL_CHUNK = 64 << 20
_NO_KERNEL_COPY = {errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM}


@dataclass(frozen=True, kw_only=True)
class Block:
    """Rows and columns of a source tensor, seen as a matrix [out, in], that go to one place of one rank file.

    `offset` is in bytes from the start of the file; the block's rows follow each other there without gaps.
    """

    rank: int
    offset: int
    first_row: int
    rows: int
    first_column: int
    columns: int


@dataclass(frozen=True, kw_only=True)
class Move:
    """One source tensor and all the blocks that are cut from it; `shape` is [out, in].

    `offset` is added to all values. `dtype` is what it becomes where that is not the checkpoint's type.
    """

    source: SourceTensor
    shape: tuple[int, int]
    transpose: bool
    blocks: Sequence[Block]
    offset: float = 0.0
    dtype: str | None = None


class RankFiles:
    """The rank files of a checkpoint while they are written; made at their full size, so that padding is zeros."""

    def __init__(self, descriptors: Sequence[int]) -> None:
        self._descriptors = descriptors

    def __getitem__(self, rank: int) -> int:
        return self._descriptors[rank]


@contextmanager
def created(folder: Path, headers: Sequence[bytes], sizes: Sequence[int]) -> Iterator[RankFiles]:
    """Create `rankN.safetensors` in `folder`, each with its header, at its size in bytes, open for writing."""
    with ExitStack() as stack:
        descriptors = []
        for rank, (header, size) in enumerate(zip(headers, sizes, strict=True)):
            descriptor = os.open(folder / f"rank{rank}.safetensors", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            stack.callback(os.close, descriptor)
            os.ftruncate(descriptor, size)
            _write(descriptor, memoryview(header), 0)
            descriptors.append(descriptor)
        yield RankFiles(descriptors)


def carry_out(move: Move, files: RankFiles, dtype: str) -> None:
    """Write all blocks of a source tensor as `dtype` (float32, float16 or bfloat16), or as its own type.

    ConversionError names the tensor when a value is not finite in `dtype`.
    """
    dtype = move.dtype or dtype
    with move.source.file.opened() as descriptor:
        rest = []
        unchanged = move.source.entry.code == CODES[dtype] and not move.transpose and not move.offset
        for block in move.blocks:
            if unchanged and block.columns == move.shape[1]:
                _copy_rows(descriptor, move, block, files[block.rank])
            else:
                rest.append(block)
        if rest:
            _write_blocks(descriptor, move, rest, files, dtype)


def buffered_bytes(move: Move, dtype: str) -> int:
    """Bytes of memory that `carry_out` holds at most: a chunk as it was read, as it becomes, and what tests it."""
    entry = move.source.entry
    if entry.code == CODES[dtype] and not move.transpose and not move.offset:
        return CHUNK
    whole = entry.size if move.transpose else 0
    return whole + 6 * CHUNK


def _write_blocks(descriptor: int, move: Move, blocks: Sequence[Block], files: RankFiles, dtype: str) -> None:
    import numpy as np

    wanted = numpy_dtype(CODES[dtype])
    for first, values in _chunks(descriptor, move):
        cast = _cast(move.source, _shifted(values, move.offset), wanted)
        for block in blocks:
            start, stop = max(first, block.first_row), min(first + len(values), block.first_row + block.rows)
            if start >= stop:
                continue
            part = cast[start - first : stop - first, block.first_column : block.first_column + block.columns]
            offset = block.offset + (start - block.first_row) * block.columns * wanted.itemsize
            flat: Any = np.ascontiguousarray(part).reshape(-1).view(np.uint8).data
            _write(files[block.rank], flat, offset)


def _chunks(descriptor: int, move: Move) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    """Consecutive rows of the source as [out, in] matrices, each with the number of its first row."""
    import numpy as np

    rows, columns = move.shape
    entry = move.source.entry
    kind = numpy_dtype(entry.code)
    step = max(1, CHUNK // max(1, columns * kind.itemsize))
    if move.transpose:
        whole: npt.NDArray[Any] = np.empty((columns, rows), dtype=kind)
        read_into(descriptor, whole, entry.begin)
        for first in range(0, rows, step):
            yield first, np.ascontiguousarray(whole[:, first : first + step].T)
        return
    buffer: npt.NDArray[Any] = np.empty((min(step, rows), columns), dtype=kind)
    for first in range(0, rows, step):
        values = buffer[: min(step, rows - first)]
        read_into(descriptor, values, entry.begin + first * columns * kind.itemsize)
        yield first, values


def _shifted(values: npt.NDArray[Any], offset: float) -> npt.NDArray[Any]:
    """`values` + `offset`, added as TensorRT-LLM's converter does: float16 as it is, anything else as float32."""
    import numpy as np

    if not offset:
        return values
    wide: npt.NDArray[Any] = values if values.dtype == np.float16 else values.astype(np.float32)
    shifted: npt.NDArray[Any] = wide + np.asarray(offset, wide.dtype)
    return shifted


def _cast(source: SourceTensor, values: npt.NDArray[Any], wanted: np.dtype[Any]) -> npt.NDArray[Any]:
    import numpy as np

    if values.dtype == wanted:
        return values
    with np.errstate(over="ignore", invalid="ignore"):
        cast: npt.NDArray[Any] = values.astype(wanted)
    if wanted.itemsize == 2:
        _require_finite(source, values, cast)
    return cast


def _require_finite(source: SourceTensor, values: npt.NDArray[Any], cast: npt.NDArray[Any]) -> None:
    """Not finite means: all bits of the exponent are set. Integer tests are several times faster than isfinite."""
    import numpy as np

    name = "float16" if cast.dtype == np.float16 else "bfloat16"
    exponent = np.uint16(0x7C00 if name == "float16" else 0x7F80)
    bad = (cast.view(np.uint16) & exponent) == exponent
    if not bad.any():
        return
    first = values[bad][0]
    limit = " (largest value: 65504)" if name == "float16" else ""
    raise ConversionError(
        f"{source.name} in {source.file.path} has {int(bad.sum())} values in {len(values)} rows that are not finite in "
        f"{name}{limit}; the first is {float(first)}.",
        hint="Convert with --dtype bfloat16 or float32."
        if np.isfinite(np.float32(first))
        else "Fetch the model again.",
    )


def _copy_rows(descriptor: int, move: Move, block: Block, target: int) -> None:
    width = move.shape[1] * numpy_dtype(move.source.entry.code).itemsize
    begin, size = move.source.entry.begin + block.first_row * width, block.rows * width
    done = 0
    while done < size:
        count = _copy(descriptor, target, min(_KERNEL_CHUNK, size - done), begin + done, block.offset + done)
        if count == 0:
            raise CorruptFileError(f"{move.source.file.path} ended within {move.source.name} while it was read.")
        done += count


def _copy(source: int, target: int, size: int, begin: int, offset: int) -> int:
    """Copy up to `size` bytes inside the kernel; through a buffer where a file system cannot."""
    try:
        return os.copy_file_range(source, target, size, begin, offset)
    except OSError as error:
        if error.errno not in _NO_KERNEL_COPY:
            raise
    data = os.pread(source, min(size, CHUNK), begin)
    _write(target, memoryview(data), offset)
    return len(data)


def _write(descriptor: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], offset + done)
