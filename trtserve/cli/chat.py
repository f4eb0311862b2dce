"""`trtserve chat`: a conversation in the terminal."""

from __future__ import annotations

import os
import re
import select
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from difflib import get_close_matches
from functools import cache, partial
from pathlib import Path
from shutil import get_terminal_size
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from trtserve.cli.endpoint import Connection, find_endpoint
from trtserve.cli.options import Fields, servers
from trtserve.cli.output import print_block, print_data, print_error, print_piece, say, terminal, visible
from trtserve.client.spec import LENGTH, REQUEST_OPTIONS, SAMPLING, QuerySpec, RequestOptions, option_value
from trtserve.errors import ServerNotFoundError, ServerUnreachableError, TrtserveError, UsageError
from trtserve.store import Store
from trtserve.store.sources import DEMO, import_words

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.markdown import Markdown
    from rich.segment import Segment

    from trtserve.client.endpoint import Endpoint
    from trtserve.client.query import AnswerTimes, Conversation, TextFilter
    from trtserve.client.request import RequestContext

_PAUSES = 4.0  # between two drawings, in times of what a drawing takes
_LOST_PAUSE = 0.5  # seconds between two looks for a server
_LOCAL_MODES = 3  # in the list of tcgetattr
_FENCES = ("```", "~~~")
_WORDS = re.compile(r"\n|[^\S\n]*\S+|[^\S\n]+")  # a word has the spaces before it
_LONGEST_WORD = 30  # columns


class PlainAnswer:
    """Prints text as it comes; on a terminal, lines are broken between words."""

    def __init__(self) -> None:
        self._width = get_terminal_size().columns if sys.stdout.isatty() else None
        self._word, self._column = "", 0

    def __enter__(self) -> PlainAnswer:
        """Begin."""
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        """End the line."""
        self.add("\n")

    def add(self, piece: str) -> None:
        if self._width is None:
            print_piece(piece)
            return
        from rich.cells import cell_len

        parts = _WORDS.findall(visible(self._word + piece))
        # The end of the last word may come with the next piece. Some languages have no spaces: a long word is printed.
        waits = bool(parts) and parts[-1] != "\n" and cell_len(parts[-1]) <= _LONGEST_WORD
        self._word = parts.pop() if waits else ""
        for part in parts:
            breaks = part[0] in " \t" and self._column + cell_len(part) > self._width
            shown = f"\n{part.lstrip()}" if breaks else part
            print_piece(shown)
            self._column = (0 if shown[0] == "\n" else self._column) + cell_len(shown.strip("\n"))


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
        return self._console.render_lines(_markdown()(visible(text)), pad=False) if text else []


@cache
def _markdown() -> type[Markdown]:
    """Return rich's Markdown, whose code begins in the first column: what is copied has no indent of its own."""
    from rich.markdown import CodeBlock, Markdown
    from rich.syntax import Syntax

    class FlushCode(CodeBlock):
        def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
            code = str(self.text).rstrip()
            yield Syntax(code, self.lexer_name, theme=self.theme, word_wrap=True, padding=(1, 0))

    class FlushMarkdown(Markdown):
        elements: ClassVar = {**Markdown.elements, "fence": FlushCode, "code_block": FlushCode}

    return FlushMarkdown


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
IN_CHAT = Fields(
    defaults={"max_tokens": MAX_TOKENS},
    texts={
        "temperature": ("Sampling temperature.", "greedy"),
        "seed": ("Seed of sampling: the same seed gives the same answer.", "a new one for each answer"),
    },
)
"""Options of a request, as conversations mean them."""
_QUOTES = '"""'
_USER, _MODEL = "bold cyan", "bold magenta"
_COMMANDS = {
    "/system": "TEXT: set the system message; without a text, remove it",
    "/set": "NAME VALUE: set an option such as temperature; without a value, remove it; alone, list the usual options",
    "/model": "NAME: ask another model or server from now on; alone, list them",
    "/retry": "ask the last question again; with a temperature, other words may be drawn",
    "/reset": "forget what was said; /clear does the same",
    "/save": "FILE: write the conversation, as Markdown or as messages in a .json file",
    "/thoughts": "what the model thought before its last answer",
    "/stats": "what the answers took",
    "/help": "this list",
    "/exit": "end; exit and Ctrl-D do the same",
    _QUOTES: "begins and ends a message of several lines; Alt-Enter starts a new line too",
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
    request: Annotated[RequestOptions, IN_CHAT],
    plain: Annotated[bool, typer.Option("--plain", help="Print answers as they are, without Markdown.")] = False,
) -> None:
    """Talk to a served model. Enter sends, Ctrl-C stops an answer, /help lists the rest.

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
    interactive = question is None and sys.stdin.isatty() and sys.stdout.isatty()
    if interactive or spec.model is not None:
        conversation.switch(spec.model, server)  # what does not answer is said before the first question
    if system is not None:
        conversation.set_system(system)
    talk = _Talk(conversation, interactive=interactive, markdown=sys.stdout.isatty() and not plain)
    if interactive:
        say(f"{talk.name}: /help lists the commands, Ctrl-D ends.")
        if any(record.source == DEMO and Path(record.repository) == server.repository for record in Store().recorded()):
            say("The demo model knows only a few hundred answers, all about machine learning. Try: What is ML?")
    lines = _typed() if interactive else map(str.rstrip, sys.stdin) if question is None else [question]
    for line in joined(iter(lines)):
        command = f"/{line}" if interactive and line.strip() in ("exit", "quit", "help", "?") else line
        if command.startswith("/"):
            if not talk.obey(command):
                break
        elif line.strip() and not (interactive and _lacks_slash(line.strip())):
            talk.ask(partial(conversation.ask, line))
    if conversation.asked is None and not interactive:
        conversation.switch(spec.model, server)  # nothing was asked; a server that does not answer is an error anyway


def _lacks_slash(line: str) -> bool:
    """Return whether a line is a command without its slash, and say so."""
    meant = {"clear": "/reset"}.get(line, f"/{line}")
    if meant not in _COMMANDS:
        return False
    say(f"This was not sent to the model; the command is {meant}.")
    return True


def joined(lines: Iterator[str]) -> Iterator[str]:
    """Yield messages: a line, or what stands between three quotes on several lines."""
    for line in lines:
        if not line.startswith(_QUOTES):
            yield line
            continue
        text = line.removeprefix(_QUOTES)
        while not text.rstrip().endswith(_QUOTES):
            more = next(lines, None)
            text += _QUOTES if more is None else f"\n{more}"
        yield text.rstrip().removesuffix(_QUOTES).strip("\n")


def _endpoint(model: str | None, connection: Connection) -> tuple[str | None, Endpoint]:
    """Return the model to ask, or None for the server's own, and the server."""
    if model is None or connection.explicit or connection.server is not None:
        return model, find_endpoint(connection, model=model)
    try:
        return None, find_endpoint(replace(connection, server=model))
    except ServerNotFoundError:  # the name of a model of the only server, else of one that could be started
        try:
            return model, find_endpoint(connection)
        except ServerNotFoundError as error:
            known = any(record.name == model for record in Store().recorded())
            words, name = (model, model) if known else import_words(model)
            first = "" if known else f"trtserve import {words}, then "
            raise ServerNotFoundError(error.message, hint=f"Start it: {first}trtserve start {name} --detach") from None


class _Talk:
    """Answers questions and carries out commands in the terminal."""

    def __init__(self, conversation: Conversation, *, interactive: bool, markdown: bool) -> None:
        self._conversation, self._interactive, self._markdown = conversation, interactive, markdown
        self._thoughts = ""
        self._lost = False  # whether the server did not answer the last time
        conversation.filter = self._filter

    def _filter(self, context: RequestContext) -> TextFilter | None:
        """Return what keeps thoughts out of an answer, or None for a model that marks none in its text."""
        from trtserve.gateway.openai.dialects import dialect_of
        from trtserve.gateway.openai.reading import reader_of

        self._thoughts = ""
        files, prompts = context.tokenizer, context.prompts
        dialect = dialect_of("\n".join(files.chat_templates.values()) if files is not None else None)
        if files is None or dialect.thoughts is None or context.spec.raw:
            return None
        prompt = prompts.texts[0] if prompts.texts else files.decode(prompts.token_ids[0])
        reader = reader_of(dialect, {}, thinks=dialect.thinks(prompt), thoughts=True, required=False)

        def said(piece: str | None) -> str:
            text = ""
            for part in reader.finish() if piece is None else reader.add(piece):
                if part.kind == "reasoning":
                    self._thoughts += part.text
                else:
                    text += part.text
            return text

        return said

    @property
    def name(self) -> str:
        """Name of the model that answers."""
        asked = self._conversation
        server = asked.server
        return asked.spec.model or server.model or (server.grpc if server.grpc_port else server.http)

    def ask(self, ask: Callable[[Callable[[str], None]], AnswerTimes]) -> None:
        """Print an answer. Ctrl-C stops it, and an error ends it; the conversation goes on in a terminal."""
        try:
            self._wait_for_server()
            with silent_keyboard(), self._printing() as add:
                times = ask(add)
        except KeyboardInterrupt:
            if not self._interactive:
                raise
            _remark("stopped")
        except TrtserveError as error:
            if not self._interactive:
                raise
            print_error(error)
            self._lost = isinstance(error, ServerUnreachableError)
            if self._lost:
                say("/retry asks again, and like any other question it waits until the server is back.")
        else:
            self._remark_on(times)

    def _remark_on(self, times: AnswerTimes) -> None:
        if times.first is None:
            say(
                "The model ended its answer at once, without any text. Ask in other words, or with a temperature: "
                "/set temperature 0.8, then /retry"
            )
        elif self._interactive:
            _remark(_described(times))
            if times.cut:
                say(_after_cut(times, self._conversation.spec.max_tokens))

    def _wait_for_server(self) -> None:
        """Wait until the server answers if it did not the last time; Ctrl-C ends it (KeyboardInterrupt)."""
        if not self._lost:
            return
        with silent_keyboard(), terminal().status("Waiting for the server. Ctrl-C stops."):
            while not self._answers():
                time.sleep(_LOST_PAUSE)
        self._lost = False
        say("The server is back.")

    def _answers(self) -> bool:
        try:
            self._conversation.switch(self._conversation.spec.model, self._conversation.server)
        except ServerUnreachableError:
            return False
        return True

    @contextmanager
    def _printing(self) -> Iterator[Callable[[str], None]]:
        """Yield what prints the pieces of an answer; in a terminal, a sign of life and who answers come first."""
        console = terminal()
        printing = MarkdownAnswer(console) if self._markdown else PlainAnswer()
        if not self._interactive:
            with printing:
                yield printing.add
            return
        from rich.text import Text

        name = Text(visible(self.name), _MODEL)
        with ExitStack() as stack:
            sign = stack.enter_context(console.status(name, spinner_style=_MODEL))
            begun = False

            def add(piece: str) -> None:
                nonlocal begun
                if not begun:
                    sign.stop()
                    console.print(name)
                    stack.enter_context(printing)
                begun = True
                printing.add(piece)

            yield add

    def obey(self, line: str) -> bool:
        """Carry out a command; return False to end."""
        command, _, rest = line.partition(" ")
        if command in ("/exit", "/quit", "/bye"):
            return False
        conversation, text = self._conversation, rest.strip()
        actions: dict[str, Callable[[], object]] = {
            "/system": lambda: self._set_system(text),
            "/set": lambda: self._set(text),
            "/model": lambda: self._switch(text),
            "/retry": lambda: self.ask(conversation.retry),
            "/reset": self._reset,
            "/save": lambda: self._save(text),
            "/thoughts": lambda: print_block(self._thoughts.strip() or "The last answer has no thoughts."),
            "/stats": self._print_stats,
            "/help": lambda: print_block("\n".join(f"{name:<9}  {text}" for name, text in _COMMANDS.items())),
        }
        actions |= {"/?": actions["/help"], "/clear": actions["/reset"]}
        if command not in actions:
            close = get_close_matches(command, actions, n=1)
            say(f"There is no command {command}{f'; did you mean {close[0]}?' if close else '; /help lists them.'}")
            return True
        try:
            actions[command]()
        except TrtserveError as error:
            if not self._interactive:  # the next line would be asked as if this one had worked
                raise
            print_error(error)
        return True

    def _set_system(self, text: str) -> None:
        self._conversation.set_system(text)
        say("The system message is set." if text else "There is no system message any more.")

    def _reset(self) -> None:
        self._conversation.reset()
        say("The conversation begins anew; the system message and what is set stay.")

    def _set(self, text: str) -> None:
        """Set or remove an option of the requests that follow, or list the options."""
        if text in ("", "all"):
            print_block("\n".join(_option_lines(self._conversation.spec.options, every=text == "all")))
            return
        name, *rest = re.split(r"[\s=]+", text, maxsplit=1)
        value = "".join(rest)
        name = name.lstrip("-").replace("-", "_")
        if name == "system":
            self._set_system(value.strip())
            return
        options = dict(self._conversation.spec.options)
        if name not in REQUEST_OPTIONS:
            near = get_close_matches(name, REQUEST_OPTIONS, n=1)
            first = f"Did you mean {near[0]}? " if near else ""
            raise UsageError(f"There is no option {name!r}.", hint=f"{first}/set all lists the options.")
        if value:
            options[name] = option_value(name, value.strip())
        else:
            options.pop(name, None)
        self._conversation.spec = replace(self._conversation.spec, options=options)
        say(f"{name} is {_shown(options[name])} from now on." if value else f"{name} is not set any more.")

    def _switch(self, name: str) -> None:
        """Ask another model of this server, or another server that was started here; or list both."""
        from trtserve.client.request import with_named_adapter
        from trtserve.client.tensors import STANDARD_MODELS
        from trtserve.server.state import list_servers

        models = self._conversation.models()
        if not name:
            others = [server.name for server in list_servers() if server.name != self.name]
            answering = [each for each in models if each not in STANDARD_MODELS] or models
            known = dict.fromkeys([self.name, *answering, *others])
            print_data("\n".join(f"{'*' if each == self.name else ' '} {each}" for each in known))
            return
        here = self._conversation.server
        # Models behind one port have repositories of their own.
        known_here = name in models or with_named_adapter(QuerySpec(model=name), here.repository).options
        model, server = (name, here) if known_here and here.grpc_port else _endpoint(name, Connection())
        self._conversation.switch(model, server)
        say(f"{self.name} answers from now on.")

    def _save(self, name: str) -> None:
        if not name:
            raise UsageError("/save needs the name of a file.")
        path = Path(name).expanduser()
        self._conversation.save(path)
        say(f"Saved to {path}")

    def _print_stats(self) -> None:
        if not self._conversation.times:
            say("There was no answer yet.")
        for number, times in enumerate(self._conversation.times, 1):
            print_data(f"answer {number}: {_described(times)}")


def _option_lines(given: Mapping[str, Any], *, every: bool) -> list[str]:
    """Return a line for each option that the command's short help has, and for each that is set; then other names."""
    listed = [name for name, option in REQUEST_OPTIONS.items() if option.declared.common or name in given]
    widest = max(map(len, listed))
    values = {name: _shown(given[name]) if name in given else "not set" for name in listed}
    # What only `query` needs is left out.
    texts = {name: REQUEST_OPTIONS[name].declared.help.partition("; with `query`")[0].rstrip(".") for name in listed}
    lines = [f"{name:<{widest}}  {values[name]:<8}  {texts[name]}." for name in listed]
    if not every:
        return [*lines, "/set all names all options."]
    panels = {option.name: option.declared.panel for option in REQUEST_OPTIONS.values() if option.name not in listed}
    others = sorted(panels, key=lambda name: panels[name] not in (LENGTH, SAMPLING))
    return [*lines, f"Also: {', '.join(others)}."]


def _shown(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _remark(text: str) -> None:
    """Write what is neither a question nor an answer."""
    terminal(stderr=True).print(text, style="dim", markup=False)


def _after_cut(times: AnswerTimes, limit: int) -> str:
    """Return what to do after a cut answer; the engine's own limit on prompt and answer ends it before max_tokens."""
    if times.tokens is not None and times.tokens < limit:
        return "The answer was cut: the model has no room for more words. /reset forgets what was said."
    return f"The answer was cut at {limit} tokens. Say “Go on.”, or /set max_tokens {2 * limit}, then /retry"


def _described(times: AnswerTimes) -> str:
    rate = times.tokens_per_second
    parts = [
        f"{times.tokens} tokens" if times.tokens is not None else f"{times.seconds:.1f} s",
        *([f"{times.thought:.0%} of it thoughts (/thoughts)"] if times.thought else []),
        *([] if rate is None else [f"{rate:.1f} tokens/s"]),
        *([] if times.first is None else [f"time to first token {times.first * 1000:.0f} ms"]),
    ]
    return ", ".join(parts)


def _typed() -> Iterator[str]:
    """Yield what the user types, until Ctrl-D; Ctrl-C clears the line."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import FileHistory
    from prompt_toolkit.key_binding import KeyBindings
    from rich.text import Text

    keys: Any = KeyBindings()

    def send(event: Any) -> None:
        text = event.current_buffer.text
        if text.startswith(_QUOTES) and not text[len(_QUOTES) :].rstrip().endswith(_QUOTES):
            event.current_buffer.insert_text("\n")
        else:
            event.current_buffer.validate_and_handle()

    keys.add("enter")(send)
    keys.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))
    keys.add("c-j")(lambda event: event.current_buffer.insert_text("\n"))
    file = Store().root / "chat-history"
    file.parent.mkdir(parents=True, exist_ok=True)
    session: PromptSession[str] = PromptSession(
        [(_USER.replace("cyan", "ansicyan"), "› ")],
        multiline=True,
        prompt_continuation="  ",
        key_bindings=keys,
        history=FileHistory(str(file)),
        completer=WordCompleter(list(_COMMANDS), sentence=True),
        complete_while_typing=False,
    )
    while True:
        for line in typed_ahead(sys.stdin.fileno()):
            terminal(stderr=True).print(Text.assemble(("› ", _USER), visible(line)))
            yield line
        try:
            line = session.prompt()
        except KeyboardInterrupt:
            if not session.default_buffer.text:
                _remark("Ctrl-D or /exit ends the conversation.")
            continue
        except EOFError:
            return
        yield line


def typed_ahead(descriptor: int) -> Iterator[str]:
    """Yield the lines that were typed into a terminal while nothing read them; the prompt would join them into one."""
    while select.select([descriptor], [], [], 0)[0] and (line := os.read(descriptor, 65536)):
        yield line.decode(errors="replace").removesuffix("\n")
