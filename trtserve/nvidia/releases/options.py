"""Options of NVIDIA's tools: flags of `trtllm-build`, arguments of the LLM API, coded modes, and old guides."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from trtserve.errors import UsageError
from trtserve.files import whole_number
from trtserve.nvidia.releases import Row, load_table, normalize_release, order

TOOL = "trtllm-build"


@dataclass(frozen=True, kw_only=True)
class BuildFlag(Row):
    """One form of one option. `build_flags.yaml` explains the fields."""

    name: str
    kind: Literal["int", "switch", "choice", "enable", "text", "list"]
    choices: tuple[str, ...] = ()
    default: str | None = None  # as typed on the command line
    also: tuple[str, ...] = ()
    plugin: bool = False
    deprecated: str = ""


@functools.cache
def all_build_flags() -> tuple[BuildFlag, ...]:
    """Every form of every option, those of the plugins last."""
    return (*_forms("flags", plugin=False), *_forms("plugins", plugin=True))


def _forms(section: str, *, plugin: bool) -> Iterator[BuildFlag]:
    table = load_table("build_flags")
    lists: dict[str, list[str]] = table["choices"]
    for name, forms in table[section].items():
        for form in forms if isinstance(forms, list) else [forms]:
            row: dict[str, Any] = dict(form)
            choices = ["enable", "disable"] if row["kind"] == "enable" else row.pop("choices", [])
            row["choices"] = tuple(value for choice in choices for value in lists.get(choice, [choice]))
            row["also"] = tuple(row.pop("also", ()))
            row["default"] = None if "default" not in row else str(row["default"])
            yield BuildFlag(name=name, plugin=plugin, **row)


def build_flags(release: str) -> dict[str, BuildFlag]:
    """Return the options of a release by name ("--max_batch_size"), those of the plugins last."""
    wanted = normalize_release(release)
    return {flag.name: flag for flag in all_build_flags() if flag.within(wanted)}


def check_build_arguments(release: str, arguments: Sequence[str]) -> None:
    """Check arguments as `trtllm-build` would; UsageError says what is wrong and what would be right."""
    known = {spelling: flag for flag in build_flags(release).values() for spelling in (flag.name, *flag.also)}
    left = list(arguments)
    while left:
        name, sign, value = left.pop(0).partition("=")
        flag = known.get(name)
        if flag is None:
            raise _unknown(name, release, known)
        values = [value] if sign else []
        while not sign and left and not left[0].startswith("--"):
            values.append(left.pop(0))
        _require_form(flag, name, values)


def build_notes(release: str, arguments: Sequence[str]) -> tuple[str, ...]:
    """Return a note on each argument that the release accepts but calls deprecated."""
    flags = build_flags(release)
    given = [flags.get(argument.partition("=")[0]) for argument in arguments]
    return tuple(f"{flag.name} is deprecated: {flag.deprecated}." for flag in given if flag and flag.deprecated)


def _unknown(name: str, release: str, known: dict[str, BuildFlag]) -> UsageError:
    message = f"{TOOL} of TensorRT-LLM {release} has no option {name}."
    if not name.startswith("-"):
        return UsageError(message, hint=f"{TOOL} has no positional arguments: `{TOOL} --help` lists its options.")
    gone = old_option_of("build", name)
    if gone is not None:
        return UsageError(message, hint=gone.answer)
    later = [flag for flag in all_build_flags() if name in (flag.name, *flag.also)]
    if later:
        spans = ", ".join(f"{flag.since} – {flag.until or ''}".rstrip() for flag in later)
        return UsageError(message, hint=f"Releases that have it: {spans}.")
    spelled = "--" + name.lstrip("-").replace("-", "_")
    close = difflib.get_close_matches(spelled, known, n=3, cutoff=0.6)
    hint = f"Did you mean {' or '.join(close)}?" if close else f"`{TOOL} --help` lists its options."
    return UsageError(message, hint=hint)


def _require_form(flag: BuildFlag, name: str, values: list[str]) -> None:
    given = " ".join([name, *values])
    if flag.kind == "switch" and values:
        raise UsageError(f"{given}: {name} takes no value.", hint=f"Write {name} alone.")
    if flag.kind != "switch" and not values:
        raise UsageError(f"{name} needs a value.", hint=_expected(flag))
    if flag.kind != "list" and len(values) > 1:
        raise UsageError(f"{given}: {name} takes one value.", hint=_expected(flag))
    for value in values:
        if not _accepts(flag, value):
            raise UsageError(f"{given}: {_expected(flag)}")


def _accepts(flag: BuildFlag, value: str) -> bool:
    if flag.kind == "int":
        return value.lstrip("-").isascii() and value.removeprefix("-").isdigit()
    # Of all choices only those of the KV cache are an enumeration, which upstream reads in any case.
    return not flag.choices or (value.lower() if flag.name == "--kv_cache_type" else value) in flag.choices


def _expected(flag: BuildFlag) -> str:
    if flag.kind == "int":
        return "It takes a whole number."
    return f"It takes one of {', '.join(flag.choices)}." if flag.choices else "It takes a text."


def dropped_argument(name: str, release: str) -> tuple[str, str] | None:
    """Return the last release with an argument that `release` lacks, and what replaces the argument."""
    found = load_table("llm_arguments")["dropped"].get(name)
    return (found["until"], found["instead"]) if found and order(release) > order(found["until"]) else None


def unknown_argument(name: str, *, others: Collection[str] = ()) -> str | None:
    """Return advice on an argument that no release has.

    Returns None for one that some release has or that is in `others`.
    """
    table = load_table("llm_arguments")
    known = {*table["arguments"], *others}
    if name in known or name in table["dropped"]:
        return None
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return f"Did you mean {close[0]}?" if close else "Leave it out, or check its name."


def backend_of(architecture: str) -> str | None:
    """Return the backend of the LLM API that loads an architecture, or None for one that no release knows."""
    backends: dict[str, list[str]] = load_table("llm_arguments")["architectures"]
    return next((backend for backend, names in backends.items() if architecture in names), None)


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
    otherwise: str | None = None
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
            numbers = [whole_number(part) for part in parts]
            value = None if None in numbers else str(sum(filter(None, numbers)))
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
    return _first(tuple(load_table("old_options")["commands"].get(command, ())), name)


def old_option_of_any_tool(name: str) -> OldOption | None:
    """Find an option among all tools."""
    return _first(tuple(old_options()), name)


def _first(tools: tuple[str, ...], name: str) -> OldOption | None:
    return next((found for tool in tools if (found := old_option(tool, name)) is not None), None)


def _key(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


SPECULATIVE_MODES = ("none", "draft_tokens_external", "medusa", "lookahead_decoding", "explicit_draft_tokens", "eagle")
"""`speculative_decoding_mode` has one bit for each: 1 for the first, then 2, 4, 8 …"""


def speculative_mode(number: object) -> str | None:
    """Return the name of a mode, or None for a value without one of these bits."""
    if isinstance(number, int) and number > 0 and number.bit_length() <= len(SPECULATIVE_MODES):
        return SPECULATIVE_MODES[number.bit_length() - 1]
    return None
