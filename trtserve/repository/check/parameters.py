"""Rules about the parameters of each model."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from trtserve.executor.loaders import is_embedded_runtime
from trtserve.nvidia.releases import RELEASES
from trtserve.nvidia.releases.old_options import TEMPLATE_TOOL, old_option
from trtserve.repository.check.findings import Finding, Rule
from trtserve.repository.check.repository import ModelFolder, Repository
from trtserve.repository.embedded import startup_refusal
from trtserve.repository.parameters import Parameter, added_parameters, parameters_of
from trtserve.repository.preflight import refusal
from trtserve.repository.profiles import (
    BLS,
    CORE,
    MODELS,
    PREPROCESSING,
)
from trtserve.repository.tables import releases_text

# Parameters of trtserve's own programs, of Triton and of the C++ backend, which the templates lack.
_FURTHER = {
    PREPROCESSING: {"lora_table"},
    CORE: {"executor", "executor_release", "recv_poll_period_ms", *(row.name for row in added_parameters(CORE))},
    BLS: {
        "core_answers",
        "preprocessing_model_name",
        "postprocessing_model_name",
        "lora_table",
        "exclude_input_in_output",
        "tensorrt_llm_model_name",
    },
}
_OF_TRITON = {"EXECUTION_ENV_PATH", "FORCE_CPU_ONLY_INPUT_TENSORS"}


def _known(repository: Repository, model: ModelFolder) -> list[Parameter]:
    release = repository.parameter_release(model)
    if model.role not in MODELS or release not in RELEASES:
        return []
    return [row for row in parameters_of(model.role) if row.within(str(release))]


def unread_parameters(repository: Repository) -> Iterator[Finding]:
    for model in repository.models.values():
        release = repository.parameter_release(model)
        if model.role not in MODELS or release is None:
            continue
        names = [row.name for row in _known(repository, model)]
        for key in sorted(set(model.parameters) - {*names, *_FURTHER.get(model.role, ()), *_OF_TRITON}):
            other = [row for row in parameters_of(model.role) if row.name == key]
            old = old_option(TEMPLATE_TOOL, key)
            if other or old is not None:
                spans = ", ".join(releases_text(row) for row in other)
                yield model.finding(
                    f"Release {release} does not read the parameter {key}" + (f"; {spans} does." if spans else "."),
                    old.answer if old is not None else "Remove it, or serve the repository with that release.",
                )
            else:
                close = difflib.get_close_matches(key, names, n=1, cutoff=0.7)
                yield model.finding(
                    f"Nothing reads the parameter {key}.", f"Did you mean {close[0]}?" if close else f"Remove {key}."
                )


def wrong_values(repository: Repository) -> Iterator[Finding]:
    for model in repository.models.values():
        for row in _known(repository, model):
            if model.embedded and row.name == "guided_decoding_backend":
                continue  # the embedded executor has its own
            text = model.parameters.get(row.name, "")
            if text and not row.values.accepts(text):
                yield model.finding(
                    f"The parameter {row.name} is {text!r}; expected {row.values.expected}.",
                    "Correct it: any other text counts as unset, or keeps the model from loading.",
                )


def missing_parameters(repository: Repository) -> Iterator[Finding]:
    for model in repository.models.values():
        for row in _known(repository, model):
            absent = row.name not in model.parameters
            needs_key = row.needs_key and absent and model.config.backend == "tensorrtllm"
            if (row.required and not model.parameters.get(row.name)) or needs_key:
                yield model.finding(
                    f"The parameter {row.name} is {'missing' if absent else 'empty'}; the model does not load without "
                    "it.",
                    f"Set it: {row.meaning}." if row.required else "Add the key; its value may be empty.",
                )


def refused_parameters(repository: Repository) -> Iterator[Finding]:
    for model in repository.models.values():
        if not is_embedded_runtime(repository.part(model.name).get("runtime")):
            continue
        reason = refusal(model.file)
        if reason is None and model.role == CORE and model.build and model.pretrained.get("vocab_size"):
            reason = startup_refusal(
                model.parameters,
                model.engine,
                release=str(repository.parameter_release(model)),
                max_queue_size=model.config.dynamic_batching.default_queue_policy.max_queue_size,
            )
        if reason is not None:
            yield model.finding(reason, "Remove the parameter, or leave its value empty.")


RULES = (
    Rule("parameter-unknown", unread_parameters, "the release reads every parameter", severity="warning"),
    Rule("parameter-value", wrong_values, "every value is valid"),
    Rule("parameter-missing", missing_parameters, "mandatory parameters are set", stops=True),
    Rule("parameter-refused", refused_parameters, "the embedded executor supports what is set", stops=True),
)
