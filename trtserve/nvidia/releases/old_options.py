"""Options of NVIDIA's tools that guides still show, and what replaces them here (`old_options.yaml`)."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

from trtserve.nvidia.releases.tables import load_table

TEMPLATE_TOOL = "fill_template.py"
_FALSE = ("false", "0", "no")
_TRUE = ("true", "1", "yes")


@dataclass(frozen=True, kw_only=True)
class OldOption:
    """One option of one tool. `old_options.yaml` explains the fields."""

    tool: str
    command: str  # the command of trtserve that does the tool's work
    name: str  # as the tool spells it
    advice: str
    until: str | None = None
    use: str | Mapping[str, str] | None = None
    default: str | None = None
    plus: Mapping[str, int] = field(default_factory=dict)
    switch: bool = False
    manual: bool = False
    needs: str | None = None  # `with` in the table

    @property
    def answer(self) -> str:
        """Where the option comes from, and the advice."""
        kind = "an option" if self.name.startswith("-") else "a key"
        if self.until is None:
            return f"{self.name} is {kind} of {self.tool}. {self.advice}"
        return f"{self.name} was {kind} of {self.tool} until TensorRT-LLM {self.until}. {self.advice}"

    @property
    def is_argument(self) -> bool:
        """Whether its value is the argument of the command here."""
        return self.use == "ARGUMENT"

    def replacement(self, value: str | None, given: Mapping[str, str | None]) -> tuple[str, str | None] | None:
        """Return the new option and its value (None for a switch), or None where the option has no successor.

        `given` maps the other options of the command line to their values.
        """
        use = self.use
        if isinstance(use, Mapping):
            word = (value or "true").lower()
            use = use.get("false" if word in _FALSE else "true" if word in _TRUE else word)
        if use is None or self.is_argument:
            return None
        name, _, fixed = use.partition(" ")
        if fixed or isinstance(self.use, Mapping):
            return name, fixed or None
        value = value or self.default
        if self.plus:
            parts = [value or "", *(given.get(other) or str(number) for other, number in self.plus.items())]
            value = str(sum(map(int, parts))) if all(part.isdecimal() for part in parts) else None
        return (name, value) if value else None


@functools.cache
def old_options() -> dict[str, dict[str, OldOption]]:
    """Tool → its old options by their names with underscores and without leading dashes."""
    return {
        tool: {
            _key(name): OldOption(tool=tool, command=table["command"], name=name, needs=row.pop("with", None), **row)
            for name, row in ((name, dict(row)) for name, row in table["options"].items())
        }
        for tool, table in load_table("old_options")["tools"].items()
    }


def old_option(tool: str, name: str) -> OldOption | None:
    """Find an option of a tool in any spelling (`--max_output_len`, `max-output-len`)."""
    return old_options()[tool].get(_key(name))


def old_option_of(command: str, name: str) -> OldOption | None:
    """Find an option among the tools whose options people give to `trtserve <command>`."""
    return _first(tools_of(command), name)


def old_option_of_any_tool(name: str) -> OldOption | None:
    """Find an option among all tools."""
    return _first(tuple(old_options()), name)


def tools_of(command: str) -> tuple[str, ...]:
    """The tools whose options people give to `trtserve <command>`, most likely first."""
    return tuple(load_table("old_options")["commands"].get(command, ()))


def _first(tools: tuple[str, ...], name: str) -> OldOption | None:
    return next((found for tool in tools if (found := old_option(tool, name)) is not None), None)


def _key(name: str) -> str:
    return name.lstrip("-").replace("-", "_")
