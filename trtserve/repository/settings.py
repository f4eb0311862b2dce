"""The keys of `--set MODEL.KEY=VALUE`: parameters of the Triton models and variables of NVIDIA's templates."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trtserve.errors import UsageError
from trtserve.files import whole_number
from trtserve.nvidia.releases.options import TEMPLATE_TOOL, old_option
from trtserve.repository.profiles import (
    BLS,
    CORE,
    DRAFT,
    MODELS,
    ConfigField,
    Profile,
    added_parameters,
    config_fields,
    find_parameter,
    parameters_of,
)
from trtserve.repository.tables import releases_text
from trtserve.specs import RepositorySpec

_RENAMED = {"batching_strategy": "gpt_model_type", "engine_dir": "gpt_model_path"}  # of the core model
# Fields of RepositorySpec that set the same as --set KEY.
_NAMED = {
    "batching_strategy": "gpt_model_type",
    "batch_scheduler_policy": "batch_scheduler_policy",
    "enable_kv_cache_reuse": "enable_kv_cache_reuse",
    "enable_chunked_context": "enable_chunked_context",
    "max_attention_window_size": "max_attention_window_size",
    "exclude_input_in_output": "exclude_input_in_output",
    "accumulate_tokens": f"{BLS}.accumulate_tokens",
    "max_queue_size": "max_queue_size",
    "ngram_max_draft_len": "ngram_max_draft_len",
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings by where they belong."""

    parameters: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # model → parameter → text
    variables: Mapping[str, Any] = field(default_factory=dict)  # fields of ConfigOptions


def settings_of(spec: RepositorySpec) -> dict[str, str]:
    """Return the settings of `--set` and of flags that mean the same, without the draft model's.

    Raises UsageError for a setting given in both ways.
    """
    settings = {key: value for key, value in spec.settings.items() if not key.startswith(f"{DRAFT}.")}
    for option, key in _NAMED.items():
        value = getattr(spec, option)
        if value is None:
            continue
        given = next((each for each in (key, f"{CORE}.{key}", option) if each in settings), None)
        if given is not None:
            flag = f"--{option.replace('_', '-')}"
            raise UsageError(f"--set {given} and {flag} were both given; leave one of them out.")
        settings[key] = str(value).lower() if isinstance(value, bool) else str(value)
    return settings


def spelled_as(spec: RepositorySpec) -> dict[str, str]:
    """Return key of `settings_of` → the option that gave it, for settings given by an option."""
    return {key: f"--{option.replace('_', '-')}" for option, key in _NAMED.items() if getattr(spec, option) is not None}


def resolve_settings(given: Mapping[str, str], table: Profile, *, spelled: Mapping[str, str] | None = None) -> Settings:
    """Check and sort settings by `model.parameter`, or `parameter` of the core model.

    One UsageError names every unknown key, with suggestions, and every wrong value. `spelled` maps keys that came from
    another option to that option.
    """
    parameters: dict[str, dict[str, str]] = {}
    variables: dict[str, Any] = {}
    options = spelled or {}
    each = [Given(key=key, value=value, option=options.get(key)) for key, value in given.items()]
    found = [_resolve(setting, table, parameters, variables) for setting in each]
    wrong = [error for error in found if error is not None]
    if len(wrong) == 1:
        raise wrong[0]
    if wrong:
        # Each hint begins with the setting that it is for.
        hints = [f"{error.message.partition(':')[0]}: {error.hint}" for error in wrong if error.hint]
        raise UsageError("\n".join(error.message for error in wrong), hint="\n".join(hints) or None)
    return Settings(parameters=parameters, variables=variables)


@dataclass(frozen=True, kw_only=True)
class Given:
    """One setting as the user gave it."""

    key: str
    value: str
    option: str | None = None  # the option that set it, or None for `--set`

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
    """Add one setting to `parameters` or `variables`; return what is wrong with it."""
    model, _, name = given.key.rpartition(".")
    model = model or CORE
    try:
        if model == CORE and name in _fields():
            variables[name] = _variable(name, given)
            return None
        name = _RENAMED.get(name, name) if model == CORE else name
        _check(given, model, name, table)
        _require_value(given, model=model, name=name, release=table.release)
    except UsageError as error:
        return error
    parameters.setdefault(model, {})[name] = given.value
    return None


def _fields() -> dict[str, ConfigField]:
    return {field.name: field for field in config_fields() if not field.flag}


def settable(name: str) -> str | None:
    """Return the key of a parameter for --set, in any release, or None when no model has it."""
    if name in _fields() or name in _RENAMED:
        return name
    models = [model for model in MODELS if any(row.name == name for row in parameters_of(model))]
    if not models:
        return None
    return name if CORE in models else f"{models[0]}.{name}"


def _variable(name: str, given: Given) -> Any:
    types, value = _fields()[name].types, given.value
    if not types:
        if (number := whole_number(value)) is None:
            raise UsageError(f"{given.text} is not a whole number of 0 or more.")
        return number
    kind = value.removeprefix("TYPE_")
    if kind not in types:
        raise UsageError(f"{given.text}; expected one of {', '.join(f'TYPE_{each}' for each in types)}.")
    return kind


def _check(given: Given, model: str, name: str, table: Profile) -> None:
    if model not in table.models:
        hint = _suggest(model, table.models) or f"The models are {', '.join(table.models)}."
        raise UsageError(f"{given.name}: there is no model {model!r}.", hint=hint)
    if flag := next((field.flag for field in config_fields() if field.name == name), ""):
        raise UsageError(f"{given.name} is not a parameter of a model.", hint=f"Use the flag {flag}.")
    known = [row.name for row in (*table.models[model].parameters, *added_parameters(model))]
    if name in known:
        return
    others = [f"{other}.{name}" for other, each in table.models.items() if name in [p.name for p in each.parameters]]
    releases = ", ".join(releases_text(row) for row in parameters_of(model) if row.name == name)
    if (old := old_option(TEMPLATE_TOOL, name)) is not None:
        hint = old.answer
    elif others:
        hint = f"Did you mean {' or '.join(others)}?"
    elif releases:
        hint = f"Releases that have it: {releases}."
    else:
        settings = [*known, *_fields(), *_RENAMED] if model == CORE else known
        hint = _suggest(name, settings) or "`trtserve help reference/parameters` lists the parameters."
    raise UsageError(f"{given.name}: {model} has no parameter {name!r} in release {table.release}.", hint=hint)


def _require_value(given: Given, *, model: str, name: str, release: str) -> None:
    declared, value = find_parameter(model, name, release), given.value
    if declared is None:
        return
    if not value.strip():
        if declared.required:
            raise UsageError(f"{given.text} is empty, but {model} needs it.")
        return
    if not declared.values.accepts(value.strip()):
        raise UsageError(f"{given.text}: expected {declared.values.expected}.")


def _suggest(name: str, known: Iterable[str]) -> str:
    """Return "Did you mean …?" with up to three similar names, or empty when there are none."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.6) or [each for each in names if name in each][:3]
    return f"Did you mean {' or '.join(close)}?" if close else ""
