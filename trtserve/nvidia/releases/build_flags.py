"""Options of `trtllm-build`: their forms, defaults and the releases that have them (`build_flags.yaml`)."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trtserve.errors import UsageError
from trtserve.nvidia.releases import Row, normalize_release
from trtserve.nvidia.releases.old_options import old_option_of
from trtserve.nvidia.releases.tables import load_table

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
