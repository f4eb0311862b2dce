"""Which NVIDIA driver each CUDA needs, and what a driver can run.

Sources: column "CUDA Driver version" of the compatibility page of triton-inference-server/server
(docs/introduction/compatibility.md) for the driver that each CUDA comes with; table 2 of the CUDA Toolkit's release
notes for the least driver of a major version ("minor version compatibility").
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from trtserve.releases.containers import CONTAINERS, Container

# CUDA → driver that comes with it, oldest first.
DRIVERS = {
    "12.5.1": "555.42.06",
    "12.6.3": "560.35.05",
    "12.8.0": "570.86.10",
    "12.8.1": "570.124.06",
    "12.9.0": "575.51.03",
    "12.9.1": "575.57.08",
    "13.0.2": "580.95.05",
    "13.1.0": "590.44.01",
}

# The least driver that runs programs of every CUDA of this major version, compiled code only: no newer PTX.
MINOR_COMPATIBLE = {12: "525.60.13", 13: "580.65.06"}

Support = Literal["full", "minor", "none"]


@dataclass(frozen=True, kw_only=True)
class Driver:
    """A driver: its version, and the newest CUDA that it speaks (major, minor); None where it did not say."""

    version: str
    cuda: tuple[int, int] | None = None

    @property
    def speaks(self) -> tuple[int, int]:
        """The newest CUDA that it speaks, from the table where it did not say; (0, 0) for one older than the table."""
        if self.cuda is not None:
            return self.cuda
        known = [cuda for cuda, needed in DRIVERS.items() if numbers(self.version) >= numbers(needed)]
        return _minor(known[-1]) if known else (0, 0)

    def runs(self, container: Container) -> Support:
        """How it runs the programs of a container: all of it, through minor version compatibility, or not at all."""
        wanted = cuda_of(container)
        if self.speaks >= wanted:
            return "full"
        least = MINOR_COMPATIBLE.get(wanted[0])
        return "minor" if least is not None and numbers(self.version) >= numbers(least) else "none"


def cuda_of(container: Container) -> tuple[int, int]:
    """CUDA of a container: `12.8.1.012` → (12, 8)."""
    return _minor(container.cuda)


def driver_of(container: Container) -> str:
    """The driver that the CUDA of a container comes with, which runs all of it."""
    return DRIVERS[".".join(container.cuda.split(".")[:3])]


def newest_container(driver: Driver, support: Support, *, fits: Callable[[str], bool] = lambda _release: True) -> str:
    """Tag of the newest container that a driver runs so, of the releases that `fits`; empty without one."""
    found = [each.tag for each in CONTAINERS if driver.runs(each) == support and fits(each.release)]
    return found[-1] if found else ""


def numbers(version: str) -> tuple[int, ...]:
    """`580.159.04` → (580, 159, 4)."""
    return tuple(int(part) for part in re.findall(r"\d+", version))


def _minor(cuda: str) -> tuple[int, int]:
    major, minor = numbers(cuda)[:2]
    return major, minor
