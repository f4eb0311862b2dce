"""`trtserve chat`: a conversation in the terminal."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trtserve.cli.endpoint import Connection, find_endpoint
from trtserve.cli.options import Fields, servers
from trtserve.cli.output import print_data, print_error, print_piece, say, terminal, visible
from trtserve.client.spec import QuerySpec, RequestOptions
from trtserve.errors import ServerNotFoundError, TrtserveError, UsageError
from trtserve.store import Store

if TYPE_CHECKING:
    from rich.console import Console
    from rich.segment import Segment

    from trtserve.client.endpoint import Endpoint
    from trtserve.client.query import AnswerTimes, Conversation

_PAUSES = 4.0  # between two drawings, in times of what a drawing takes
_LOCAL_MODES = 3  # in the list of tcgetattr
_FENCES = ("```", "~~~")


class PlainAnswer:
    """Prints text as it comes."""

    def __enter__(self) -> PlainAnswer:
        """Begin."""
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        """End the line."""
        self.add("\n")

    def add(self, piece: str) -> None:
        """Print the next piece."""
        print_piece(piece)


class MarkdownAnswer:
    """Prints Markdown: what is complete or above the screen's room stays as it is, the rest is drawn again.

    Drawing more would flicker, and cannot reach what has left the screen.
    """

    def __init__(self, console: Console) -> None:
        from rich.live import Live

        self._text = ""
        self._above = 0  # lines of the last block that are printed for good
        self._pause = self._drawn = 0.0
        self._console = console
        self._live = Live(console=console, auto_refresh=False)

    def __enter__(self) -> MarkdownAnswer:
        """Begin to draw."""
        self._live.start()
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        """Leave the last block on the screen."""
        self._draw()
        self._live.stop()

    def add(self, piece: str) -> None:
        """Add the next piece."""
        self._text += piece
        end = complete_blocks(self._text)
        if end:
            self._print(self._lines(self._text[:end]))
            self._text, self._above = self._text[end:], 0
        if end or time.monotonic() - self._drawn >= self._pause:
            self._draw()

    def _draw(self) -> None:
        """Draw the last block: the lines that the screen has no room for are printed for good."""
        from rich.segment import SegmentLines

        began = time.monotonic()
        lines = self._lines(self._text)
        room = max(1, self._console.height - 2)
        if len(lines) > self._above + room:
            self._print(lines[:-room])
        self._live.update(SegmentLines(lines[self._above :], new_lines=True), refresh=True)
        self._drawn = time.monotonic()
        self._pause = (self._drawn - began) * _PAUSES

    def _print(self, lines: list[list[Segment]]) -> None:
        from rich.segment import SegmentLines

        if lines[self._above :]:
            self._console.print(SegmentLines(lines[self._above :], new_lines=True), end="")
        self._above = max(self._above, len(lines))

    def _lines(self, text: str) -> list[list[Segment]]:
        from rich.markdown import Markdown

        return self._console.render_lines(Markdown(visible(text)), pad=False) if text else []


@contextmanager
def silent_keyboard() -> Iterator[None]:
    """Show nothing of what is typed while an answer is drawn, not even ^C: it would move the lines to draw again."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    silent = list(before)
    silent[_LOCAL_MODES] &= ~(termios.ECHO | termios.ECHONL)
    termios.tcsetattr(sys.stdin, termios.TCSANOW, silent)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


def complete_blocks(text: str) -> int:
    """Return the length of the complete blocks at the beginning of `text`: up to the last blank line outside code."""
    end = at = 0
    fence = ""
    for line in text.splitlines(keepends=True):
        bare = line.strip()
        if fence:
            fence = "" if bare == fence else fence
        elif bare.startswith(_FENCES):
            fence = bare[:3]
        elif not bare and line.endswith("\n"):
            end = at + len(line)
        at += len(line)
    return end


MAX_TOKENS = 1024
_COMMANDS = {
    "/system": "TEXT: set the system message; without a text, remove it",
    "/reset": "forget what was said",
    "/save": "FILE: write the conversation, as Markdown or as messages in a .json file",
    "/stats": "what the answers took",
    "/help": "this list",
    "/exit": "end; Ctrl-D does the same",
}


def chat(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="Running server, or a model on it; default: the only one.", autocompletion=servers
        ),
    ] = None,
    *,
    connection: Connection,
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None,
    request: Annotated[RequestOptions, Fields(defaults={"max_tokens": MAX_TOKENS})],
    plain: Annotated[bool, typer.Option("--plain", help="Print answers as they are, without Markdown.")] = False,
) -> None:
    """Talk to a served model. Enter sends, Alt-Enter starts a new line, Ctrl-C stops an answer, /help lists the rest.

    Without a terminal, every line of the standard input is a question.

    Examples:
        trtserve chat
        trtserve chat --system "Answer briefly." --temperature 0.7 --top-p 0.9
        trtserve chat --url gpu-box:8001
    """
    name, server = _endpoint(model, connection)
    converse(server, QuerySpec(model=name, options=request.given()), system=system, plain=plain)


def converse(
    server: Endpoint, spec: QuerySpec, *, system: str | None = None, plain: bool = False, question: str | None = None
) -> None:
    """Talk to a model until the user ends it; with a `question`, print its answer and return."""
    from trtserve.client.query import Conversation

    conversation = Conversation(spec=spec, server=server)
    if system is not None:
        conversation.set_system(system)
    interactive = question is None and sys.stdin.isatty() and sys.stdout.isatty()
    if interactive:
        say(f"{server.model or spec.model or server.grpc}: /help lists the commands, Ctrl-D ends.")
    lines = _typed() if interactive else map(str.rstrip, sys.stdin) if question is None else [question]
    for line in lines:
        if line.startswith("/"):
            if not _obey(conversation, line):
                return
        elif line.strip():
            answer = MarkdownAnswer(terminal()) if interactive and not plain else PlainAnswer()
            _ask(conversation, line, answer, talkative=interactive)


def _endpoint(model: str | None, connection: Connection) -> tuple[str | None, Endpoint]:
    """Return the model to ask, or None for the server's own, and the server."""
    if model is None or connection.explicit or connection.server is not None:
        return model, find_endpoint(connection)
    try:
        return None, find_endpoint(replace(connection, server=model))
    except ServerNotFoundError:  # the name of a model of the only server, else of one that could be started
        try:
            return model, find_endpoint(connection)
        except ServerNotFoundError as error:
            known = any(record.name == model for record in Store().recorded())
            first = "" if known else f"trtserve import {model}, then "
            raise ServerNotFoundError(error.message, hint=f"Start it: {first}trtserve start {model} --detach") from None


def _ask(conversation: Conversation, question: str, printing: MarkdownAnswer | PlainAnswer, *, talkative: bool) -> None:
    """Print the answer. Ctrl-C stops it, and an error ends it; the conversation goes on in a terminal."""
    try:
        with silent_keyboard(), printing as answer:
            times = conversation.ask(question, answer.add)
    except KeyboardInterrupt:
        if not talkative:
            raise
        say("stopped")
    except TrtserveError as error:
        if not talkative:
            raise
        print_error(error)
    else:
        if talkative:
            say(_described(times))


def _described(times: AnswerTimes) -> str:
    rate = times.tokens_per_second
    parts = [
        f"{times.tokens} tokens" if times.tokens is not None else f"{times.seconds:.1f} s",
        *([] if rate is None else [f"{rate:.1f} tokens/s"]),
        *([] if times.first is None else [f"first after {times.first * 1000:.0f} ms"]),
    ]
    return ", ".join(parts)


def _obey(conversation: Conversation, line: str) -> bool:
    """Carry out a command; return False to end."""
    command, _, rest = line.partition(" ")
    if command in ("/exit", "/quit", "/bye"):
        return False
    actions: dict[str, Callable[[], object]] = {
        "/system": lambda: conversation.set_system(rest.strip()),
        "/reset": conversation.reset,
        "/save": lambda: _save(conversation, rest.strip()),
        "/stats": lambda: _print_stats(conversation),
        "/help": lambda: print_data("\n".join(f"{name:<8} {text}" for name, text in _COMMANDS.items())),
    }
    if command not in actions:
        say(f"There is no command {command}; /help lists them.")
        return True
    try:
        actions[command]()
    except TrtserveError as error:
        print_error(error)
    return True


def _save(conversation: Conversation, name: str) -> None:
    if not name:
        raise UsageError("/save needs the name of a file.")
    path = Path(name).expanduser()
    conversation.save(path)
    say(f"Saved to {path}")


def _print_stats(conversation: Conversation) -> None:
    if not conversation.times:
        say("There was no answer yet.")
    for number, times in enumerate(conversation.times, 1):
        print_data(f"answer {number}: {_described(times)}")


def _typed() -> Iterator[str]:
    """Yield what the user types, until Ctrl-D; Ctrl-C clears the line."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import FileHistory
    from prompt_toolkit.key_binding import KeyBindings

    keys: Any = KeyBindings()
    keys.add("enter")(lambda event: event.current_buffer.validate_and_handle())
    keys.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))
    keys.add("c-j")(lambda event: event.current_buffer.insert_text("\n"))
    file = Store().root / "chat-history"
    file.parent.mkdir(parents=True, exist_ok=True)
    session: PromptSession[str] = PromptSession(
        "› ",
        multiline=True,
        prompt_continuation="  ",
        key_bindings=keys,
        history=FileHistory(str(file)),
        completer=WordCompleter(list(_COMMANDS), sentence=True),
        complete_while_typing=False,
    )
    while True:
        for line in typed_ahead(sys.stdin.fileno()):
            say(f"› {line}")
            yield line
        answer = _read(session.prompt)
        if answer is None:
            return
        yield answer


def typed_ahead(descriptor: int) -> Iterator[str]:
    """Yield the lines that were typed into a terminal while nothing read them; the prompt would join them into one."""
    while select.select([descriptor], [], [], 0)[0] and (line := os.read(descriptor, 65536)):
        yield line.decode(errors="replace").removesuffix("\n")


def _read(prompt: Callable[[], str]) -> str | None:
    """Return the next line, "" after Ctrl-C, or None after Ctrl-D."""
    try:
        return prompt()
    except KeyboardInterrupt:
        return ""
    except EOFError:
        return None
