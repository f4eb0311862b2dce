"""The environment variables of the command line: what they are called, and a word about those that nothing reads."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

PREFIX = "TRTSERVE_"
# Those that belong to no single option.
_GENERAL = ("HOME", "DEBUG", "TRTLLM_VERSION", "TRTLLM_EXAMPLES")
# How alike a name must be: of short names one letter is a larger share.
_CLOSE, _CLOSE_SHORT = 0.85, 0.75


def commands_of(node: Any, names: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command of a tree, with the words that lead to it; `names` lead to `node`."""
    yield names, node
    for name, child in getattr(node, "commands", {}).items():
        yield from commands_of(child, (*names, name))


def name_after_options(tree: Any) -> None:
    """Let every option be read from the variable of its own name, also where the parameter is called otherwise.

    Typer itself reads TRTSERVE_STOP_EVERYTHING for a parameter `everything` whose option is --all.
    """
    for names, node in commands_of(tree):
        for parameter in node.params:
            named = _variable(names, _option(parameter))
            if parameter.envvar is None and named != _variable(names, parameter.name):
                parameter.envvar = named


def unread_variables(
    names: Iterable[str], commands: Collection[str], tree_of: Callable[[tuple[str, ...]], Any]
) -> Iterator[str]:
    """A sentence for each of the variables `names` that looks like one of ours and is none.

    Only what comes close to a variable, or begins with a command's name, is spoken of: the rest may be somebody else's,
    such as what Kubernetes sets for a service that is called trtserve. `tree_of` makes the tree of some commands.
    """
    for name in sorted(names):
        rest = name.removeprefix(PREFIX)
        if rest == name or rest in _GENERAL:
            continue
        word = rest.partition("_")[0].lower()
        near = (
            (word,) if word in commands else tuple(difflib.get_close_matches(word, commands, n=1, cutoff=_CLOSE_SHORT))
        )
        read = _variables(tree_of(near)) if near else set()
        if rest in read:
            continue
        close = difflib.get_close_matches(rest, sorted(read), n=1, cutoff=_CLOSE)
        close = close or difflib.get_close_matches(rest, _GENERAL, n=1, cutoff=_CLOSE_SHORT)
        if close:
            yield f"{name} is set, and nothing reads it. Did you mean {PREFIX}{close[0]}?"
        elif word in commands:
            yield f"{name} is set, and nothing reads it: `trtserve {word}` has no such option."


def setting_variables(message: str, arguments: Sequence[str], environment: Mapping[str, str]) -> Iterator[str]:
    """A sentence for each variable that gave an option its value of which an error's `message` speaks."""
    words = [word for word in arguments if not word.startswith("-")]
    commands = [PREFIX + "_".join((*words[:count], "")).upper().replace("-", "_") for count in (2, 1)]
    typed = {word.partition("=")[0].replace("_", "-") for word in arguments}
    said = re.split(r"[\s'\",;:]+", message)
    for name, value in sorted(environment.items()):
        command = next((command for command in commands if name.startswith(command)), None)
        if command is None or not value or name in message:
            continue
        option = "--" + name.removeprefix(command).lower().replace("_", "-")
        if option not in typed and (option in said or value in said):
            yield f"{name} sets {option}."


def _variables(tree: Any) -> set[str]:
    """What the commands of a tree read, without the prefix."""
    found = set()
    for names, node in commands_of(tree):
        for parameter in node.params:
            found |= {_variable(names, _option(parameter)), _variable(names, parameter.name)}
    return {name.removeprefix(PREFIX) for name in found}


def _variable(names: tuple[str, ...], option: str) -> str:
    return PREFIX + "_".join((*names, option)).upper().replace("-", "_")


def _option(parameter: Any) -> str:
    long = (option.removeprefix("--") for option in parameter.opts if option.startswith("--"))
    return str(next(long, parameter.name))
