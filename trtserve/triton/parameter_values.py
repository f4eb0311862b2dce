"""The kinds of values that parameters of the Triton models take, in every runtime.

Source: sections 1, 2 and 5 of the interface reference of the Triton models. Where NVIDIA's backend takes a value that
it cannot read for none, with a warning in its log at most, the value is refused here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

Kind = Literal["bool", "int", "float", "words", "path", "list", "text"]

_NUMBER = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
_TREE = re.compile(r"\{[0-9]+(, *[0-9]+)*\}(, *\{[0-9]+(, *[0-9]+)*\})*")  # with blanks in NVIDIA's own guide
_DEVICES = re.compile(r"[0-9]+(,[0-9]+)*(;[0-9]+(,[0-9]+)*)*")


@dataclass(frozen=True)
class Values:
    """`accepts` tells whether a text is one of them, `expected` says in words which they are.

    `choices` are those among which a runtime may have fewer: every word of an enumeration, or the neutral number.
    """

    kind: Kind
    expected: str
    accepts: Callable[[str], bool]
    choices: tuple[str, ...] = ()


def _is_integer(text: str, least: int) -> bool:
    return text.isascii() and text.isdigit() and int(text) >= least


def integer(least: int, *, neutral: int | None = None) -> Values:
    """Whole numbers of `least` or more; `neutral` is the one that asks for nothing."""
    choices = () if neutral is None else (str(neutral),)
    return Values("int", f"a whole number of {least} or more", lambda text: _is_integer(text, least), choices)


def integers(least: int) -> Values:
    """Lists of whole numbers of `least` or more."""
    return Values(
        "list",
        f"whole numbers of {least} or more, separated by commas",
        lambda text: all(_is_integer(part, least) for part in text.split(",")),
    )


def share(*, zero: bool) -> Values:
    """Numbers up to 1; 0 only with `zero`."""
    return Values(
        "float",
        f"a number in {'[' if zero else '('}0, 1]",
        lambda text: _NUMBER.fullmatch(text) is not None and 0 <= float(text) <= 1 and (zero or float(text) > 0),
    )


def one_of(*words: str) -> Values:
    """An enumeration."""
    return Values("words", f"one of {', '.join(words)}", lambda text: text in words, words)


def _matching(pattern: re.Pattern[str], expected: str) -> Values:
    return Values("list", expected, lambda text: pattern.fullmatch(text) is not None)


FOLDER = Values("path", "any path", lambda _: True)
TEXT = Values("text", "any text", lambda _: True)
# The words that the C++ backend and the Python core model read alike.
SWITCH = replace(
    one_of("true", "false", "True", "False", "TRUE", "FALSE", "1", "0"), kind="bool", choices=("true", "false")
)
_WORDS = ("true", "1", "t", "y", "yes", "false", "0", "f", "n", "no")
CHOICE = Values("bool", f"one of {', '.join(_WORDS)}", lambda text: text.lower() in _WORDS)
TREE = _matching(_TREE, "a tree such as {0},{0,0},{1}")
DEVICES = _matching(_DEVICES, "numbers such as 0,1, or 0,1;2,3 for two instances")
