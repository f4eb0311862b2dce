"""The five Triton models of a release and the model of the LLM API, as NVIDIA's files have them."""

from __future__ import annotations

from dataclasses import dataclass

from tests.doubles import model_steps, model_tensors
from tests.doubles.core_tensors import template_tensors
from tests.doubles.flags import Release

MODELS = ("preprocessing", "tensorrt_llm", "postprocessing", "ensemble", "tensorrt_llm_bls")
_TABLES = {
    "preprocessing": (model_tensors.PREPROCESSING_INPUTS, model_tensors.PREPROCESSING_OUTPUTS),
    "postprocessing": (model_tensors.POSTPROCESSING_INPUTS, model_tensors.POSTPROCESSING_OUTPUTS),
    "ensemble": (model_tensors.ENSEMBLE_INPUTS, model_tensors.ENSEMBLE_OUTPUTS),
    "tensorrt_llm_bls": (model_tensors.BLS_INPUTS, model_tensors.BLS_OUTPUTS),
    "llmapi": (model_tensors.LLMAPI_INPUTS, model_tensors.LLMAPI_OUTPUTS),
}


@dataclass(frozen=True, kw_only=True)
class TensorRow:
    """One tensor: `kind` without TYPE_, or LOGITS, FEATURES, TABLE where a type is put in; `dims` as 2x-1."""

    direction: str  # in or out
    name: str
    kind: str
    dims: str
    flags: str  # of o (optional), r (ragged), s (reshape to [])


@dataclass(frozen=True, kw_only=True)
class StepRow:
    """One line of a step's map: the model's tensor and the ensemble's."""

    model: str
    direction: str
    tensor: str
    ensemble_tensor: str


def parse_release(text: str) -> Release:
    """(1, 2) of `1.2`."""
    major, minor = text.split(".")
    return int(major), int(minor)


def _lines(table: str, release: Release) -> list[list[str]]:
    """The words of every row of a release, without its last two, which are first release and first without it."""
    rows = [line.split() for line in table.split("\n") if line]
    return [
        row[:-2]
        for row in rows
        if parse_release(row[-2]) <= release and (row[-1] == "-" or release < parse_release(row[-1]))
    ]


def tensors(model: str, release: Release) -> list[TensorRow]:
    """Inputs, then outputs of one of MODELS or of `llmapi`."""
    if model == "tensorrt_llm":
        found = template_tensors(release)
    else:
        found = [
            (direction, row[0], row[1], row[2], row[3])
            for direction, table in zip(("in", "out"), _TABLES[model], strict=True)
            for row in _lines(table, release)
        ]
    return [
        TensorRow(direction=direction, name=name, kind=kind, dims=dims, flags=flags)
        for direction, name, kind, dims, flags in found
    ]


def parameters(model: str, release: Release) -> dict[str, str]:
    """Key → text of the template."""
    return {key: text for name, key, text in _lines(model_steps.PARAMETERS, release) if name == model}


def steps(release: Release) -> list[StepRow]:
    """Every line of the ensemble's maps, in the order of its steps."""
    return [
        StepRow(model=model, direction=direction, tensor=tensor, ensemble_tensor=outer)
        for model, direction, tensor, outer in _lines(model_steps.STEPS, release)
    ]
