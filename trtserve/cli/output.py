"""Output of the command line: data on stdout, messages on stderr, one JSON envelope, one form of error message."""

from __future__ import annotations

import json
import re
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import ceil
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any

from trtserve.errors import TrtserveError
from trtserve.host.machine import format_bytes
from trtserve.progress import Task, Unit

if TYPE_CHECKING:
    from rich.console import Console

    from trtserve.pipeline import StageSummary

ENVELOPE_VERSION = 1
_documents: list[str] = []  # commands whose JSON this command line has written
_LABEL = len("error: ")
_LONG_WORD = 24
_NARROWEST = 20
_MOST_LINES = 3  # of a table cell; a table with taller cells is printed without rules
# Sizes such as 3 GiB are not broken after the number.
_SIZE = re.compile(r"(?<=\d) (?=[KMGT]i?B\b)")
_NO_BREAK = "\N{NO-BREAK SPACE}"
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and newline
# One or two short labels, each with two spaces or more, and a text; the label of a command, which is never broken.
_LONG = re.compile(r"\S{1000,}")
_LABELLED = re.compile(r"(?:\S(?: ?\S){0,24} {2,}){1,2}(?=\S)")
_COPIED = "command "
_SECONDS_BETWEEN_LINES = 10.0
_INTERRUPT_ECHO = 3  # a terminal shows ^C behind the line, which must not begin another one
_SIGNS, _SIGNS_PER_SECOND = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏", 5
_BYTES = {
    "size": "size_bytes",
    "disk": "disk_bytes",
    "memory": "memory_bytes",
    "free_disk": "free_disk_bytes",
    "free_memory": "free_memory_bytes",
    "weights": "weight_bytes",
    "activations": "activation_bytes",
    "adapter_memory": "adapter_bytes",
    "kv_per_token": "kv_bytes_per_token",
}


def terminal(*, stderr: bool = False, soft_wrap: bool = False) -> Console:
    """Return the terminal that stdout or stderr is; texts cannot command it, whatever is printed."""
    from rich.console import Console
    from rich.segment import Segment

    class Harmless(Console):
        def render(self, *arguments: Any, **options: Any) -> Iterator[Segment]:
            for segment in super().render(*arguments, **options):
                yield segment if segment.control else segment._replace(text=visible(segment.text))

    return Harmless(stderr=stderr, highlight=False, soft_wrap=soft_wrap)


def _stderr() -> Console:
    return terminal(stderr=True, soft_wrap=True)


# Where a line may end: behind a blank, and behind a character of a script without them.
_WORDS = re.compile(r"(?<=[\s\u2e80-\uffef\U00010000-\U0010ffff])")


def print_data(text: str) -> None:
    """Write one piece of data to stdout."""
    print_piece(text if text.endswith("\n") else text + "\n")


def print_piece(text: str) -> None:
    """Write a piece of a text to stdout: as it is, or with its control characters spelled out on a terminal."""
    sys.stdout.write(visible(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def print_text(text: str) -> None:
    """Write what a model said to stdout: as it is, or on a terminal with its long lines wrapped between words."""
    if sys.stdout.isatty():
        width = get_terminal_size().columns
        lines = (wrapped(line, width) if len(line) > width else [line] for line in text.splitlines())
        text = "\n".join(part for parts in lines for part in parts)
    print_data(text)


class StreamedText:
    """A text that comes in pieces, on stdout: on a terminal its lines are wrapped between words, as in `print_text`."""

    def __init__(self) -> None:
        self._width = get_terminal_size().columns if sys.stdout.isatty() else 0
        self._column, self._word = 0, ""

    def write(self, piece: str) -> None:
        """Print a piece; on a terminal a word waits for its end."""
        if not self._width:
            print_piece(piece)
            return
        *words, self._word = _WORDS.split(self._word + piece)
        for word in words:
            self._put(word)

    def end(self) -> None:
        """Print the last word, and end the line."""
        self._put(self._word)
        self._column, self._word = 0, ""
        print_data("")

    def _put(self, word: str) -> None:
        from rich.cells import cell_len

        shown = visible(word.rstrip())
        if self._column and self._column + cell_len(shown) > self._width:
            print_piece("\n")
            self._column = 0
        self._column += cell_len(shown)
        print_piece(shown)
        for blank in word[len(word.rstrip()) :]:
            if blank == "\n" or self._column < self._width:  # a blank beyond the line would begin the next one
                print_piece(blank)
            self._column = 0 if blank == "\n" else self._column + 1


def print_stopped(names: Sequence[str]) -> None:
    """Write the names of servers that were stopped to stdout; on a terminal as a sentence each."""
    print_data("\n".join(f"{name} is stopped." if sys.stdout.isatty() else name for name in names))


def cut(text: str) -> str:
    """Return a text for people without the ends of words that are longer than any: values of a stranger's file."""
    return _LONG.sub(lambda found: f"{found[0][:200]}… ({len(found[0])} characters)", text)


def print_block(text: str) -> None:
    """Write lines to stdout, wrapped between words on a terminal.

    The rest of a wrapped line is aligned with its indent, or with the text after a label. Commands are not wrapped.
    """
    if sys.stdout.isatty():
        text = "\n".join(_folded(text.splitlines(), get_terminal_size().columns))
    print_data(text)


def _folded(lines: Sequence[str], width: int, *, hang: int = 0) -> list[str]:
    """Return lines of at most `width` unless a word is longer; the rest of a wrapped line is indented by `hang`."""
    return [part for line in lines for part in _fold(line, width, hang)]


def _fold(line: str, width: int, hang: int) -> list[str]:
    if len(line) <= width or line.startswith(_COPIED):
        return [line]
    label = _LABELLED.match(line)
    before = label[0] if label else line[: len(line) - len(line.lstrip())]
    under = len(before) if label else len(before) + hang
    return wrapped(line[len(before) :], max(under + _NARROWEST, width), first=before, rest=" " * under)


def print_json(command: str, result: object) -> None:
    """Write the versioned envelope {"version", "command", "result"} to stdout."""
    _print_envelope({"version": ENVELOPE_VERSION, "command": command, "result": result})


def with_bytes(value: Any) -> Any:
    """Return JSON whose sizes say in their keys that they are bytes."""
    if isinstance(value, dict):
        return {_BYTES.get(key, key): with_bytes(each) for key, each in value.items()}
    return [with_bytes(each) for each in value] if isinstance(value, list | tuple) else value


def print_json_error(command: str, error: TrtserveError) -> None:
    """Write the envelope of an error to stdout, unless a result was written: stdout holds one document."""
    if _documents:
        return
    facts = {
        "code": type(error).__name__,
        "exit_code": error.code,
        "message": error.message,
        "next": error.hint,
        "log": error.log,
    }
    _print_envelope({"version": ENVELOPE_VERSION, "command": command, "error": facts})


def forget_documents() -> None:
    """Reset the record of documents written to stdout, for a new command line."""
    _documents.clear()


def _print_envelope(envelope: Mapping[str, object]) -> None:
    _documents.append(str(envelope["command"]))
    print_data(json.dumps(envelope, indent=2, default=str))


def count(number: int) -> str:
    """Return a number of parameters for people: `8.03 B`, `3.8 M`, three digits or less below a trillion."""
    if number >= 999_500_000:
        return f"{number / 1e9:.{2 - (number >= 10**10) - (number >= 10**11)}f} B"
    return f"{number / 1e6:.{number < 99_950_000:d}f} M"


def print_stages(stages: Sequence[StageSummary]) -> None:
    """Write a line for each stage: what it would do, how much it would write, and where."""
    for stage in stages:
        path = stage["path"] or "a folder of the store that follows from the weights"
        print_block(f"{stage['stage']:<9} {stage['action']:<6} {format_bytes(stage['bytes']):>9}  {path}")


def print_commands(stages: Sequence[StageSummary]) -> None:
    """Write the external commands that the stages would run."""
    for stage in stages:
        if stage["command"]:
            print_data(f"command   {stage['command']}")


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, title: str | None = None) -> None:
    """Write a table to stdout: with rules on a terminal, tab-separated with column names elsewhere.

    A narrow terminal gets the table without rules, so that a row is a line, or with rows and columns exchanged; a very
    narrow one a block of `column  cell` lines per row.
    """
    if not sys.stdout.isatty():
        print_data("\n".join("\t".join(map(str, row)) for row in (columns, *rows)))
        return
    from rich import box
    from rich.table import Table

    room = terminal().width
    widths, lines = _fitting_widths(columns, rows, room), True
    bare = _bare_widths(columns, rows, room)
    if widths is None or (bare is not None and sum(widths) < sum(bare)):  # cells would take several lines
        widths, lines = bare, False
    if widths is None and len(rows) > 1:
        exchanged = list(zip(columns, *rows, strict=True))
        other = _fitting_widths(exchanged[0], exchanged[1:], room)
        if other is not None:
            columns, rows, widths, lines = exchanged[0], exchanged[1:], other, True
    if widths is None:
        longest = max(map(len, columns))
        blocks = ([f"{name:<{longest}}  {cell}" for name, cell in zip(columns, row, strict=True)] for row in rows)
        print_block("\n\n".join("\n".join(block) for block in blocks))
        return
    if lines:
        table = Table(title=title)
    else:
        gap = sum(widths) + 2 * (len(widths) - 1) <= room  # two blanks between columns, where there is room
        table = Table(title=title, box=box.SIMPLE_HEAD, show_edge=False, padding=(0, int(gap), 0, 0), pad_edge=False)
    for column, width in zip(columns, widths, strict=True):
        # Fold instead of cutting: half a path or version is useless.
        table.add_column(column, overflow="fold", width=width)
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    terminal().print(table)


def _fitting_widths(columns: Sequence[str], rows: Sequence[Sequence[object]], room: int) -> list[int] | None:
    """Return the width of each column of a table that is `room` characters wide, or None when the cells do not fit.

    Rich's own layout goes below the minimum widths and then cuts the table at the right.
    """
    # Very long words, such as paths, count less.
    cells = zip(columns, *rows, strict=True)
    longest = (
        max(len(word) for cell in column for word in (_SIZE.sub("_", str(cell)).split() or [""])) for column in cells
    )
    widths = [min(width, _LONG_WORD) for width in longest]
    whole = [max(len(str(cell)) for cell in column) for column in zip(columns, *rows, strict=True)]
    spare = room - (sum(widths) + 3 * len(widths) + 1)
    if spare < 0:
        return None
    for _ in range(spare):
        # Widen the column with the tallest cells.
        fullest = max(range(len(widths)), key=lambda i: whole[i] / max(1, widths[i]))
        widths[fullest] += widths[fullest] < whole[fullest]
    folded = max(ceil(all_ / max(1, width)) for all_, width in zip(whole, widths, strict=True))
    return widths if folded <= _MOST_LINES else None


def _bare_widths(columns: Sequence[str], rows: Sequence[Sequence[object]], room: int) -> list[int] | None:
    """Return the widths of a table without rules and with each cell on one line, or None when it exceeds `room`.

    Only headers may be wrapped: without rules a wrapped cell cannot be told from the next one.
    """
    widths = [
        max(*map(len, column.split()), *(len(str(cell)) for cell in cells))
        for column, *cells in zip(columns, *rows, strict=True)
    ]
    return widths if sum(widths) + len(widths) - 1 <= room else None


def visible(text: str) -> str:
    """Return `text` with control characters spelled out: names and answers of models must not command the terminal."""
    return CONTROLS.sub(lambda found: repr(found[0])[1:-1], text)


def say(text: str) -> None:
    """Write a message to stderr, wrapped and indented on a terminal."""
    console, text = _stderr(), visible(text)
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
    """Write a label and its text, aligned and wrapped between words on a terminal."""
    from rich.text import Text

    console, text = _stderr(), visible(text)
    if console.is_terminal:
        room = max(_NARROWEST, console.width - _LABEL)
        lines = [part for line in text.splitlines() for part in wrapped(line, room)]
        text = ("\n" + " " * _LABEL).join(lines)
    console.print(Text.assemble((label.ljust(_LABEL), style), text))


def wrapped(line: str, width: int, *, first: str = "", rest: str = "") -> list[str]:
    """Return a line wrapped between words; the parts begin with `first` and `rest`."""
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

    _lasting = True  # whether a line stays where a bar was

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet

    def step(self, text: str) -> None:
        if not self.quiet:
            say(text)

    def warn(self, text: str) -> None:
        _say_labelled("warning: ", "bold yellow", text)

    @contextmanager
    def task(self, text: str, *, total: int, unit: Unit = "items", done: int = 0) -> Iterator[Task]:
        if self.quiet:
            yield _SilentTask()
            return
        if not sys.stderr.isatty():
            say(text)
            yield _LineTask(text, total=total, unit=unit, done=done)
            return
        console = _stderr()
        # A long text is printed above its bar.
        above = len(text) > console.width // 2
        if above:
            say(text)
        with _bar(console, unit) as bar:
            yield _BarTask(bar, bar.add_task("" if above else text, total=total, completed=done), "" if above else text)
        if not above and self._lasting:
            say(text)


class ChangingLine(TerminalProgress):
    """Progress as one line of a terminal, which changes and disappears at the end; plain lines elsewhere.

    Work in bytes or items has its bar, which disappears too.
    """

    _lasting = False

    def __init__(self, *, quiet: bool = False) -> None:
        super().__init__(quiet=quiet)
        self._line = _spinner(_stderr()) if sys.stderr.isatty() and not quiet else None
        self._task = None if self._line is None else self._line.add_task("")

    def __enter__(self) -> ChangingLine:
        """Show the sign of life."""
        if self._line is not None:
            self.step("Starting")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Remove the line; say that an interrupt ended what it told of."""
        live = self._line is not None
        self.end()
        if live and kind is KeyboardInterrupt:
            self.step("Interrupted.")

    def end(self) -> None:
        """Remove the line; later steps are lines that stay."""
        if self._line is not None:
            self._line.stop()
        self._line = None

    def keep(self, text: str) -> None:
        """Print a line that stays; the changing line comes back with the next step."""
        if self._line is not None:
            self._line.stop()
        super().step(text)

    def step(self, text: str) -> None:
        if self._line is None:
            super().step(text)
        else:
            self._line.start()
            self._line.update(self._task, description=visible(text))

    def warn(self, text: str) -> None:
        if self._line is not None:
            self._line.stop()
        super().warn(text)

    @contextmanager
    def task(self, text: str, *, total: int, unit: Unit = "items", done: int = 0) -> Iterator[Task]:
        if self._line is None or unit != "parts":
            if self._line is not None:
                self._line.stop()
            with super().task(text, total=total, unit=unit, done=done) as task:
                yield task
        else:
            self.step(text)
            yield _ChangingTask(self.step, text, total=total, done=done)


class BriefLine(ChangingLine):
    """A changing line that elsewhere tells of stages and long tasks only; with `verbose`, each step is a line."""

    def __init__(self, *, quiet: bool = False, verbose: bool = False) -> None:
        super().__init__(quiet=quiet)
        self._leaves_out = not verbose and not sys.stderr.isatty()
        if verbose:
            self._line = None

    def __enter__(self) -> BriefLine:
        """Show the sign of life."""
        super().__enter__()
        return self

    def stage(self, text: str) -> None:
        """Say what begins, wherever that is shown."""
        super().step(text)

    def step(self, text: str) -> None:
        if not self._leaves_out:
            super().step(text)

    @contextmanager
    def task(self, text: str, *, total: int, unit: Unit = "items", done: int = 0) -> Iterator[Task]:
        if self._leaves_out and not self.quiet:
            yield _LineTask(text, total=total, unit=unit, done=done)
        else:
            with super().task(text, total=total, unit=unit, done=done) as task:
                yield task


class _ChangingTask:
    def __init__(self, show: Callable[[str], None], text: str, *, total: int, done: int) -> None:
        self._show, self._text, self._total, self._done = show, text, total, done
        self._described = ""

    def advance(self, amount: int) -> None:
        self._done += amount
        self._show(f"{self._text}, {self._done} of {self._total}{self._described}")

    def describe(self, text: str) -> None:
        self._described = f": {text}" if text else ""
        self.advance(0)


def _spinner(console: Console) -> Any:
    """Return a line with a sign of life, the seconds since the first step, and the step that runs."""
    from rich import progress as rich_progress
    from rich.text import Text

    class Line(rich_progress.ProgressColumn):
        def render(self, task: rich_progress.Task) -> Text:
            seconds = task.elapsed or 0.0
            line = Text(f"{_SIGNS[int(seconds * _SIGNS_PER_SECOND) % len(_SIGNS)]} {seconds:.0f} s  {task.description}")
            line.truncate(console.width - _INTERRUPT_ECHO, overflow="ellipsis")
            return line

    return rich_progress.Progress(Line(), console=console, transient=True, refresh_per_second=_SIGNS_PER_SECOND)


def _bar(console: Console, unit: Unit) -> Any:
    """Return a progress bar with text, amounts, rate and remaining time; on a narrow terminal only the bar shrinks."""
    from rich import progress as rich_progress
    from rich.table import Column
    from rich.text import Text

    show = format_bytes if unit == "bytes" else str
    whole = Column(no_wrap=True)

    class Amounts(rich_progress.ProgressColumn):
        def render(self, task: rich_progress.Task) -> Text:
            rate = f", {show(round(task.speed))}/s" if task.speed and unit == "bytes" else ""
            return Text(f"{show(int(task.completed))} of {show(int(task.total or 0))}{rate}")

    return rich_progress.Progress(
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        Amounts(table_column=whole),
        rich_progress.TimeRemainingColumn(table_column=whole),
        console=console,
        transient=True,
    )


class _SilentTask:
    def advance(self, amount: int) -> None:
        pass

    def describe(self, text: str) -> None:
        pass


class _LineTask:
    """Progress for a log: a line every ten seconds, with rate and remaining time."""

    def __init__(self, text: str, *, total: int, unit: Unit, done: int) -> None:
        self._text, self._unit = text, unit
        self._total = total
        self._done = self._began_with = done
        self._show = format_bytes if unit == "bytes" else str
        self._described = ""
        self._began = self._said = time.monotonic()

    def advance(self, amount: int) -> None:
        self._done += amount
        now = time.monotonic()
        if now - self._said < _SECONDS_BETWEEN_LINES:
            return
        self._said = now
        rate = (self._done - self._began_with) / (now - self._began)
        amounts = f"{self._show(self._done)} of {self._show(self._total)}"
        if self._unit == "bytes":
            amounts += f", {self._show(round(rate))}/s"
        left = f", {max(0, self._total - self._done) / rate:.0f} s left" if rate and self._unit != "parts" else ""
        say(f"{self._text}: {amounts}{left}{self._described}")

    def describe(self, text: str) -> None:
        self._described = f"; {text}" if text else ""


class _BarTask:
    def __init__(self, bar: Any, identifier: Any, text: str) -> None:
        self._bar = bar
        self._identifier = identifier
        self._text = text

    def advance(self, amount: int) -> None:
        self._bar.advance(self._identifier, amount)

    def describe(self, text: str) -> None:
        whole = f"{self._text}: {text}" if self._text else text
        short = len(whole) > self._bar.console.width // 2
        self._bar.update(self._identifier, description=text if short else whole)
