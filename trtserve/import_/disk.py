"""Whether a disk has room, asked before the first byte is written."""

from __future__ import annotations

from pathlib import Path

from trtserve.errors import DiskSpaceError
from trtserve.machine import free_disk, gibibytes

# Left free for everything else that writes to the disk meanwhile.
RESERVE = 256 * 2**20


def require_disk(folder: Path, needed: int, what: str) -> None:
    """DiskSpaceError when the file system of `folder` has not `needed` bytes for `what` and a reserve."""
    free = free_disk(folder)
    if needed > 0 and free < needed + RESERVE:
        raise DiskSpaceError(
            f"{what} would take {gibibytes(needed)}, and {gibibytes(RESERVE)} stay in reserve; {folder} has"
            f" {gibibytes(free)} free.",
            hint="Free some space (`trtserve remove`), set TRTSERVE_HOME to a folder on a larger disk, or choose a"
            " smaller engine with --quantize int8.",
        )
