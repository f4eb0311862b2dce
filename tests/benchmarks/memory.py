"""Anonymous memory of a command and all its processes: RssAnon + RssShmem from /proc.

Processes that were forked to work for their parent share its pages until one of them writes: of those, only what they
have for themselves is added, so that a page counts once, as a cgroup counts it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")


def anonymous_bytes(pid: int) -> int:
    """Bytes of the process and its descendants together; 0 when it has ended."""
    total = process_bytes(pid)
    for child in _children(pid):
        total += _own_bytes(child) if _is_copy(child, pid) else anonymous_bytes(child)
    return total


def process_bytes(pid: int) -> int:
    """Bytes of one process; 0 when it has ended. Program files do not count: who else maps them changes at any time."""
    return _lines(pid, "status", "RssAnon", "RssShmem")


def _own_bytes(pid: int) -> int:
    return _lines(pid, "smaps_rollup", "Private_Dirty") + sum(map(_own_bytes, _children(pid)))


def _children(pid: int) -> Iterator[int]:
    with suppress(OSError):
        for thread in (_PROC / str(pid) / "task").iterdir():
            yield from map(int, (thread / "children").read_text().split())


def _is_copy(child: int, parent: int) -> bool:
    """Return whether a process runs its parent's program; also true between fork and exec."""
    try:
        return (_PROC / str(child) / "cmdline").read_bytes() == (_PROC / str(parent) / "cmdline").read_bytes()
    except OSError:
        return True


def _lines(pid: int, name: str, *keys: str) -> int:
    """Bytes in the lines of such a file that begin with one of `keys`; 0 where the process has ended."""
    try:
        lines = (_PROC / str(pid) / name).read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(keys))
