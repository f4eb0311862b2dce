"""Rules about the configuration of each model: its parameters, and how it is served."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from trtserve.errors import did_you_mean
from trtserve.executor.loaders import is_embedded_runtime
from trtserve.executor.runtimes import runs_on_cpu
from trtserve.executor.vllm.arguments import BACKEND
from trtserve.nvidia.releases import RELEASES
from trtserve.nvidia.releases.options import TEMPLATE_TOOL, old_option
from trtserve.repository.check.repository import LLMAPI, ModelFolder, Repository
from trtserve.repository.check.rules import Finding, every_model, model_rule, of_role, rule, with_engine
from trtserve.repository.engines import startup_refusal
from trtserve.repository.profiles import (
    BLS,
    CORE,
    ENSEMBLE,
    MODELS,
    POSTPROCESSING,
    PREPROCESSING,
    Parameter,
    added_parameters,
    parameters_of,
    read_classes,
    refused_parameter,
)
from trtserve.repository.tables import releases_text

_ENVIRONMENT, _MODEL_FOLDER = "EXECUTION_ENV_PATH", "$$TRITON_MODEL_DIRECTORY"
_LONG_DELAY = 1_000_000  # microseconds
_CORE_KEY, _DRAFT_KEY = "tensorrt_llm_model_name", "tensorrt_llm_draft_model_name"
# Roles of the models that a BLS model asks; others do not take its tensors.
_ROLES = {
    _CORE_KEY: (CORE, LLMAPI),
    _DRAFT_KEY: (CORE,),
    "preprocessing_model_name": (PREPROCESSING,),
    "postprocessing_model_name": (POSTPROCESSING,),
}
_SAME_BATCHES = "Set max_batch_size to the same number in all models."


@rule("version-served", "the versions that a policy or a step asks for exist", stops=True)
def unserved_versions(repository: Repository) -> Iterator[Finding]:
    for model in repository.models.values():
        if model.versions and not _served(model):
            wanted = ", ".join(map(str, model.config.version_policy.specific.versions))
            yield model.finding(
                f"version_policy serves version {wanted}, which has no folder.",
                f"Remove version {wanted} from version_policy.",
            )
    for ensemble in repository.of(ENSEMBLE):
        for step in ensemble.config.ensemble_scheduling.step:
            asked = repository.models.get(step.model_name)
            if asked is None or step.model_version < 0 or not asked.versions:
                continue
            served = _served(asked)
            if step.model_version not in served:
                yield ensemble.finding(
                    f"A step asks for version {step.model_version} of {asked.name}; served are "
                    f"{', '.join(map(str, sorted(served))) or 'none'}.",
                    "Write model_version: -1.",
                )


def _served(model: ModelFolder) -> set[int]:
    """The versions that Triton loads: the newest one unless a policy names others."""
    present = sorted(int(path.name) for path in model.versions if int(path.name) > 0)
    policy = model.config.version_policy
    if policy.HasField("specific"):
        return set(present) & set(policy.specific.versions)
    return set(present if policy.HasField("all") else present[-max(policy.latest.num_versions, 1) :])


@model_rule("warmup", "warm-up names tensors and files that exist", every_model, stops=True)
def wrong_warmup(_: Repository, model: ModelFolder) -> Iterator[Finding]:
    declared = {tensor.name for tensor in model.config.input}
    for sample in model.config.model_warmup:
        for name, tensor in sorted(sample.inputs.items()):
            if name not in declared:
                yield model.finding(f"model_warmup names the undeclared input {name}.", "Correct the name.")
            elif tensor.input_data_file and not (model.path / "warmup" / tensor.input_data_file).is_file():
                yield model.finding(
                    f"model_warmup reads warmup/{tensor.input_data_file}, which does not exist.",
                    f"Put it into {model.name}/warmup, or remove the sample.",
                )


@model_rule("environment", "the Python environment of a model exists", every_model)
def absent_environments(_: Repository, model: ModelFolder) -> Iterator[Finding]:
    text = model.parameters.get(_ENVIRONMENT, "")
    if text and not Path(text.replace(_MODEL_FOLDER, str(model.path))).exists():
        yield model.finding(
            f"{_ENVIRONMENT} is {text!r}, which is not on this machine.",
            f"Put the environment into the model's folder, and write {_MODEL_FOLDER}/NAME.tar.gz.",
        )


@model_rule("streaming", "core and BLS model have one transaction policy", of_role(BLS))
def mixed_policies(repository: Repository, model: ModelFolder) -> Iterator[Finding]:
    core = repository.core_of(model)
    if core is not None and core.role in (CORE, LLMAPI) and core.decoupled != model.decoupled:
        own, other = str(model.decoupled).lower(), str(core.decoupled).lower()
        yield model.finding(
            f"{model.name} has decoupled: {own}, its core model {core.name} {other}: streaming needs it in both.",
            "Make the repository again with --streaming or --no-streaming, which sets both.",
        )


@model_rule(
    "streaming-tokenizer", "pre- and postprocessing answer once", of_role(PREPROCESSING, POSTPROCESSING), stops=True
)
def streaming_tokenizers(_: Repository, model: ModelFolder) -> Iterator[Finding]:
    if model.decoupled:
        yield model.finding(
            f"{model.name} sets decoupled: true, but sends exactly one response per request.",
            "Remove model_transaction_policy from it.",
        )


@model_rule("batch-engine", "batches are not larger than the engine's", with_engine, severity="warning")
def large_batches(_: Repository, model: ModelFolder) -> Iterator[Finding]:
    built, own = model.limit("max_batch_size"), model.config.max_batch_size
    if built is not None and own > built:
        yield model.finding(
            f"It accepts batches of {own}; the engine runs {built} requests at a time.",
            f"Set max_batch_size to {built} in all models, or build with --max-batch-size {own}.",
        )


@model_rule("batch-inner", "the models that a BLS model asks accept its batches", of_role(BLS))
def inner_batches(repository: Repository, model: ModelFolder) -> Iterator[Finding]:
    preprocessing = repository.models.get(model.parameters.get("preprocessing_model_name") or PREPROCESSING)
    for inner in (repository.core_of(model), preprocessing):
        if inner is None:
            continue
        accepted = 1 if inner.role == LLMAPI else inner.config.max_batch_size
        if accepted < model.config.max_batch_size:
            yield model.finding(
                f"It accepts batches of {model.config.max_batch_size}; {inner.name}, which it asks, accepts "
                f"{accepted}.",
                _SAME_BATCHES,
            )


@model_rule("batch-none", "NVIDIA's models have a batch axis", of_role(*MODELS))
def without_batches(_: Repository, model: ModelFolder) -> Iterator[Finding]:
    if model.config.max_batch_size < 1:
        yield model.finding(
            "max_batch_size is 0: its tensors then lack the batch axis that the other models send.", _SAME_BATCHES
        )


@model_rule("batch-preferred", "preferred batches are possible", every_model, stops=True)
def preferred_batches(_: Repository, model: ModelFolder) -> Iterator[Finding]:
    largest = model.config.max_batch_size
    for size in model.config.dynamic_batching.preferred_batch_size:
        if not 1 <= size <= largest:
            yield model.finding(
                f"preferred_batch_size is {size}, and max_batch_size {largest}.",
                f"Set preferred_batch_size to {largest}.",
            )


@model_rule("queue-delay", "queues delay requests for less than a second", every_model, severity="warning")
def long_delays(_: Repository, model: ModelFolder) -> Iterator[Finding]:
    delay = model.config.dynamic_batching.max_queue_delay_microseconds
    if delay >= _LONG_DELAY:
        yield model.finding(
            f"max_queue_delay_microseconds is {delay}: a request waits {delay / 1e6:g} s for others.",
            "Set it to 0; the core model batches in flight.",
        )


@model_rule("instance-kind", "instances are on processors that exist", every_model)
def wrong_instances(repository: Repository, model: ModelFolder) -> Iterator[Finding]:
    kinds = model.config.DESCRIPTOR.fields_by_name["instance_group"].message_type.enum_types_by_name["Kind"]
    for group in model.config.instance_group:
        kind = kinds.values_by_number[group.kind].name
        if kind == "KIND_CPU" and group.gpus:
            yield model.finding("An instance_group of KIND_CPU names gpus, which Triton refuses.", "Remove gpus.")
        elif kind == "KIND_GPU" and runs_on_cpu(repository.part(model.name).get("runtime")):
            yield model.finding(
                "An instance_group has KIND_GPU; this repository is for CPUs, and Triton refuses such an instance "
                "on a machine without GPUs.",
                "Write kind: KIND_CPU.",
            )


@model_rule("instance-count", "the number of instances is given", every_model, severity="warning")
def uncounted_instances(_: Repository, model: ModelFolder) -> Iterator[Finding]:
    # NVIDIA's own repositories of the backend vllm have none, and get one.
    if model.config.backend != BACKEND and any(group.count < 1 for group in model.config.instance_group):
        yield model.finding(
            "An instance_group has no count above 0, and Triton then chooses one.", "Write count: 1, or more."
        )


@model_rule("instance-engine", "instances of one engine have their own GPUs", of_role(CORE), severity="warning")
def engines_loaded_twice(_: Repository, model: ModelFolder) -> Iterator[Finding]:
    if model.instances > 1 and model.core is not None and not model.core.gpu_device_ids:
        yield model.finding(
            f"{model.instances} instances load the engine {model.instances} times, all in the same memory.",
            "Write count: 1 (one instance batches in flight), or give gpu_device_ids a group for each instance.",
        )


@model_rule("instance-bls", "BLS instances can fill the engine's batch", of_role(BLS), severity="warning")
def few_bls_instances(repository: Repository, model: ModelFolder) -> Iterator[Finding]:
    core = repository.core_of(model)
    if core is None or core.role != CORE or (core.limit("max_batch_size") or 1) < 2 or model.instances > 1:
        return
    if not model.own or (model.decoupled and model.parameters.get("core_answers") == "pushed"):
        yield model.finding(
            f"One instance of {model.name} serves one {'stream' if model.own else 'request'} at a time; the "
            f"engine runs {core.limit('max_batch_size')}.",
            "Raise the count of its instance_group: trtserve repo --bls-instance-count N",
        )


@model_rule("inner-model", "the models that a BLS model asks exist and are of the right kind", of_role(BLS))
def wrong_inner_models(repository: Repository, model: ModelFolder) -> Iterator[Finding]:
    given, core = model.parameters, repository.core_of(model)
    asked = {key: given.get(key, "") for key in (_DRAFT_KEY, "multimodal_encoders_name")}
    asked[_CORE_KEY] = given.get(_CORE_KEY) or CORE
    if core is None or core.role != LLMAPI:
        for name in (PREPROCESSING, POSTPROCESSING):
            asked[f"{name}_model_name"] = given.get(f"{name}_model_name") or name
    for key, name in asked.items():
        found = repository.models.get(name)
        if name and found is None and name not in repository.unread:
            yield model.finding(
                f"{key} is {name!r}, which is not in the repository.",
                did_you_mean(name, repository.models, "Add that model, or remove the parameter."),
            )
        elif found is not None and found.role not in _ROLES.get(key, (found.role,)):
            kind = "this model itself" if found is model else f"a model of the kind {found.role or 'unknown'}"
            yield model.finding(f"{key} is {name!r}, which is {kind}.", "Name a model of the right kind.")
        elif key == _DRAFT_KEY and name and name == asked[_CORE_KEY]:
            yield model.finding(
                f"The draft model and the target model are the same: {name}.",
                "Name a smaller model, or remove the parameter.",
            )


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


@model_rule("parameter-unknown", "the release reads every parameter", every_model, severity="warning")
def unread_parameters(repository: Repository, model: ModelFolder) -> Iterator[Finding]:
    release = repository.parameter_release(model)
    if model.role not in MODELS or release is None:
        return
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
            fix = did_you_mean(key, names, f"Remove {key}.", cutoff=0.7)
            yield model.finding(f"Nothing reads the parameter {key}.", fix)


@model_rule("parameter-value", "every value is valid", every_model)
def wrong_values(repository: Repository, model: ModelFolder) -> Iterator[Finding]:
    for row in _known(repository, model):
        if model.embedded and row.name == "guided_decoding_backend":
            continue  # the embedded executor has its own
        text = model.parameters.get(row.name, "")
        if text and not row.values.accepts(text):
            yield model.finding(
                f"The parameter {row.name} is {text!r}; expected {row.values.expected}.",
                "Correct it: any other text counts as unset, or keeps the model from loading.",
            )


@model_rule("parameter-missing", "mandatory parameters are set", every_model, stops=True)
def missing_parameters(repository: Repository, model: ModelFolder) -> Iterator[Finding]:
    for row in _known(repository, model):
        absent = row.name not in model.parameters
        needs_key = row.needs_key and absent and model.config.backend == "tensorrtllm"
        if (row.required and not model.parameters.get(row.name)) or needs_key:
            yield model.finding(
                f"The parameter {row.name} is {'missing' if absent else 'empty'}; the model does not load without it.",
                f"Set it: {row.meaning}." if row.required else "Add the key; its value may be empty.",
            )


@model_rule("parameter-refused", "the embedded executor supports what is set", every_model, stops=True)
def refused_parameters(repository: Repository, model: ModelFolder) -> Iterator[Finding]:
    reason = refused_parameter(model.parameters, read_classes(model.version))
    embedded = is_embedded_runtime(repository.part(model.name).get("runtime"))
    if reason is None and embedded and model.role == CORE and model.engine.model.vocab_size:
        reason = startup_refusal(
            model.parameters,
            model.engine,
            release=str(repository.parameter_release(model)),
            max_queue_size=model.config.dynamic_batching.default_queue_policy.max_queue_size,
        )
    if reason is not None:
        yield model.finding(reason, "Remove the parameter, or leave its value empty.")
