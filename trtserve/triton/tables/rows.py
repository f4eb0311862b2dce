"""What a row of the tables says: the releases that have it, and for a parameter its values and its use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trtserve.triton.parameter_values import Kind, Values

Class = Literal["effective", "no meaning", "refused"]


def order(release: str) -> tuple[int, int]:
    """`0.18.2` → (0, 18)."""
    major, minor = release.split(".")[:2]
    return int(major), int(minor)


@dataclass(frozen=True, kw_only=True)
class Row:
    """Something that exists from release `since` to release `until` (None: still there)."""

    since: str
    until: str | None = None

    def within(self, release: str) -> bool:
        """Whether the row is part of `release`."""
        return order(self.since) <= order(release) and (self.until is None or order(release) <= order(self.until))


@dataclass(frozen=True)
class Fate:
    """What becomes of a parameter on the openvino runtime, and `why`.

    `refused` is a value that changes results and cannot be done here: one of `impossible` (every value when that is
    empty) that is not `neutral`.
    """

    kind: Class = "effective"
    why: str = ""
    impossible: tuple[str, ...] = ()
    neutral: tuple[str, ...] = ()


EFFECTIVE = Fate()


def without_meaning(why: str) -> Fate:
    """Accepted, so that one repository serves laptop and GPU; nothing here depends on it."""
    return Fate("no meaning", why)


def refused(why: str, *, only: tuple[str, ...] = (), neutral: tuple[str, ...] = ()) -> Fate:
    """A load error that names the parameter, for the values `only` and not for those that are `neutral`."""
    return Fate("refused", why, only, neutral)


@dataclass(frozen=True, kw_only=True)
class Parameter(Row):
    """One `parameters` entry; `text` is its value when nothing is set, empty for unset.

    `default` says in words what unset means; a `required` parameter cannot be unset.
    """

    name: str
    values: Values
    meaning: str
    default: str = ""
    text: str = ""
    fate: Fate = EFFECTIVE
    required: bool = False


@dataclass(frozen=True, kw_only=True)
class ConfigField:
    """A variable of NVIDIA's templates that fills a field of config.pbtxt and no parameter.

    `types` are Triton's data types (without TYPE_) that it takes, where it takes any. `flag` sets it, else `--set`.
    """

    name: str
    meaning: str
    kind: Kind = "int"
    types: tuple[str, ...] = ()
    flag: str = ""
