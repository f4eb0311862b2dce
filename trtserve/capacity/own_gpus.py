"""The GPUs of this machine, for plans that name no other."""

from __future__ import annotations

from trtserve.capacity.gpus import Gpu
from trtserve.launch.gpus import gpu_memory, visible_devices, visible_gpu


def own_gpu(ranks: int) -> Gpu | None:
    """The one with the least free memory of those that so many ranks would take; None where nvidia-smi tells none.

    The ranks take the first GPUs that $CUDA_VISIBLE_DEVICES shows.
    """
    gpu, devices = visible_gpu(), visible_devices()
    if gpu is None or not devices:
        return None
    taken = [memory.free for memory in gpu_memory() if memory.index in devices[:ranks]]
    if not taken:
        return None
    sm = int(float(gpu.sm) * 10)
    return Gpu(name=f"this machine's {gpu.name}", memory=min(taken), sm=sm, here=len(devices))
