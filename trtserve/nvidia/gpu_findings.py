"""What may be wrong with GPUs for a model or an engine, in the words of `doctor`, `check`, `plan` and `build`."""

from __future__ import annotations

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.quantized import GPTQ, require_gpu_sm
from trtserve.errors import UnsupportedModelError
from trtserve.host.machine import format_bytes
from trtserve.nvidia.releases import RELEASES
from trtserve.nvidia.releases.containers import containers_of, kernels_for

FIRST_FP8 = 89  # compute capability × 10 from which GPUs have FP8 arithmetic
FIRST_BFLOAT16 = 80  # compute capability × 10 from which GPUs have bfloat16 arithmetic


def capability_words(sm: int) -> str:
    """Write a compute capability: 89 → 8.9, 120 → 12.0."""
    return f"{sm // 10}.{sm % 10}"


def architecture_words(capability: str) -> str:
    """Name the architecture of a compute capability, where it is known."""
    row = kernels_for(capability)
    return f"compute capability {capability}" if row is None else f"{row.architecture} ({capability})"


def missing_fp8(config: CheckpointConfig, gpu: str, sm: int, *, cache: bool = False) -> str | None:
    """Return that a kind of GPU lacks the FP8 arithmetic of a checkpoint or of an FP8 KV `cache`, or None."""
    weights = str(config.quantization.algorithm).startswith("FP8")
    if sm >= FIRST_FP8 or not (weights or cache):
        return None
    return _too_old("FP8 weights need" if weights else "An FP8 KV cache needs", FIRST_FP8, gpu, sm)


def missing_arithmetic(config: CheckpointConfig, gpu: str, sm: int, *, cache: bool = False) -> str | None:
    """Return why a kind of GPU cannot calculate with a checkpoint's numbers, or None; `cache` as in `missing_fp8`."""
    if (problem := missing_fp8(config, gpu, sm, cache=cache)) is not None:
        return problem
    if config.dtype == "bfloat16" and sm < FIRST_BFLOAT16:
        return _too_old("bfloat16 needs", FIRST_BFLOAT16, gpu, sm)
    if config.quantization.algorithm == GPTQ:
        try:
            require_gpu_sm(sm)
        except UnsupportedModelError as error:
            return error.message
    return None


def _too_old(what: str, least: int, gpu: str, sm: int) -> str:
    return f"{what} a GPU of compute capability {capability_words(least)} or later; {gpu} has {capability_words(sm)}."


def kernels_note(gpu: str, capability: str) -> str | None:
    """Return which releases have kernels for a GPU, or None when all do or it is unknown."""
    row = kernels_for(capability)
    if row is None or all(row.within(release) for release in RELEASES):
        return None
    which = f"until {row.until}, and by none later" if row.until else f"from {row.since} on"
    return f"{gpu} ({row.architecture}) is supported by TensorRT-LLM {which}"


def kernels_fix(capability: str) -> str:
    """Say which release to use for a GPU that another one has no kernels for."""
    row = kernels_for(capability)
    if row is None:
        return "Use a newer GPU, or --runtime openvino."
    if row.until is not None:
        last = containers_of(row.until)[-1]
        return f"Use TensorRT-LLM {row.until} at most (container {last.tag}), a newer GPU, or --runtime openvino."
    return f"Use TensorRT-LLM {row.since} or newer (container {containers_of(row.since)[0].tag})."


def larger_than_a_gpu(subject: str, size: int, memory: int) -> str | None:
    """Return that `subject`, the weights of a rank, is larger than the largest GPU here, or None."""
    if size <= memory:
        return None
    return (
        f"{subject} has {format_bytes(size)} of weights; the largest GPU of this machine has {format_bytes(memory)} of "
        "memory."
    )
