"""What parameters of the Triton models mean on the openvino runtime, and the file that tells it to the models."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from trtserve.triton.profiles import BLS, CORE, ENSEMBLE, POSTPROCESSING, PREPROCESSING
from trtserve.triton.tables import parameters as tables
from trtserve.triton.tables.rows import Parameter

CLASSES_FILE = "parameter_classes.json"

PARAMETERS: dict[str, tuple[Parameter, ...]] = {
    PREPROCESSING: tables.PREPROCESSING,
    CORE: tables.CORE,
    POSTPROCESSING: tables.POSTPROCESSING,
    ENSEMBLE: (),
    BLS: tables.BLS,
}


def find_parameter(model: str, name: str, release: str) -> Parameter | None:
    """The declaration of `name` of `model` in `release`; None when that release has none."""
    return next((each for each in PARAMETERS.get(model, ()) if each.name == name and each.within(release)), None)


def parameter_classes(model: str, release: str) -> dict[str, Any]:
    """Content of CLASSES_FILE: the parameters of `model` that have no meaning, and those that are refused.

    {"without_meaning": {name: {"why", "unset"}}, "refused": {name: {"why", "impossible", "neutral"}}}; `unset` is the
    text that stands for no value, an empty `impossible` means every value.
    """
    rows = [row for row in PARAMETERS.get(model, ()) if row.within(release)]
    return {
        "without_meaning": {
            row.name: {"why": row.fate.why, "unset": row.text} for row in rows if row.fate.kind == "no meaning"
        },
        "refused": {
            row.name: {"why": row.fate.why, "impossible": row.fate.impossible, "neutral": row.fate.neutral}
            for row in rows
            if row.fate.kind == "refused"
        },
    }


def classes_json(model: str, release: str) -> str | None:
    """Text of CLASSES_FILE of `model`; None when all its parameters are effective."""
    content = parameter_classes(model, release)
    return json.dumps(content, indent=2) + "\n" if any(content.values()) else None


def set_without_meaning(model: str, given: Mapping[str, str], release: str) -> list[str]:
    """Names in `given` (parameter → text) that are set to something and have no meaning on the openvino runtime."""
    classes = parameter_classes(model, release)["without_meaning"]
    return [name for name, entry in classes.items() if given.get(name, "").strip() not in ("", entry["unset"])]
