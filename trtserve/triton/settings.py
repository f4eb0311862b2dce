"""What `--set MODEL.KEY=VALUE` may set: parameters of the Triton models, and the variables of NVIDIA's templates."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trtserve.errors import UsageError
from trtserve.releases.retired import TEMPLATE_TOOL, retired
from trtserve.triton.parameters import PARAMETERS, find_parameter
from trtserve.triton.profiles import CORE, Profile
from trtserve.triton.tables.parameters import FIELDS

# Of the core model.
_FIELDS = {field.name: field for field in FIELDS if not field.flag}
_FLAGS = {field.name: field.flag for field in FIELDS if field.flag}
_RENAMED = {"batching_strategy": "gpt_model_type", "engine_dir": "gpt_model_path"}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """`parameters` maps model → parameter → text; `variables` are fields of ConfigOptions."""

    parameters: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    variables: Mapping[str, Any] = field(default_factory=dict)


def resolve_settings(given: Mapping[str, str], table: Profile, *, spelled: Mapping[str, str] | None = None) -> Settings:
    """Sort `model.parameter` and `parameter` (of the core model) keys.

    UsageError for keys that are none, with suggestions, and for values that parameters do not take: for all of them at
    once. Keys that were given by an option of their own have it in `spelled`.
    """
    parameters: dict[str, dict[str, str]] = {}
    variables: dict[str, Any] = {}
    options = spelled or {}
    each = [Given(key=key, value=value, option=options.get(key)) for key, value in given.items()]
    found = [_resolve(setting, table, parameters, variables) for setting in each]
    if wrong := [error for error in found if error is not None]:
        raise _together(wrong)
    return Settings(parameters=parameters, variables=variables)


def _together(wrong: Sequence[UsageError]) -> UsageError:
    """One error for all of them; each hint says what it is about."""
    if len(wrong) == 1:
        return wrong[0]
    hints = [f"{error.message.partition(':')[0]}: {error.hint}" for error in wrong if error.hint]
    return UsageError("\n".join(error.message for error in wrong), hint="\n".join(hints) or None)


@dataclass(frozen=True, kw_only=True)
class Given:
    """One setting as it was given: by `--set`, or by an `option` of its own."""

    key: str
    value: str
    option: str | None = None

    @property
    def name(self) -> str:
        """What the user typed, without the value."""
        return self.option or f"--set {self.key}"

    @property
    def text(self) -> str:
        """What the user typed."""
        return f"{self.option} {self.value}" if self.option else f"--set {self.key}={self.value}"


def _resolve(
    given: Given, table: Profile, parameters: dict[str, dict[str, str]], variables: dict[str, Any]
) -> UsageError | None:
    """Put one setting where it belongs; what is wrong with it."""
    model, _, name = given.key.rpartition(".")
    model = model or CORE
    try:
        if model == CORE and name in _FIELDS:
            variables[name] = _variable(name, given)
            return None
        name = _RENAMED.get(name, name) if model == CORE else name
        _check(given, model, name, table)
        _require_value(given, model=model, name=name, release=table.release)
    except UsageError as error:
        return error
    parameters.setdefault(model, {})[name] = given.value
    return None


def settable(name: str) -> str | None:
    """The key by which --set sets a parameter of this name, of any release; None when no model has it."""
    if name in _FIELDS or name in _RENAMED:
        return name
    models = [model for model, rows in PARAMETERS.items() if any(row.name == name for row in rows)]
    if not models:
        return None
    return name if CORE in models else f"{models[0]}.{name}"


def parse_assignments(texts: list[str]) -> dict[str, str]:
    """`["key=value", …]` as a dict; UsageError for a text without `=` and for a key given twice."""
    result: dict[str, str] = {}
    for text in texts:
        key, sign, value = text.partition("=")
        if not sign or not key:
            raise UsageError(
                f"--set {text!r} is not KEY=VALUE.", hint="For example: --set kv_cache_free_gpu_mem_fraction=0.5"
            )
        if key in result:
            raise UsageError(f"--set gives {key} twice.")
        result[key] = value
    return result


def _variable(name: str, given: Given) -> Any:
    types, value = _FIELDS[name].types, given.value
    if not types:
        if not (value.isascii() and value.isdigit()):
            raise UsageError(f"{given.text} is not a number of 0 or more.")
        return int(value)
    kind = value.removeprefix("TYPE_")
    if kind not in types:
        raise UsageError(f"{given.text}; expected one of {', '.join(f'TYPE_{each}' for each in types)}.")
    return kind


def _check(given: Given, model: str, name: str, table: Profile) -> None:
    if model not in table.models:
        raise UsageError(f"{given.name}: there is no model {model!r}.", hint=_suggest(model, list(table.models)))
    if name in _FLAGS:
        raise UsageError(f"{given.name} is not a parameter of a model.", hint=f"Use the flag {_FLAGS[name]}.")
    known = [parameter.name for parameter in table.models[model].parameters]
    if name in known:
        return
    old = retired(TEMPLATE_TOOL, name)
    others = [f"{other}.{name}" for other, each in table.models.items() if name in [p.name for p in each.parameters]]
    extra = [*_FIELDS, *_RENAMED] if model == CORE else []
    elsewhere = _releases(model, name)
    hint = f"Releases that have it: {elsewhere}." if elsewhere else _close(name, known + extra)
    if others:
        hint = f"Did you mean {' or '.join(others)}?"
    raise UsageError(
        f"{given.name}: {model} has no parameter {name!r} in release {table.release}.", hint=old.answer if old else hint
    )


def _releases(model: str, name: str) -> str:
    """The releases that have the parameter, such as `0.19 – 0.21, 1.0 –`; empty when none has."""
    return ", ".join(
        f"{row.since} – {row.until or ''}".rstrip() for row in PARAMETERS.get(model, ()) if row.name == name
    )


def _require_value(given: Given, *, model: str, name: str, release: str) -> None:
    declared, value = find_parameter(model, name, release), given.value
    if declared is None:
        return
    if not value.strip():
        if declared.required:
            raise UsageError(f"{given.text} is empty; the core model does not load without it.")
        return
    if not declared.values.accepts(value.strip()):
        raise UsageError(f"{given.text}: expected {declared.values.expected}.")


def _suggest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    return f"Did you mean {' or '.join(close)}?" if close else f"It has: {', '.join(known) or 'none'}."


def _close(name: str, known: list[str]) -> str:
    """Parameters are too many to be listed."""
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.6) or [each for each in known if name in each][:3]
    return f"Did you mean {' or '.join(close)}?" if close else "docs/parameters.md lists its parameters."
