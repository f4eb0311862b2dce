"""Options of stages that may run NVIDIA's tools: the release and the container."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from trtserve.specs.options import Spec, option

NVIDIA_TOOLS = "NVIDIA's tools"
_nvidia_tools = partial(option, panel=NVIDIA_TOOLS)


@dataclass(frozen=True, kw_only=True)
class ForRelease(Spec):
    """The TensorRT-LLM to work for."""

    trtllm_version: str | None = _nvidia_tools(
        None,
        metavar="VERSION",
        help="TensorRT-LLM to work for, such as 1.2.0.",
        unset="the engine's, else the installed one",
        variable="TRTSERVE_TRTLLM_VERSION",
    )


@dataclass(frozen=True, kw_only=True)
class InContainer(ForRelease):
    """The container to run NVIDIA's tools in."""

    container: str | None = _nvidia_tools(
        None,
        "--container",
        "--container-image",
        metavar="IMAGE",
        help="Run NVIDIA's tools in this container: a tag such as 25.12, or an image by name or digest.",
    )
    container_flags: tuple[str, ...] = _nvidia_tools(
        (),
        "--container-flag",
        metavar="FLAG",
        help="Pass FLAG to docker run unchanged, for example --container-flag=--shm-size=8g; repeatable.",
    )
