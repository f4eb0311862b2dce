"""Which TensorRT-LLM is installed, and what its release can do: read from package metadata, nothing is imported."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING

from trtserve.errors import UsageError
from trtserve.releases import NEWEST, RELEASES, order, release_of
from trtserve.releases.containers import CONTAINERS

if TYPE_CHECKING:
    from importlib.metadata import Distribution

OPTION = "--trtllm-version"
PACKAGE = "tensorrt_llm"
BUILDER = "trtllm-build"
_FOLDERS = ("site-packages", "dist-packages")


@dataclass(frozen=True, kw_only=True)
class Installed:
    """A TensorRT-LLM: `version` as its package says it, `release` as the tables name it.

    `tensorrt` is the version of TensorRT: of its package, or what the container of that version has; None: unknown.
    `environment` is the folder in which the packages lie, None when nobody looked.
    """

    version: str
    release: str
    tensorrt: str | None
    source: str
    environment: Path | None = None


def installed(override: str | None = None) -> Installed | None:
    """What `--trtllm-version` says, else the package that trtllm-build on PATH belongs to, else that of this Python.

    None when there is none; UsageError for an override that is no version.
    """
    if override:
        version = override.strip().removeprefix("v")
        return Installed(
            version=version,
            release=release_of(version),
            tensorrt=_tensorrt_of_container(version),
            source=OPTION,
        )
    for folders in _environments():
        found = _version(PACKAGE, folders)
        if found is not None:
            version, environment = found
            tensorrt = _version("tensorrt", folders)
            return Installed(
                version=version,
                release=release_of(version),
                tensorrt=tensorrt[0] if tensorrt else _tensorrt_of_container(version),
                source="package metadata",
                environment=environment,
            )
    return None


def interpreter(found: Installed) -> Path:
    """The Python that imports it: of PREFIX/lib/pythonX.Y/site-packages, where it was found, else the one we run in."""
    if found.environment is not None and not found.environment.is_relative_to(sys.prefix):
        python = Path(*found.environment.parts[:-3], "bin", "python3")
        if python.exists():
            return python
    return Path(sys.executable)


def has_engine_path(release: str) -> bool:
    """Whether a release still builds and runs TensorRT engines."""
    return order(release) <= order(NEWEST)


def engine_route(release: str) -> str:
    """The class that builds engines from Python: of `tensorrt_llm` itself until 0.21."""
    return "tensorrt_llm._tensorrt_engine.LLM" if order(release) >= (1, 0) else "tensorrt_llm.LLM"


ENGINE_REMOVED = (
    f"TensorRT-LLM {{version}} has no TensorRT engines any more: trtllm-build, the converters and the C++ backend of "
    f"Triton were removed after {NEWEST}."
)
ENGINE_REMOVED_HINT = (
    "Serve the model without one (`trtserve import MODEL --runtime llmapi`), or use "
    f"TensorRT-LLM {NEWEST} (container {CONTAINERS[-1].tag})."
)


def require_engine_path(version: str) -> str:
    """The release of a version that builds engines; UsageError for one that does not or that the tables lack."""
    release = release_of(version)
    if not has_engine_path(release):
        raise UsageError(ENGINE_REMOVED.format(version=version), hint=ENGINE_REMOVED_HINT)
    if release not in RELEASES:
        raise UsageError(
            f"TensorRT-LLM {version} is older than {RELEASES[0]}, the first release that trtserve knows.",
            hint=f"Use a container from {CONTAINERS[0].tag} on.",
        )
    return release


def _environments() -> Iterator[list[str] | None]:
    """Where packages may lie: folders beside the trtllm-build on PATH, and None for this interpreter."""
    builder = which(BUILDER)
    if builder is not None:
        for prefix in dict.fromkeys((Path(builder).parent.parent, Path(builder).resolve().parent.parent)):
            found = [str(path) for name in _FOLDERS for path in prefix.glob(f"lib/python3*/{name}")]
            if found:
                yield found
    yield None


def _version(package: str, folders: list[str] | None) -> tuple[str, Path] | None:
    """Version and place of an installed package, from its dist-info."""
    for each in _distributions(package, folders):
        return each.version, Path(str(each.locate_file("")))
    return None


def _distributions(package: str, folders: list[str] | None) -> Iterable[Distribution]:
    from importlib import metadata  # loads much, of which most commands need nothing

    return metadata.distributions(name=package, path=sys.path if folders is None else folders)


def _tensorrt_of_container(version: str) -> str | None:
    """The TensorRT of the containers with a version, when they all have the same."""
    exact = {each.tensorrt for each in CONTAINERS if each.tensorrt_llm == version}
    return exact.pop() if len(exact) == 1 else None
