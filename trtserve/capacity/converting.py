"""Memory of a conversion, in bytes; apart from the other stages, whose runtimes a conversion need not load."""

from __future__ import annotations

from collections.abc import Sequence

from trtserve.architectures.streaming import Move, buffered_bytes, needs_numpy, process_count

# Anonymous memory, measured (Python 3.11, NumPy 1.26, PyTorch 2.13): the process, and what each further one has for
# itself of what it shares with the first until one of them writes to it.
_CONVERT_PROCESS = 14.3 * 2**20
_FORKED = 3.6 * 2**20
_NUMPY = 8.3 * 2**20
_UNPICKLING = 130 * 2**20  # PyTorch, which brings NumPy


def convert_libraries(moves: Sequence[Move]) -> tuple[str, ...]:
    """What a conversion loads: PyTorch where it reads pickled files."""
    return tuple(sorted({"numpy"}.union(*(move.source.file.libraries for move in moves))))


def convert_memory(moves: Sequence[Move], dtype: str, *, repacking: Sequence[int] = ()) -> int:
    """Peak of a conversion's processes: one source tensor, or quantised matrix (its bytes), is under way at a time."""
    processes = process_count(moves)
    held = [buffered_bytes(move, dtype, processes) for move in moves]
    pickled = "torch" in convert_libraries(moves)
    libraries = _NUMPY if pickled or repacking or any(needs_numpy(move, dtype) for move in moves) else 0
    libraries += _UNPICKLING if pickled else 0
    base = _CONVERT_PROCESS + (processes - 1) * _FORKED + libraries
    return round(base) + max([*held, *repacking], default=0)
