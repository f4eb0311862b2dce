"""The table of commands, and the Typer application of all or some of them.

A command's module is imported when the application has that command: all of them together, and what Typer makes of
their options, take more time than many a command itself.
"""

from __future__ import annotations

import functools
import importlib
import os
import signal
import sys
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import typer

from trtserve import __version__
from trtserve.interrupts import Interrupted, one_interrupt

# What shells say of a process that a signal ended is this and the number of the signal.
SIGNALLED = 128
STAGES = "Stages, in order (import does all up to repo)"
MODELS = "Models and what is made of them"
UPKEEP = "Servers and this machine"


@dataclass(frozen=True, kw_only=True)
class Command:
    """A function of a module of this package; one that `clears` does so after SIGTERM and SIGHUP too, and in peace."""

    module: str
    function: str
    panel: str | None = None
    clears: bool = False


@dataclass(frozen=True, kw_only=True)
class Group:
    """Commands below a command."""

    help: str
    panel: str
    commands: dict[str, Command]


def _stage(module: str, function: str | None = None, *, clears: bool = False) -> Command:
    return Command(module=module, function=function or module, panel=STAGES, clears=clears)


def _model(module: str, function: str | None = None, *, clears: bool = False) -> Command:
    return Command(module=module, function=function or module, panel=MODELS, clears=clears)


def _upkeep(module: str) -> Command:
    return Command(module=module, function=module, panel=UPKEEP)


# In the order in which a model goes through them.
COMMANDS: dict[str, Command | Group] = {
    "import": _stage("import_", clears=True),
    "convert": _stage("convert", clears=True),
    "build": _stage("build", clears=True),
    "repo": _stage("repo", clears=True),
    "start": _stage("start"),
    "query": _stage("query"),
    "bench": Group(
        help="Measure a served model.\n\nThe core model gets token ids, any other model (--model ensemble) text. "
        "`token-norm-dist` and `dataset` are those of benchmark_core_model.py; `dataset --model ensemble` is "
        "end_to_end_test.py; `token-norm-dist --model ensemble --concurrency 1` is genai-perf.",
        panel=STAGES,
        commands={
            "token-norm-dist": Command(module="bench", function="token_norm_dist"),
            "dataset": Command(module="bench", function="dataset"),
        },
    ),
    "plan": _model("plan"),
    "check": _model("check"),
    "inspect": _model("inspect"),
    "lora": _model("lora", clears=True),
    "list": _model("list_", "list_models"),
    "remove": _model("remove"),
    "status": _upkeep("status"),
    "logs": _upkeep("logs"),
    "metrics": _upkeep("metrics"),
    "stop": _upkeep("stop"),
    "doctor": _upkeep("doctor"),
}


def application(names: Collection[str] = tuple(COMMANDS)) -> typer.Typer:
    """The command line with the commands `names`."""
    app = typer.Typer(
        name="trtserve",
        help="From a Hugging Face checkpoint to a served and measured endpoint on Triton Inference Server.",
        epilog="Every option is also read from the environment, as TRTSERVE_COMMAND_OPTION: "
        "TRTSERVE_START_HTTP_PORT=9000.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={
            "help_option_names": ["-h", "--help"],
            "auto_envvar_prefix": "TRTSERVE",
            # TensorRT-LLM's own spelling of its flags is --max_batch_size.
            "token_normalize_func": lambda token: token.replace("_", "-"),
        },
    )
    app.callback()(_root)
    for name in names:
        _add(app, name, COMMANDS[name])
    return app


def _add(app: typer.Typer, name: str, entry: Command | Group) -> None:
    if isinstance(entry, Command):
        module = importlib.import_module(f"trtserve.cli.{entry.module}")
        body = _guarded(getattr(module, entry.function), clears=entry.clears)
        app.command(name=name, rich_help_panel=entry.panel)(body)
        return
    group = typer.Typer(no_args_is_help=True)
    for below, command in entry.commands.items():
        _add(group, below, command)
    app.add_typer(group, name=name, help=entry.help, rich_help_panel=entry.panel)


def _print_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"trtserve {__version__}\n")
        raise typer.Exit


def _root(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
    debug: bool = typer.Option(False, "--debug", help="Show tracebacks."),
) -> None:
    if debug:
        os.environ["TRTSERVE_DEBUG"] = "1"


def _guarded(function: Callable[..., None], *, clears: bool) -> Callable[..., None]:
    """`function`, in which Ctrl-C ends the process with code 130, and a reader of its output that goes away with 0.

    Neither leaves a traceback. One that `clears` away what it began does so after SIGTERM and SIGHUP (codes 143 and
    129) too, and in peace.
    """

    @functools.wraps(function)
    def body(*arguments: Any, **options: Any) -> None:
        with one_interrupt() if clears else nullcontext(lambda: None) as received:
            try:
                function(*arguments, **options)
            except KeyboardInterrupt as interrupt:
                counted = interrupt.number if isinstance(interrupt, Interrupted) else None
                raise typer.Exit(SIGNALLED + (counted or received() or signal.SIGINT)) from None
            except BrokenPipeError:
                _discard_stdout()
            except ImportError:  # what NumPy makes of an interrupt while it is loaded
                if (number := received()) is None:
                    raise
                raise typer.Exit(SIGNALLED + number) from None

    return body


def _discard_stdout() -> None:
    """The reader of our stdout went away (`| head`): nothing is wrong. Keeps the interpreter's own flush quiet."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
