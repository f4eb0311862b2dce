"""This machine's GPUs, for plans that name no other."""

from __future__ import annotations

from trtserve.host.gpus import list_gpus, visible_devices, visible_gpu
from trtserve.pipeline.planner.gpus import Gpu


def own_gpu(ranks: int) -> Gpu | None:
    """Return the GPU with the least free memory among the first `ranks` visible ones, or None without nvidia-smi.

    The ranks take the first GPUs in $CUDA_VISIBLE_DEVICES.
    """
    gpu, devices = visible_gpu(), visible_devices()
    if gpu is None or not devices:
        return None
    taken = [each.free for each in list_gpus() if each.memory and each.index in devices[:ranks]]
    if not taken:
        return None
    sm = int(float(gpu.capability) * 10)
    return Gpu(name=f"this machine's {gpu.name}", memory=min(taken), sm=sm, here=len(devices))
