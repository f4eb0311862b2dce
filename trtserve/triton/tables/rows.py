"""What a row of the tables says: the releases that have it, and for a parameter its values and its use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trtserve.releases import Row
from trtserve.triton.parameter_values import Kind, Values

Class = Literal["effective", "no meaning", "refused"]


@dataclass(frozen=True)
class Fate:
    """What becomes of a parameter on the openvino runtime, and `why`.

    `refused` is a value that changes results and cannot be done here: one of `impossible` (every value when that is
    empty) that is not `neutral`. `differs` says what a value that is carried out does otherwise than in TensorRT-LLM.
    """

    kind: Class = "effective"
    why: str = ""
    impossible: tuple[str, ...] = ()
    neutral: tuple[str, ...] = ()
    differs: str = ""


EFFECTIVE = Fate()


def effective_but(differs: str) -> Fate:
    """Carried out, with a difference that docs/compatibility.md explains."""
    return Fate(differs=differs)


def without_meaning(why: str) -> Fate:
    """Accepted, so that one repository serves laptop and GPU; nothing here depends on it."""
    return Fate("no meaning", why)


def refused(why: str, *, only: tuple[str, ...] = (), neutral: tuple[str, ...] = (), differs: str = "") -> Fate:
    """A load error that names the parameter, for the values `only` and not for those that are `neutral`.

    `differs` is about the others.
    """
    return Fate("refused", why, only, neutral, differs)


@dataclass(frozen=True, kw_only=True)
class Parameter(Row):
    """One `parameters` entry; `text` is its value when nothing is set, empty for unset.

    `default` says in words what unset means; a `required` parameter cannot be unset, and NVIDIA's C++ backend does
    not load a model without the key of one that `needs_key`.
    """

    name: str
    values: Values
    meaning: str
    default: str = ""
    text: str = ""
    fate: Fate = EFFECTIVE
    required: bool = False
    needs_key: bool = False


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
