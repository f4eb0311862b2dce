"""Which NVIDIA driver each CUDA needs, and what a driver can run (`drivers.yaml`)."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Literal

from trtserve.host.nvidia import Driver
from trtserve.nvidia.releases.containers import Container, all_containers
from trtserve.nvidia.releases.tables import load_table

Support = Literal["full", "minor", "none"]


@functools.cache
def driver_versions() -> dict[str, str]:
    """CUDA → the driver that comes with it, oldest first."""
    return dict(load_table("drivers")["drivers"])


@functools.cache
def minor_version_drivers() -> dict[int, str]:
    """Major version of CUDA → the least driver that runs compiled programs of all its minor versions."""
    return dict(load_table("drivers")["minor_version"])


def newest_cuda(driver: Driver) -> tuple[int, int]:
    """Return the newest CUDA that a driver runs: reported, else from the table; (0, 0) if older than the table."""
    if driver.cuda is not None:
        return driver.cuda
    known = [cuda for cuda, needed in driver_versions().items() if numbers(driver.version) >= numbers(needed)]
    return _minor(known[-1]) if known else (0, 0)


def driver_support(driver: Driver, container: Container) -> Support:
    """Return how well a driver runs the programs of a container: fully, through minor version compatibility, or not."""
    wanted = cuda_of(container)
    if newest_cuda(driver) >= wanted:
        return "full"
    least = minor_version_drivers().get(wanted[0])
    return "minor" if least is not None and numbers(driver.version) >= numbers(least) else "none"


def cuda_of(container: Container) -> tuple[int, int]:
    """CUDA version of a container: `12.8.1.012` → (12, 8)."""
    return _minor(container.cuda)


def driver_of(container: Container) -> str:
    """The driver that comes with the CUDA of a container, which runs it fully."""
    return driver_versions()[".".join(container.cuda.split(".")[:3])]


def newest_container(driver: Driver, support: Support, *, fits: Callable[[str], bool] = lambda _release: True) -> str:
    """Tag of the newest container with this support by a driver, among releases that `fits`, or ""."""
    found = [each.tag for each in all_containers() if driver_support(driver, each) == support and fits(each.release)]
    return found[-1] if found else ""


def numbers(version: str) -> tuple[int, ...]:
    """`580.159.04` → (580, 159, 4)."""
    return tuple(int(part) for part in re.findall(r"\d+", version))


def _minor(cuda: str) -> tuple[int, int]:
    major, minor = numbers(cuda)[:2]
    return major, minor
