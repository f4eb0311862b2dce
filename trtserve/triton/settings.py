"""What `--set MODEL.KEY=VALUE` may set: parameters of the Triton models, and the variables of NVIDIA's templates."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trtserve.errors import UsageError
from trtserve.triton.parameter_values import require_value
from trtserve.triton.profiles import CORE, Profile

# Variables of the core model's template that are no parameters, and how their text is read.
_NUMBERS = ("max_queue_size", "max_queue_delay_microseconds")
_TYPES = {
    "logits_datatype": ("FP32", "FP16"),
    "encoder_input_features_data_type": ("FP16", "BF16", "FP32"),
    "prompt_embedding_table_data_type": ("FP16", "BF16", "FP32"),
}
_RENAMED = {"batching_strategy": "gpt_model_type", "engine_dir": "gpt_model_path"}
_FLAGS = {
    "decoupled_mode": "--streaming / --no-streaming",
    "triton_max_batch_size": "--triton-max-batch-size",
    "preprocessing_instance_count": "--preprocessing-instance-count",
    "postprocessing_instance_count": "--postprocessing-instance-count",
    "bls_instance_count": "--bls-instance-count",
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """`parameters` maps model → parameter → text; `variables` are fields of ConfigOptions."""

    parameters: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    variables: Mapping[str, Any] = field(default_factory=dict)


def resolve_settings(given: Mapping[str, str], table: Profile) -> Settings:
    """Sort `model.parameter` and `parameter` (of the core model) keys.

    UsageError for a key that is none, with a suggestion, and for a value that the parameter does not take.
    """
    parameters: dict[str, dict[str, str]] = {}
    variables: dict[str, Any] = {}
    for key, value in given.items():
        model, _, name = key.rpartition(".")
        model = model or CORE
        if model == CORE and (name in _NUMBERS or name in _TYPES):
            variables[name] = _variable(name, value)
        else:
            name = _RENAMED.get(name, name) if model == CORE else name
            _check(key, model, name, table)
            require_value(key, value, model=model, name=name, release=table.release)
            parameters.setdefault(model, {})[name] = value
    return Settings(parameters=parameters, variables=variables)


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


def _variable(name: str, value: str) -> Any:
    if name in _NUMBERS:
        if not value.isdigit():
            raise UsageError(f"--set {name}={value} is not a number of 0 or more.")
        return int(value)
    kind = value.removeprefix("TYPE_")
    if kind not in _TYPES[name]:
        raise UsageError(f"--set {name}={value}; expected one of {', '.join(f'TYPE_{each}' for each in _TYPES[name])}.")
    return kind


def _check(key: str, model: str, name: str, table: Profile) -> None:
    if model not in table.models:
        raise UsageError(f"--set {key}: there is no model {model!r}.", hint=_suggest(model, list(table.models)))
    if name in _FLAGS:
        raise UsageError(f"--set {key} is not a parameter of a model.", hint=f"Use the flag {_FLAGS[name]}.")
    known = [parameter.name for parameter in table.models[model].parameters]
    if name in known:
        return
    others = [f"{other}.{name}" for other, each in table.models.items() if name in [p.name for p in each.parameters]]
    extra = [*_NUMBERS, *_TYPES, *_RENAMED] if model == CORE else []
    raise UsageError(
        f"--set {key}: {model} has no parameter {name!r} in release {table.release}.",
        hint=f"Did you mean {' or '.join(others)}?" if others else _suggest(name, known + extra),
    )


def _suggest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    return f"Did you mean {' or '.join(close)}?" if close else f"It has: {', '.join(known) or 'none'}."
