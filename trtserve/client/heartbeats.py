"""What the executors of a server show of themselves: `programs/shared/run_folder.py` writes it, this reads it."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

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


def read_heartbeats(folder: Path) -> list[Heartbeat]:
    """Return the heartbeats of a server's executors; none before they have loaded, and for NVIDIA's backends."""
    found = []
    for path in sorted(folder.glob(HEARTBEATS)):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # it was removed, or is being written for the first time
            continue
        now = time.monotonic()
        found.append(
            Heartbeat(
                model=record["model"],
                pid=record["pid"],
                age=now - record["time"],
                stalled=now - record["moved"],
                open_requests=record["open_requests"],
                failure=None if record["failure"] is None else record["failure"].removeprefix(f"{STOPPED}: "),
            )
        )
    return found
