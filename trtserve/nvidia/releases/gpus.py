"""Which GPUs each release of TensorRT-LLM has kernels for, by compute capability (`gpus.yaml`)."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from trtserve.nvidia.releases import Row
from trtserve.nvidia.releases.tables import load_table


@dataclass(frozen=True, kw_only=True)
class Kernels(Row):
    """The releases that have kernels for a compute capability."""

    capability: str  # such as 9.0
    architecture: str
    examples: str  # GPUs with this capability


@functools.cache
def kernels() -> tuple[Kernels, ...]:
    """Every known compute capability, lowest first."""
    return tuple(Kernels(**row) for row in load_table("gpus"))


def kernels_for(capability: str) -> Kernels | None:
    """Return the entry of a compute capability, or None for an unknown one."""
    return next((row for row in kernels() if row.capability == capability), None)


def runs_on(release: str, capability: str) -> bool | None:
    """Return whether a release has kernels for a GPU, or None for an unknown GPU, which may be newer than the table."""
    row = kernels_for(capability)
    if row is not None:
        return row.within(release)
    return False if _order(capability) < _order(kernels()[0].capability) else None


def _order(capability: str) -> tuple[int, int]:
    major, _, minor = capability.partition(".")
    return int(major), int(minor or 0)
