"""JSON schemas that clients send, as guides need them."""

from __future__ import annotations

import json
from typing import Any

from trtserve.files import parse_json

MOST_CHARACTERS = 32
MOST_OF_FORMAT = 64
"""Characters of a text with a format: a UUID has 36."""
MOST_ELEMENTS = 4
MOST_NUMBER = 999_999
_OF_NAMES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_VALUES = ("const", "enum", "default", "examples", "required")
_RANGE = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "enum", "const")
_NAMING_MORE = ("$ref", "anyOf", "oneOf", "allOf")
"""What may name properties of an object beside its own."""
_ANY_NAME = "^[a-z_]{1,16}$"
_LIMITED_BY = ("maxLength", "pattern", "enum", "const")


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

    Only those get a bound that the schema gives none. What is not a JSON object is returned as it is.
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
        most = MOST_OF_FORMAT if "format" in schema else MOST_CHARACTERS
        found["maxLength"] = max(most, _least(schema, "minLength"))
    if "integer" in kinds and not any(name in schema for name in _RANGE):
        found |= {"minimum": -MOST_NUMBER, "maximum": MOST_NUMBER}
    if "array" in kinds and "maxItems" not in schema:
        found["maxItems"] = max(MOST_ELEMENTS, _least(schema, "minItems"))
    if "object" in kinds and "patternProperties" not in schema and schema.get("additionalProperties") is not False:
        found |= _names(schema, found.get("additionalProperties"))
    return found


def _names(schema: dict[str, Any], value: Any) -> dict[str, Any]:
    """Return what bounds the names of an object, whose other properties are `value`: without it an object has any."""
    if any(name in schema for name in _NAMING_MORE):
        return {}
    named, required = schema.get("properties") or {}, schema.get("required") or []
    if not (isinstance(named, dict) and isinstance(required, list) and named.keys() >= set(map(str, required))):
        return {}  # the engine says what is wrong
    if named:
        return {"additionalProperties": False}
    value = value if isinstance(value, dict) and value else {"type": "string", "maxLength": MOST_CHARACTERS}
    most = schema.get("maxProperties", max(MOST_ELEMENTS, _least(schema, "minProperties")))
    return {"patternProperties": {_ANY_NAME: value}, "additionalProperties": False, "maxProperties": most}


def _inside(key: str, value: Any) -> Any:
    if key in _OF_NAMES and isinstance(value, dict):
        return {name: _bounded(each) for name, each in value.items()}
    return value if key in _VALUES else _bounded(value)


def _least(schema: dict[str, Any], name: str) -> int:
    value = schema.get(name)
    return value if isinstance(value, int) else 0
