"""Stream tensors from source files into rank files: one pass over each source, memory bounded by a chunk.

The work is cut into jobs shared by several processes, so that one reads or casts while another writes. All bytes pass
through buffers of about `CHUNK` bytes per process; only a transposed tensor (Conv1D) is held in full.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtserve.checkpoint.casts import Cast, cast_bytes, not_finite_exponent
from trtserve.checkpoint.source import SourceTensor
from trtserve.checkpoint.tensor_files import (
    CODES,
    LazyModule,
    TensorFile,
    item_size,
    numpy_dtype,
    read_bytes,
    read_into,
)
from trtserve.checkpoint.worker_pool import run_all, worker_count
from trtserve.errors import ConversionError
from trtserve.process.signals import held_back

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
else:
    np = LazyModule("numpy")

CHUNK = 256 << 10  # small enough to fit a core's cache together with the cast result
# The page cache uses folios as large as a write. This size beats copy_file_range, which moves 64 KiB at a time. Larger
# writes took up to six times the CPU time in a virtual machine that returns free memory to its host in 2 MiB pieces,
# because large folios come from such pieces (2.2 GB: 0.51 s at 128 KiB, 2.5 s at 512 KiB, cp 0.56 s).
_WRITTEN = 128 << 10
_CHUNKS_OF_JOB = 16
WORTH = 16 << 20  # source bytes that justify one more process, which takes some milliseconds to start


@dataclass(frozen=True, kw_only=True)
class Block:
    """Rows and columns of a source tensor, seen as a matrix [out, in], bound for one place in one rank file.

    `offset` is in bytes from the start of the file; the block's rows are contiguous there.
    """

    rank: int
    offset: int
    first_row: int
    rows: int
    first_column: int
    columns: int


@dataclass(frozen=True, kw_only=True)
class Move:
    """One source tensor and all blocks cut from it; `shape` is [out, in].

    `offset` is added to all values. `dtype` is the target type when it is not the checkpoint's.
    """

    source: SourceTensor
    shape: tuple[int, int]
    transpose: bool
    blocks: Sequence[Block]
    offset: float = 0.0
    dtype: str | None = None


@contextmanager
def created(folder: Path, headers: Sequence[bytes], sizes: Sequence[int]) -> Iterator[list[int]]:
    """Create `rankN.safetensors` in `folder`, each with its header and full size in bytes; yield their descriptors.

    Padding is zeros.
    """
    with ExitStack() as stack:
        descriptors = []
        for rank, (header, size) in enumerate(zip(headers, sizes, strict=True)):
            descriptor = os.open(folder / f"rank{rank}.safetensors", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            stack.callback(os.close, descriptor)
            os.ftruncate(descriptor, size)
            _write(descriptor, memoryview(header), 0)
            descriptors.append(descriptor)
        yield descriptors


@dataclass(frozen=True, kw_only=True)
class _Copy:
    """Consecutive values of a source tensor bound for one place in a rank file, copied or changed.

    `begin` and `offset` are byte offsets in the source and the rank file. `done` is the number of source bytes that
    this job completes.
    """

    move: Move
    rank: int
    begin: int
    offset: int
    numbers: int
    done: int = 0


@dataclass(frozen=True, kw_only=True)
class _Cut:
    """Rows of a source tensor that are cut by columns, or changed for several `blocks`; `done` as in _Copy."""

    move: Move
    blocks: Sequence[Block]
    first_row: int
    rows: int
    done: int = 0


_Job = _Copy | _Cut


def carry_out(
    moves: Sequence[Move], files: Sequence[int], dtype: str, advance: Callable[[int], None] = lambda _: None
) -> None:
    """Write all blocks of all source tensors, cast to `dtype` (float32, float16 or bfloat16) or to their own type.

    `advance` is called with the number of source bytes completed. Raises ConversionError naming the tensor when a value
    is not finite in `dtype`.
    """

    @contextmanager
    def worker() -> Iterator[Callable[[_Job], int]]:
        with ExitStack() as opened:
            yield _JobRunner(files, dtype, opened).carry_out

    def jobs() -> Iterator[_Job]:
        for move in moves:
            *others, last = _jobs_of(move, move.dtype or dtype)
            yield from others
            yield replace(last, done=move.source.entry.size)

    def holds_a_tensor(job: _Job) -> bool:
        return isinstance(job, _Cut) and job.move.transpose

    run_all(jobs(), worker, advance, count=process_count(moves), alone=holds_a_tensor)


def process_count(moves: Sequence[Move]) -> int:
    """Return the number of processes that carry out `moves`, including the caller."""
    return min(worker_count(), 1 + sum(move.source.entry.size for move in moves) // WORTH)


def load_types(moves: Sequence[Move], dtype: str) -> None:
    """Import what cut or changed tensors need, once, before processes are forked."""
    with held_back():  # NumPy prints a traceback when interrupted
        for code in {code for move in moves if needs_numpy(move, dtype) for code in _codes(move, dtype)}:
            numpy_dtype(code)


def needs_numpy(move: Move, dtype: str) -> bool:
    """Return whether a tensor is changed or cut by columns; otherwise its bytes are only copied."""
    return not _unchanged(move, move.dtype or dtype) or _has_columns(move)


def _codes(move: Move, dtype: str) -> tuple[str, str]:
    """Return a tensor's type codes before and after."""
    return move.source.entry.code, CODES[move.dtype or dtype]


def buffered_bytes(move: Move, dtype: str, processes: int) -> int:
    """Return the bytes of memory that `carry_out` uses for such a tensor, in all processes together.

    Each process holds a chunk as read, its cast result (up to twice the size), and a part of that when cutting by
    columns; one process holds a transposed tensor.
    """
    if not needs_numpy(move, dtype):
        return processes * CHUNK
    before, after = _codes(move, dtype)
    widths = item_size(before), item_size(after)
    read = CHUNK * widths[0] // widths[1] if _copied(move, move.dtype or dtype) else CHUNK
    changed = read * widths[1] // widths[0]
    casts = 0 if before == after else changed + cast_bytes(before, after)
    part = changed if _has_columns(move) else 0
    whole = move.source.entry.size if move.transpose else 0
    if move.source.encoding is not None:  # codes, scales, zero points and values in float32
        read *= 16
    return whole + processes * (read + casts + part)


def _unchanged(move: Move, dtype: str) -> bool:
    plain = not move.transpose and not move.offset and move.source.encoding is None
    return plain and move.source.entry.code == CODES[dtype]


def _has_columns(move: Move) -> bool:
    return any(block.columns != move.shape[1] for block in move.blocks)


def _copied(move: Move, dtype: str) -> list[Block]:
    """Return the blocks whose values are contiguous both in the source and in the rank file.

    Returns None when several blocks need the same values changed: those are changed once for all blocks.
    """
    if move.transpose or move.source.encoding or not (_unchanged(move, dtype) or _are_apart(move.blocks)):
        return []
    return [block for block in move.blocks if block.columns == move.shape[1]]


def _are_apart(blocks: Sequence[Block]) -> bool:
    rows = sorted((block.first_row, block.first_row + block.rows) for block in blocks)
    return all(stop <= start for (_, stop), (start, _) in itertools.pairwise(rows))


def _jobs_of(move: Move, dtype: str) -> Iterator[_Job]:
    copied = _copied(move, dtype)
    for block in copied:
        yield from _copies(move, block, dtype)
    cut = [block for block in move.blocks if block not in copied]
    if not cut:
        return
    rows = move.shape[0]
    step = rows if move.transpose else _CHUNKS_OF_JOB * _chunk_rows(move)
    for first in range(0, rows, step):
        yield _Cut(move=move, blocks=cut, first_row=first, rows=min(step, rows - first))


def _copies(move: Move, block: Block, dtype: str) -> Iterator[_Copy]:
    """Cut a block at chunk boundaries of the rank file, which is where large folios begin."""
    before, after = (item_size(code) for code in _codes(move, dtype))
    begin = move.source.entry.begin + block.first_row * _row_bytes(move)
    offset, left = block.offset, block.rows * block.columns
    while left:
        numbers = min(left, _numbers_to(_CHUNKS_OF_JOB * CHUNK, offset, after))
        yield _Copy(move=move, rank=block.rank, begin=begin, offset=offset, numbers=numbers)
        begin, offset, left = begin + numbers * before, offset + numbers * after, left - numbers


def _numbers_to(multiple: int, offset: int, width: int) -> int:
    """Return how many `width`-byte values fit between `offset` and the next `multiple`; at least one."""
    return max(1, (multiple - offset % multiple) // width)


def _chunk_rows(move: Move) -> int:
    """Return the number of source rows processed at a time."""
    return max(1, CHUNK // max(1, _row_bytes(move)))


def _row_bytes(move: Move) -> int:
    return move.source.entry.size // move.shape[0]


class _JobRunner:
    """The state of one process: its open source file and its reusable buffers."""

    def __init__(self, files: Sequence[int], dtype: str, opened: ExitStack) -> None:
        """`opened` closes the source file."""
        self._files = files
        self._dtype = dtype
        self._opened = opened
        self._file: TensorFile | None = None
        self._descriptor = -1
        self._buffers: dict[str, bytearray] = {}
        self._casts: dict[tuple[np.dtype[Any], np.dtype[Any]], Cast] = {}

    def carry_out(self, job: _Job) -> int:
        """Run a job and return its `done`."""
        if isinstance(job, _Copy):
            self._copy(job)
        else:
            self._cut(job)
        return job.done

    def _open(self, source: SourceTensor) -> int:
        """Open the source's file; jobs are sorted by file."""
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
        """Return an array in the buffer for `use`, valid until the next request for it."""
        flat = np.frombuffer(self._buffer(use, math.prod(shape) * dtype.itemsize), dtype=dtype)
        return flat.reshape(shape)

    def _copy(self, job: _Copy) -> None:
        move = job.move
        copy = self._copy_bytes if _unchanged(move, move.dtype or self._dtype) else self._copy_changed
        width = item_size(_codes(move, self._dtype)[1])
        begin, offset, left = job.begin, job.offset, job.numbers
        while left:
            numbers = min(left, _numbers_to(CHUNK, offset, width))
            begin += copy(move, self._files[job.rank], begin, offset, numbers)
            offset, left = offset + numbers * width, left - numbers

    def _copy_bytes(self, move: Move, target: int, begin: int, offset: int, numbers: int) -> int:
        """Copy values from `begin` to `offset`; return their size in bytes."""
        part = self._buffer("copied", numbers * item_size(move.source.entry.code))
        read_bytes(self._open(move.source), part, begin, move.source.where)
        _write(target, part, offset)
        return len(part)

    def _copy_changed(self, move: Move, target: int, begin: int, offset: int, numbers: int) -> int:
        """Change values from `begin` on, write them to `offset`, and return their size in bytes."""
        values = self._array("read", (numbers,), numpy_dtype(move.source.entry.code))
        read_into(self._open(move.source), values, begin, move.source.where)
        wanted = numpy_dtype(_codes(move, self._dtype)[1])
        write_at(target, self._cast(move.source, _shifted(values, move.offset), wanted), offset)
        return values.nbytes

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
        if part.flags.c_contiguous:
            return part
        copied = self._array("part", part.shape, part.dtype)
        np.copyto(copied, part)
        return copied

    def _chunks(self, job: _Cut) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """Yield consecutive source rows as [out, in] matrices, each with its first row."""
        move, entry = job.move, job.move.source.entry
        descriptor, kind, step = self._open(move.source), numpy_dtype(entry.code), _chunk_rows(move)
        if move.transpose:
            yield from _transposed(descriptor, move, step)
            return
        for first in range(job.first_row, job.first_row + job.rows, step):
            rows = min(step, job.first_row + job.rows - first)
            if move.source.encoding is not None:
                yield first, move.source.encoding.rows(first, rows).astype(kind, copy=False)
                continue
            values = self._array("read", (rows, move.shape[1]), kind)
            read_into(descriptor, values, entry.begin + first * _row_bytes(move), move.source.where)
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
    """Return rows of a tensor stored as [in, out]."""
    rows, columns = move.shape
    entry = move.source.entry
    # Use the kernel's pages directly: the allocator would keep some megabytes per process after the array is freed.
    pages = mmap.mmap(-1, entry.size)
    whole: npt.NDArray[Any] = np.frombuffer(pages, numpy_dtype(entry.code)).reshape(columns, rows)
    read_into(descriptor, whole, entry.begin, move.source.where)
    for first in range(0, rows, step):
        yield first, np.ascontiguousarray(whole[:, first : first + step].T)


def _shifted(values: npt.NDArray[Any], offset: float) -> npt.NDArray[Any]:
    """Return `values` + `offset`, added as TensorRT-LLM's converter does: in float16, or else in float32."""
    if not offset:
        return values
    wide: npt.NDArray[Any] = values if values.dtype == np.float16 else values.astype(np.float32)
    shifted: npt.NDArray[Any] = wide + np.asarray(offset, wide.dtype)
    return shifted


def _not_finite(source: SourceTensor, values: npt.NDArray[Any], cast: npt.NDArray[Any]) -> ConversionError:
    """Describe non-finite values in these rows (all exponent bits set)."""
    exponent = np.uint16(not_finite_exponent(cast.dtype))
    bad = (cast.view(np.uint16) & exponent) == exponent
    first = values[bad][0]
    limit = " (largest value: 65504)" if cast.dtype == np.float16 else ""
    return ConversionError(
        f"{source.name} in {source.file.path} has {int(bad.sum())} of {values.size} numbers that are not finite in "
        f"{cast.dtype.name}{limit}; the first is {float(first)}.",
        hint="Convert with --dtype bfloat16 or float32."
        if np.isfinite(np.float32(first))
        else "Fetch the model again.",
    )


def write_at(descriptor: int, values: npt.NDArray[Any], offset: int) -> None:
    """Write an array row by row, starting `offset` bytes into a rank file."""
    flat: Any = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
    _write(descriptor, flat, offset)


def _write(descriptor: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done : done + _WRITTEN], offset + done)
