"""One command line from its words to its exit code: the one place where errors become messages and codes."""

from __future__ import annotations

import functools
import os
import traceback
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import typer

from trtserve.cli.commands import COMMANDS, application
from trtserve.cli.environment import name_after_options, setting_variables, unread_variables
from trtserve.cli.output import TerminalProgress, print_error
from trtserve.cli.plain_values import take_plain_values
from trtserve.cli.stage_panels import group_by_stage
from trtserve.cli.unknown import answer_unknown_options
from trtserve.errors import MemoryLimitError, TrtserveError, UsageError
from trtserve.files import file_error
from trtserve.machine import address_space, gibibytes, refused_memory

_COMPLETION = "_TRTSERVE_COMPLETE"


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    try:
        _warn_of_variables()
        tree = _command_line(_named(arguments))
        code = tree(args=list(arguments), prog_name="trtserve", standalone_mode=False)
    except SystemExit as ending:
        return _ended(ending.code)
    except typer.TyperException as error:
        # All that is left of them: a group without a command, whose help has been printed.
        return error.exit_code
    except Exception as error:  # noqa: BLE001 - the one place where every error becomes a message
        if os.environ.get("TRTSERVE_DEBUG"):
            traceback.print_exc()
        explained = _explained(error)
        if isinstance(explained, UsageError):
            said = (explained.hint or "", *setting_variables(explained.message, arguments, os.environ))
            explained.hint = " ".join(filter(None, said)) or None
        print_error(explained)
        return explained.code
    # The code of a typer.Exit; commands return nothing.
    return code if isinstance(code, int) else 0


def _ended(code: object) -> int:
    """The exit code of a SystemExit; one with a text fails, and says it, as Python does."""
    if code is None or isinstance(code, int):
        return code or 0
    print_error(TrtserveError(str(code)))
    return 1


def _warn_of_variables() -> None:
    if _COMPLETION in os.environ:  # the shell shows what we say
        return
    for sentence in unread_variables(os.environ, COMMANDS, lambda names: typer.main.get_command(application(names))):
        TerminalProgress().warn(sentence)


def _named(arguments: Sequence[str]) -> Collection[str]:
    """The command that a command line names; none for the version, all where it begins with something else."""
    first = next((word for word in arguments if word != "--debug"), "")
    if first == "--version":
        return ()
    return (first,) if first in COMMANDS else tuple(COMMANDS)


def _command_line(names: Collection[str] = tuple(COMMANDS)) -> Any:
    """The command tree; its help does not repeat the name of an environment variable for every option."""
    tree = typer.main.get_command(application(names))
    _simplify_help(tree)
    group_by_stage(tree)
    name_after_options(tree)
    take_plain_values(tree)
    answer_unknown_options(tree, lambda: typer.main.get_command(application()))
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
    if isinstance(error, MemoryLimitError):
        return error
    if (reason := refused_memory(error)) is not None:
        return MemoryLimitError(
            f"The memory ran out{f': {reason}' if str(reason) else ''}{_limit()}.",
            hint="`trtserve plan` says what is needed; look at limits of this shell too (ulimit -v).",
        )
    if isinstance(error, TrtserveError):
        return error
    refused = file_error(error, Path(error.filename or "A file")) if isinstance(error, OSError) else None
    return refused or _unexpected(error)


def _limit() -> str:
    space = address_space()
    return f" (ulimit -v allows this process {gibibytes(space.limit)} of addresses)" if space else ""


def _unexpected(error: Exception) -> TrtserveError:
    return TrtserveError(
        f"Unexpected {type(error).__name__}: {error}",
        hint="This is a defect of trtserve. Run the command again as `trtserve --debug …` and report the traceback.",
    )
