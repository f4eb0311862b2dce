"""The interface through which library code reports progress without knowing about terminals."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Literal, Protocol

Unit = Literal["bytes", "items", "parts"]
"""What work is counted in. `parts` differ in size, so the remaining time cannot be estimated from them."""


class Task(Protocol):
    """A piece of work whose progress is measured."""

    def advance(self, amount: int) -> None:
        """Record `amount` more units as done."""

    def describe(self, text: str) -> None:
        """Say what the work looks like at this moment, in a few words."""


class Progress(Protocol):
    """Receives what a stage reports; the command line shows it, tests and libraries may ignore it."""

    def step(self, text: str) -> None:
        """Report the step that begins, in one line."""

    def warn(self, text: str) -> None:
        """Report something that the user should know although the work continues."""

    def task(self, text: str, *, total: int, unit: Unit = "items", done: int = 0) -> AbstractContextManager[Task]:
        """Measure work of `total` units; `done` are finished already."""


class _SilentTask:
    def advance(self, amount: int) -> None:
        pass

    def describe(self, text: str) -> None:
        pass


class SilentProgress:
    """A Progress that reports nothing."""

    def step(self, text: str) -> None:
        pass

    def warn(self, text: str) -> None:
        pass

    @contextmanager
    def task(self, text: str, *, total: int, unit: Unit = "items", done: int = 0) -> Iterator[Task]:
        yield _SilentTask()


SILENT: Progress = SilentProgress()
