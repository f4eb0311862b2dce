"""What Typer refuses, in the words of every other error: what happened, what was expected, what to do next."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import typer

from trtserve.errors import UsageError

_EXTRA = re.compile(r"extra argument\(s\) \((.*)\)", re.DOTALL)
# What fill_template.py takes.
_FILLED = re.compile(r"\w+:\S")
_FEW = 5
# Pydantic's names of what is wrong with a value, and what should have come; its limits stand in braces.
_EXPECTED: Mapping[str, str] = {
    "int_parsing": "an integer",
    "int_parsing_size": "an integer that a machine can hold",
    "int_from_float": "an integer",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_parsing": "true or false",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
}


def explain_usage(error: typer.TyperException, path: str | None = None) -> UsageError:
    """`error` as one of ours; `path` is the command, such as `trtserve bench`, where the error does not know it.

    Typer has no public names for its kinds of errors: their attributes tell them apart.
    """
    context, parameter = getattr(error, "ctx", None), getattr(error, "param", None)
    path = path or (context.command_path if context is not None else "trtserve")
    option = getattr(error, "option_name", None)
    if option:
        takes = "takes no value" if "does not take" in error.message else "needs a value"
        return UsageError(f"{option} {takes}.", hint=_help(path, "explains it"))
    if parameter is None:
        return _of_words(error, path)
    if isinstance(error.__cause__, ValueError):
        return _of_value(error, error.__cause__, parameter, context, path)
    if not error.message:
        help_text = str(getattr(parameter, "help", "") or "").rstrip(".")
        what = _name(parameter)
        return UsageError(
            f"`{path}` needs {what}.", hint=f"{what}: {help_text}. {_help(path)}" if help_text else _help(path)
        )
    return UsageError(f"{_name(parameter)}: {_sentence(error.format_message())}", hint=_help(path))


def only_shows_help(error: typer.TyperException) -> bool:
    """Whether this is a group that was called alone: its help has been printed, and nothing is to be said."""
    return type(error).__name__ == "NoArgsIsHelpError"


def no_such_command(word: str, path: str, commands: Sequence[str]) -> UsageError:
    """The error for `word` behind `path`, which has these commands."""
    close = difflib.get_close_matches(word, commands, n=3)
    hint = f"Did you mean {' or '.join(f'`{path} {name}`' for name in close)}?" if close else None
    if hint is None and len(commands) <= _FEW:
        hint = f"Its commands: {', '.join(commands)}."
    return UsageError(f"`{path}` has no command {word}.", hint=hint or _help(path, "lists its commands"))


def _of_words(error: typer.TyperException, path: str) -> UsageError:
    """More arguments than a command takes, or none behind a group."""
    extra = _EXTRA.search(error.message)
    message = f"`{path}` takes no such argument: {extra[1]}." if extra else _sentence(error.format_message())
    if extra and path == "trtserve repo" and _FILLED.match(extra[1]):
        return UsageError(
            message,
            hint="KEY:VALUE,… is for fill_template.py: `trtserve repo --from-template DIR 'KEY:VALUE,…'`; without "
            "templates it is --set KEY=VALUE.",
        )
    return UsageError(message, hint=_help(path, "says what it takes"))


def _of_value(error: typer.TyperException, cause: Any, parameter: Any, context: Any, path: str) -> UsageError:
    """A value of the wrong type or beyond a limit; says so too when it came from the environment."""
    name, found = _name(parameter), cause.errors()[0]
    variable = variable_of(parameter, context) if _came_from_environment(context, parameter) else None
    expected = _EXPECTED.get(found["type"])
    wanted = expected.format_map(found.get("ctx", {})) if expected else _sentence(error.message).rstrip(".")
    subject = f"{variable} ({name} of `{path}`)" if variable else name
    return UsageError(f"{subject} is {str(found['input'])!r}; expected {wanted}.", hint=_help(path, "explains it"))


def variable_of(parameter: Any, context: Any) -> str:
    """The environment variable that sets a parameter."""
    given = parameter.envvar
    named = given if isinstance(given, str) else next(iter(given or ()), None)
    return named or f"{context.auto_envvar_prefix}_{parameter.name.upper()}"


def _came_from_environment(context: Any, parameter: Any) -> bool:
    source = context.get_parameter_source(parameter.name) if context is not None else None
    return getattr(source, "name", "") == "ENVIRONMENT"


def _name(parameter: Any) -> str:
    """An option's first long name, or what stands for an argument in the help."""
    if parameter.param_type_name == "argument":
        return str(parameter.metavar or parameter.name.upper())
    return str(next((option for option in parameter.opts if option.startswith("--")), parameter.opts[0]))


def _help(path: str, does: str = "explains the rest") -> str:
    return f"`{path} -h` {does}."


def _sentence(text: str) -> str:
    return text if text.endswith((".", "?")) else f"{text}."
