"""The table of commands, and the one place where errors become messages and exit codes."""

from __future__ import annotations

import functools
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import typer

from trtserve import __version__
from trtserve.cli import (
    bench,
    build,
    check,
    convert,
    doctor,
    import_,
    inspect,
    list_,
    logs,
    lora,
    metrics,
    plan,
    query,
    remove,
    repo,
    start,
    status,
    stop,
)
from trtserve.cli.output import print_error
from trtserve.cli.unknown import answer_unknown_options
from trtserve.errors import MemoryLimitError, TrtserveError
from trtserve.process import one_interrupt
from trtserve.store import file_error

# What shells say of a process that a signal ended is this and the number of the signal.
SIGNALLED = 128
STAGES = "Stages, in order (import runs the first four)"
UPKEEP = "Servers, store and machine"

app = typer.Typer(
    name="trtserve",
    help="From a Hugging Face checkpoint to a served and measured endpoint on Triton Inference Server.",
    epilog="Every option is also read from the environment, as TRTSERVE_COMMAND_OPTION: TRTSERVE_START_HTTP_PORT=9000.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "auto_envvar_prefix": "TRTSERVE",
        # TensorRT-LLM's own spelling of its flags is --max_batch_size.
        "token_normalize_func": lambda token: token.replace("_", "-"),
    },
)


def _print_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"trtserve {__version__}\n")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
    debug: bool = typer.Option(False, "--debug", help="Show tracebacks."),
) -> None:
    if debug:
        os.environ["TRTSERVE_DEBUG"] = "1"


def command(
    function: Callable[..., None],
    *,
    name: str | None = None,
    group: typer.Typer = app,
    clears: bool = False,
    **settings: Any,
) -> None:
    """Register `function` as a command.

    Ctrl-C in it ends the process with code 130, a reader of its output that goes away with 0; neither with a traceback.
    One that `clears` away what it began does so after SIGTERM and SIGHUP (codes 143 and 129) too, and in peace.
    """

    @functools.wraps(function)
    def body(*arguments: Any, **options: Any) -> None:
        with one_interrupt() if clears else nullcontext(lambda: None) as received:
            try:
                function(*arguments, **options)
            except KeyboardInterrupt:
                raise typer.Exit(SIGNALLED + (received() or signal.SIGINT)) from None
            except BrokenPipeError:
                _discard_stdout()
            except ImportError:  # what NumPy makes of an interrupt while it is loaded
                if (number := received()) is None:
                    raise
                raise typer.Exit(SIGNALLED + number) from None

    group.command(name=name or function.__name__, **settings)(body)


def _discard_stdout() -> None:
    """The reader of our stdout went away (`| head`): nothing is wrong. Keeps the interpreter's own flush quiet."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    try:
        _command_line()(args=list(arguments), prog_name="trtserve")
    except SystemExit as ending:
        return ending.code if isinstance(ending.code, int) else 0
    except Exception as error:  # noqa: BLE001 - the one place where every error becomes a message
        if os.environ.get("TRTSERVE_DEBUG"):
            traceback.print_exc()
        explained = _explained(error)
        print_error(explained)
        return explained.code
    return 0


def _command_line() -> Any:
    """The command tree; its help does not repeat the name of an environment variable for every option."""
    tree = typer.main.get_command(app)
    _simplify_help(tree)
    answer_unknown_options(tree)
    return tree


def _simplify_help(node: Any) -> None:
    for parameter in node.params:
        parameter.show_envvar = False
    children = getattr(node, "commands", {}).values()
    if not children:
        # Tables of Rich cut long option names at 80 columns; plain help prints every name whole.
        node.rich_markup_mode = None
        node.format_options = functools.partial(_format_options, node)
    for child in children:
        _simplify_help(child)


def _format_options(node: Any, context: Any, formatter: Any) -> None:
    """Arguments and options in plain text, each option below the heading of its panel."""
    sections: dict[str, list[tuple[str, str]]] = {}
    for parameter in node.get_params(context):
        record = parameter.get_help_record(context)
        title = "Arguments" if parameter.param_type_name == "argument" else parameter.rich_help_panel or "Options"
        if record is not None:
            sections.setdefault(title, []).append(record)
    for title, records in sections.items():
        with formatter.section(title):
            formatter.write_dl(records)


def _explained(error: Exception) -> TrtserveError:
    if isinstance(error, TrtserveError):
        return error
    if isinstance(error, MemoryError):
        return MemoryLimitError(
            f"Memory ran out{f': {error}' if str(error) else ''}.",
            hint="`trtserve plan` says what is needed; look at limits of this shell too (ulimit -v).",
        )
    refused = file_error(error, Path(error.filename or "A file")) if isinstance(error, OSError) else None
    return refused or _unexpected(error)


def _unexpected(error: Exception) -> TrtserveError:
    return TrtserveError(
        f"Unexpected {type(error).__name__}: {error}",
        hint="This is a defect of trtserve. Run the command again as `trtserve --debug …` and report the traceback.",
    )


# In the order in which a model goes through them.
command(import_.import_, name="import", clears=True, rich_help_panel=STAGES)
command(convert.convert, clears=True, rich_help_panel=STAGES)
command(build.build, clears=True, rich_help_panel=STAGES)
command(repo.repo, clears=True, rich_help_panel=STAGES)
command(start.start, rich_help_panel=STAGES)
command(query.query, rich_help_panel=STAGES)
app.add_typer(bench.group, name="bench", help="Measure a served model.", rich_help_panel=STAGES)
command(bench.token_norm_dist, name="token-norm-dist", group=bench.group)
command(plan.plan, rich_help_panel=UPKEEP)
command(check.check, rich_help_panel=UPKEEP)
command(inspect.inspect, rich_help_panel=UPKEEP)
command(lora.lora, clears=True, rich_help_panel=UPKEEP)
command(stop.stop, rich_help_panel=UPKEEP)
command(status.status, rich_help_panel=UPKEEP)
command(logs.logs, rich_help_panel=UPKEEP)
command(metrics.metrics, rich_help_panel=UPKEEP)
command(list_.list_models, name="list", rich_help_panel=UPKEEP)
command(remove.remove, rich_help_panel=UPKEEP)
command(doctor.doctor, rich_help_panel=UPKEEP)
