"""The JSON schema of setup files, with which editors complete and check them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trtserve.bench.requirements import RATES, TIMES
from trtserve.pipeline.setup_file.content import (
    BENCHMARK_KEYS,
    SCALARS,
    SERVED_MODEL,
    benchmark_options,
    cluster_options,
    model_options,
    server_options,
)
from trtserve.specs.bench import RANDOM
from trtserve.specs.cluster import OPTIONS, ClusterSpec
from trtserve.specs.options import Option, options_of

_TYPES = {int: "integer", float: "number", bool: "boolean"}
_TEXT = {"type": "string", "minLength": 1}
_TIME = {"type": ["string", "number"], "description": "At most this time, such as 300ms or 2s."}
_RATE = {"type": "number", "exclusiveMinimum": 0, "description": "At least this."}
_BENCHMARK_TYPES: Mapping[str, Any] = {
    "traffic": {"enum": list(RANDOM)},
    "limits": {
        "type": "object",
        "properties": {**dict.fromkeys(TIMES, _TIME), **dict.fromkeys(RATES, _RATE)},
        "additionalProperties": False,
    },
}


def json_schema() -> dict[str, Any]:
    """Return the schema (draft 2020-12)."""
    texts = {name: {"type": "string", "minLength": 1, "description": text} for name, text in SCALARS.items()}
    served = {"type": "string", "description": SERVED_MODEL}
    clusters = {
        kind: {
            "type": "object",
            "description": options_of(ClusterSpec)[kind].declared.help,
            "properties": _properties(cluster_options(kind)),
            "additionalProperties": False,
        }
        for kind in OPTIONS
    }
    measured = {
        name: {"description": text, **_BENCHMARK_TYPES.get(name, _TEXT)} for name, text in BENCHMARK_KEYS.items()
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Setup file of trtserve",
        "type": "object",
        "properties": {
            "models": _named("Models, by name.", {**texts, **_properties(model_options())}, "source"),
            "servers": _named(
                "Servers, by name.", {"model": served, **clusters, **_properties(server_options())}, "model"
            ),
            "benchmarks": _named("Benchmarks, by name.", {**measured, **_properties(benchmark_options())}, "server"),
        },
        "required": ["models"],
        "additionalProperties": False,
    }


def _named(description: str, properties: Mapping[str, Any], required: str) -> dict[str, Any]:
    entry = {"type": "object", "properties": properties, "required": [required], "additionalProperties": False}
    return {"type": "object", "description": description, "additionalProperties": entry}


def _properties(options: Mapping[str, Option]) -> dict[str, Any]:
    return {name: _property(option) for name, option in options.items()}


def _property(option: Option) -> dict[str, Any]:
    value = _value(option)
    if option.container == "tuple":
        value = {"type": "array", "items": value}
    elif option.container == "dict":
        value = {"type": "object", "additionalProperties": value}
    if option.nullable:
        value = {"anyOf": [value, {"type": "null"}]}
    return {"description": option.declared.help, **value}


def _value(option: Option) -> dict[str, Any]:
    if option.choices:
        return {"enum": list(option.choices)}
    if option.type not in _TYPES:
        # A version such as 25.12 needs no quotes: the file is read as it is written.
        return {"type": ["string", "number", "boolean"]}
    declared = option.declared
    bounds = {"minimum": declared.minimum, "exclusiveMinimum": declared.above, "maximum": option.maximum}
    return {"type": _TYPES[option.type], **{key: value for key, value in bounds.items() if value is not None}}
