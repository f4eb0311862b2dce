"""The supported runtimes, the memory of their engines on this machine, and smaller steps that fit it.

One file for each runtime, one line each in `RUNTIMES`. A step is `max_batch_size` and `max_num_tokens`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from trtserve.artifacts.engine_config import EngineConfig
from trtserve.errors import TrtserveError, UsageError
from trtserve.executor.loaders import embedded_runtime
from trtserve.executor.openvino.runtime import OpenvinoRuntime
from trtserve.executor.torch import runtime as torch
from trtserve.executor.vllm.installation import find_installation
from trtserve.executor.vllm.runtime import VllmRuntime
from trtserve.host.gpus import list_gpus
from trtserve.nvidia.releases.installed import has_engine_path, installed
from trtserve.nvidia.tensorrt_llm import LlmapiRuntime, TensorrtLlmRuntime
from trtserve.progress import SILENT, Progress
from trtserve.specs import RuntimeName
from trtserve.specs.build import DeviceName
from trtserve.specs.runtime import CPU_LIMITS, EngineNeeds, Requirement, Runtime

RUNTIMES: dict[str, Runtime] = {
    "tensorrt_llm": TensorrtLlmRuntime(),
    "llmapi": LlmapiRuntime(),
    "torch": torch.TorchRuntime(),
    "vllm": VllmRuntime(),
    "openvino": OpenvinoRuntime(),
}

CPU_RUNTIME: RuntimeName = "openvino"  # what `auto` means on a machine without NVIDIA GPUs

_NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")


def choose_runtime(name: RuntimeName, progress: Progress = SILENT, *, container: str | None = None) -> Runtime:
    """Return the runtime called `name`; `auto` picks what this machine (or the `container`) supports.

    Raises UsageError for a container with a runtime that uses nothing in it.
    """
    if name != "auto":
        if container is not None and "tensorrt_llm" not in RUNTIMES[name].requirements:
            raise UsageError(
                f"--container runs NVIDIA's tools, which the {name} runtime does not use.",
                hint="Omit --container, or use --runtime tensorrt_llm.",
            )
        return RUNTIMES[name]
    if container is not None:
        chosen, reason = "tensorrt_llm", f"the container {container} has it"
    else:
        chosen, reason = automatic_runtime()
    progress.step(f"Runtime: {chosen} ({reason})")
    return RUNTIMES[chosen]


def runs_on_cpu(name: str | None, device: DeviceName | None = None) -> bool:
    """Return whether the runtime `name` runs engines in main memory, when asked for `device`.

    False for None and unknown names.
    """
    return name in RUNTIMES and RUNTIMES[str(name)].device(device) == "cpu"


def runtimes_with(requirement: Requirement) -> frozenset[str]:
    """Return the names of the runtimes that need this of a machine."""
    return frozenset(name for name, runtime in RUNTIMES.items() if requirement in runtime.requirements)


def automatic_runtime() -> tuple[str, str]:
    """Return the runtime that `auto` picks on this machine, and the reason."""
    if not has_nvidia_gpu():
        return CPU_RUNTIME, "no NVIDIA GPU on this machine"
    found = installed()
    if found is None:
        cuda = torch.cuda_version()
        if cuda is None and (own := _vllm_for_gpus()) is not None:
            return (
                "vllm",
                f"an NVIDIA GPU and vLLM {own} on this machine, and neither TensorRT-LLM nor PyTorch with CUDA",
            )
        if cuda is None:
            return CPU_RUNTIME, "this machine has an NVIDIA GPU, but neither TensorRT-LLM nor PyTorch with CUDA"
        return "torch", f"an NVIDIA GPU and PyTorch with CUDA {cuda} on this machine, and no TensorRT-LLM"
    what = f"an NVIDIA GPU and TensorRT-LLM {found.version} on this machine"
    if not has_engine_path(found.release):
        return "llmapi", f"{what}, which has no engines any more"
    return "tensorrt_llm", what


def _vllm_for_gpus() -> str | None:
    """Return the version of the vLLM that serves here, or None when there is none for GPUs."""
    try:
        found = find_installation()
    except TrtserveError:
        return None
    return None if found is None or found.on_cpu else found.version


def has_nvidia_gpu() -> bool:
    """Return whether NVIDIA's driver lists a GPU, in /proc or through nvidia-smi (WSL, sandboxes)."""
    return (_NVIDIA_GPUS.is_dir() and any(_NVIDIA_GPUS.iterdir())) or bool(list_gpus())


_FEWEST_TOKENS = 256  # fewer tokens only slow down prompts


def usual_steps(batch: int, tokens: int, *, beams: int = 1) -> Iterator[tuple[int, int]]:
    """Return smaller (max_batch_size, max_num_tokens) in powers of two that cost no speed, closest first.

    Tokens shrink first; the batch shrinks only when it requires that many tokens.
    """
    for fewer in _powers_below(tokens, max(CPU_LIMITS.max_num_tokens, batch * beams)):
        yield batch, fewer
    for rows in _powers_below(batch, CPU_LIMITS.max_batch_size):
        yield rows, min(tokens, max(CPU_LIMITS.max_num_tokens, rows * beams))


def smallest_step(batch: int, tokens: int, *, beams: int = 1) -> tuple[int, int]:
    """Return the limits with the least memory that still accept every request the engine accepts."""
    rows = min(batch, CPU_LIMITS.max_batch_size)
    return rows, min(tokens, max(_FEWEST_TOKENS, rows * beams))


def step_flags(asked: tuple[int, int], step: tuple[int, int]) -> str:
    """Return the options of `build` and `import` that set `step`, or "" when it is unchanged."""
    named = zip(("--max-batch-size", "--max-num-tokens"), asked, step, strict=True)
    return " ".join(f"{flag} {value}" for flag, before, value in named if value != before)


def engine_needs_of(config: EngineConfig) -> EngineNeeds:
    """Return the memory that an existing engine needs, from its `config.json`; 0 for one on GPUs."""
    return RUNTIMES[str(embedded_runtime(config))].memory_of(config)


def draft_memory(config: EngineConfig, kv_tokens: int | None) -> int:
    """Return the memory of a draft model's process, with `kv_tokens` of cache, or one sequence's."""
    needs = engine_needs_of(config)
    return needs.serving + (kv_tokens or config.build.max_seq_len) * needs.kv_per_token


def fitting_step(engine: EngineConfig, room: int) -> str | None:
    """Return options with which an engine in main memory needs at most `room` bytes without its cache."""
    asked, beams = (engine.build.max_batch_size, engine.build.max_num_tokens), engine.build.max_beam_width
    for batch, tokens in (*usual_steps(*asked, beams=beams), smallest_step(*asked, beams=beams)):
        if engine_needs_of(engine.with_build(max_batch_size=batch, max_num_tokens=tokens)).serving <= room:
            return step_flags(asked, (batch, tokens)) or None
    return None


def _powers_below(value: int, least: int) -> Iterator[int]:
    """Return powers of two below `value`, largest first, then `least`; nothing when `value` is not larger."""
    power = 1 << (value - 1).bit_length() >> 1 if value > 1 else 0
    while power > least:
        yield power
        power //= 2
    if value > least:
        yield least
