"""Notes of a GPU plan besides sizes: requirements of the conversion, and limits of the engines."""

from __future__ import annotations

from collections.abc import Iterator

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures.gemma3 import engine_problem
from trtserve.checkpoint.kernel_layout import HOPPER
from trtserve.checkpoint.quantized import GPTQ
from trtserve.errors import counted
from trtserve.nvidia.releases import RELEASES
from trtserve.nvidia.releases.gpus import kernels_for
from trtserve.pipeline.planner.gpu_fit import GpuFit
from trtserve.pipeline.planner.gpus import Gpu


def gpu_notes(config: CheckpointConfig, asked: GpuFit, gpu: Gpu) -> Iterator[str]:
    """Return notes on a checkpoint config and its target GPUs."""
    ranks = asked.tp_size * asked.pp_size
    if gpu.here is not None and gpu.here < ranks:
        yield f"{ranks} ranks; {counted(gpu.here, 'GPU')} can be seen"
    # The layout of 4-bit weights depends on the GPU generation; the default is Ampere's.
    if config.quantization.algorithm == GPTQ and gpu.sm is not None and gpu.sm >= HOPPER:
        yield f"convert with --gpu-sm {gpu.sm}, which the order of 4-bit weights depends on"
    if problem := engine_problem(config):
        yield f"{problem}: take --runtime llmapi"
    if note := release_note(gpu):
        yield note


def release_note(gpu: Gpu) -> str | None:
    """Return which releases have kernels for a GPU, or None when all do."""
    row = kernels_for(f"{gpu.sm // 10}.{gpu.sm % 10}") if gpu.sm is not None else None
    if row is None or all(row.within(release) for release in RELEASES):
        return None
    which = f"until {row.until}, and by none later" if row.until else f"from {row.since} on"
    return f"{gpu.name} ({row.architecture}) is supported by TensorRT-LLM {which}"
