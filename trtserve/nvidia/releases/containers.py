"""NVIDIA's Triton containers: which TensorRT-LLM, TensorRT, CUDA, PyTorch and Python each holds (`containers.yaml`)."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from trtserve.errors import UsageError
from trtserve.nvidia.releases import Row, normalize_release, release_of
from trtserve.nvidia.releases.tables import load_table

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
    """The newest container."""
    return all_containers()[-1]


def container(tag: str) -> Container:
    """Return the container with a tag or a full image name. Raises UsageError for an unknown one."""
    wanted = tag.strip().rpartition(":")[2].removesuffix("-trtllm-python-py3")
    known = all_containers()
    for each in known:
        if each.tag == wanted:
            return each
    raise UsageError(
        f"{tag!r} is not a known container; known are {known[0].tag} … {known[-1].tag}.",
        hint=f"Use one of {', '.join(each.tag for each in known)}.",
    )


def containers_of(release: str) -> tuple[Container, ...]:
    """Return the containers of a release ("0.17", "0.17.0"), oldest first.

    Raises UsageError for an unsupported release.
    """
    wanted = normalize_release(release)
    return tuple(each for each in all_containers() if each.release == wanted)


def shares_engines(one: Container, other: Container) -> bool:
    """Return whether engines built in one container load in the other: same release of TensorRT-LLM, same TensorRT."""
    return one.release == other.release and one.tensorrt == other.tensorrt


@dataclass(frozen=True, kw_only=True)
class SourceBuild(Row):
    """How the container of a release is built from source."""

    repository: str  # on GitHub, cloned at the release's tag
    commands: tuple[str, ...]  # run in the clone
    note: str
    base: str | None = None  # tag of the base images; None: unknown


def source_build(release: str) -> SourceBuild:
    """Return how the container of a release is built from source. Raises UsageError for an unsupported release."""
    wanted = normalize_release(release)
    table = load_table("containers")
    base = table["base_images"].get(wanted)
    builds = (SourceBuild(**{**row, "commands": tuple(row["commands"])}, base=base) for row in table["source_builds"])
    return next(build for build in builds if build.within(wanted))
