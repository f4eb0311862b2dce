"""Memory of a conversion, in bytes; apart from the other stages, whose runtimes a conversion need not load."""

from __future__ import annotations

from collections.abc import Sequence

from trtserve.architectures.streaming import Move, buffered_bytes

# Anonymous memory, measured (Python 3.11, PyTorch 2.13).
_CONVERT_PROCESS = 33 * 2**20
TORCH = 215 * 2**20


def convert_libraries(moves: Sequence[Move]) -> tuple[str, ...]:
    """What a conversion loads: PyTorch where it reads pickled files."""
    return tuple(sorted({"numpy"}.union(*(move.source.file.libraries for move in moves))))


def convert_memory(moves: Sequence[Move], dtype: str, *, repacking: Sequence[int] = ()) -> int:
    """Peak of a conversion's process: one source tensor, or quantised matrix (its bytes), is under way at a time."""
    held = [buffered_bytes(move, dtype) for move in moves]
    torch = TORCH if "torch" in convert_libraries(moves) else 0
    return _CONVERT_PROCESS + torch + max([*held, *repacking], default=0)
