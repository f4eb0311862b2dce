"""What each of NVIDIA's containers holds, and the drivers and GPUs that run it.

Tables: `containers.yaml`, `drivers.yaml`, `gpus.yaml`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from trtserve.errors import UsageError
from trtserve.host.gpus import Driver
from trtserve.nvidia.releases import Row, load_table, normalize_release, release_of

REPOSITORY = "nvcr.io/nvidia/tritonserver"


@dataclass(frozen=True, kw_only=True)
class Container:
    """One image; versions as the compatibility page writes them."""

    tag: str  # such as 25.12
    tensorrt_llm: str
    tensorrt: str
    cuda: str
    pytorch: str
    python: str

    @property
    def release(self) -> str:
        """`0.17.0.post1` → `0.17`."""
        return release_of(self.tensorrt_llm)

    @property
    def image(self) -> str:
        """The name that docker pulls."""
        return f"{REPOSITORY}:{self.tag}-trtllm-python-py3"


@functools.cache
def all_containers() -> tuple[Container, ...]:
    """Every container, oldest first."""
    return tuple(Container(**row) for row in load_table("containers")["containers"])


def latest_container() -> Container:
    return all_containers()[-1]


def container(tag: str) -> Container:
    """Return the container with a tag or a full image name. Raises UsageError for an unknown one."""
    wanted = tag.strip().rpartition(":")[2].removesuffix("-trtllm-python-py3")
    known = all_containers()
    for each in known:
        if each.tag == wanted:
            return each
    if wanted in vllm_containers():
        raise UsageError(
            f"There is no container {wanted} with TensorRT-LLM: {known[-1].tag} was the last. {wanted} has vLLM "
            f"{vllm_containers()[wanted]}, for models that are imported with --runtime vllm.",
            hint=f"Use {known[-1].tag}, or import the model again (`trtserve help how-to/after-containers`).",
        )
    raise UsageError(
        f"{tag!r} is not a known container; known are {known[0].tag} … {known[-1].tag}.",
        hint=f"Use one of {', '.join(each.tag for each in known)}.",
    )


@functools.cache
def vllm_containers() -> dict[str, str]:
    """Return the version of vLLM of each container that has it, such as 26.08 → 0.27.1, oldest first."""
    return dict(load_table("containers")["vllm"])


def containers_of(release: str) -> tuple[Container, ...]:
    """Return the containers of a release ("0.17", "0.17.0"), oldest first.

    Raises UsageError for an unsupported release.
    """
    wanted = normalize_release(release)
    return tuple(each for each in all_containers() if each.release == wanted)


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
