"""Rules about the machine that will serve: what is installed, its GPUs, and which of them models are given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from trtserve.errors import counted
from trtserve.files import whole_number
from trtserve.host.gpus import count_gpus, list_gpus, visible_gpu
from trtserve.host.machine import MINIMUM_SHARED_MEMORY, SHARED_MEMORY, format_bytes, free_shared_memory
from trtserve.nvidia.engine_files import tensorrt_version
from trtserve.nvidia.gpu_findings import larger_than_a_gpu
from trtserve.nvidia.releases import release_of
from trtserve.nvidia.releases.converters import WORKER
from trtserve.nvidia.releases.installed import has_engine_path, installed
from trtserve.repository.check.repository import LLMAPI, MachineFacts, ModelFolder, Repository
from trtserve.repository.check.rules import Finding, model_rule, of_role, rule
from trtserve.repository.engines import Installation, mismatches, rank_sizes, rebuild_command, remake_command
from trtserve.repository.profiles import CORE
from trtserve.repository.served import Groups


def this_machine(trtllm_version: str | None = None) -> MachineFacts:
    """Describe this machine. Raises UsageError for something that is not a version."""
    here, gpu = installed(trtllm_version), visible_gpu()
    return MachineFacts(
        installation=Installation(
            tensorrt_llm=here.version if here else None,
            tensorrt=here.tensorrt if here else None,
            sm=gpu.capability if gpu else None,
            gpu=gpu.name if gpu else None,
        ),
        gpus=count_gpus(),
        version=here.version if here else None,
        gpu_bytes=max((each.memory for each in list_gpus() if each.memory), default=None),
    )


def has_gpu() -> bool:
    """Return whether this machine could serve GPU repositories."""
    return bool(list_gpus())


@rule("machine-engine", "TensorRT-LLM, TensorRT and GPU are those of the engine", needs="machine")
def foreign_engines(repository: Repository) -> Iterator[Finding]:
    for model, folder in repository.gpu_engines:
        if repository.here is None or model.core is None:
            continue
        first, core = folder / "rank0.engine", model.core
        if first.is_file() and (version := tensorrt_version(first)) is not None:
            core = replace(core, origin={"tensorrt": version, **core.origin})
        for reason in mismatches(core, repository.here.installation):
            built_as = repository.core_entry(model).get("built_as")
            again = remake_command(repository.path, core) or rebuild_command(core, built_as)
            yield model.finding(
                f"The engine does not fit this machine: {reason}.", f"Build it again here: {again}", folder
            )


@rule("machine-release", "the installed TensorRT-LLM runs engines", needs="machine")
def no_engine_path(repository: Repository) -> Iterator[Finding]:
    version = repository.here.version if repository.here is not None else None
    if version is None or has_engine_path(release_of(version)):
        return
    for model, _ in repository.gpu_engines:
        yield model.finding(
            f"TensorRT-LLM {version} has no TensorRT engines any more.",
            "Serve the model with --runtime llmapi, or with an older container.",
        )


@model_rule("machine-gpus", "every rank has a GPU", of_role(CORE, LLMAPI), needs="machine")
def few_gpus(repository: Repository, model: ModelFolder) -> Iterator[Finding]:
    if repository.here is None or model.core is None or model.embedded:
        return
    devices = {number for group in model.core.gpu_device_ids for number in group}
    needed = max(model.core.world_size, max(devices, default=-1) + 1)
    if needed > repository.here.gpus:
        yield model.finding(
            f"{model.name} needs {counted(needed, 'GPU')}, and this machine has {repository.here.gpus}.",
            "Serve it on a machine with as many, or build the engine for fewer ranks.",
        )


@rule("machine-gpu-memory", "no rank's engine is larger than a GPU", needs="machine")
def large_engines(repository: Repository) -> Iterator[Finding]:
    memory = repository.here.gpu_bytes if repository.here is not None else None
    for model, folder in repository.gpu_engines:
        sizes = {name: size for name, size in rank_sizes(folder).items() if name.endswith(".engine")}
        largest = max(sizes, key=lambda name: sizes[name], default=None)
        if memory is None or largest is None or model.engine.build.weight_streaming:
            continue
        if (problem := larger_than_a_gpu(largest, sizes[largest], memory)) is None:
            continue
        yield model.finding(
            problem,
            "Convert with a larger --tp-size and build again, which makes each rank smaller. `trtserve plan` prints "
            "the memory that a model needs.",
            folder,
        )


@rule("machine-memory", "python models have enough shared memory", needs="machine")
def little_shared_memory(repository: Repository) -> Iterator[Finding]:
    if repository.here is None:
        return
    processes = sum(model.instances for model in repository.models.values() if model.config.backend == "python")
    needed, free = MINIMUM_SHARED_MEMORY + 2**20 * processes, free_shared_memory(SHARED_MEMORY)
    if free is None or free < needed:
        found = "which is not writable" if free is None else f"which has {format_bytes(free)} free"
        yield Finding(
            file=repository.path,
            what=f"The Python models need {format_bytes(needed)} of shared memory in {SHARED_MEMORY}, {found}.",
            fix="In Docker: --shm-size=1g.",
        )


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
    nodes = whole_number(model.parameters.get("num_nodes", "")) if key == "gpu_device_ids" else None
    return count * (1 if nodes is None else nodes) == ranks


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
