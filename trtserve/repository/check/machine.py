"""Rules about the machine that will serve: what is installed there, its GPUs and its shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from trtserve.errors import counted
from trtserve.host.gpus import count_gpus, list_gpus, visible_gpu
from trtserve.host.machine import MINIMUM_SHARED_MEMORY, SHARED_MEMORY, format_bytes, free_shared_memory
from trtserve.nvidia.engine_files import tensorrt_version
from trtserve.nvidia.gpu_findings import larger_than_a_gpu
from trtserve.nvidia.releases import release_of
from trtserve.nvidia.releases.installed import has_engine_path, installed
from trtserve.repository.check.repository import LLMAPI, MachineFacts, ModelFolder, Repository
from trtserve.repository.check.rules import Finding, model_rule, of_role, rule
from trtserve.repository.engines import Installation, mismatches, rank_sizes, rebuild_command, remake_command
from trtserve.repository.profiles import CORE


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
