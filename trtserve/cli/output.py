"""How the command line speaks: data on stdout, talk on stderr, one JSON envelope, one form of error message."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from trtserve.errors import TrtserveError
from trtserve.progress import Task, Unit

if TYPE_CHECKING:
    from rich.console import Console

ENVELOPE_VERSION = 1


def _stderr() -> Console:
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=True)


def print_data(text: str) -> None:
    """Write one piece of data to stdout."""
    sys.stdout.write(text if text.endswith("\n") else text + "\n")
    sys.stdout.flush()


def print_json(command: str, result: object) -> None:
    """Write the versioned envelope {"version", "command", "result"} to stdout."""
    envelope = {"version": ENVELOPE_VERSION, "command": command, "result": result}
    print_data(json.dumps(envelope, indent=2, default=str))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, title: str | None = None) -> None:
    """Write a table to stdout; plain tab-separated lines when stdout is not a terminal."""
    if not sys.stdout.isatty():
        for row in rows:
            print_data("\t".join(str(cell) for cell in row))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    Console().print(table)


def say(text: str) -> None:
    """Write one line of talk to stderr."""
    _stderr().print(text, markup=False)


def print_error(error: TrtserveError) -> None:
    """Write what happened, what to do next and where the log is."""
    console = _stderr()
    console.print("[bold red]error:[/] ", end="")
    console.print(error.message, markup=False)
    if error.hint:
        console.print("[bold]next:[/]  ", end="")
        console.print(error.hint, markup=False)
    if error.log is not None:
        console.print("[bold]log:[/]   ", end="")
        console.print(str(error.log), markup=False)


class TerminalProgress:
    """Progress on a terminal: a bar with rate and remaining time; plain lines elsewhere."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet

    def step(self, text: str) -> None:
        if not self._quiet:
            say(text)

    def warn(self, text: str) -> None:
        console = _stderr()
        console.print("[bold yellow]warning:[/] ", end="")
        console.print(text, markup=False)

    @contextmanager
    def task(self, text: str, *, total: int, unit: Unit = "items", done: int = 0) -> Iterator[Task]:
        if self._quiet or not sys.stderr.isatty():
            self.step(text)
            yield _SilentTask()
            return
        from rich import progress as rich_progress

        columns: list[Any] = [rich_progress.TextColumn("{task.description}"), rich_progress.BarColumn()]
        if unit == "bytes":
            columns += [rich_progress.DownloadColumn(), rich_progress.TransferSpeedColumn()]
        else:
            columns += [rich_progress.MofNCompleteColumn()]
        columns += [rich_progress.TimeRemainingColumn()]
        with rich_progress.Progress(*columns, console=_stderr(), transient=True) as bar:
            identifier = bar.add_task(text, total=total, completed=done)
            yield _BarTask(bar, identifier)


class _SilentTask:
    def advance(self, amount: int) -> None:
        pass


class _BarTask:
    def __init__(self, bar: Any, identifier: Any) -> None:
        self._bar = bar
        self._identifier = identifier

    def advance(self, amount: int) -> None:
        self._bar.advance(self._identifier, amount)
