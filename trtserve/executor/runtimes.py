"""The supported runtimes: one file each, one line each in `RUNTIMES`."""

from __future__ import annotations

from pathlib import Path

from trtserve.errors import UsageError
from trtserve.executor.openvino.runtime import OpenvinoRuntime
from trtserve.executor.torch import runtime as torch
from trtserve.host.gpus import list_gpus
from trtserve.nvidia.llmapi import LlmapiRuntime
from trtserve.nvidia.releases.installed import has_engine_path, installed
from trtserve.nvidia.tensorrt_llm import TensorrtLlmRuntime
from trtserve.progress import SILENT, Progress
from trtserve.specs import RuntimeName
from trtserve.specs.build import Device
from trtserve.specs.runtime import EnginePlan, Limits, Requirement, Runtime

__all__ = [
    "CPU_RUNTIME",
    "RUNTIMES",
    "EnginePlan",
    "Limits",
    "Runtime",
    "automatic_runtime",
    "choose_runtime",
    "runs_on_cpu",
    "runtimes_with",
]

RUNTIMES: dict[str, Runtime] = {
    "tensorrt_llm": TensorrtLlmRuntime(),
    "llmapi": LlmapiRuntime(),
    "torch": torch.TorchRuntime(),
    "openvino": OpenvinoRuntime(),
}

CPU_RUNTIME: RuntimeName = "openvino"
"""What `auto` means on a machine without NVIDIA GPUs."""

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


def runs_on_cpu(name: str | None, device: Device | None = None) -> bool:
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
        if cuda is None:
            return CPU_RUNTIME, "this machine has an NVIDIA GPU, but neither TensorRT-LLM nor PyTorch with CUDA"
        return "torch", f"an NVIDIA GPU and PyTorch with CUDA {cuda} on this machine, and no TensorRT-LLM"
    what = f"an NVIDIA GPU and TensorRT-LLM {found.version} on this machine"
    if not has_engine_path(found.release):
        return "llmapi", f"{what}, which has no engines any more"
    return "tensorrt_llm", what


def has_nvidia_gpu() -> bool:
    """Return whether NVIDIA's driver lists a GPU, in /proc or through nvidia-smi (WSL, sandboxes)."""
    return (_NVIDIA_GPUS.is_dir() and any(_NVIDIA_GPUS.iterdir())) or bool(list_gpus())
