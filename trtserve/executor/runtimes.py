"""The supported runtimes: one module each, one line each in `RUNTIMES`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trtserve.errors import UsageError
from trtserve.executor.openvino import runtime as openvino
from trtserve.executor.torch import runtime as torch
from trtserve.host.gpus import list_gpus
from trtserve.nvidia import llmapi, tensorrt_llm
from trtserve.nvidia.releases.installed import has_engine_path, installed
from trtserve.progress import SILENT, Progress
from trtserve.specs import RuntimeName
from trtserve.specs.runtime import EnginePlan, Limits, Runtime

__all__ = [
    "CPU_RUNTIME",
    "RUNTIMES",
    "EnginePlan",
    "Limits",
    "Runtime",
    "automatic_runtime",
    "choose_runtime",
    "runs_on_cpu",
]

RUNTIMES: dict[str, Runtime[Any]] = {
    tensorrt_llm.NAME: tensorrt_llm,
    llmapi.NAME: llmapi,
    torch.NAME: torch,
    openvino.NAME: openvino,
}

CPU_RUNTIME: RuntimeName = "openvino"
"""What `auto` means on a machine without NVIDIA GPUs."""

_NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")


def choose_runtime(name: RuntimeName, progress: Progress = SILENT, *, container: str | None = None) -> Runtime[Any]:
    """Return the runtime called `name`; `auto` picks what this machine (or the `container`) supports.

    Raises UsageError for an embedded runtime in a container.
    """
    if container is not None and name != "auto" and RUNTIMES[name].EMBEDDED:
        raise UsageError(
            f"--container runs NVIDIA's tools, which the {name} runtime does not use.",
            hint="Omit --container, or use --runtime tensorrt_llm.",
        )
    if container is not None and name == "auto":
        progress.step(f"Runtime: {tensorrt_llm.NAME} (the container {container} has it)")
        return RUNTIMES[tensorrt_llm.NAME]
    if name != "auto":
        return RUNTIMES[name]
    chosen, reason = automatic_runtime()
    progress.step(f"Runtime: {chosen} ({reason})")
    return RUNTIMES[chosen]


def runs_on_cpu(name: str | None, device: str | None = None) -> bool:
    """Return whether the runtime `name` runs engines in main memory, when asked for `device`.

    False for None and unknown names.
    """
    runtime = RUNTIMES.get(str(name))
    return runtime is not None and (device == "cpu" or not runtime.NEEDS_GPU)


def automatic_runtime() -> tuple[str, str]:
    """Return the runtime that `auto` picks on this machine, and the reason."""
    if not has_nvidia_gpu():
        return CPU_RUNTIME, "no NVIDIA GPU on this machine"
    found = installed()
    if found is None:
        cuda = torch.cuda_version()
        if cuda is None:
            return CPU_RUNTIME, "this machine has an NVIDIA GPU, but neither TensorRT-LLM nor PyTorch with CUDA"
        return torch.NAME, f"an NVIDIA GPU and PyTorch with CUDA {cuda} on this machine, and no TensorRT-LLM"
    what = f"an NVIDIA GPU and TensorRT-LLM {found.version} on this machine"
    if not has_engine_path(found.release):
        return llmapi.NAME, f"{what}, which has no engines any more"
    return tensorrt_llm.NAME, what


def has_nvidia_gpu() -> bool:
    """Return whether NVIDIA's driver lists a GPU, in /proc or through nvidia-smi (WSL, sandboxes)."""
    return (_NVIDIA_GPUS.is_dir() and any(_NVIDIA_GPUS.iterdir())) or bool(list_gpus())
