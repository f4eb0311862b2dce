"""Which TensorRT-LLM is installed, read from package metadata without importing it, and what its release can do."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from shutil import which

from trtserve.errors import UsageError
from trtserve.nvidia.releases import LAST_WITH_ENGINES, NEWEST, RELEASES, order, release_of
from trtserve.nvidia.releases.containers import all_containers, containers_of

OPTION = "--trtllm-version"
PACKAGE = "tensorrt_llm"
BUILDER = "trtllm-build"
_FOLDERS = ("site-packages", "dist-packages")


@dataclass(frozen=True, kw_only=True)
class Installed:
    """A TensorRT-LLM that is installed, or that `--trtllm-version` names."""

    version: str  # as in the package metadata, such as 0.17.0.post1
    release: str
    tensorrt: str | None  # version of the TensorRT package, else of the containers with this version; None: unknown
    source: str  # where the version was found
    environment: Path | None = None  # folder of the packages; None for `--trtllm-version`


def installed(override: str | None = None) -> Installed | None:
    """Return what `--trtllm-version` names, else the package of the trtllm-build on PATH, else that of this Python.

    Returns None when there is none. Raises UsageError for an override that is not a version.
    """
    if override:
        version = override.strip().removeprefix("v")
        return Installed(
            version=version, release=release_of(version), tensorrt=_tensorrt_of_container(version), source=OPTION
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
    """Return the Python of the environment that it was found in (PREFIX/lib/pythonX.Y/site-packages), else ours."""
    if found.environment is not None and not found.environment.is_relative_to(sys.prefix):
        python = Path(*found.environment.parts[:-3], "bin", "python3")
        if python.exists():
            return python
    return Path(sys.executable)


def has_engine_path(release: str) -> bool:
    """Return whether a release still builds and runs TensorRT engines."""
    return order(release) <= order(LAST_WITH_ENGINES)


def require_engine_path(version: str) -> str:
    """Return the release of a version. Raises UsageError for one that builds no engines or that is not supported."""
    release = release_of(version)
    if not has_engine_path(release):
        raise UsageError(
            f"TensorRT-LLM {version} has no TensorRT engines any more: trtllm-build, the converters and Triton's C++ "
            f"backend were removed after {LAST_WITH_ENGINES}.",
            hint="Serve the model without an engine (`trtserve import MODEL --runtime llmapi`), or use "
            f"TensorRT-LLM {LAST_WITH_ENGINES} (container {containers_of(LAST_WITH_ENGINES)[-1].tag}).",
        )
    if release not in RELEASES:
        raise UsageError(
            f"TensorRT-LLM {version} is older than {RELEASES[0]}; supported are {RELEASES[0]} … {NEWEST}.",
            hint=f"Use a container from {all_containers()[0].tag} on.",
        )
    return release


def _environments() -> Iterator[list[str] | None]:
    """Yield the package folders of the trtllm-build on PATH, then None for this interpreter."""
    builder = which(BUILDER)
    if builder is not None:
        for prefix in dict.fromkeys((Path(builder).parent.parent, Path(builder).resolve().parent.parent)):
            found = [str(path) for name in _FOLDERS for path in prefix.glob(f"lib/python3*/{name}")]
            if found:
                yield found
    yield None


def _version(package: str, folders: list[str] | None) -> tuple[str, Path] | None:
    """Version and folder of an installed package, from its dist-info."""
    from importlib import metadata  # slow to import, and most commands do not need it

    for each in metadata.distributions(name=package, path=sys.path if folders is None else folders):
        return each.version, Path(str(each.locate_file("")))
    return None


def _tensorrt_of_container(version: str) -> str | None:
    """The TensorRT of the containers with a version, None unless they all have the same one."""
    exact = {each.tensorrt for each in all_containers() if each.tensorrt_llm == version}
    return exact.pop() if len(exact) == 1 else None
