"""JSON schemas that clients send, as guides need them."""

from __future__ import annotations

import json
from typing import Any

from trtserve.files import parse_json

MOST_CHARACTERS = 32
MOST_ELEMENTS = 4
MOST_NUMBER = 999_999
_OF_NAMES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_VALUES = ("const", "enum", "default", "examples", "required")
_RANGE = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "enum", "const")
_ANY_OBJECT = {
    "patternProperties": {"^[a-z_]{1,16}$": {"type": "string", "maxLength": MOST_CHARACTERS}},
    "additionalProperties": False,
    "maxProperties": MOST_ELEMENTS,
}
_LIMITED_BY = ("maxLength", "pattern", "format", "enum", "const")


def moved(schema: Any, root: str) -> Any:
    """Return a schema with its local references below `root`."""
    if isinstance(schema, list):
        return [moved(each, root) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: moved(each, root) for key, each in schema.items()}
    reference = found.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        found["$ref"] = root + reference[1:]
    return found


def bounded(text: str) -> str:
    """Return a schema whose texts, numbers, lists and objects end: a model not trained to answer does not end them.

    Only those get a bound that the schema gives none. What is no object of JSON is returned as it is.
    """
    try:
        schema = parse_json(text)
    except ValueError:  # the engine says so
        return text
    return json.dumps(_bounded(schema)) if isinstance(schema, dict) else text


def _bounded(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_bounded(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _inside(key, each) for key, each in schema.items()}
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if "string" in kinds and not any(name in schema for name in _LIMITED_BY):
        found["maxLength"] = max(MOST_CHARACTERS, _least(schema, "minLength"))
    if "integer" in kinds and not any(name in schema for name in _RANGE):
        found |= {"minimum": -MOST_NUMBER, "maximum": MOST_NUMBER}
    if "array" in kinds and "maxItems" not in schema:
        found["maxItems"] = max(MOST_ELEMENTS, _least(schema, "minItems"))
    if "object" in kinds and schema.keys().isdisjoint(("additionalProperties", "patternProperties")):
        # Without names of its own an object would have any.
        found |= {"additionalProperties": False} if schema.get("properties") else _ANY_OBJECT
    return found


def _inside(key: str, value: Any) -> Any:
    if key in _OF_NAMES and isinstance(value, dict):
        return {name: _bounded(each) for name, each in value.items()}
    return value if key in _VALUES else _bounded(value)


def _least(schema: dict[str, Any], name: str) -> int:
    value = schema.get(name)
    return value if isinstance(value, int) else 0
