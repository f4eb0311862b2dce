"""The stages of a planned import, as they are shown before it begins."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypedDict


class Stage(TypedDict):
    """One stage of a planned import; `bytes` are those that it would write, `command` is what would be run."""

    stage: str
    action: Literal["make", "reuse"]
    path: str | None
    bytes: int
    command: str | None


def planned_stage(name: str, path: Path | None, size: int, *, done: bool, command: str | None = None) -> Stage:
    """A stage that writes `size` bytes to `path`, or finds its result there."""
    return Stage(
        stage=name,
        action="reuse" if done else "make",
        path=str(path) if path else None,
        bytes=0 if done else size,
        command=None if done else command,
    )
