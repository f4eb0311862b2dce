"""Plain values of options and arguments, which need no pydantic.

Typer checks every value with an adapter of pydantic, also where nothing was given; to import that and to make the
adapters takes longer than to load all else a command needs. Texts, numbers in digits and readable paths are the same
without. Typer gets everything else, so that its errors, and what it accepts besides, stay what they are.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args, get_origin

_INTEGER = re.compile(r"-?[0-9]{1,18}")
_NUMBER = re.compile(r"-?[0-9]{1,15}(\.[0-9]{1,15})?")
# Settings of an option that make Typer look at a value more closely, where they are not these.
_LAX = {"min": None, "max": None, "parser": None, "exists": False, "writable": False, "resolve_path": False}


class _NotPlainError(Exception):
    """A value is for Typer."""


def take_plain_values(tree: Any) -> None:
    """Let the options and arguments of every command of a tree take plain values as they are."""
    for parameter in tree.params:
        _take(parameter)
    _take_of_help(tree)
    for child in getattr(tree, "commands", {}).values():
        take_plain_values(child)


def _take(parameter: Any) -> None:
    described = parameter.type_descriptor
    if _LAX.items() <= vars(described.parameter_info).items():
        _shorten(parameter, described.annotation)


def _take_of_help(command: Any) -> None:
    """The option --help, which Typer makes when it reads a command line, and then keeps."""
    find, taken = command.get_help_option, list[Any]()

    def help_option(context: Any) -> Any:
        option = find(context)
        if option is not None and option not in taken:
            _take(option)
            taken.append(option)
        return option

    command.get_help_option = help_option


def _shorten(parameter: Any, kind: Any) -> None:
    process, several = parameter.process_value, parameter.multiple or parameter.nargs == -1

    def process_plain(context: Any, value: Any) -> Any:
        absent = value is None and not parameter.required
        try:
            plain = (() if several else None) if absent else _plain(kind, value)
        except _NotPlainError:
            return process(context, value)
        return plain if parameter.callback is None else parameter.callback(context, parameter, plain)

    parameter.process_value = process_plain


def _plain(kind: Any, value: Any) -> Any:
    if get_origin(kind) is list and isinstance(value, list | tuple) and value:
        return [_plain(get_args(kind)[0], each) for each in value]
    if type(value) is kind and kind in (str, int, float, bool):
        return value
    if isinstance(value, str) and kind in _READERS:
        return _READERS[kind](value)
    raise _NotPlainError


def _integer(text: str) -> int:
    if not _INTEGER.fullmatch(text):
        raise _NotPlainError
    return int(text)


def _number(text: str) -> float:
    if not _NUMBER.fullmatch(text):
        raise _NotPlainError
    return float(text)


def _path(text: str) -> Path:
    path = Path(text)
    if path.exists() and not os.access(path, os.R_OK):
        raise _NotPlainError
    return path


_READERS: Mapping[Any, Callable[[str], Any]] = {int: _integer, float: _number, Path: _path}
