"""Which of NVIDIA's Triton containers holds which TensorRT-LLM, TensorRT, CUDA, PyTorch and Python.

Sources: the compatibility page of triton-inference-server/server (docs/introduction/compatibility.md); for building
them, docs/build.md and build.sh of the tagged releases of tensorrtllm_backend and the release notes of TensorRT-LLM.
"""

from __future__ import annotations

from dataclasses import dataclass

from trtserve.errors import UsageError
from trtserve.releases import Row, normalize_release, release_of

REPOSITORY = "nvcr.io/nvidia/tritonserver"


@dataclass(frozen=True, kw_only=True)
class Container:
    """One image; versions as the compatibility page writes them."""

    tag: str
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


# Tag, TensorRT-LLM, TensorRT, CUDA, Python, PyTorch.
_TABLE = """
24.08  0.12.0        10.3.0     12.5.1.007  3.10  2.4.0a0 (24.7)
24.09  0.13.0        10.4.0     12.5.1.007  3.10  2.4.0a0 (24.7)
24.10  0.14.0        10.4.0     12.5.1.007  3.10  2.4.0a0 (24.7)
24.11  0.15.0        10.6.0     12.6.3      3.10  2.5.0a0 (24.10)
24.12  0.16.0        10.7.0     12.6.3      3.12  2.6.0a0 (24.11)
25.01  0.17.0        10.8.0.43  12.8.0.038  3.12  2.6.0a0 (25.1)
25.02  0.17.0.post1  10.8.0.43  12.8.0.038  3.12  2.6.0a0 (25.1)
25.03  0.18.0        10.9.0.34  12.8.1.012  3.12  2.7.0a0 (25.3)
25.04  0.18.2        10.9.0.34  12.8.1.012  3.12  2.7.0a0 (25.3)
25.05  0.19.0        10.9.0.34  12.8.1.012  3.12  2.7.0a0 (25.3)
25.06  0.20.0        10.10.0.31 12.9.0.036  3.12  2.7.0a0 (25.4)
25.07  0.20.0        10.10.0.31 12.9.0.036  3.12  2.7.0a0 (25.4)
25.08  0.21.0        10.11.0.33 12.9.0.043  3.12  2.8.0a0 (25.5)
25.09  1.0.0         10.11.0.33 12.9.1.010  3.12  2.8.0a0 (25.6)
25.10  1.0.0         10.11.0.33 12.9.1.010  3.12  2.8.0a0 (25.6)
25.11  1.0.3.2510    10.13.3.9  13.0.2.006  3.12  2.9.0a0 (25.10)
25.12  1.1.0         10.13.3.9  13.0.2.006  3.12  2.9.0a0 (25.10)
26.01  1.1.0         10.13.3.9  13.0.2.006  3.12  2.9.0a0 (25.10)
26.02  1.1.0         10.13.3.9  13.0.2.006  3.12  2.9.0a0 (25.10)
26.03  1.2.0         10.14.1.48 13.1.0.036  3.12  2.10.0a0 (25.12)
26.04  1.2.1         10.14.1.48 13.1.0.036  3.12  2.10.0a0 (25.12)
26.05  1.2.1         10.14.1.48 13.1.0.036  3.12  2.10.0a0 (25.12)
26.06  1.2.1         10.14.1.48 13.1.0.036  3.12  2.10.0a0 (25.12)
26.07  1.2.1         10.14.1.48 13.1.0.036  3.12  2.10.0a0 (25.12)
"""


def _container(line: str) -> Container:
    tag, tensorrt_llm, tensorrt, cuda, python, *pytorch = line.split()
    return Container(
        tag=tag, tensorrt_llm=tensorrt_llm, tensorrt=tensorrt, cuda=cuda, python=python, pytorch=" ".join(pytorch)
    )


CONTAINERS = tuple(_container(line) for line in _TABLE.strip().splitlines())
"""From the oldest to the newest."""


def container(tag: str) -> Container:
    """The container with a tag; a whole image name will do. UsageError for one that the table does not have."""
    wanted = tag.strip().rpartition(":")[2].removesuffix("-trtllm-python-py3")
    for each in CONTAINERS:
        if each.tag == wanted:
            return each
    raise UsageError(
        f"There is no container {tag!r} in the table, which covers {CONTAINERS[0].tag} … {CONTAINERS[-1].tag}.",
        hint=f"Use one of {', '.join(each.tag for each in CONTAINERS)}.",
    )


def containers_of(release: str) -> tuple[Container, ...]:
    """The containers with a release ("0.17", "0.17.0"), oldest first; UsageError for a release not in the tables."""
    wanted = normalize_release(release)
    return tuple(each for each in CONTAINERS if each.release == wanted)


def shares_engines(one: Container, other: Container) -> bool:
    """Whether engines built in one container load in the other: same release of TensorRT-LLM, same TensorRT."""
    return one.release == other.release and one.tensorrt == other.tensorrt


@dataclass(frozen=True, kw_only=True)
class SourceBuild:
    """How the container of a release is built from its sources; `base` is the tag of the base images, None: unknown.

    `repository` (of GitHub) is cloned at the release's tag; `commands` are run in it; `note` is what to know.
    """

    repository: str
    commands: tuple[str, ...]
    note: str
    base: str | None = None


_BACKEND = "triton-inference-server/tensorrtllm_backend"
_SUBMODULES = ("git lfs install", "git submodule update --init --recursive")
_DOCKERFILE = "DOCKER_BUILDKIT=1 docker build -t triton_trt_llm -f dockerfile/Dockerfile.trt_llm_backend ."
_MAKE = "make -C docker tritonrelease_build"
_AARCH64 = "On aarch64 add `--build-arg TORCH_INSTALL_TYPE=src_non_cxx11_abi`."
_SCRIPT = "`./build.sh` is another way: it makes the same image as NVIDIA's."
_STALE = (
    "`./build.sh` has not the versions of these releases: it needs the variables BASE_IMAGE, PYTORCH_IMAGE, "
    "TRT_VERSION,\nTRITON_SERVER_REPO_TAG, TENSORRTLLM_BACKEND_REPO_TAG and PYTHON_BACKEND_REPO_TAG."
)

# Release, tag of the base images by the release notes. Of 0.14 they do not tell (inferred): its container has the CUDA
# 12.5.1 and the PyTorch of 24.07, as those of 0.12 and 0.13 have.
_BASES = {
    "0.12": "24.07",
    "0.13": "24.07",
    "0.14": "24.07",
    "0.15": "24.10",
    "0.16": "24.11",
    "0.17": "25.01",
    "0.18": "25.03",
    "0.21": "25.05",
    "1.0": "25.06",
    "1.1": "25.10",
    "1.2": "25.12",
}


def source_build(release: str) -> SourceBuild:
    """How the container of a release is built from source; UsageError for a release not in the tables."""
    wanted = normalize_release(release)
    if Row(since="0.20").within(wanted):
        return SourceBuild(
            repository="NVIDIA/TensorRT-LLM",
            commands=(*_SUBMODULES, "git lfs pull", _MAKE),
            note="The Triton backend has moved into TensorRT-LLM's repository.",
            base=_BASES.get(wanted),
        )
    return SourceBuild(
        repository=_BACKEND,
        commands=(*_SUBMODULES, _DOCKERFILE),
        note=f"{_AARCH64}\n{_STALE if Row(since='0.16').within(wanted) else _SCRIPT}",
        base=_BASES.get(wanted),
    )
