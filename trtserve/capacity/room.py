"""The guard of every stage: memory (within the cgroup) and disk are compared with the need before anything begins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from trtserve.errors import DiskSpaceError, MemoryLimitError
from trtserve.machine import free_disk, free_memory, gibibytes

# Left free for everything else that writes to the disk meanwhile.
RESERVE = 256 * 2**20


def require_disk(folder: Path, needed: int, what: str) -> None:
    """DiskSpaceError when the file system of `folder` has not `needed` bytes for `what` and a reserve."""
    free = free_disk(folder)
    if needed > 0 and free < needed + RESERVE:
        raise DiskSpaceError(
            f"{what} would take {gibibytes(needed)}, and {gibibytes(RESERVE)} stay in reserve; {folder} has"
            f" {gibibytes(free)} free.",
            hint="Free some space (`trtserve remove`), choose a folder on a larger disk with --out or TRTSERVE_HOME, or"
            " a smaller engine with --quantize int8 or int4.",
        )


def require_memory(needed: int, what: str, advice: Callable[[int], str]) -> None:
    """MemoryLimitError when fewer than `needed` bytes of memory are free for `what`, which ends like "X needs".

    `advice` is given the free bytes and says what would fit.
    """
    free = free_memory()
    if needed > free:
        raise MemoryLimitError(
            f"{what} {gibibytes(needed)} of memory; {gibibytes(free)} are free.",
            hint=advice(free),
        )
