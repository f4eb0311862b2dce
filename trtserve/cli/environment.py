"""Warn about environment variables that look like options but are not, and explain errors that variables cause."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from trtserve.cli.parser import PREFIX, variables_of

# Variables that belong to no single option.
_GENERAL = ("HOME", "DEBUG", "TRTLLM_VERSION", "TRTLLM_EXAMPLES")
# Similarity for a suggestion; in a short name one letter matters more.
_CLOSE, _CLOSE_SHORT = 0.85, 0.75


def commands_of(node: Any, names: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every command of a tree with the words that lead to it; `names` lead to `node`."""
    yield names, node
    for name, child in getattr(node, "commands", {}).items():
        yield from commands_of(child, (*names, name))


def unread_variables(
    names: Iterable[str], commands: Collection[str], tree_of: Callable[[tuple[str, ...]], Any]
) -> Iterator[str]:
    """Yield a warning for each of the variables `names` that looks like one of ours but is not.

    Only near misses and names that begin with a command are reported: Kubernetes, for example, sets variables for a
    service called trtserve. `tree_of` makes the tree of some commands.
    """
    for name in sorted(names):
        rest = name.removeprefix(f"{PREFIX}_")
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
            yield f"{name} is set but not read. Did you mean {PREFIX}_{close[0]}?"
        elif word in commands:
            yield f"{name} is set but not read: `trtserve {word}` has no such option."


def setting_variables(message: str, arguments: Sequence[str], environment: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence for each variable that set an option which an error's `message` mentions."""
    words = [word for word in arguments if not word.startswith("-")]
    commands = ["_".join((PREFIX, *words[:count], "")).upper().replace("-", "_") for count in (2, 1)]
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
    """The variables that the commands of a tree read, without TRTSERVE_."""
    found = {
        name
        for names, node in commands_of(tree)
        for parameter in node.params
        for name in variables_of(parameter, "_".join((PREFIX, *names)).upper().replace("-", "_"))
    }
    return {name.removeprefix(f"{PREFIX}_") for name in found}
