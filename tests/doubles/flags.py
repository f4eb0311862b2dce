"""Flags of NVIDIA's argparse tools with the releases that know them; the tables are in the tools' own modules."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass

Release = tuple[int, int]
FIRST: Release = (0, 12)
END: Release = (1, 3)

SWITCHES = ("enable", "disable")
_TYPES: dict[str, Callable[[str], object]] = {"int": int, "float": float, "text": str, "texts": str, "choice": str}


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One flag in the releases since ≤ release < until."""

    names: tuple[str, ...]
    kind: str  # int, float, text, texts, switch, choice, or optional (a choice whose value may be left out)
    default: object = None
    choices: tuple[str, ...] = ()
    since: Release = FIRST
    until: Release = END
    required: bool = False
    plugin: bool = False  # of trtllm-build: goes into plugin_config

    def valid_in(self, release: Release) -> bool:
        """Whether this release's parser knows the flag in this form."""
        return self.since <= release < self.until


def flag(
    names: str,
    kind: str,
    default: object = None,
    *,
    since: Release = FIRST,
    until: Release = END,
    required: bool = False,
) -> Flag:
    """A flag with a free value, or a switch."""
    return Flag(names=tuple(names.split()), kind=kind, default=default, since=since, until=until, required=required)


def choice(
    names: str, choices: str, default: str | None = None, *, since: Release = FIRST, until: Release = END
) -> Flag:
    """A flag with one of these words."""
    return Flag(
        names=tuple(names.split()),
        kind="choice",
        default=default,
        choices=tuple(choices.split()),
        since=since,
        until=until,
    )


def optional(names: str, choices: str, default: str) -> Flag:
    """A choice whose value may be omitted, which means the default."""
    return Flag(names=tuple(names.split()), kind="optional", default=default, choices=tuple(choices.split()))


def add_flag(parser: argparse.ArgumentParser, known: Flag) -> None:
    """Add one flag to a parser."""
    if known.kind == "switch":
        parser.add_argument(*known.names, action="store_true", default=bool(known.default))
    elif known.kind == "optional":
        parser.add_argument(*known.names, nargs="?", const=known.default, default=known.default, choices=known.choices)
    else:
        parser.add_argument(
            *known.names,
            type=_TYPES[known.kind],
            default=known.default,
            choices=known.choices or None,
            nargs="+" if known.kind == "texts" else None,
            required=known.required,
        )


def make_parser(program: str, known: Iterable[Flag], release: Release) -> argparse.ArgumentParser:
    """The parser of one tool in one release; no abbreviations."""
    parser = argparse.ArgumentParser(prog=program, allow_abbrev=False)
    for one in known:
        if one.valid_in(release):
            add_flag(parser, one)
    return parser
