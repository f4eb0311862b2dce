"""Memory of a conversion in bytes; a separate module, so that conversions do not load the runtimes."""

from __future__ import annotations

from collections.abc import Sequence

from trtserve.checkpoint.streaming import (
    Move,
    buffered_bytes,
    needs_numpy,
    process_count,
)

# Anonymous memory, measured (Python 3.11, NumPy 1.26, PyTorch 2.13): the first process, and each further one's private
# copy of pages that it writes to.
_CONVERT_PROCESS = 16.3 * 2**20
_FORKED = 3.6 * 2**20
_NUMPY = 8.3 * 2**20
_UNPICKLING = 130 * 2**20  # PyTorch, which imports NumPy


def convert_libraries(moves: Sequence[Move]) -> tuple[str, ...]:
    """Return the libraries that a conversion imports: PyTorch when it reads pickled files."""
    return tuple(sorted({"numpy"}.union(*(move.source.file.libraries for move in moves))))


def convert_memory(moves: Sequence[Move], dtype: str, *, repacking: Sequence[int] = ()) -> int:
    """Return the peak of a conversion's processes, which hold one source tensor or quantised matrix at a time."""
    processes = process_count(moves)
    held = [buffered_bytes(move, dtype, processes) for move in moves]
    pickled = "torch" in convert_libraries(moves)
    libraries = _NUMPY if pickled or repacking or any(needs_numpy(move, dtype) for move in moves) else 0
    libraries += _UNPICKLING if pickled else 0
    base = _CONVERT_PROCESS + (processes - 1) * _FORKED + libraries
    return round(base) + max([*held, *repacking], default=0)
