"""The runtimes that can serve a model: one file each, one line each in `RUNTIMES`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trtserve.errors import UsageError
from trtserve.launch.gpus import describe_gpus
from trtserve.progress import SILENT, Progress
from trtserve.releases.installed import has_engine_path, installed
from trtserve.runtimes import llmapi, openvino, tensorrt_llm
from trtserve.runtimes.base import EnginePlan, Limits, Runtime
from trtserve.specs import RuntimeName

__all__ = ["RUNTIMES", "EnginePlan", "Limits", "Runtime", "automatic_runtime", "choose_runtime"]

RUNTIMES: dict[str, Runtime[Any]] = {
    tensorrt_llm.NAME: tensorrt_llm,
    llmapi.NAME: llmapi,
    openvino.NAME: openvino,
}

_NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")


def choose_runtime(name: RuntimeName, progress: Progress = SILENT, *, container: str | None = None) -> Runtime[Any]:
    """The runtime called `name`; `auto` takes what this machine has and says so, with a `container` NVIDIA's.

    UsageError for the embedded runtime in a container, which does not have it.
    """
    if container is not None and name == openvino.NAME:
        raise UsageError(
            "--container runs NVIDIA's tools, and the openvino runtime needs none of them.",
            hint="Leave --container out, or take --runtime tensorrt_llm.",
        )
    if container is not None and name == "auto":
        progress.step(f"Runtime: {tensorrt_llm.NAME} (the container {container} has it)")
        return RUNTIMES[tensorrt_llm.NAME]
    if name != "auto":
        return RUNTIMES[name]
    chosen, reason = automatic_runtime()
    progress.step(f"Runtime: {chosen} ({reason})")
    return RUNTIMES[chosen]


def automatic_runtime() -> tuple[str, str]:
    """The runtime that `auto` takes on this machine, and why."""
    if not has_nvidia_gpu():
        return openvino.NAME, "no NVIDIA GPU on this machine"
    found = installed()
    if found is None:
        return openvino.NAME, "this machine has an NVIDIA GPU, but TensorRT-LLM is not installed"
    what = f"an NVIDIA GPU and TensorRT-LLM {found.version} on this machine"
    if not has_engine_path(found.release):
        return llmapi.NAME, f"{what}, which has no engines any more"
    return tensorrt_llm.NAME, what


def has_nvidia_gpu() -> bool:
    """True when NVIDIA's driver lists a GPU: in /proc, or through nvidia-smi where that is missing (WSL, sandboxes)."""
    return (_NVIDIA_GPUS.is_dir() and any(_NVIDIA_GPUS.iterdir())) or bool(describe_gpus())
