"""Rules that compare the tensors of each model with those that trtserve would declare for its release."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from trtserve.nvidia.releases import order
from trtserve.repository.check.findings import Finding, Rule
from trtserve.repository.check.repository import (
    LLMAPI,
    ModelFolder,
    Repository,
    model_profile,
    releases_of,
    tensor_names,
)
from trtserve.repository.config import ConfigOptions, tensors_config, type_name
from trtserve.repository.profiles import CORE, ENSEMBLE

# Types that a repository may choose where a profile has a name such as `$logits` for a type.
_CHOICES = ("FP32", "FP16", "BF16")
# Container 25.05 has TensorRT-LLM 0.19 with these names of 0.20.
_EARLY_NAMES = frozenset({"min_tokens", "seed"})
_NEEDED_OUTPUTS = {CORE: {"output_ids", "sequence_length"}}
_LOGITS, _LOGITS_TYPED_SINCE = ("context_logits", "generation_logits"), "0.17"
_FIX = "Write it as NVIDIA's template of this release has it, or make the file again with trtserve repo."


def expected_tensors(repository: Repository, model: ModelFolder) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Name → tensor of the inputs and outputs that trtserve would declare, with the data types that the model chose.

    Returns None for a model of another kind, or if the release is unknown.
    """
    profile = repository.profile(model)
    if profile is None:
        return None
    if model.role != LLMAPI and repository.release(model) == "0.19":
        later = model_profile(model.role, "0.20").inputs
        profile = replace(profile, inputs=(*profile.inputs, *(row for row in later if row.name in _EARLY_NAMES)))
    config = tensors_config(profile, ConfigOptions(max_batch_size=1, decoupled=False))
    inputs, outputs = ({tensor.name: tensor for tensor in tensors} for tensors in (config.input, config.output))
    chosen = {row.name for row in (*profile.inputs, *profile.outputs) if row.type.startswith("$")}
    for tensor in (*model.config.input, *model.config.output):
        if tensor.name in chosen and type_name(tensor) in _CHOICES:
            {**inputs, **outputs}[tensor.name].data_type = tensor.data_type
    return inputs, outputs


def different_tensors(repository: Repository) -> Iterator[Finding]:
    for model in repository.models.values():
        expected = expected_tensors(repository, model)
        if expected is None:
            continue
        inputs, outputs = expected
        for tensors, wanted in ((model.config.input, inputs), (model.config.output, outputs)):
            for tensor in tensors:
                if tensor.name in wanted and (differences := list(_differences(tensor, wanted[tensor.name]))):
                    yield model.finding(f"The tensor {tensor.name} {'; it '.join(differences)}.", _FIX)
                elif tensor.name not in {*inputs, *outputs}:
                    yield from _of_another_release(repository, model, tensor.name)
        needed = {name for name, tensor in inputs.items() if not tensor.optional}
        needed -= {tensor.name for tensor in model.config.input}
        needed |= _NEEDED_OUTPUTS.get(model.role, set()) - {tensor.name for tensor in model.config.output}
        for name in sorted(needed):
            yield model.finding(
                f"The tensor {name} is not declared, and {model.name} cannot work without it.",
                "Copy it from NVIDIA's template of this release.",
            )


def _differences(tensor: Any, expected: Any) -> Iterator[str]:
    """What is wrong with a tensor, and what was expected. What a template leaves required may be optional."""
    if tensor.data_type != expected.data_type:
        yield f"has the type {type_name(tensor)}, expected {type_name(expected)}"
    if list(tensor.dims) != list(expected.dims):
        yield f"has the dims {list(tensor.dims)}, expected {list(expected.dims)}"
    if tensor.reshape != expected.reshape or tensor.HasField("reshape") != expected.HasField("reshape"):
        yield f"has {_reshape(tensor)}, expected {_reshape(expected)}"
    if getattr(expected, "allow_ragged_batch", False) and not tensor.allow_ragged_batch:
        yield "is not ragged, expected allow_ragged_batch: true"
    if getattr(expected, "optional", False) and not tensor.optional:
        yield "is required from every client, expected optional: true"


def _reshape(tensor: Any) -> str:
    return f"reshape: {{ shape: {list(tensor.reshape.shape)} }}" if tensor.HasField("reshape") else "no reshape"


def _of_another_release(repository: Repository, model: ModelFolder, name: str) -> Iterator[Finding]:
    release = repository.release(model)
    having = [each for each in releases_of(model.role) if name in tensor_names(model.role, each)]
    if having and (release is not None or model.role == LLMAPI):
        yield model.finding(
            f"The tensor {name} belongs to release {having[0]} … {having[-1]}; this repository is for release "
            f"{release}, which does not read it.",
            "Make the repository for the release that serves it: trtserve repo --release RELEASE",
        )


def misspelt_tensors(repository: Repository) -> Iterator[Finding]:
    for model in repository.models.values():
        expected = expected_tensors(repository, model)
        if expected is None:
            continue
        known = {*expected[0], *expected[1]}
        declared = {tensor.name for tensor in (*model.config.input, *model.config.output)}
        for name in sorted(declared - known):
            close = difflib.get_close_matches(name, known - declared, n=1, cutoff=0.85)
            if close and not any(name in tensor_names(model.role, each) for each in releases_of(model.role)):
                yield model.finding(f"{model.name} does not read the tensor {name}.", f"Did you mean {close[0]}?")


def repeated_tensors(repository: Repository) -> Iterator[Finding]:
    for model in repository.models.values():
        for tensors in (model.config.input, model.config.output):
            names = [tensor.name for tensor in tensors]
            if model.role == ENSEMBLE:  # NVIDIA's ensemble of 0.19 has harmless identical duplicates
                names = list({tensor.SerializeToString(deterministic=True): tensor.name for tensor in tensors}.values())
            for name, count in Counter(names).items():
                if count > 1:
                    yield model.finding(f"The tensor {name} is declared {count} times.", "Keep one of them.")


def wrong_logits(repository: Repository) -> Iterator[Finding]:
    """The C++ backend refuses to return logits of another type than the engine's."""
    for model, _ in repository.gpu_engines:
        release, built = repository.release(model), str(model.pretrained.get("logits_dtype"))
        expected = {"float16": "FP16", "float32": "FP32"}.get(built)
        if model.config.backend != "tensorrtllm" or release is None or order(release) < order(_LOGITS_TYPED_SINCE):
            continue
        for tensor in model.config.output:
            if tensor.name in _LOGITS and expected is not None and type_name(tensor) != expected:
                yield model.finding(
                    f"The output {tensor.name} is {type_name(tensor)}; the engine was built with {built} logits.",
                    f"Write data_type: TYPE_{expected}, in the ensemble and the BLS model too.",
                )


def unreachable_features(repository: Repository) -> Iterator[Finding]:
    for model, _ in repository.engines:
        declared = {tensor.name for tensor in (*model.config.input, *model.config.output)}
        built = {
            "context_logits": model.build.get("gather_context_logits"),
            "generation_logits": model.build.get("gather_generation_logits"),
            "prompt_embedding_table": model.limit("max_prompt_embedding_table_size"),
            "lora_weights": model.plugins.get("lora_plugin"),
            "draft_input_ids": model.limit("max_draft_len"),
        }
        for name in sorted(name for name, value in built.items() if value and name not in declared):
            yield model.finding(
                f"The engine was built for {name}, and the model does not declare that tensor.",
                "Declare it, or build an engine without it, which takes less memory.",
            )


RULES = (
    Rule("tensors", different_tensors, "tensors are those of the release: names, types, dims, optional, ragged"),
    Rule("tensor-name", misspelt_tensors, "no tensor is misspelt", severity="warning"),
    Rule("tensor-twice", repeated_tensors, "no tensor is declared twice"),
    Rule("logits-type", wrong_logits, "logits have the engine's type"),
    Rule("feature-unreachable", unreachable_features, "what the engine was built for is declared", severity="warning"),
)
