"""The runtimes that can build and serve engines: one file each, one line each in `RUNTIMES`."""

from __future__ import annotations

from pathlib import Path

from trtserve.errors import MissingDependencyError
from trtserve.progress import SILENT, Progress
from trtserve.runtimes import openvino
from trtserve.runtimes.base import EnginePlan, Limits, Runtime
from trtserve.specs import RuntimeName

__all__ = ["RUNTIMES", "EnginePlan", "Limits", "Runtime", "choose_runtime"]

RUNTIMES: dict[str, Runtime] = {openvino.NAME: openvino}

_NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")


def choose_runtime(name: RuntimeName, progress: Progress = SILENT) -> Runtime:
    """The runtime called `name`; `auto` takes what this machine has and says so.

    MissingDependencyError when this trtserve has no such runtime.
    """
    if name == "auto":
        progress.step(f"Runtime: {openvino.NAME} ({_reason()})")
        return RUNTIMES[openvino.NAME]
    if name not in RUNTIMES:
        raise MissingDependencyError(
            f"The {name} runtime is not built yet in this version, and {_gpus()}; "
            f"runtimes here: {', '.join(RUNTIMES)}.",
            hint=f"Choose --runtime {openvino.NAME}. For an engine of TensorRT-LLM: `trtserve convert` makes the "
            "checkpoint, and TensorRT-LLM's own `trtllm-build` reads it.",
        )
    return RUNTIMES[name]


def _reason() -> str:
    if has_nvidia_gpu():
        return "this trtserve has no runtime for the NVIDIA GPU of this machine"
    return "no NVIDIA GPU on this machine"


def _gpus() -> str:
    return "this machine has an NVIDIA GPU" if has_nvidia_gpu() else "this machine has no NVIDIA GPU"


def has_nvidia_gpu() -> bool:
    """True when NVIDIA's kernel driver lists a GPU."""
    return _NVIDIA_GPUS.is_dir() and any(_NVIDIA_GPUS.iterdir())
