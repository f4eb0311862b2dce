"""The TensorRT-LLM and the tritonserver that will serve, and whether an engine was built for them."""

from __future__ import annotations

from pathlib import Path

from trtserve.errors import MissingDependencyError, UsageError
from trtserve.host.gpus import list_gpus
from trtserve.nvidia.containers import installed_in
from trtserve.nvidia.releases import NEWEST, order
from trtserve.nvidia.releases.installed import Installed, installed, require_engine_path
from trtserve.progress import Progress
from trtserve.repository.engine_match import Installation, require_matching
from trtserve.repository.preflight import Served
from trtserve.repository.remake_command import remake_command
from trtserve.server.repositories import import_again
from trtserve.server.triton.installation import CONTAINER_TRITON, Triton, find_triton
from trtserve.specs import ServerSpec
from trtserve.store import Store

_LLMAPI_SINCE = "0.19"


def installed_for(spec: ServerSpec) -> Installed | None:
    """Return the TensorRT-LLM that will serve: the container's, or this machine's, or None when it is unknown."""
    if spec.container is not None:
        return installed_in(spec.container, spec.trtllm_version)
    return installed(spec.trtllm_version)


def launch_release(served: Served, spec: ServerSpec) -> str:
    """Return the release whose launch script is followed.

    It is the container's, --trtllm-version, the installed one or the repository's; the newest one for the embedded
    executor. Raises UsageError for a release that cannot serve this kind of repository.
    """
    if served.runtime is None or served.embedded:
        return NEWEST
    found = installed_for(spec)
    engine = served.core_models[0].version if served.core_models else None
    version = found.version if found is not None else served.release or engine or NEWEST
    if not served.uses_llmapi:
        return require_engine_path(version)
    if order(version) < order(_LLMAPI_SINCE):
        raise UsageError(
            f"TensorRT-LLM {version} has no LLM API model for Triton; {_LLMAPI_SINCE} was the first.",
            hint="Use a newer container: --container 26.07.",
        )
    # Releases after the last one of the tables still have this launcher.
    return NEWEST if order(version) > order(NEWEST) else require_engine_path(version)


def gpu_triton(served: Served, *, on_this_machine: bool = True) -> Triton:
    """Return the tritonserver here that has the backends; for another machine that of NVIDIA's container will do."""
    try:
        return find_triton(served.backends | {"python"}, system_first=True)
    except MissingDependencyError:
        if on_this_machine:
            raise
        return CONTAINER_TRITON


def require_release(served: Served, spec: ServerSpec, progress: Progress, *, repository: Path) -> None:
    """Raise RepositoryError for an engine of another TensorRT-LLM than the one that will serve."""
    found = installed_for(spec)
    if found is not None:
        there = Installation(tensorrt_llm=found.version, tensorrt=found.tensorrt, sm=None, gpu=None)
        command = _remake_command(repository, served, spec, Store())
        require_matching(served, there, progress, remake_command=command, container=spec.container)


def require_fitting_engine(
    served: Served, spec: ServerSpec, progress: Progress, *, repository: Path, store: Store
) -> None:
    """Raise RepositoryError, with the command that builds it again, for an engine of other versions or another GPU."""
    found = installed_for(spec)
    gpus = list_gpus()
    first = spec.gpus[0] if spec.gpus and spec.gpus[0] < len(gpus) else 0
    installation = Installation(
        tensorrt_llm=found.version if found else None,
        tensorrt=found.tensorrt if found else None,
        sm=gpus[first].capability if gpus else None,
        gpu=gpus[first].name if gpus else None,
    )
    command = _remake_command(repository, served, spec, store)
    require_matching(served, installation, progress, remake_command=command, container=spec.container)


def _remake_command(repository: Path, served: Served, spec: ServerSpec, store: Store) -> str | None:
    """Return the command that makes a repository again with its engine: the import's, else `trtserve repo`'s."""
    if (command := import_again(repository, store)) is not None or not served.core_models:
        return command
    return remake_command(repository, served.core_models[0], container=spec.container)
