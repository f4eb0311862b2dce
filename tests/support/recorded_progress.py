"""A progress that records its messages."""

from __future__ import annotations

from trtserve.progress import SilentProgress


class Lines(SilentProgress):
    """`lines` are the steps, in order; `warnings` the warnings."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.warnings: list[str] = []

    def step(self, text: str) -> None:
        self.lines.append(text)

    def warn(self, text: str) -> None:
        self.warnings.append(text)
