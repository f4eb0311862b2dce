"""Run one command line; the only place where errors become messages and exit codes."""

from __future__ import annotations

import itertools
import os
import traceback
from collections.abc import Collection, Sequence
from pathlib import Path

import typer

from trtserve.cli.commands import (
    COMMANDS,
    COMPLETION_VARIABLE,
    Group,
    command_tree,
)
from trtserve.cli.environment import setting_variables, unread_variables
from trtserve.cli.output import (
    TerminalProgress,
    forget_documents,
    print_error,
    print_json_error,
)
from trtserve.errors import MemoryLimitError, TrtserveError, UsageError
from trtserve.files import file_error
from trtserve.host.machine import address_space, format_bytes, refused_memory


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    forget_documents()
    try:
        _warn_of_variables()
        code = command_tree(_named(arguments))(args=list(arguments), prog_name="trtserve", standalone_mode=False)
    except SystemExit as ending:  # raised by a library
        if ending.code is None or isinstance(ending.code, int):
            return ending.code or 0
        return _report(TrtserveError(str(ending.code)), arguments)
    except Exception as error:  # noqa: BLE001 - the one place where every error becomes a message
        if os.environ.get("TRTSERVE_DEBUG"):
            traceback.print_exc()
        return _report(_explained(error), arguments)
    return code if isinstance(code, int) else 0  # the code of typer.Exit; commands return None


def _report(error: TrtserveError, arguments: Sequence[str]) -> int:
    """Print an error to stderr, and with --json to stdout too; return its exit code."""
    if isinstance(error, UsageError):
        hints = (error.hint or "", *setting_variables(error.message, arguments, os.environ))
        error.hint = " ".join(filter(None, hints)) or None
    print_error(error)
    ours = itertools.takewhile(lambda word: word != "--", arguments)
    if "--json" in ours:
        words = [word for word in arguments if not word.startswith("-")]
        entry = COMMANDS.get(words[0]) if words else None
        print_json_error(" ".join(words[:2] if isinstance(entry, Group) else words[:1]), error)
    return error.code


def _warn_of_variables() -> None:
    if COMPLETION_VARIABLE in os.environ:  # the shell would show the warning
        return
    for sentence in unread_variables(os.environ, COMMANDS, command_tree):
        TerminalProgress().warn(sentence)


def _named(arguments: Sequence[str]) -> Collection[str]:
    """Return the names of the commands to load: one command, none for --version, otherwise all."""
    words = os.environ.get("COMP_WORDS", "").split()[1:] if COMPLETION_VARIABLE in os.environ else arguments
    first = next((word for word in words if word != "--debug"), "")
    if first == "--version":
        return ()
    return (first,) if first in COMMANDS else tuple(COMMANDS)


def _explained(error: Exception) -> TrtserveError:
    if isinstance(error, MemoryLimitError):
        return error
    if (reason := refused_memory(error)) is not None:
        space = address_space()
        limit = f" (ulimit -v limits this process to {format_bytes(space.limit)} of addresses)" if space else ""
        return MemoryLimitError(
            f"Out of memory{f': {reason}' if str(reason) else ''}{limit}.",
            hint="`trtserve plan` estimates what is needed; check the limits of this shell too (ulimit -v).",
        )
    if isinstance(error, TrtserveError):
        return error
    if isinstance(error, typer.TyperException):
        return UsageError(error.format_message(), hint="`trtserve -h` lists the commands.")
    refused = file_error(error, Path(error.filename or "A file")) if isinstance(error, OSError) else None
    return refused or TrtserveError(
        f"Unexpected {type(error).__name__}: {error}",
        hint="This is a bug in trtserve. Run the command again as `trtserve --debug …` and report the traceback.",
    )
