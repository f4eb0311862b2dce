"""Moving tensors from source files into rank files: one pass over each source, memory bounded by a chunk.

The work is cut into jobs that threads share, so that one reads or casts while another writes. All bytes pass through
buffers of about `CHUNK` bytes, which every thread keeps; only a transposed tensor (Conv1D) is held whole.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtserve.architectures.casts import CAST_BYTES, Cast, not_finite_exponent
from trtserve.architectures.source import SourceTensor
from trtserve.architectures.tensor_files import CODES, TensorFile, numpy_dtype, read_into
from trtserve.architectures.threads import run_all, worker_count
from trtserve.errors import ConversionError, CorruptFileError
from trtserve.interrupts import held_back

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# Small enough for a core's cache.
CHUNK = 512 << 10
# The page cache takes folios as large as a write. This size is faster than copy_file_range, which moves 64 KiB at a
# time; larger ones took up to six times the CPU time in a virtual machine that hands free memory back to its host in
# pieces of 2 MiB, because large folios come from such pieces (2.2 GB: 0.51 s of 128 KiB, 2.5 s of 512 KiB, cp 0.56 s).
_WRITTEN = 128 << 10
_CHUNKS_OF_JOB = 8


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


@dataclass(frozen=True, kw_only=True)
class _Copy:
    """Bytes of a source tensor that go to one place of a rank file as they are; `begin` counts from the file's start.

    `done` bytes of sources are behind us when it is carried out.
    """

    source: SourceTensor
    rank: int
    begin: int
    offset: int
    size: int
    done: int = 0


@dataclass(frozen=True, kw_only=True)
class _Cut:
    """Rows of a source tensor that are changed, or cut by columns, for `blocks`; `done` is as in _Copy."""

    move: Move
    blocks: Sequence[Block]
    first_row: int
    rows: int
    done: int = 0


_Job = _Copy | _Cut


def carry_out(
    moves: Sequence[Move], files: RankFiles, dtype: str, advance: Callable[[int], None] = lambda _: None
) -> None:
    """Write all blocks of all source tensors as `dtype` (float32, float16 or bfloat16), or as their own type.

    `advance` is called with bytes of source tensors that are done. ConversionError names the tensor when a value is
    not finite in `dtype`.
    """
    whole = threading.Lock()

    @contextmanager
    def worker() -> Iterator[Callable[[_Job], int]]:
        with _Hands(files, dtype, whole) as hands:
            yield hands.carry_out

    run_all(_jobs(moves, dtype), worker, advance)


def load_types(moves: Sequence[Move], dtype: str) -> None:
    """Load what changed numbers need, before any thread does.

    An interrupted import leaves its lock taken (CPython 3.11), and another thread would wait for it for ever. NumPy
    prints the interrupt as well.
    """
    if any(not _unchanged(move, move.dtype or dtype) for move in moves):
        with held_back():
            numpy_dtype(CODES[dtype])


def buffered_bytes(move: Move, dtype: str) -> int:
    """Bytes of memory that `carry_out` holds at most for such a tensor, in all threads together.

    Each has a chunk as it was read, as it becomes (up to twice the size), and a part of that; a transposed tensor is
    held once.
    """
    if _unchanged(move, move.dtype or dtype):
        return worker_count() * 2 * CHUNK
    whole = move.source.entry.size if move.transpose else 0
    return whole + worker_count() * (6 * CHUNK + CAST_BYTES)


def _unchanged(move: Move, dtype: str) -> bool:
    return move.source.entry.code == CODES[dtype] and not move.transpose and not move.offset


def _jobs(moves: Sequence[Move], dtype: str) -> Iterator[_Job]:
    for move in moves:
        *others, last = _jobs_of(move, move.dtype or dtype)
        yield from others
        yield replace(last, done=move.source.entry.size)


def _jobs_of(move: Move, dtype: str) -> Iterator[_Job]:
    cut, unchanged = [], _unchanged(move, dtype)
    for block in move.blocks:
        if unchanged and block.columns == move.shape[1]:
            yield from _copies(move, block)
        else:
            cut.append(block)
    if not cut:
        return
    rows = move.shape[0]
    step = rows if move.transpose else _CHUNKS_OF_JOB * _chunk_rows(move)
    for first in range(0, rows, step):
        yield _Cut(move=move, blocks=cut, first_row=first, rows=min(step, rows - first))


def _copies(move: Move, block: Block) -> Iterator[_Copy]:
    """The bytes of a block, cut where the rank file has whole chunks, which is where large folios begin."""
    width = _row_bytes(move)
    begin = move.source.entry.begin + block.first_row * width
    offset, end = block.offset, block.offset + block.rows * width
    while offset < end:
        size = min(end, _next_multiple(offset, _CHUNKS_OF_JOB * CHUNK)) - offset
        yield _Copy(source=move.source, rank=block.rank, begin=begin, offset=offset, size=size)
        begin, offset = begin + size, offset + size


def _next_multiple(offset: int, size: int) -> int:
    return (offset // size + 1) * size


def _chunk_rows(move: Move) -> int:
    """Rows of a source tensor that are worked on at a time."""
    return max(1, CHUNK // max(1, _row_bytes(move)))


def _row_bytes(move: Move) -> int:
    return move.source.entry.size // move.shape[0]


class _Hands:
    """What one thread works with: the source file that it has open, and buffers that it keeps.

    `whole` is held by the one thread that holds a whole tensor.
    """

    def __init__(self, files: RankFiles, dtype: str, whole: threading.Lock) -> None:
        self._files = files
        self._dtype = dtype
        self._whole = whole
        self._opened = ExitStack()
        self._file: TensorFile | None = None
        self._descriptor = -1
        self._buffers: dict[str, bytearray] = {}
        self._casts: dict[tuple[np.dtype[Any], np.dtype[Any]], Cast] = {}

    def __enter__(self) -> _Hands:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def carry_out(self, job: _Job) -> int:
        """Do what the job says; returns its `done`."""
        if isinstance(job, _Copy):
            self._copy(job)
        elif job.move.transpose:
            with self._whole:
                self._cut(job)
        else:
            self._cut(job)
        return job.done

    def _open(self, source: SourceTensor) -> int:
        """Descriptor of the file that holds a source; jobs come file by file."""
        if self._file is not source.file:
            self._opened.close()
            self._descriptor = self._opened.enter_context(source.file.opened())
            self._file = source.file
        return self._descriptor

    def _buffer(self, use: str, size: int) -> memoryview:
        if len(self._buffers.get(use, b"")) < size:
            self._buffers[use] = bytearray(size)
        return memoryview(self._buffers[use])[:size]

    def _array(self, use: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """An array in the buffer for `use`, until it is asked for again."""
        import numpy as np

        flat = np.frombuffer(self._buffer(use, math.prod(shape) * dtype.itemsize), dtype=dtype)
        return flat.reshape(shape)

    def _copy(self, job: _Copy) -> None:
        source, target = self._open(job.source), self._files[job.rank]
        begin, offset, end = job.begin, job.offset, job.offset + job.size
        buffer = self._buffer("copied", CHUNK)
        while offset < end:
            part = buffer[: min(end, _next_multiple(offset, CHUNK)) - offset]
            count = os.preadv(source, [part], begin)
            if count == 0:
                raise CorruptFileError(f"{job.source.file.path} ended within {job.source.name} while it was read.")
            _write(target, part[:count], offset)
            begin, offset = begin + count, offset + count

    def _cut(self, job: _Cut) -> None:
        move, dtype = job.move, job.move.dtype or self._dtype
        wanted = numpy_dtype(CODES[dtype])
        for first, values in self._chunks(job):
            cast = self._cast(move.source, _shifted(values, move.offset), wanted)
            for block in job.blocks:
                start, stop = max(first, block.first_row), min(first + len(values), block.first_row + block.rows)
                if start >= stop:
                    continue
                part = cast[start - first : stop - first, block.first_column : block.first_column + block.columns]
                offset = block.offset + (start - block.first_row) * block.columns * wanted.itemsize
                write_at(self._files[block.rank], self._contiguous(part), offset)

    def _contiguous(self, part: npt.NDArray[Any]) -> npt.NDArray[Any]:
        import numpy as np

        if part.flags.c_contiguous:
            return part
        copied = self._array("part", part.shape, part.dtype)
        np.copyto(copied, part)
        return copied

    def _chunks(self, job: _Cut) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """Consecutive rows of the source as [out, in] matrices, each with the number of its first row."""
        move, entry = job.move, job.move.source.entry
        descriptor, kind, step = self._open(move.source), numpy_dtype(entry.code), _chunk_rows(move)
        if move.transpose:
            yield from _transposed(descriptor, move, step)
            return
        for first in range(job.first_row, job.first_row + job.rows, step):
            rows = min(step, job.first_row + job.rows - first)
            values = self._array("read", (rows, move.shape[1]), kind)
            read_into(descriptor, values, entry.begin + first * _row_bytes(move))
            yield first, values

    def _cast(self, source: SourceTensor, values: npt.NDArray[Any], wanted: np.dtype[Any]) -> npt.NDArray[Any]:
        if values.dtype == wanted:
            return values
        cast = self._array("cast", values.shape, wanted)
        kinds = values.dtype, wanted
        if kinds not in self._casts:
            self._casts[kinds] = Cast(*kinds)
        if not self._casts[kinds].into(values, cast):
            raise _not_finite(source, values, cast)
        return cast


def _transposed(descriptor: int, move: Move, step: int) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    """Rows of a tensor that is stored [in, out]."""
    import numpy as np

    rows, columns = move.shape
    entry = move.source.entry
    whole: npt.NDArray[Any] = np.empty((columns, rows), dtype=numpy_dtype(entry.code))
    read_into(descriptor, whole, entry.begin)
    for first in range(0, rows, step):
        yield first, np.ascontiguousarray(whole[:, first : first + step].T)


def _shifted(values: npt.NDArray[Any], offset: float) -> npt.NDArray[Any]:
    """`values` + `offset`, added as TensorRT-LLM's converter does: float16 as it is, anything else as float32."""
    import numpy as np

    if not offset:
        return values
    wide: npt.NDArray[Any] = values if values.dtype == np.float16 else values.astype(np.float32)
    shifted: npt.NDArray[Any] = wide + np.asarray(offset, wide.dtype)
    return shifted


def _not_finite(source: SourceTensor, values: npt.NDArray[Any], cast: npt.NDArray[Any]) -> ConversionError:
    """What is wrong with rows of which not all numbers are finite: all bits of their exponent are set."""
    import numpy as np

    exponent = np.uint16(not_finite_exponent(cast.dtype))
    bad = (cast.view(np.uint16) & exponent) == exponent
    first = values[bad][0]
    limit = " (largest value: 65504)" if cast.dtype == np.float16 else ""
    return ConversionError(
        f"{source.name} in {source.file.path} has {int(bad.sum())} values in {len(values)} rows that are not finite in "
        f"{cast.dtype.name}{limit}; the first is {float(first)}.",
        hint="Convert with --dtype bfloat16 or float32."
        if np.isfinite(np.float32(first))
        else "Fetch the model again.",
    )


def write_at(descriptor: int, values: npt.NDArray[Any], offset: int) -> None:
    """Write an array, row after row, from `offset` bytes after the start of a rank file on."""
    import numpy as np

    flat: Any = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
    _write(descriptor, flat, offset)


def _write(descriptor: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done : done + _WRITTEN], offset + done)
