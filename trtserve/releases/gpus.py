"""For which GPUs each release of TensorRT-LLM has kernels, by compute capability.

Sources: the release notes (Volta removed in 0.15; Blackwell in 0.17) and the default CMAKE_CUDA_ARCHITECTURES of
cpp/CMakeLists.txt and cpp/cmake/modules/cuda_configuration.cmake. PTX is never included, so a GPU without kernels of
its own major version cannot run. Those for 7.0 run on 7.5 too; Blackwell's are for one GPU exactly until CUDA 12.9
(release 0.20), from then on for its family, which 10.3 and 12.1 belong to.
"""

from __future__ import annotations

from dataclasses import dataclass

from trtserve.releases import Row


@dataclass(frozen=True, kw_only=True)
class Kernels(Row):
    """Kernels for a compute capability ("9.0") of an architecture, and for which GPUs these are."""

    capability: str
    architecture: str
    examples: str


KERNELS = (
    Kernels(capability="7.0", architecture="Volta", examples="V100", since="0.12", until="0.14"),
    Kernels(capability="7.5", architecture="Turing", examples="T4, RTX 20", since="0.12", until="0.14"),
    Kernels(capability="8.0", architecture="Ampere", examples="A100, A30", since="0.12"),
    Kernels(capability="8.6", architecture="Ampere", examples="A10, A40, RTX 30", since="0.12"),
    Kernels(capability="8.9", architecture="Ada Lovelace", examples="L4, L40S, RTX 40", since="0.12"),
    Kernels(capability="9.0", architecture="Hopper", examples="H100, H200, GH200", since="0.12"),
    Kernels(capability="10.0", architecture="Blackwell", examples="B200, GB200", since="0.17"),
    Kernels(capability="10.3", architecture="Blackwell", examples="B300, GB300", since="0.20"),
    Kernels(capability="12.0", architecture="Blackwell", examples="RTX 50, RTX PRO 6000", since="0.17"),
    Kernels(capability="12.1", architecture="Blackwell", examples="GB10", since="0.20"),
)


def kernels_for(capability: str) -> Kernels | None:
    """The row of a compute capability; None for one that the table lacks."""
    return next((row for row in KERNELS if row.capability == capability), None)


def runs_on(release: str, capability: str) -> bool | None:
    """Whether a release has kernels for a GPU; None for a GPU that the table lacks and that may be newer than it."""
    row = kernels_for(capability)
    if row is not None:
        return row.within(release)
    return False if _order(capability) < _order(KERNELS[0].capability) else None


def _order(capability: str) -> tuple[int, int]:
    major, _, minor = capability.partition(".")
    return int(major), int(minor or 0)
