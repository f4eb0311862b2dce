"""Rules about tensors: those of each model compared with its release's, and how ensembles connect them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from trtserve.errors import did_you_mean
from trtserve.nvidia.releases import order
from trtserve.repository.check.repository import (
    LLMAPI,
    ModelFolder,
    Repository,
    model_profile,
    releases_of,
    tensor_names,
)
from trtserve.repository.check.rules import Finding, every_model, model_rule, of_role, with_engine, with_gpu_engine
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


@model_rule("tensors", "tensors are those of the release: names, types, dims, optional, ragged", every_model)
def different_tensors(repository: Repository, model: ModelFolder) -> Iterator[Finding]:
    expected = expected_tensors(repository, model)
    if expected is None:
        return
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


@model_rule("tensor-name", "no tensor is misspelt", every_model, severity="warning")
def misspelt_tensors(repository: Repository, model: ModelFolder) -> Iterator[Finding]:
    expected = expected_tensors(repository, model)
    if expected is None:
        return
    known = {*expected[0], *expected[1]}
    declared = {tensor.name for tensor in (*model.config.input, *model.config.output)}
    for name in sorted(declared - known):
        close = did_you_mean(name, known - declared, cutoff=0.85)
        if close and not any(name in tensor_names(model.role, each) for each in releases_of(model.role)):
            yield model.finding(f"{model.name} does not read the tensor {name}.", close)


@model_rule("tensor-twice", "no tensor is declared twice", every_model)
def repeated_tensors(_: Repository, model: ModelFolder) -> Iterator[Finding]:
    for tensors in (model.config.input, model.config.output):
        names = [tensor.name for tensor in tensors]
        if model.role == ENSEMBLE:  # NVIDIA's ensemble of 0.19 has harmless identical duplicates
            names = list({tensor.SerializeToString(deterministic=True): tensor.name for tensor in tensors}.values())
        for name, count in Counter(names).items():
            if count > 1:
                yield model.finding(f"The tensor {name} is declared {count} times.", "Keep one of them.")


@model_rule("logits-type", "logits have the engine's type", with_gpu_engine)
def wrong_logits(repository: Repository, model: ModelFolder) -> Iterator[Finding]:
    """The C++ backend refuses to return logits of another type than the engine's."""
    release, built = repository.release(model), model.engine.model.logits_dtype
    expected = {"float16": "FP16", "float32": "FP32"}.get(built)
    if model.config.backend != "tensorrtllm" or release is None or order(release) < order(_LOGITS_TYPED_SINCE):
        return
    for tensor in model.config.output:
        if tensor.name in _LOGITS and expected is not None and type_name(tensor) != expected:
            yield model.finding(
                f"The output {tensor.name} is {type_name(tensor)}; the engine was built with {built} logits.",
                f"Write data_type: TYPE_{expected}, in the ensemble and the BLS model too.",
            )


@model_rule("feature-unreachable", "what the engine was built for is declared", with_engine, severity="warning")
def unreachable_features(_: Repository, model: ModelFolder) -> Iterator[Finding]:
    declared = {tensor.name for tensor in (*model.config.input, *model.config.output)}
    built = {
        "context_logits": model.engine.build.gather_context_logits,
        "generation_logits": model.engine.build.gather_generation_logits,
        "prompt_embedding_table": model.limit("max_prompt_embedding_table_size"),
        "lora_weights": model.engine.build.plugin_config.lora_plugin,
        "draft_input_ids": model.limit("max_draft_len"),
    }
    for name in sorted(name for name, value in built.items() if value and name not in declared):
        yield model.finding(
            f"The engine was built for {name}, and the model does not declare that tensor.",
            "Declare it, or build an engine without it, which takes less memory.",
        )


@dataclass(frozen=True, kw_only=True)
class _End:
    """One end of an ensemble tensor: a tensor of a step's model, or of the ensemble itself."""

    model: ModelFolder
    tensor: Any
    makes: bool  # whether it is the source

    @property
    def dims(self) -> tuple[int, ...]:
        return tuple(self.tensor.dims)

    @property
    def batched_dims(self) -> tuple[int, ...]:
        return ((-1,) if self.model.config.max_batch_size > 0 else ()) + self.dims

    @property
    def described(self) -> str:
        return f"{type_name(self.tensor)} {list(self.dims)} in {self.model.name} ({self.tensor.name})"

    def fits(self, other: _End) -> bool:
        """Return whether the shapes may be equal: Triton compares them with and without the batch axes."""
        return _alike(self.dims, other.dims) or _alike(self.batched_dims, other.batched_dims)


def _alike(first: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return len(first) == len(other) and all(a == b or -1 in (a, b) for a, b in zip(first, other, strict=True))


@model_rule("ensemble-step", "steps name models of the repository", of_role(ENSEMBLE), stops=True)
def absent_steps(repository: Repository, ensemble: ModelFolder) -> Iterator[Finding]:
    if not ensemble.config.ensemble_scheduling.step:
        yield ensemble.finding("It has no step.", "Copy the steps of NVIDIA's template.")
    for name in {step.model_name for step in ensemble.config.ensemble_scheduling.step}:
        if name not in repository.models and name not in repository.unread:
            yield ensemble.finding(
                f"A step names the model {name!r}, which is not in the repository.",
                did_you_mean(name, repository.models, f"It has: {', '.join(sorted(repository.models))}."),
            )


@model_rule("ensemble-map", "maps are complete, and each tensor has one source", of_role(ENSEMBLE), stops=True)
def wrong_maps(repository: Repository, ensemble: ModelFolder) -> Iterator[Finding]:
    """Maps name tensors of their step, every required input is mapped, every tensor has one source and a use."""
    for step, model in _steps(repository, ensemble):
        for mapped, tensors in ((step.input_map, model.config.input), (step.output_map, model.config.output)):
            for name in sorted(set(mapped) - {tensor.name for tensor in tensors}):
                yield ensemble.finding(
                    f"The step {model.name} maps {name}, and that model declares no such tensor.",
                    "Declare it there, or remove the line from the map.",
                )
        for tensor in model.config.input:
            if not tensor.optional and tensor.name not in step.input_map:
                yield ensemble.finding(
                    f"The step {model.name} needs the input {tensor.name}, and nothing is mapped to it.",
                    "Map a tensor to it, or mark it optional in that model.",
                )
    for name, ends in _tensors(repository, ensemble).items():
        sources = sum(end.makes for end in ends)
        if sources == 0:
            yield ensemble.finding(
                f"The tensor {name} has no source: no input of the ensemble and no output of a step has that name.",
                "Map the output of a step to it, or declare the input.",
            )
        elif all(end.model is ensemble for end in ends):
            yield ensemble.finding(f"No step uses the input {name}.", "Map it to an input, or remove it.")
        elif sources > 1:
            yield ensemble.finding(f"{sources} steps make the tensor {name}.", "Give each its own name.")


@model_rule("ensemble-tensor", "both ends of a tensor have the same type and shape", of_role(ENSEMBLE), stops=True)
def unequal_tensors(repository: Repository, ensemble: ModelFolder) -> Iterator[Finding]:
    for name, (first, *others) in _tensors(repository, ensemble).items():
        for other in others:
            types, shapes = type_name(first.tensor) != type_name(other.tensor), not first.fits(other)
            if types or shapes:
                yield ensemble.finding(
                    f"The tensor {name} has two {'types' if types else 'shapes'}: {first.described} and "
                    f"{other.described}.",
                    "Write the same in both files.",
                )
                break


@model_rule("ensemble-batch", "batches fit every step", of_role(ENSEMBLE), stops=True)
def larger_batches(repository: Repository, ensemble: ModelFolder) -> Iterator[Finding]:
    own = ensemble.config.max_batch_size
    for model in {model.name: model for _, model in _steps(repository, ensemble)}.values():
        accepted = model.config.max_batch_size
        if accepted < own:
            yield ensemble.finding(
                f"It accepts batches of {own}, and its step {model.name} accepts {accepted}.",
                f"Set max_batch_size to the same number in all models, at most {accepted} in {ensemble.name}.",
            )


@model_rule("ensemble-policy", "it streams only if a step does", of_role(ENSEMBLE), severity="warning")
def own_policy(repository: Repository, ensemble: ModelFolder) -> Iterator[Finding]:
    steps = [model for _, model in _steps(repository, ensemble)]
    if ensemble.decoupled and steps and not any(model.decoupled for model in steps):
        yield ensemble.finding(
            "It sets decoupled: true, but none of its steps is decoupled.",
            "Remove model_transaction_policy from the ensemble, and set it in the core model.",
        )


def _steps(repository: Repository, ensemble: ModelFolder) -> Iterator[tuple[Any, ModelFolder]]:
    for step in ensemble.config.ensemble_scheduling.step:
        if step.model_name in repository.models:
            yield step, repository.models[step.model_name]


def _tensors(repository: Repository, ensemble: ModelFolder) -> dict[str, list[_End]]:
    """Return a map of ensemble tensors to their ends.

    It is empty while a step's model is missing or unreadable, which another rule reports.
    """
    if any(step.model_name not in repository.models for step in ensemble.config.ensemble_scheduling.step):
        return {}
    found: dict[str, list[_End]] = defaultdict(list)
    for tensor in ensemble.config.input:
        found[tensor.name].append(_End(model=ensemble, tensor=tensor, makes=True))
    for tensor in ensemble.config.output:
        found[tensor.name].append(_End(model=ensemble, tensor=tensor, makes=False))
    for step, model in _steps(repository, ensemble):
        inputs = {tensor.name: tensor for tensor in model.config.input}
        outputs = {tensor.name: tensor for tensor in model.config.output}
        for mapped, declared, makes in ((step.input_map, inputs, False), (step.output_map, outputs, True)):
            for name, target in mapped.items():
                if name in declared:
                    found[target].append(_End(model=model, tensor=declared[name], makes=makes))
    return found
