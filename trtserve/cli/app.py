"""The table of commands, the Typer application of them, and how one command line runs.

A command's module is imported only when the application contains that command: importing all of them takes longer than
running most commands. This is the only place where errors become messages and exit codes.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import typer

from trtserve._version import __version__
from trtserve.cli.options import with_spec_options
from trtserve.cli.output import TerminalProgress, cut, forget_documents, print_error, print_json_error
from trtserve.cli.parser import ParsedCommand, ParsedGroup, UnknownOptionError, setting_variables, unread_variables
from trtserve.errors import MemoryLimitError, TrtserveError, UsageError
from trtserve.files import file_error, is_unicode
from trtserve.host.machine import address_space, format_bytes, refused_memory
from trtserve.process.signals import Interrupted, one_interrupt

COMPLETION_VARIABLE = "_TRTSERVE_COMPLETE"
"""Set by the shell while it completes a command line."""
_INTERRUPTED = (
    b"\nInterrupted: what is finished or downloaded is kept, the rest is being removed. "
    b"The same command continues there.\n"
)
# A process that a signal ended has the exit code 128 plus the signal's number.
SIGNALLED = 128
USUAL = "Serve a model and use it, in the usual order"
_HUB_VARIABLES: dict[str, tuple[Callable[[str], object], str]] = {
    "HF_ENDPOINT": (lambda text: urlsplit(text).hostname, "the address of a hub"),
    "HF_HUB_ETAG_TIMEOUT": (int, "seconds"),
    "HF_HUB_DOWNLOAD_TIMEOUT": (int, "seconds"),
}
STAGES = "The stages of import, one by one"
MODELS = "Models"
UPKEEP = "Servers and this machine"
SETUP = "One file for models and servers"


@dataclass(frozen=True, kw_only=True)
class CommandEntry:
    """A function of a module of this package."""

    module: str
    function: str
    panel: str | None = None  # heading in the help
    guide: str = ""  # page of the documentation, as `trtserve help` takes it
    cleans_up: bool = False  # removes unfinished work after SIGTERM and SIGHUP too, and a second Ctrl-C waits for that


@dataclass(frozen=True, kw_only=True)
class GroupEntry:
    """Commands below a command."""

    help: str
    panel: str
    guide: str
    commands: dict[str, CommandEntry]
    default: str
    """The command that runs where none is given."""


def _command(
    panel: str | None, guide: str, module: str, function: str | None = None, *, cleans_up: bool = False
) -> CommandEntry:
    return CommandEntry(module=module, function=function or module, panel=panel, guide=guide, cleans_up=cleans_up)


# In the order in which a user needs them.
COMMANDS: dict[str, CommandEntry | GroupEntry] = {
    "run": _command(USUAL, "how-to/chat", "run_", "run", cleans_up=True),
    "import": _command(USUAL, "getting-started.md", "import_", cleans_up=True),
    "start": _command(USUAL, "how-to/serve", "start"),
    "chat": _command(USUAL, "how-to/chat", "chat"),
    "query": _command(USUAL, "how-to/query", "query"),
    "bench": GroupEntry(
        help="Measure a served model.\n\n"
        "Every subcommand sends one kind of traffic to the model that users call, or to --model; without one it is "
        "`token-norm-dist`: 100 random prompts, 8 at a time. `report` and `compare` read results again.\n\nExamples:\n"
        "  trtserve bench\n"
        "  trtserve bench token-norm-dist --concurrency 8\n"
        "  trtserve bench --request-rate 5 --slo ttft=200ms,itl=50ms --out monday\n"
        "  trtserve bench compare monday tuesday --max-regression 5%",
        panel=USUAL,
        guide="how-to/bench",
        default="token-norm-dist",
        commands={
            "token-norm-dist": _command(None, "how-to/bench", "bench", "token_norm_dist"),
            "token-from-histogram": _command(None, "how-to/bench", "bench", "token_from_histogram"),
            "dataset": _command(None, "how-to/bench", "bench", "dataset"),
            "prefix": _command(None, "how-to/bench", "bench", "prefix"),
            "sessions": _command(None, "how-to/bench", "bench", "sessions"),
            "replay": _command(None, "how-to/bench", "bench", "replay"),
            "e2e": _command(None, "how-to/bench", "bench", "e2e"),
            "report": _command(None, "how-to/bench-results", "bench_results", "report"),
            "compare": _command(None, "how-to/bench-results", "bench_results", "compare"),
        },
    ),
    "status": _command(USUAL, "how-to/watch", "status"),
    "logs": _command(USUAL, "how-to/watch", "status", "logs"),
    "stop": _command(USUAL, "how-to/supervise", "status", "stop"),
    "convert": _command(STAGES, "how-to/quantise", "convert", cleans_up=True),
    "build": _command(STAGES, "how-to/engines", "convert", "build", cleans_up=True),
    "repo": _command(STAGES, "how-to/engines", "repo", cleans_up=True),
    "lora": _command(STAGES, "how-to/query", "convert", "lora", cleans_up=True),
    "models": _command(MODELS, "getting-started.md", "models"),
    "plan": _command(MODELS, "how-to/plan", "plan"),
    "check": _command(MODELS, "how-to/check", "check"),
    "inspect": _command(MODELS, "how-to/engines", "models", "inspect"),
    "list": _command(MODELS, "getting-started.md", "models", "list_models"),
    "remove": _command(MODELS, "getting-started.md", "models", "remove"),
    "prune": _command(MODELS, "getting-started.md", "models", "prune"),
    "push": _command(MODELS, "how-to/travel", "models", "push"),
    "pull": _command(MODELS, "how-to/travel", "models", "pull"),
    "init": _command(SETUP, "how-to/setup-file", "setup_file", "init"),
    "up": _command(SETUP, "how-to/setup-file", "setup_file", "up", cleans_up=True),
    "diff": _command(SETUP, "how-to/setup-file", "setup_file", "diff"),
    "down": _command(SETUP, "how-to/setup-file", "setup_file", "down"),
    "tune": _command(SETUP, "how-to/tune", "tune", cleans_up=True),
    "metrics": _command(UPKEEP, "how-to/watch", "metrics"),
    "doctor": _command(UPKEEP, "how-to/doctor", "doctor"),
    "gateway": _command(UPKEEP, "how-to/gateway", "gateway"),
    "door": _command(None, "how-to/gateway", "gateway"),  # its former name, which no list shows
    "replicas": _command(UPKEEP, "how-to/gateway", "gateway", "replicas"),
    "bindings": _command(UPKEEP, "how-to/nvidia-guides", "doctor", "bindings"),
}
SHOWN = tuple(name for name, entry in COMMANDS.items() if entry.panel is not None)
_HELP = frozenset(("-h", "--help", "--help-all", "--version"))
_WITHOUT_HUB = ("status", "logs", "stop", "list", "remove", "prune", "down", "metrics", "replicas")


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    logging.raiseExceptions = False  # what a library logs may have half a character of a file, which no stream takes
    forget_documents()
    arguments = with_default(_asked_help(arguments))
    try:
        _warn_of_variables()
        _require_hub_variables(arguments)
        code = command_tree(_named(arguments))(args=list(arguments), prog_name="trtserve", standalone_mode=False)
    except SystemExit as ending:  # raised by a library
        if ending.code is None or isinstance(ending.code, int):
            return ending.code or 0
        return _report(TrtserveError(str(ending.code)), arguments)
    except Exception as error:  # noqa: BLE001 - the one place where every error becomes a message
        if os.environ.get("TRTSERVE_DEBUG"):
            traceback.print_exc()
        return _report(_explained(error, arguments), arguments)
    return code if isinstance(code, int) else 0  # the code of typer.Exit; commands return None


def _asked_help(arguments: Sequence[str]) -> Sequence[str]:
    """Return `COMMAND --help WORDS` for `help COMMAND WORDS`."""
    if arguments[:1] != ["help"]:
        return arguments
    words = list(arguments[1:])
    entry = COMMANDS.get(words[0]) if words else None
    path = (
        0 if entry is None else 2 if isinstance(entry, GroupEntry) and words[1:2] and words[1] in entry.commands else 1
    )
    return [*words[:path], "--help", *words[path:]]


def with_default(arguments: Sequence[str]) -> Sequence[str]:
    """Return `GROUP COMMAND` for a group without a command: `bench`, `bench --concurrency 4`."""
    entry, rest = COMMANDS.get(arguments[0]) if arguments else None, arguments[1:]
    if not isinstance(entry, GroupEntry) or not _HELP.isdisjoint(rest):
        return arguments
    named = bool(rest) and (
        not rest[0].startswith("-") or any(word.replace("_", "-") in entry.commands for word in rest)
    )
    return arguments if named else [arguments[0], entry.default, *rest]


def _report(error: TrtserveError, arguments: Sequence[str]) -> int:
    """Print an error to stderr, and with --json to stdout too; return its exit code."""
    words = [word for word in arguments if not word.startswith("-")]
    entry = COMMANDS.get(words[0]) if words else None
    command = " ".join(words[: 2 if isinstance(entry, GroupEntry) else 1])
    error.message = cut(error.message)
    if isinstance(error, UsageError):
        hints = (error.hint or "", *setting_variables(error.message, arguments, os.environ))
        error.hint = " ".join(filter(None, hints)) or f"`{' '.join(('trtserve', *command.split()))} -h` explains it."
    with suppress(OSError):  # nobody can be told: a full disk, or a reader that went away; the exit code remains
        print_error(error)
    if "--json" in itertools.takewhile(lambda word: word != "--", arguments):
        try:
            print_json_error(command, error)
        except OSError:
            _forget_output()
    return error.code


def _warn_of_variables() -> None:
    if COMPLETION_VARIABLE in os.environ:  # the shell would show the warning
        return
    for sentence in unread_variables(os.environ, COMMANDS, command_tree):
        TerminalProgress().warn(sentence)


def _require_hub_variables(arguments: Sequence[str]) -> None:
    """Raise UsageError for variables at which huggingface_hub, which every tokenizer needs, cannot be imported.

    What never imports it goes on, such as `stop`.
    """
    if not arguments or arguments[0] in _WITHOUT_HUB or not _HELP.isdisjoint(arguments):
        return
    for name, (read, expected) in _HUB_VARIABLES.items():
        value = os.environ.get(name, "0")
        try:
            read(value)
        except ValueError:
            raise UsageError(f"{name} is {value[:200]!r}; expected {expected}.", hint="Unset it.") from None


def _named(arguments: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the commands to load: one command, none for --version, otherwise all."""
    words = os.environ.get("COMP_WORDS", "").split()[1:] if COMPLETION_VARIABLE in os.environ else arguments
    first = next((word for word in words if word != "--debug"), "")
    if first == "--version":
        return ()
    return (first,) if first in COMMANDS else SHOWN


def _explained(error: Exception, arguments: Sequence[str]) -> TrtserveError:
    if isinstance(error, MemoryLimitError):
        return error
    if isinstance(error, UnknownOptionError):
        from trtserve.cli.corrections import explain_unknown

        return explain_unknown(error, command_tree())
    if (reason := refused_memory(error)) is not None:
        space = address_space()
        limit = f" (ulimit -v limits this process to {format_bytes(space.limit)} of addresses)" if space else ""
        return MemoryLimitError(
            f"Out of memory{f': {reason}' if str(reason) else ''}{limit}.",
            hint="`trtserve plan` estimates what is needed; check the limits of this shell too (ulimit -v).",
        )
    if isinstance(error, TrtserveError):
        return error
    if isinstance(error, UnicodeEncodeError) and "surrogates" in error.reason:
        wrong = next((place for place, word in enumerate(arguments, start=1) if not is_unicode(word)), None)
        source = "An environment variable or a file" if wrong is None else f"Argument {wrong} of this command"
        return UsageError(f"{source} has bytes that are not UTF-8.", hint="Type it again in UTF-8.")
    if isinstance(error, typer.TyperException):
        return UsageError(error.format_message(), hint="`trtserve -h` lists the commands.")
    refused = None
    if isinstance(error, OSError):  # a write into what is open names no file; a copy names two
        refused = file_error(error, Path(error.filename2 or error.filename or "The output"))
    return refused or TrtserveError(
        f"Unexpected {type(error).__name__}: {error}",
        hint="This is a bug in trtserve. Run the command again as `trtserve --debug …` and report the traceback.",
    )


def application(names: tuple[str, ...] = SHOWN) -> typer.Typer:
    """Return the Typer application with the commands `names`."""
    app = typer.Typer(
        name="trtserve",
        help="Serve language models with Triton Inference Server, and measure them."
        "\n\nExamples:\n  trtserve run demo\n  trtserve stop\n"
        "  trtserve import smollm2-135m-instruct\n  trtserve start --detach --ui\n"
        '  trtserve query "What is gravity?"',
        epilog="`trtserve help COMMAND` explains a command. `trtserve help WORDS`, such as `trtserve help load lora`, "
        "searches options and documentation. Every option is also read from the environment, as "
        "TRTSERVE_COMMAND_OPTION: TRTSERVE_START_HTTP_PORT=9000.",
        cls=ParsedGroup,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        add_completion=False,  # replaced below by a version that does not complete files where none are expected
        context_settings={
            "help_option_names": ["-h", "--help"],
            "auto_envvar_prefix": "TRTSERVE",
            "max_content_width": 100,
            # TensorRT-LLM's own spelling of its flags is --max_batch_size.
            "token_normalize_func": lambda token: token.replace("_", "-"),
        },
    )
    app.callback()(_root)
    for name in names:
        _add(app, name, COMMANDS[name])
    return app


def command_tree(names: tuple[str, ...] = SHOWN) -> Any:
    """Return the tree of Typer's commands, whose root has the commands `names`."""
    if COMPLETION_VARIABLE in os.environ:
        _typer_completion().completion_init()
    return _tree(names)


@functools.cache
def _tree(names: tuple[str, ...]) -> Any:
    tree: Any = typer.main.get_command(application(names))
    tree.commands = {name: tree.commands[name] for name in names}  # Typer puts groups last
    return tree


def _add(app: typer.Typer, name: str, entry: CommandEntry | GroupEntry) -> None:
    if isinstance(entry, CommandEntry):
        module = importlib.import_module(f"trtserve.cli.{entry.module}")
        body = _guarded(with_spec_options(getattr(module, entry.function)), cleans_up=entry.cleans_up)
        app.command(name=name, cls=ParsedCommand, rich_help_panel=entry.panel, epilog=_guide(entry))(body)
        return
    group = typer.Typer(cls=ParsedGroup, context_settings={"obj": entry.default})
    for below, command in entry.commands.items():
        _add(group, below, command)
    app.add_typer(group, name=name, help=entry.help, rich_help_panel=entry.panel, epilog=_guide(entry))


def _guide(entry: CommandEntry | GroupEntry) -> str:
    return f"Guide: `trtserve help {entry.guide}`"


def _print_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"trtserve {__version__}\n")
        raise typer.Exit


def _typer_completion() -> Any:
    return importlib.import_module("typer.completion")


def _install_completion(wanted: bool) -> None:
    if wanted:
        shell, path = _typer_completion().install(prog_name="trtserve")
        path.write_text(without_files(path.read_text(encoding="utf-8")), encoding="utf-8")
        sys.stdout.write(f"Installed completion for {shell} in {path}; it takes effect in new shells.\n")
        raise typer.Exit


def _show_completion(wanted: bool) -> None:
    if wanted:
        shell = Path(os.environ.get("SHELL", "bash")).name
        script = _typer_completion().get_completion_script(
            prog_name="trtserve", complete_var=COMPLETION_VARIABLE, shell=shell
        )
        sys.stdout.write(without_files(script) + "\n")
        raise typer.Exit


def without_files(script: str) -> str:
    """Return Typer's completion script, changed so that the shell does not add local files of its own."""
    script = script.replace("complete -o default ", "complete ").replace(
        "    return 0\n", "    [[ ${COMPREPLY-} == */ ]] && compopt -o nospace\n    return 0\n"
    )
    return script.replace("=complete_zsh trtserve)", "=complete_zsh trtserve | grep -vx _files)")


def _root(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
    debug: bool = typer.Option(False, "--debug", help="Show tracebacks."),
    install_completion: bool = typer.Option(
        False, "--install-completion", callback=_install_completion, help="Install completion for this shell."
    ),
    show_completion: bool = typer.Option(
        False, "--show-completion", callback=_show_completion, help="Print the completion script of this shell."
    ),
) -> None:
    if debug:
        os.environ["TRTSERVE_DEBUG"] = "1"


def _guarded(function: Callable[..., None], *, cleans_up: bool) -> Callable[..., None]:
    """Wrap `function` to exit quietly: code 130 on Ctrl-C, code 0 when the reader of its output goes away.

    With `cleans_up` unfinished work is also removed after SIGTERM and SIGHUP (exit codes 143 and 129).
    """

    @functools.wraps(function)
    def body(*arguments: Any, **options: Any) -> None:
        def tell() -> None:
            if not options.get("quiet"):
                with suppress(OSError):  # it was closed
                    os.write(sys.stderr.fileno(), _INTERRUPTED)

        with one_interrupt(tell) if cleans_up else nullcontext(lambda: None) as received:
            try:
                function(*arguments, **options)
            except KeyboardInterrupt as interrupt:
                counted = interrupt.number if isinstance(interrupt, Interrupted) else None
                raise typer.Exit(SIGNALLED + (counted or received() or signal.SIGINT)) from None
            except BrokenPipeError:
                _forget_output()  # the reader of stdout went away (`| head`), which is not an error

    return body


def _forget_output() -> None:
    """Keep the interpreter's last flush of stdout quiet."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
