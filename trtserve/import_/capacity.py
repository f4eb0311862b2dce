"""Whether a model fits this machine: free disk and memory, said with numbers and with the setting that would fit."""

from __future__ import annotations

from pathlib import Path

from trtserve.errors import DiskSpaceError
from trtserve.machine import free_disk, gibibytes

# Left free for everything else that writes to the disk meanwhile.
DISK_RESERVE = 256 * 2**20


def require_disk(folder: Path, needed: int, what: str) -> None:
    """DiskSpaceError when the file system of `folder` has not `needed` bytes for `what` and a reserve."""
    free = free_disk(folder)
    if needed > 0 and free < needed + DISK_RESERVE:
        raise DiskSpaceError(
            f"{what} need {gibibytes(needed)}; {folder} has {gibibytes(free)} free, of which"
            f" {gibibytes(DISK_RESERVE)} stay in reserve.",
            hint="Free some space (`trtserve remove`), or set TRTSERVE_HOME to a folder on a larger disk.",
        )
