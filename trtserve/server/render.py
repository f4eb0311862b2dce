"""Fill the template files of `templates/`: manifests and job scripts.

Every value is quoted for the language of its file, so that a hostile name stays a value. A missing value is an
error.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from functools import cache
from pathlib import PurePath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import Environment


class Verbatim(str):
    """Text that is quoted already, or that is part of the language itself."""

    __slots__ = ()


def render(template: str, **values: object) -> str:
    """Return the text of a template file, such as `task.sh.j2`, with these values."""
    language = PurePath(template.removesuffix(".j2")).suffix
    return _environment(_QUOTES[language]).get_template(template).render(values)


def shell_value(value: object) -> str:
    return value if isinstance(value, Verbatim) else shlex.quote(str(value))


def yaml_value(value: object) -> str:
    """Return a string, number or boolean as a YAML scalar on one line."""
    import yaml

    if isinstance(value, Verbatim):
        return value
    text = yaml.safe_dump([value], default_flow_style=True, width=float("inf")).strip()[1:-1]
    if "\n" in text:
        text = yaml.safe_dump([value], default_flow_style=True, default_style='"', width=float("inf")).strip()[1:-1]
    return text


def unit_value(value: object) -> str:
    """Return a value as one word of a systemd unit, where % and $ have a meaning in quotes too."""
    text = str(value)
    if isinstance(value, Verbatim) or re.fullmatch(r"[A-Za-z0-9/._:=@+-]+", text):
        return text
    for character, escaped in (("\\", "\\\\"), ('"', '\\"'), ("%", "%%"), ("$", "$$"), ("\n", "\\n")):
        text = text.replace(character, escaped)
    return f'"{text}"'


def yaml_block(text: str, indent: int) -> Verbatim:
    """Return a text as a literal block whose lines are indented by `indent`, or quoted if it must be escaped."""
    # YAML reads other line breaks than \n too, and control characters must be escaped.
    readable = all(character.isprintable() for character in text.replace("\n", ""))
    if not readable or text.startswith(" ") or not text.endswith("\n") or text.endswith("\n\n"):
        return Verbatim(yaml_value(text))
    lines = (f"{' ' * indent}{line}" if line else "" for line in text.split("\n"))
    return Verbatim("|\n" + "\n".join(lines).rstrip("\n"))


_QUOTES = {".sh": shell_value, ".sbatch": shell_value, ".yaml": yaml_value, ".service": unit_value}


@cache
def _environment(quote: Callable[[object], str]) -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("trtserve.server"),
        undefined=StrictUndefined,
        finalize=quote,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["block"] = yaml_block
    return environment
