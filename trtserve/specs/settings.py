"""Keywords of engines that `--set KEY=VALUE` gives: values in YAML, keys with dots where keywords are nested."""

from __future__ import annotations

import json
from typing import Any

from trtserve.errors import UsageError


def setting_value(key: str, text: str) -> Any:
    """Return the value of `--set key=text`. Raises UsageError for what is not YAML, or has no place in JSON."""
    import yaml

    try:
        value = yaml.safe_load(text)
        json.dumps(value)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:  # ValueError: a date such as 2001-99-99
        dated = isinstance(error, TypeError)
        reason = "a date, a set or bytes" if dated else f"not YAML: {getattr(error, 'problem', None) or error}"
        raise UsageError(
            f"--set {key}={text}: the value is {reason}.", hint=f"""A text in quotes: --set '{key}="…"'"""
        ) from None
    return value


def put_setting(into: dict[str, Any], key: str, value: object) -> None:
    """Set the keyword `key`. Raises UsageError when a part of it has a value that has no parts."""
    *parents, name = key.split(".")
    for parent in parents:
        into = into.setdefault(parent, {})
        if not isinstance(into, dict):
            raise UsageError(f"--set {key}: {parent} is set to {into!r} and has no parts.")
    into[name] = value
