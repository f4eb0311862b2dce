"""How library code reports long work without knowing a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Literal, Protocol

Unit = Literal["bytes", "items"]


class Task(Protocol):
    """One measured piece of work."""

    def advance(self, amount: int) -> None:
        """Record `amount` more units as done."""


class Progress(Protocol):
    """Receiver of what a stage does; the command line draws it, tests and libraries may ignore it."""

    def step(self, text: str) -> None:
        """Say which step begins, in one line."""

    def warn(self, text: str) -> None:
        """Say something that the user should know although the work goes on."""

    def task(self, text: str, *, total: int, unit: Unit = "items", done: int = 0) -> AbstractContextManager[Task]:
        """Measure work of `total` units of which `done` are behind us already."""


class _SilentTask:
    def advance(self, amount: int) -> None:
        pass


class SilentProgress:
    """A Progress that says nothing."""

    def step(self, text: str) -> None:
        pass

    def warn(self, text: str) -> None:
        pass

    @contextmanager
    def task(self, text: str, *, total: int, unit: Unit = "items", done: int = 0) -> Iterator[Task]:
        yield _SilentTask()


SILENT: Progress = SilentProgress()
