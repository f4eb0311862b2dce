"""Follow the log of `trtllm-build`: current phase and expected remaining time."""

from __future__ import annotations

import re
import time
from pathlib import Path

from trtserve.progress import Progress

_STILL_THERE = 60.0

_BUILDING = re.compile(r"Build TensorRT engine ")
_GENERATED = re.compile(r"Engine generation completed in ([\d.]+) seconds")
_SERIALIZING = re.compile(r"Serializing engine to \S*rank(\d+)\.engine")
_DONE = re.compile(r"Total time of building all engines: (\S+)")
_WARNING = re.compile(r"\[W\] (.+)")


class BuildLog:
    """Reads new log lines and reports to `progress`; `seconds` is the expected total."""

    def __init__(self, path: Path, world_size: int, progress: Progress, *, seconds: float | None) -> None:
        self._path = path
        self._world_size = world_size
        self._progress = progress
        self._seconds = seconds
        self._read = self._building = 0
        self._rest = ""
        self._began = self._said = time.monotonic()
        self.written: set[int] = set()

    def follow(self) -> None:
        """Report new lines; after a long silence, report that the build is still running."""
        for line in self._new_lines():
            self._tell(line)
        if time.monotonic() - self._said >= _STILL_THERE:
            self._say("Still building")

    def _new_lines(self) -> list[str]:
        with self._path.open("rb") as file:
            file.seek(self._read)
            added = file.read()
        self._read += len(added)
        *lines, self._rest = (self._rest + added.decode("utf-8", errors="replace")).split("\n")
        return lines

    def _tell(self, line: str) -> None:
        if _BUILDING.search(line):
            self._building += 1
            self._say(f"Weights are loaded; TensorRT builds engine {self._building} of {self._world_size}")
        elif found := _GENERATED.search(line):
            self._say(f"TensorRT took {duration(float(found[1]))}")
        elif found := _SERIALIZING.search(line):
            self.written.add(int(found[1]))
            self._say(f"Writing rank{found[1]}.engine ({len(self.written)} of {self._world_size})")
        elif found := _DONE.search(line):
            self._progress.step(f"All engines are built ({found[1]})")
        elif found := _WARNING.search(line):
            self._progress.step(f"trtllm-build: {found[1]}")

    def _say(self, text: str) -> None:
        self._said = time.monotonic()
        passed = self._said - self._began
        left = ""
        if self._seconds is not None and passed < self._seconds:
            left = f", about {duration(self._seconds - passed)} left"
        self._progress.step(f"{text} ({duration(passed)}{left})" if "(" not in text else text + left)


def duration(seconds: float) -> str:
    """Format seconds: `45 s`, `3 min`, `1.5 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
