"""How the command line speaks: data on stdout, talk on stderr, one JSON envelope, one form of error message."""

from __future__ import annotations

import json
import re
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import ceil
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any

from trtserve.errors import TrtserveError
from trtserve.machine import gibibytes
from trtserve.progress import Task, Unit

if TYPE_CHECKING:
    from rich.console import Console

ENVELOPE_VERSION = 1
_LABEL = len("error: ")
_LONG_WORD = 24
_LEAST_ROOM = 20
# Of a cell, in a table that is still one.
_MOST_LINES = 3
# A size is one word.
_SIZE = re.compile(r"(?<=\d) (?=[KMGT]i?B\b)")
_NO_BREAK = "\N{NO-BREAK SPACE}"
# A short label, two blanks or more, a text; and the label whose text is a command.
_LABELLED = re.compile(r"\S(?: ?\S){0,14} {2,}(?=\S)")
_COPIED = "command "
_SECONDS_BETWEEN_LINES = 10.0


def _stderr() -> Console:
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=True)


def print_data(text: str) -> None:
    """Write one piece of data to stdout."""
    sys.stdout.write(text if text.endswith("\n") else text + "\n")
    sys.stdout.flush()


def print_block(text: str) -> None:
    """Write lines to stdout; on a terminal each is broken between words, and no word is cut.

    What is broken goes on under itself: under its indent, or under the text behind a label. A command stays whole,
    since it is there to be copied.
    """
    if sys.stdout.isatty():
        text = "\n".join(_folded(text.splitlines(), get_terminal_size().columns))
    print_data(text)


def _folded(lines: Sequence[str], width: int, *, hang: int = 0) -> list[str]:
    """Lines of at most `width`, as far as words allow; `hang` more blanks stand before what goes on from a line."""
    return [part for line in lines for part in _fold(line, width, hang)]


def _fold(line: str, width: int, hang: int) -> list[str]:
    if len(line) <= width or line.startswith(_COPIED):
        return [line]
    label = _LABELLED.match(line)
    before = label[0] if label else line[: len(line) - len(line.lstrip())]
    under = len(before) if label else len(before) + hang
    return wrapped(line[len(before) :], max(under + _LEAST_ROOM, width), first=before, rest=" " * under)


def print_json(command: str, result: object) -> None:
    """Write the versioned envelope {"version", "command", "result"} to stdout."""
    envelope = {"version": ENVELOPE_VERSION, "command": command, "result": result}
    print_data(json.dumps(envelope, indent=2, default=str))


def count(number: int) -> str:
    """Parameters for people: `8.03 B`, `3.8 M`."""
    return f"{number / 1e9:.2f} B" if number >= 10**9 else f"{number / 1e6:.1f} M"


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, title: str | None = None) -> None:
    """Write a table to stdout; where that is not a terminal, lines of cells with tabs between them, columns first.

    On a terminal too narrow for its words and lines it goes without the lines; on one too narrow for the words alone,
    each row becomes a block of `column  cell` lines.
    """
    if not sys.stdout.isatty():
        # A name and its value explain each other.
        heading = [columns] if len(columns) > 2 else []
        print_data("\n".join("\t".join(map(str, row)) for row in (*heading, *rows)))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    room = Console().width
    widths, lines = _fitting_widths(columns, rows, room), True
    if widths is None:
        widths, lines = _bare_widths(columns, rows, room), False
    if widths is None:
        print_block("\n\n".join(_block(columns, row) for row in rows))
        return
    table = Table(title=title) if lines else Table(title=title, box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    for column, width in zip(columns, widths, strict=True):
        # A cut path or version is of no use; a narrow terminal folds it.
        table.add_column(column, overflow="fold", width=width)
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    Console().print(table)


def _fitting_widths(columns: Sequence[str], rows: Sequence[Sequence[object]], room: int) -> list[int] | None:
    """Width of each column, so that the table takes no more than `room` characters; None when its cells do not fit.

    Rich's own share-out goes below the least widths and then cuts the table at the right.
    """
    widths = _least_widths(columns, rows)
    whole = [max(len(str(cell)) for cell in column) for column in zip(columns, *rows, strict=True)]
    spare = room - (sum(widths) + 3 * len(widths) + 1)
    if spare < 0:
        return None
    for _ in range(spare):
        # The next blank goes to the column that would be folded into most lines.
        fullest = max(range(len(widths)), key=lambda i: whole[i] / max(1, widths[i]))
        widths[fullest] += widths[fullest] < whole[fullest]
    folded = max(ceil(all_ / max(1, width)) for all_, width in zip(whole, widths, strict=True))
    return widths if folded <= _MOST_LINES else None


def _least_widths(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> list[int]:
    """Width of each column's longest word; words that no table has room for, such as paths, count less."""
    cells = zip(columns, *rows, strict=True)
    longest = (
        max(len(word) for cell in column for word in (_SIZE.sub("_", str(cell)).split() or [""])) for column in cells
    )
    return [min(width, _LONG_WORD) for width in longest]


def _bare_widths(columns: Sequence[str], rows: Sequence[Sequence[object]], room: int) -> list[int] | None:
    """Widths of a table without lines, in which every cell stands on one line; None when that takes more than `room`.

    Only headers may be broken: without lines nobody can tell where a broken cell ends.
    """
    widths = [
        max(*map(len, column.split()), *(len(str(cell)) for cell in cells))
        for column, *cells in zip(columns, *rows, strict=True)
    ]
    return widths if sum(widths) + len(widths) - 1 <= room else None


def _block(columns: Sequence[str], row: Sequence[object]) -> str:
    width = max(map(len, columns))
    return "\n".join(f"{column:<{width}}  {cell}" for column, cell in zip(columns, row, strict=True))


def say(text: str) -> None:
    """Write talk to stderr; on a terminal a long line is broken between words, and what goes on is indented."""
    console = _stderr()
    if console.is_terminal:
        text = "\n".join(_folded(text.splitlines() or [""], console.width, hang=2))
    console.print(text, markup=False)


def print_error(error: TrtserveError) -> None:
    """Write what happened, what to do next and where the log is."""
    _say_labelled("error:", "bold red", error.message)
    if error.hint:
        _say_labelled("next:", "bold", error.hint)
    if error.log is not None:
        _say_labelled("log:", "bold", str(error.log))


def _say_labelled(label: str, style: str, text: str) -> None:
    """A label and its text; on a terminal the text is broken between words, under itself, and no word is cut."""
    from rich.text import Text

    console = _stderr()
    if console.is_terminal:
        room = max(_LEAST_ROOM, console.width - _LABEL)
        lines = [part for line in text.splitlines() for part in wrapped(line, room)]
        text = ("\n" + " " * _LABEL).join(lines)
    console.print(Text.assemble((label.ljust(_LABEL), style), text))


def wrapped(line: str, width: int, *, first: str = "", rest: str = "") -> list[str]:
    """A line broken between words, of which none is cut; its parts begin with `first` and with `rest`."""
    parts = textwrap.wrap(
        _SIZE.sub(_NO_BREAK, line),
        width,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [part.replace(_NO_BREAK, " ") for part in parts] or [first]


class TerminalProgress:
    """Progress on a terminal: a bar with rate and remaining time; plain lines elsewhere."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet

    def step(self, text: str) -> None:
        if not self._quiet:
            say(text)

    def warn(self, text: str) -> None:
        _say_labelled("warning: ", "bold yellow", text)

    @contextmanager
    def task(self, text: str, *, total: int, unit: Unit = "items", done: int = 0) -> Iterator[Task]:
        if self._quiet:
            yield _SilentTask()
            return
        if not sys.stderr.isatty():
            say(text)
            yield _LineTask(text, total=total, unit=unit, done=done)
            return
        console = _stderr()
        # A long text stands above its bar, which has the line to itself.
        above = len(text) > console.width // 2
        if above:
            say(text)
        with _bar(console, unit) as bar:
            yield _BarTask(bar, bar.add_task("" if above else text, total=total, completed=done))
        if not above:
            say(text)


def _bar(console: Console, unit: Unit) -> Any:
    """Text, bar, figures and remaining time; where there is little room the bar gets shorter, no figure is cut."""
    from rich import progress as rich_progress
    from rich.table import Column

    if unit == "bytes":
        kinds: list[Any] = [rich_progress.DownloadColumn, rich_progress.TransferSpeedColumn]
    else:
        kinds = [rich_progress.MofNCompleteColumn]
    figures = [kind(table_column=Column(no_wrap=True)) for kind in (*kinds, rich_progress.TimeRemainingColumn)]
    return rich_progress.Progress(
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        *figures,
        console=console,
        transient=True,
    )


class _SilentTask:
    def advance(self, amount: int) -> None:
        pass


class _LineTask:
    """Progress for a log: a line now and then, with rate and remaining time."""

    def __init__(self, text: str, *, total: int, unit: Unit, done: int) -> None:
        self._text = text
        self._total = total
        self._done = self._began_with = done
        self._show = gibibytes if unit == "bytes" else str
        self._began = self._said = time.monotonic()

    def advance(self, amount: int) -> None:
        self._done += amount
        now = time.monotonic()
        if now - self._said < _SECONDS_BETWEEN_LINES:
            return
        self._said = now
        rate = max(1.0, (self._done - self._began_with) / (now - self._began))
        left = max(0, self._total - self._done) / rate
        amounts = f"{self._show(self._done)} of {self._show(self._total)}, {self._show(round(rate))}/s"
        say(f"{self._text}: {amounts}, {left:.0f} s left")


class _BarTask:
    def __init__(self, bar: Any, identifier: Any) -> None:
        self._bar = bar
        self._identifier = identifier

    def advance(self, amount: int) -> None:
        self._bar.advance(self._identifier, amount)
