"""A cgroup with a hard limit of memory, for one process and those that it starts; root can make one."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class MemoryGroup:
    """A group below the one of this process; version 1 or 2."""

    folder: Path

    def enter(self) -> None:
        """Put the calling process into it."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def kills(self) -> int:
        """How many of its processes the kernel killed because of the limit."""
        for name in ("memory.oom_control", "memory.events"):
            with suppress(FileNotFoundError):
                lines = (self.folder / name).read_text().splitlines()
                return int(dict(line.split() for line in lines)["oom_kill"])
        return 0


@contextmanager
def memory_group(limit: int) -> Iterator[MemoryGroup | None]:
    """A group whose processes have at most `limit` bytes, page cache included; None when none can be made."""
    folder = _own_folder() / f"trtserve-bench-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError:
        yield None
        return
    try:
        yield MemoryGroup(folder) if _limit(folder, limit) else None
    finally:
        for _ in range(100):  # a process that has ended leaves it a moment later
            with suppress(OSError):
                folder.rmdir()
                break
            time.sleep(0.05)


def _limit(folder: Path, limit: int) -> bool:
    for name in ("memory.limit_in_bytes", "memory.max"):
        with suppress(OSError):
            if (folder / name).exists():
                (folder / name).write_text(str(limit))
                return True
    return False


def _own_folder() -> Path:
    """The group of this process that counts memory."""
    groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    for _, controllers, path in groups:
        if "memory" in controllers.split(","):
            return _CGROUP / "memory" / path.lstrip("/")
    return _CGROUP / next((path for _, controllers, path in groups if not controllers), "").lstrip("/")
