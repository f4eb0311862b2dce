"""parameter_classes.json: the parameters that the runtime ignores or refuses. Without the file there are none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .parameters import ModelParameters

_FILE = "parameter_classes.json"


def check_classes(parameters: ModelParameters, folder: Path, log: Callable[[str], None]) -> ModelParameters:
    """Return `parameters` without those that the runtime ignores. Raises ValueError for one that it refuses.

    Ignored parameters (such as GPUs or paths of another machine) are unset in the result, and one line to `log` lists
    those that had a value. `folder` holds parameter_classes.json.
    """
    classes = _read(folder / _FILE)
    for name, entry in classes["refused"].items():
        if reason := refusal(name, parameters.text(name), entry):
            raise ValueError(reason)
    ignored = [
        name for name, entry in classes["ignored"].items() if parameters.text(name) not in (None, entry["unset"])
    ]
    if ignored:
        log(f"Parameters ignored on this runtime: {', '.join(ignored)}")
    return parameters.without(classes["ignored"])


def refusal(name: str, value: str | None, entry: dict[str, Any]) -> str | None:
    """Return why `value` is refused, or None for a supported or neutral value."""
    if value is None or value.lower() in entry["accepted"]:
        return None
    if entry["values"] and value.lower() not in entry["values"]:
        return None
    return f"Parameter {name} is {value!r}, which this runtime does not support: {entry['why']}."


def _read(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {"refused": {}, "ignored": {}}
    return content
