"""The table of commands, and the Typer application of all or some of them.

A command's module is imported only when the application contains that command: importing all of them takes longer than
running most commands.
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
from pathlib import Path
from typing import Any

import typer

from trtserve._version import __version__
from trtserve.cli.output import say
from trtserve.cli.parser import Command as TyperCommand
from trtserve.cli.parser import Group as TyperGroup
from trtserve.cli.spec_options import with_spec_options
from trtserve.process.interrupts import Interrupted, one_interrupt

COMPLETION_VARIABLE = "_TRTSERVE_COMPLETE"
"""Set by the shell while it completes a command line."""
# A process that a signal ended has the exit code 128 plus the signal's number.
SIGNALLED = 128
STAGES = "Stages, in order (import runs all up to repo)"
MODELS = "Models and artefacts"
UPKEEP = "Servers and this machine"
SETUP = "One file for models and servers"


@dataclass(frozen=True, kw_only=True)
class Command:
    """A function of a module of this package."""

    module: str
    function: str
    panel: str | None = None  # heading in the help
    cleans_up: bool = False  # removes unfinished work after SIGTERM and SIGHUP too, and a second Ctrl-C waits for that


@dataclass(frozen=True, kw_only=True)
class Group:
    """Commands below a command."""

    help: str
    panel: str
    commands: dict[str, Command]


def _stage(module: str, function: str | None = None, *, cleans_up: bool = False) -> Command:
    return Command(module=module, function=function or module, panel=STAGES, cleans_up=cleans_up)


def _model(module: str, function: str | None = None, *, cleans_up: bool = False) -> Command:
    return Command(module=module, function=function or module, panel=MODELS, cleans_up=cleans_up)


def _upkeep(module: str) -> Command:
    return Command(module=module, function=module, panel=UPKEEP)


def _setup(function: str, *, cleans_up: bool = False) -> Command:
    return Command(module="setup_file", function=function, panel=SETUP, cleans_up=cleans_up)


# In the order in which a user needs them.
COMMANDS: dict[str, Command | Group] = {
    "import": _stage("import_", cleans_up=True),
    "convert": _stage("convert", cleans_up=True),
    "build": _stage("build", cleans_up=True),
    "repo": _stage("repo", cleans_up=True),
    "start": _stage("start"),
    "query": _stage("query"),
    "chat": _stage("chat"),
    "bench": Group(
        help="Measure a served model.\n\n"
        "Every subcommand sends one kind of traffic to the model that users call, or to --model. `report` and "
        "`compare` read results again.\n\nExamples:\n"
        "  trtserve bench token-norm-dist --concurrency 8\n"
        "  trtserve bench token-norm-dist --request-rate 5 --slo ttft=200ms,itl=50ms --out monday\n"
        "  trtserve bench compare monday tuesday --max-regression 5%",
        panel=STAGES,
        commands={
            "token-norm-dist": Command(module="bench", function="token_norm_dist"),
            "token-from-histogram": Command(module="bench", function="token_from_histogram"),
            "dataset": Command(module="bench", function="dataset"),
            "prefix": Command(module="bench", function="prefix"),
            "sessions": Command(module="bench", function="sessions"),
            "replay": Command(module="bench", function="replay"),
            "e2e": Command(module="bench", function="e2e"),
            "report": Command(module="bench_results", function="report"),
            "compare": Command(module="bench_results", function="compare"),
        },
    ),
    "init": _setup("init"),
    "up": _setup("up", cleans_up=True),
    "diff": _setup("diff"),
    "down": _setup("down"),
    "plan": _model("plan"),
    "check": _model("check"),
    "inspect": _model("inspect"),
    "lora": _model("lora", cleans_up=True),
    "models": _model("models"),
    "list": _model("list_", "list_models"),
    "remove": _model("remove"),
    "door": _upkeep("door"),
    "status": _upkeep("status"),
    "logs": _upkeep("logs"),
    "metrics": _upkeep("metrics"),
    "stop": _upkeep("stop"),
    "doctor": _upkeep("doctor"),
    "bindings": _upkeep("bindings"),
}


def application(names: Collection[str] = tuple(COMMANDS)) -> typer.Typer:
    """Return the Typer application with the commands `names`."""
    app = typer.Typer(
        name="trtserve",
        help="From a Hugging Face checkpoint to a served and measured endpoint on Triton Inference Server."
        '\n\nExamples:\n  trtserve import demo\n  trtserve start --detach\n  trtserve query "What is ML?"',
        epilog="Every option is also read from the environment, as TRTSERVE_COMMAND_OPTION: "
        "TRTSERVE_START_HTTP_PORT=9000.",
        cls=TyperGroup,
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


def command_tree(names: Collection[str] = tuple(COMMANDS)) -> Any:
    """Return the tree of Typer's commands, whose root has the commands `names`."""
    if COMPLETION_VARIABLE in os.environ:
        _typer_completion().completion_init()
    return typer.main.get_command(application(names))


def _add(app: typer.Typer, name: str, entry: Command | Group) -> None:
    if isinstance(entry, Command):
        module = importlib.import_module(f"trtserve.cli.{entry.module}")
        body = _guarded(with_spec_options(getattr(module, entry.function)), cleans_up=entry.cleans_up)
        app.command(name=name, cls=TyperCommand, rich_help_panel=entry.panel)(body)
        return
    group = typer.Typer(cls=TyperGroup)
    for below, command in entry.commands.items():
        _add(group, below, command)
    app.add_typer(group, name=name, help=entry.help, rich_help_panel=entry.panel)


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
        with one_interrupt() if cleans_up else nullcontext(lambda: None) as received:
            try:
                function(*arguments, **options)
            except KeyboardInterrupt as interrupt:
                if cleans_up and not options.get("quiet"):
                    say("Interrupted: unfinished work was removed.")
                counted = interrupt.number if isinstance(interrupt, Interrupted) else None
                raise typer.Exit(SIGNALLED + (counted or received() or signal.SIGINT)) from None
            except BrokenPipeError:
                # The reader of stdout went away (`| head`), which is not an error. Keep the interpreter's flush quiet.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    return body
