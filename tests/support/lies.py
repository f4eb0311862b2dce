"""Generated lies: JSON documents and other texts with a few wrong values in them."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

_DEEP: Any = []
for _ in range(60):
    _DEEP = [_DEEP]
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 7, 0.5, -0.0, 1e308, 2**31, 2**63, 2**64, 10**30, 10**400),
    *(float("nan"), float("inf"), -float("inf")),
    *(
        "",
        "x",
        "1",
        "-1",
        "²",
        "9" * 5000,
        "true",
        "null",
        "\0",
        "\ud800",
        "\x1b]52;c;eA==\x07",
        "é" * 300,
        "a" * 5000,
        "(a+)+$",
        "[",
        "%s{}",
    ),
    *("/dev/zero", "/dev/stdin", "../../../etc/passwd", "a/b", ".", "..", "</script><script>alert(1)</script>"),
    *([], {}, [[]], [None], [1], ["x"], {"": None}, {"a": {"b": 1}}, [{}] * 3, _DEEP),
)


def _places(content: Any) -> Iterator[tuple[Any, Any]]:
    """Every value in a JSON document: what it is in, and its key or number there."""
    for key, value in list(content.items() if isinstance(content, dict) else enumerate(content)):
        yield content, key
        if isinstance(value, (dict, list)):
            yield from _places(value)


def lie(text: str, chance: random.Random) -> str:
    """Change one to three values of a JSON document, or its text."""
    if chance.random() < 0.1:
        place = chance.randrange(len(text) + 1)
        return (
            text[:place]
            + chance.choice(("", "\0", "{", "]", '"', "9" * 5000, "[" * 20_000, "\ud83d"))
            + text[place + 1 :]
        )
    content = json.loads(text)
    for _ in range(chance.randint(1, 3)):
        places = list(_places(content))
        if not places:
            break
        inside, key = chance.choice(places)
        kind = chance.random()
        if kind < 0.7:
            inside[key] = copy.deepcopy(chance.choice(VALUES))  # a later lie may change it
        elif kind < 0.8:
            del inside[key]
        elif isinstance(inside, dict):
            inside[chance.choice(("", "x", "../x", "\0", "a" * 300, f"{key}x"))] = inside.pop(key)
        else:
            inside += [inside[key]] * 3
    return json.dumps(content)


def lie_in_text(text: str, chance: random.Random) -> str:
    """Change a part of a file that is not JSON."""
    place = chance.randrange(len(text) + 1)
    new = chance.choice(
        (
            "",
            "\0",
            "{",
            "}",
            "[",
            ":",
            '"',
            "x",
            "-1",
            "9" * 40,
            "9" * 5000,
            "²",
            "&a [*a, *a]",
            "\x1b[2J",
            "\n",
            "null",
        )
    )
    return text[:place] + new + text[place + chance.choice((0, 1, 5, 40)) :]
