"""Whether engines fit the memory that their GPUs have free, before anything is loaded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from trtserve.errors import MemoryLimitError
from trtserve.launch.gpus import GpuMemory, gpu_memory, visible_devices
from trtserve.machine import gibibytes
from trtserve.specs import ServerSpec
from trtserve.start.plan import Plan
from trtserve.triton.core_models import CoreModel


def require_gpu_memory(plan: Plan, spec: ServerSpec) -> None:
    """MemoryLimitError when the engine files of one GPU's ranks are larger than its free memory.

    That is the least they take: the KV cache and the values between operations come on top of it. What nvidia-smi does
    not tell (no driver, partitions of a GPU) is not judged.
    """
    free = {gpu.index: gpu for gpu in gpu_memory()}
    visible = visible_devices() or ()
    placed: dict[int, list[tuple[CoreModel, int]]] = defaultdict(list)
    for device, core, rank in _placed(plan, spec, visible):
        placed[device].append((core, rank))
    for device, ranks in sorted(placed.items()):
        if device in free:
            _require(free[device], ranks)


def _require(gpu: GpuMemory, ranks: list[tuple[CoreModel, int]]) -> None:
    needed = sum(_size(core, rank) for core, rank in ranks)
    if needed <= gpu.free:
        return
    words = ", ".join(f"rank {rank} of {core.name} {gibibytes(_size(core, rank))}" for core, rank in ranks)
    raise MemoryLimitError(
        f"GPU {gpu.index} has {gibibytes(gpu.free)} of {gibibytes(gpu.total)} free; the engines alone take "
        f"{gibibytes(needed)} of it ({words}), the KV cache not counted.",
        hint=_advice(gpu, ranks, needed),
    )


def _advice(gpu: GpuMemory, ranks: list[tuple[CoreModel, int]], needed: int) -> str:
    if needed <= gpu.total:
        return "End what uses the GPU (nvidia-smi names it), or choose other GPUs with --gpus."
    if len(ranks) > 1:
        return "Give the models GPUs of their own: gpu_device_ids of each, and --multi-model."
    ((core, _),) = ranks
    size = core.world_size
    while sum(_sizes(core)) > size * gpu.total:
        size *= 2
    return (
        f"{size} ranks would hold it: trtserve start --world-size {size} makes them of an import, "
        f"`trtserve convert --tp-size {size}` and `build` of any model. `trtserve plan` has the whole need."
    )


def _placed(plan: Plan, spec: ServerSpec, visible: Sequence[int]) -> Iterator[tuple[int, CoreModel, int]]:
    """GPU, model and rank of every rank of every instance whose engine is here."""
    models = [core for core in plan.served.core_models if core.engine is not None and not _streams(core)]
    each = plan.served.world_size
    for number in range(1 if spec.multi_model else spec.instances):
        own = list(spec.gpus or visible)
        own = own if spec.multi_model or spec.instances == 1 else own[number * each : (number + 1) * each]
        for core in models:
            for group in core.gpu_device_ids or (tuple(range(core.world_size)),):
                yield from ((own[device], core, rank) for rank, device in enumerate(group) if device < len(own))


def _streams(core: CoreModel) -> bool:
    """Whether the engine may leave weights in the memory of the host."""
    return bool((core.config.get("build_config") or {}).get("weight_streaming"))


def _sizes(core: CoreModel) -> list[int]:
    return [_size(core, rank) for rank in range(core.world_size)]


def _size(core: CoreModel, rank: int) -> int:
    path = None if core.engine is None else core.engine / f"rank{rank}.engine"
    return path.stat().st_size if path is not None and path.is_file() else 0
