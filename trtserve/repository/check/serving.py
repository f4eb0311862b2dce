"""Rules about how models are served: versions, batches, queues, instances, streaming, and the models that BLS asks."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path

from trtserve.executor.runtimes import runs_on_cpu
from trtserve.repository.check.findings import Finding, Rule
from trtserve.repository.check.repository import LLMAPI, ModelFolder, Repository
from trtserve.repository.profiles import (
    BLS,
    CORE,
    ENSEMBLE,
    MODELS,
    POSTPROCESSING,
    PREPROCESSING,
)

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


def wrong_warmup(repository: Repository) -> Iterator[Finding]:
    for model in repository.models.values():
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


def absent_environments(repository: Repository) -> Iterator[Finding]:
    for model in repository.models.values():
        text = model.parameters.get(_ENVIRONMENT, "")
        if text and not Path(text.replace(_MODEL_FOLDER, str(model.path))).exists():
            yield model.finding(
                f"{_ENVIRONMENT} is {text!r}, which is not on this machine.",
                f"Put the environment into the model's folder, and write {_MODEL_FOLDER}/NAME.tar.gz.",
            )


def mixed_policies(repository: Repository) -> Iterator[Finding]:
    for model in repository.of(BLS):
        core = repository.core_of(model)
        if core is not None and core.role in (CORE, LLMAPI) and core.decoupled != model.decoupled:
            own, other = str(model.decoupled).lower(), str(core.decoupled).lower()
            yield model.finding(
                f"{model.name} has decoupled: {own}, its core model {core.name} {other}: streaming needs it in both.",
                "Make the repository again with --streaming or --no-streaming, which sets both.",
            )


def streaming_tokenizers(repository: Repository) -> Iterator[Finding]:
    for model in repository.of(PREPROCESSING, POSTPROCESSING):
        if model.decoupled:
            yield model.finding(
                f"{model.name} sets decoupled: true, but sends exactly one response per request.",
                "Remove model_transaction_policy from it.",
            )


def large_batches(repository: Repository) -> Iterator[Finding]:
    for model, _ in repository.engines:
        built, own = model.limit("max_batch_size"), model.config.max_batch_size
        if built is not None and own > built:
            yield model.finding(
                f"It accepts batches of {own}; the engine runs {built} requests at a time.",
                f"Set max_batch_size to {built} in all models, or build with --max-batch-size {own}.",
            )


def inner_batches(repository: Repository) -> Iterator[Finding]:
    for model in repository.of(BLS):
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


def without_batches(repository: Repository) -> Iterator[Finding]:
    for model in repository.of(*MODELS):
        if model.config.max_batch_size < 1:
            yield model.finding(
                "max_batch_size is 0: its tensors then lack the batch axis that the other models send.", _SAME_BATCHES
            )


def preferred_batches(repository: Repository) -> Iterator[Finding]:
    for model in repository.models.values():
        largest = model.config.max_batch_size
        for size in model.config.dynamic_batching.preferred_batch_size:
            if not 1 <= size <= largest:
                yield model.finding(
                    f"preferred_batch_size is {size}, and max_batch_size {largest}.",
                    f"Set preferred_batch_size to {largest}.",
                )


def long_delays(repository: Repository) -> Iterator[Finding]:
    for model in repository.models.values():
        delay = model.config.dynamic_batching.max_queue_delay_microseconds
        if delay >= _LONG_DELAY:
            yield model.finding(
                f"max_queue_delay_microseconds is {delay}: a request waits {delay / 1e6:g} s for others.",
                "Set it to 0; the core model batches in flight.",
            )


def wrong_instances(repository: Repository) -> Iterator[Finding]:
    for model in repository.models.values():
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


def uncounted_instances(repository: Repository) -> Iterator[Finding]:
    for model in repository.models.values():
        if any(group.count < 1 for group in model.config.instance_group):
            yield model.finding(
                "An instance_group has no count above 0, and Triton then chooses one.", "Write count: 1, or more."
            )


def engines_loaded_twice(repository: Repository) -> Iterator[Finding]:
    for model in repository.of(CORE):
        if model.instances > 1 and model.core is not None and not model.core.gpu_device_ids:
            yield model.finding(
                f"{model.instances} instances load the engine {model.instances} times, all in the same memory.",
                "Write count: 1 (one instance batches in flight), or give gpu_device_ids a group for each instance.",
            )


def few_bls_instances(repository: Repository) -> Iterator[Finding]:
    for model in repository.of(BLS):
        core = repository.core_of(model)
        if core is None or core.role != CORE or (core.limit("max_batch_size") or 1) < 2 or model.instances > 1:
            continue
        if not model.own or (model.decoupled and model.parameters.get("core_answers") == "pushed"):
            yield model.finding(
                f"One instance of {model.name} serves one {'stream' if model.own else 'request'} at a time; the "
                f"engine runs {core.limit('max_batch_size')}.",
                "Raise the count of its instance_group: trtserve repo --bls-instance-count N",
            )


def wrong_inner_models(repository: Repository) -> Iterator[Finding]:
    for model in repository.of(BLS):
        given, core = model.parameters, repository.core_of(model)
        asked = {key: given.get(key, "") for key in (_DRAFT_KEY, "multimodal_encoders_name")}
        asked[_CORE_KEY] = given.get(_CORE_KEY) or CORE
        if core is None or core.role != LLMAPI:
            for name in (PREPROCESSING, POSTPROCESSING):
                asked[f"{name}_model_name"] = given.get(f"{name}_model_name") or name
        for key, name in asked.items():
            found = repository.models.get(name)
            if name and found is None and name not in repository.unread:
                close = difflib.get_close_matches(name, repository.models, n=1)
                yield model.finding(
                    f"{key} is {name!r}, which is not in the repository.",
                    f"Did you mean {close[0]}?" if close else "Add that model, or remove the parameter.",
                )
            elif found is not None and found.role not in _ROLES.get(key, (found.role,)):
                kind = "this model itself" if found is model else f"a model of the kind {found.role or 'unknown'}"
                yield model.finding(f"{key} is {name!r}, which is {kind}.", "Name a model of the right kind.")
            elif key == _DRAFT_KEY and name and name == asked[_CORE_KEY]:
                yield model.finding(
                    f"The draft model and the target model are the same: {name}.",
                    "Name a smaller model, or remove the parameter.",
                )


RULES = (
    Rule("version-served", unserved_versions, "the versions that a policy or a step asks for exist", stops=True),
    Rule("warmup", wrong_warmup, "warm-up names tensors and files that exist", stops=True),
    Rule("environment", absent_environments, "the Python environment of a model exists"),
    Rule("streaming", mixed_policies, "core and BLS model have one transaction policy"),
    Rule("streaming-tokenizer", streaming_tokenizers, "pre- and postprocessing answer once", stops=True),
    Rule("batch-engine", large_batches, "batches are not larger than the engine's", severity="warning"),
    Rule("batch-inner", inner_batches, "the models that a BLS model asks accept its batches"),
    Rule("batch-none", without_batches, "NVIDIA's models have a batch axis"),
    Rule("batch-preferred", preferred_batches, "preferred batches are possible", stops=True),
    Rule("queue-delay", long_delays, "queues delay requests for less than a second", severity="warning"),
    Rule("instance-kind", wrong_instances, "instances are on processors that exist"),
    Rule("instance-count", uncounted_instances, "the number of instances is given", severity="warning"),
    Rule("instance-engine", engines_loaded_twice, "instances of one engine have their own GPUs", severity="warning"),
    Rule("instance-bls", few_bls_instances, "BLS instances can fill the engine's batch", severity="warning"),
    Rule("inner-model", wrong_inner_models, "the models that a BLS model asks exist and are of the right kind"),
)
