"""What a plan for GPUs says beside sizes: what a conversion for them needs, and what their engines cannot do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trtserve.architectures.gemma3 import engine_problem
from trtserve.architectures.kernel_layout import HOPPER
from trtserve.architectures.quantized import GPTQ, quant_algo
from trtserve.capacity.fitting import GpuFit
from trtserve.capacity.gpus import Gpu
from trtserve.errors import counted
from trtserve.releases import RELEASES
from trtserve.releases.gpus import kernels_for


def gpu_notes(config: Mapping[str, Any], asked: GpuFit, gpu: Gpu) -> Iterator[str]:
    """Notes on a checkpoint with this config and the GPUs that it is planned for."""
    ranks = asked.tp_size * asked.pp_size
    if gpu.here is not None and gpu.here < ranks:
        yield f"{ranks} ranks; {counted(gpu.here, 'GPU')} can be seen"
    # The order of 4-bit weights belongs to a generation of GPUs; that of Ampere is the one that is taken else.
    if quant_algo(config) == GPTQ and gpu.sm is not None and gpu.sm >= HOPPER:
        yield f"convert with --gpu-sm {gpu.sm}, which the order of 4-bit weights depends on"
    if problem := engine_problem(config):
        yield f"{problem}: take --runtime llmapi"
    if note := release_note(gpu):
        yield note


def release_note(gpu: Gpu) -> str | None:
    """Which releases have kernels for a GPU; None when all have."""
    row = kernels_for(f"{gpu.sm // 10}.{gpu.sm % 10}") if gpu.sm is not None else None
    if row is None or all(row.within(release) for release in RELEASES):
        return None
    which = f"until {row.until}, and by none later" if row.until else f"from {row.since} on"
    return f"{gpu.name} ({row.architecture}) is supported by TensorRT-LLM {which}"
