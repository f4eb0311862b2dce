"""Rules about the machine that is to serve: what is installed there, its GPUs and its shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from trtserve.check.repository.findings import Fault, refusal
from trtserve.check.repository.subject import LLMAPI, MachineFacts, Subject
from trtserve.doctor import MINIMUM_SHARED_MEMORY, check_shared_memory, raise_failed
from trtserve.errors import counted
from trtserve.launch.gpus import count_gpus, describe_gpus, gpu_memory, visible_gpu
from trtserve.machine import gibibytes
from trtserve.releases import release_of
from trtserve.releases.installed import has_engine_path, installed
from trtserve.repo.again import remake_command
from trtserve.repo.engine import rank_sizes
from trtserve.runtimes.plan_header import tensorrt_version
from trtserve.triton.core_models import CoreModel
from trtserve.triton.engine_match import Installation, mismatches, rebuild_command
from trtserve.triton.profiles import CORE
from trtserve.triton.server import SHARED_MEMORY


def this_machine(trtllm_version: str | None = None) -> MachineFacts:
    """What is installed here; UsageError for a version that is none."""
    here, gpu = installed(trtllm_version), visible_gpu()
    return MachineFacts(
        installation=Installation(
            tensorrt_llm=here.version if here else None,
            tensorrt=here.tensorrt if here else None,
            sm=gpu.sm if gpu else None,
            gpu=gpu.name if gpu else None,
        ),
        gpus=count_gpus(),
        version=here.version if here else None,
        gpu_bytes=max((each.total for each in gpu_memory()), default=None),
    )


def has_gpu() -> bool:
    """Whether this machine is one that GPU repositories may be served on."""
    return bool(describe_gpus())


def foreign_engines(subject: Subject) -> Iterator[Fault]:
    """Engines were built by what is installed, for this GPU."""
    for model in subject.gpu_engines:
        if subject.here is None or model.core is None:
            continue
        for reason in mismatches(_with_tensorrt(model.core), subject.here.installation):
            entry = (subject.facts.get("core_models") or {}).get(model.name, {})
            again = remake_command(subject.path, model.core) or rebuild_command(model.core, entry.get("built_as"))
            yield Fault(
                model=model.name,
                file=model.core.engine,
                what=f"The engine does not fit this machine: {reason}.",
                fix=f"Build it again here: {again}",
            )


def _with_tensorrt(core: CoreModel) -> CoreModel:
    """`core` with the TensorRT that its engine itself names, where no manifest tells it."""
    first = core.engine / "rank0.engine" if core.engine is not None else None
    found = tensorrt_version(first) if first is not None and first.is_file() else None
    return core if found is None else replace(core, origin={"tensorrt": found, **core.origin})


def no_engine_path(subject: Subject) -> Iterator[Fault]:
    """The installed TensorRT-LLM runs engines."""
    version = subject.here.version if subject.here is not None else None
    if version is None or has_engine_path(release_of(version)):
        return
    for model in subject.gpu_engines:
        yield Fault(
            model=model.name,
            file=model.file,
            what=f"TensorRT-LLM {version} has no TensorRT engines any more.",
            fix="Serve the model with --runtime llmapi, or with an older container.",
        )


def few_gpus(subject: Subject) -> Iterator[Fault]:
    """There is a GPU for each rank."""
    for model in subject.of(CORE, LLMAPI):
        if subject.here is None or model.core is None or model.embedded:
            continue
        devices = {number for group in model.core.gpu_device_ids for number in group}
        wanted = max(model.core.world_size, max(devices, default=-1) + 1)
        if wanted > subject.here.gpus:
            yield Fault(
                model=model.name,
                file=model.file,
                what=f"{model.name} needs {counted(wanted, 'GPU')}, and this machine has {subject.here.gpus}.",
                fix="Serve it where they are, or build the engine for fewer ranks.",
            )


def large_engines(subject: Subject) -> Iterator[Fault]:
    """A rank's engine, which is the least it takes, is not larger than a GPU."""
    memory = subject.here.gpu_bytes if subject.here is not None else None
    for model in subject.gpu_engines:
        assert model.core is not None
        assert model.core.engine is not None
        sizes = {name: size for name, size in rank_sizes(model.core.engine).items() if name.endswith(".engine")}
        largest = max(sizes, key=lambda name: sizes[name], default=None)
        if memory is None or largest is None or sizes[largest] <= memory or model.build.get("weight_streaming"):
            continue
        yield Fault(
            model=model.name,
            file=model.core.engine,
            what=f"{largest} has {gibibytes(sizes[largest])}, and a GPU of this machine {gibibytes(memory)}: it cannot "
            "be loaded, the KV cache not counted.",
            fix="Convert with a larger --tp-size and build again: each rank is smaller then. `trtserve plan` has the "
            "whole need.",
        )


def little_shared_memory(subject: Subject) -> Iterator[Fault]:
    """Every process of a python model finds memory to share with Triton."""
    if subject.here is None:
        return
    stubs = sum(model.instances for model in subject.models.values() if model.config.backend == "python")
    found = check_shared_memory(SHARED_MEMORY, least=MINIMUM_SHARED_MEMORY + 2**20 * stubs)
    if (error := refusal(partial(raise_failed, [found]))) is not None:
        yield Fault(file=subject.path, what=error.message, fix=error.hint or "")
