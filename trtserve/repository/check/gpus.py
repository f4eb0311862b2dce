"""Rules about the GPUs and MPI ranks that models are given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from trtserve.errors import counted
from trtserve.nvidia.releases.triton import WORKER
from trtserve.repository.check.repository import LLMAPI, ModelFolder, Repository
from trtserve.repository.check.rules import Finding, rule
from trtserve.repository.core_models import Groups
from trtserve.repository.profiles import CORE


@rule("gpu-groups", "every instance has a group, every rank its own GPU and MPI rank")
def wrong_groups(repository: Repository) -> Iterator[Finding]:
    """Check gpu_device_ids and participant_ids: a group for each instance, in it a different number for each rank."""
    used_ranks: Counter[int] = Counter()
    for model, key, groups in _groups(repository):
        assert model.core is not None
        ranks, numbers = model.core.world_size, Counter(number for group in groups for number in group)
        wrong = next((group for group in groups if not _fits(model, key, len(group), ranks)), None)
        if wrong is not None:
            nodes = f" on num_nodes {model.parameters['num_nodes']}" if "num_nodes" in model.parameters else ""
            yield model.finding(
                f"{key} has the group {','.join(map(str, wrong))} of {len(wrong)} for {counted(ranks, 'rank')}{nodes}.",
                "A group has one number for each rank (tensor × pipeline parallel); with num_nodes, gpu_device_ids are "
                "those of one node.",
            )
        if len(groups) != model.instances:
            yield model.finding(
                f"{key} has {counted(len(groups), 'group')}, and instance_group counts "
                f"{counted(model.instances, 'instance')}.",
                "Make the two numbers equal.",
            )
        repeated = [number for number, count in numbers.items() if count > 1]
        if repeated and model.role != LLMAPI:
            yield model.finding(
                f"{key} names {', '.join(map(str, repeated))} more than once.", "Give each rank its own number."
            )
        if model.core.backend == "python" and len(groups) > 1:
            yield model.finding(
                f"{key} has {len(groups)} groups; the python variant takes one.", "Use the C++ backend for more."
            )
        if key == "participant_ids":
            if 0 in numbers:
                yield model.finding("participant_ids names 0, which is the orchestrator's rank.", "Count from 1.")
            if shared := sorted(number for number in numbers if used_ranks[number]):
                yield model.finding(f"{key} names {shared}, which another model has.", "Give each model its own ranks.")
            used_ranks += numbers


def _fits(model: ModelFolder, key: str, count: int, ranks: int) -> bool:
    """A number for each rank; with num_nodes, TensorRT-LLM counts the GPUs of one node."""
    nodes = model.parameters.get("num_nodes", "")
    return count * int(nodes) == ranks if key == "gpu_device_ids" and nodes.isdigit() else count == ranks


@rule("gpu-shared", "models have the same GPUs or their own")
def shared_gpus(repository: Repository) -> Iterator[Finding]:
    """Models have the same GPUs, as a leader's ranks need, or none in common, as an orchestrator needs."""
    placed = [(model, groups) for model, key, groups in _groups(repository) if key == "gpu_device_ids"]
    for number, (model, groups) in enumerate(placed):
        for other, others in placed[:number]:
            shared = {gpu for group in groups for gpu in group} & {gpu for group in others for gpu in group}
            if shared and groups != others:
                yield model.finding(
                    f"gpu_device_ids of {model.name} and {other.name} share GPU {', '.join(map(str, sorted(shared)))} "
                    "but are not the same: no launch mode can assign them.",
                    "Give each model its own GPUs (--multi-model), or the same ones to both.",
                )


@rule("worker-path", "the worker program of an orchestrator exists", severity="warning")
def absent_workers(repository: Repository) -> Iterator[Finding]:
    for model in repository.of(CORE):
        text = model.parameters.get("executor_worker_path", WORKER)
        if text != WORKER and not repository.located(text, model.name).is_file():
            yield model.finding(
                f"executor_worker_path is {text!r}, which does not exist here.", f"NVIDIA's containers have {WORKER}."
            )


def _groups(repository: Repository) -> Iterator[tuple[ModelFolder, str, Groups]]:
    for model in repository.of(CORE, LLMAPI):
        if model.core is not None and not model.embedded:
            if model.core.gpu_device_ids:
                yield model, "gpu_device_ids", model.core.gpu_device_ids
            if model.core.participant_ids:
                yield model, "participant_ids", model.core.participant_ids
