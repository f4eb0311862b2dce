"""Rules about what Triton does when it loads a model: the version it takes, instances, warm-up, axes of batches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from trtserve.check.repository.findings import Fault
from trtserve.check.repository.subject import ModelFolder, Subject
from trtserve.triton.profiles import CORE, ENSEMBLE, MODELS

_AGAIN = "Write it as NVIDIA's template has it, or make the file again with trtserve repo."
_ENVIRONMENT, _OWN_FOLDER = "EXECUTION_ENV_PATH", "$$TRITON_MODEL_DIRECTORY"


def unserved_versions(subject: Subject) -> Iterator[Fault]:
    """A version that the policy chooses is there, and the version that a step asks for is served."""
    for model in subject.models.values():
        if model.versions and not _served(model):
            wanted = ", ".join(map(str, model.config.version_policy.specific.versions))
            yield _fault(model, f"version_policy serves version {wanted}, which has no folder.", "Leave it out.")
    for ensemble in subject.of(ENSEMBLE):
        for step in ensemble.config.ensemble_scheduling.step:
            asked = subject.models.get(step.model_name)
            if asked is None or step.model_version < 0 or not asked.versions:
                continue
            if step.model_version not in (served := _served(asked)):
                told = ", ".join(map(str, sorted(served))) or "none"
                yield _fault(
                    ensemble,
                    f"A step asks for version {step.model_version} of {asked.name}; served is {told}.",
                    "Write model_version: -1.",
                )


def _served(model: ModelFolder) -> set[int]:
    """The versions that Triton loads: the newest one unless a policy says otherwise."""
    there = sorted(int(path.name) for path in model.versions if int(path.name) > 0)
    policy = model.config.version_policy
    if policy.HasField("specific"):
        return set(there) & set(policy.specific.versions)
    if policy.HasField("all"):
        return set(there)
    return set(there[-max(policy.latest.num_versions, 1) :])


def wrong_instances(subject: Subject) -> Iterator[Fault]:
    """Instances are on processors that there are."""
    for model in subject.models.values():
        kinds = model.config.DESCRIPTOR.fields_by_name["instance_group"].message_type.enum_types_by_name["Kind"]
        for group in model.config.instance_group:
            kind = kinds.values_by_number[group.kind].name
            if kind == "KIND_CPU" and group.gpus:
                yield _fault(model, "An instance_group is of KIND_CPU and names gpus, which Triton refuses.", _AGAIN)
            elif kind == "KIND_GPU" and subject.member(model.name).get("runtime") == "openvino":
                yield _fault(
                    model,
                    "An instance_group is of KIND_GPU; this repository is served by the CPU, and Triton refuses such "
                    "an instance on a machine without GPUs.",
                    "Write kind: KIND_CPU.",
                )


def engine_twice(subject: Subject) -> Iterator[Fault]:
    """Instances of one engine have GPUs of their own."""
    for model in subject.of(CORE):
        if model.instances > 1 and model.core is not None and not model.core.gpu_device_ids:
            yield _fault(
                model,
                f"{model.instances} instances load the engine {model.instances} times, all in the same memory.",
                "Write count: 1 (one instance batches in flight), or give gpu_device_ids a group for each.",
            )


def wrong_warmup(subject: Subject) -> Iterator[Fault]:
    """Requests for warming up name tensors and files that are there."""
    for model in subject.models.values():
        declared = {tensor.name for tensor in model.config.input}
        for sample in model.config.model_warmup:
            for name, tensor in sorted(sample.inputs.items()):
                if name not in declared:
                    yield _fault(
                        model, f"model_warmup names the input {name}, which is not declared.", "Correct the name."
                    )
                elif tensor.input_data_file and not (model.path / "warmup" / tensor.input_data_file).is_file():
                    yield _fault(
                        model,
                        f"model_warmup reads warmup/{tensor.input_data_file}, which is not there.",
                        f"Put it into {model.name}/warmup, or leave the sample out.",
                    )


def without_batches(subject: Subject) -> Iterator[Fault]:
    """Models of the chain have the axis of batches, without which their tensors have other shapes."""
    for model in subject.of(*MODELS):
        if model.config.max_batch_size < 1:
            yield _fault(
                model,
                "max_batch_size is 0: tensors then have no axis of batches, and the models of the chain send one.",
                "Set it to 1 or more, to the same number in all models.",
            )


def absent_environments(subject: Subject) -> Iterator[Fault]:
    """The Python environment of a model is there."""
    for model in subject.models.values():
        text = model.parameters.get(_ENVIRONMENT, "")
        if not text or _placed(text, model).exists():
            continue
        yield _fault(
            model,
            f"{_ENVIRONMENT} is {text!r}, which is not on this machine.",
            f"Put the environment beside the model, and name it {_OWN_FOLDER}/NAME.tar.gz.",
        )


def _placed(text: str, model: ModelFolder) -> Path:
    return Path(text.replace(_OWN_FOLDER, str(model.path)))


def _fault(model: ModelFolder, what: str, fix: str) -> Fault:
    return Fault(model=model.name, file=model.file, what=what, fix=fix)
