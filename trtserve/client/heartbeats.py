"""What the executors of a server show of themselves: `programs/shared/run_folder.py` writes it, this reads it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from trtserve.errors import ArtifactError
from trtserve.files import read_as
from trtserve.programs.shared.run_folder import HEARTBEATS, STOPPED

_SILENT = 15.0
_STALLED = 60.0


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """The newest record of one executor."""

    model: str
    pid: int
    age: float
    """Seconds since it was written; an executor writes every second."""
    stalled: float
    """Seconds since it made a step or had nothing to do."""
    open_requests: int
    failure: str | None
    """Why the executor has stopped working for good."""

    @property
    def ailment(self) -> str:
        """What is wrong with an executor whose process lives, or empty."""
        if self.failure is not None:
            return f"its executor has stopped working: {self.failure}"
        if self.age > _SILENT:
            return f"its process {self.pid} has shown no sign of life for {self.age:.0f} s"
        if self.stalled > _STALLED:
            return f"its executor has made no step for {self.stalled:.0f} s, with {self.open_requests} open requests"
        return ""


@dataclass(frozen=True, kw_only=True)
class _Written:
    """A heartbeat as `run_folder.py` writes it; times are seconds of the monotonic clock."""

    model: str
    pid: int
    time: float
    moved: float
    open_requests: int
    failure: str | None


def read_heartbeats(folder: Path) -> list[Heartbeat]:
    """Return the heartbeats of a server's executors; none before they have loaded, and for NVIDIA's backends."""
    found = []
    for path in sorted(folder.glob(HEARTBEATS)):
        try:
            written = read_as(path, _Written, "a heartbeat", tolerant=True)
        except (FileNotFoundError, ArtifactError):  # it was removed, or is being written for the first time
            continue
        now = time.monotonic()
        found.append(
            Heartbeat(
                model=written.model,
                pid=written.pid,
                age=now - written.time,
                stalled=now - written.moved,
                open_requests=written.open_requests,
                failure=None if written.failure is None else written.failure.removeprefix(f"{STOPPED}: "),
            )
        )
    return found
