"""Which parameters of a model its runtime gives no meaning, and which it must refuse; absent file: neither."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from model_parameters import ModelParameters

_FILE = "parameter_classes.json"


def check_classes(parameters: ModelParameters, folder: Path, say: Callable[[str], None]) -> ModelParameters:
    """Those of `parameters` that mean something; ValueError naming one that cannot be carried out.

    What has no meaning is unset in the result, so that nothing can depend on it (on the GPUs or paths of another
    machine); what of it was set is listed in one line to `say`. `folder` holds parameter_classes.json.
    """
    classes = _read(folder / _FILE)
    for name, entry in classes["refused"].items():
        if reason := refusal(name, parameters.text(name), entry):
            raise ValueError(reason)
    ignored = [name for name, entry in classes["without_meaning"].items() if _is_set(parameters.text(name), entry)]
    if ignored:
        say(f"Parameters without meaning on this runtime: {', '.join(ignored)}")
    return parameters.without(classes["without_meaning"])


def refusal(name: str, value: str | None, entry: dict[str, Any]) -> str | None:
    """What is said against `value`; None for one that is carried out or asks for nothing."""
    if value is None or value.lower() in entry["neutral"]:
        return None
    if entry["impossible"] and value.lower() not in entry["impossible"]:
        return None
    return f"Parameter {name} is {value!r}, which this runtime cannot carry out: {entry['why']}."


def _is_set(value: str | None, entry: dict[str, Any]) -> bool:
    return value is not None and value != entry["unset"]


def _read(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {"refused": {}, "without_meaning": {}}
    return content
