"""Specs from the options of a command: each option has the name of the field that it fills."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

S = TypeVar("S")


def filled(spec: type[S], options: Mapping[str, Any]) -> S:
    """The dataclass `spec` with the values of `options`; fields for which the command has no option keep their default.

    An option that may be given several times is a list, or None; where the field's default is a tuple it becomes one.
    """
    given = {field.name: options[field.name] for field in fields(spec) if field.name in options}  # type: ignore[arg-type]
    several = [field.name for field in fields(spec) if field.default == ()]  # type: ignore[arg-type]
    return spec(**given | {name: tuple(given[name] or ()) for name in several if name in given})
