"""What Slurm and Kubernetes have in common: the same launch on other machines, written as files."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from trtserve.artifacts import ModelRepository
from trtserve.errors import ArtifactError, UsageError, counted, listing
from trtserve.files import write_whole, writing
from trtserve.progress import Progress
from trtserve.repository.check import require_sound
from trtserve.repository.served import ServedRepository, inspect_repository
from trtserve.server.engine_fit import require_fitting_engine, require_world_size
from trtserve.server.launch.devices import EngineNodes, fit_engines, require_node_devices
from trtserve.server.launch.modes import Single, launch_mode
from trtserve.server.state import server_name
from trtserve.server.triton.tritonserver import Address
from trtserve.specs import ServerSpec
from trtserve.specs.cluster import INSTEAD, ON_THIS_MACHINE, ClusterSpec
from trtserve.specs.options import given_flags
from trtserve.store import Store

GATEWAY_PORT = 9000
_TOKEN = re.compile(r"(?<=_)[0-9a-f]{8}(?![0-9A-Za-z])")  # the random part of `unique_prefix`
_MARK = "Written by `trtserve start --"  # the start of a line in every file that is written for a cluster


@dataclass(frozen=True, kw_only=True)
class ClusterJob:
    """The files that start a server on other machines, before they are written."""

    files: Mapping[Path, str]  # text of each file; the first one is what sbatch or kubectl is given
    logs: Path | None = None  # folder that is created for logs; Slurm does not create it
    command: str = ""  # what the user runs to start the server
    engines: Sequence[EngineNodes] = ()
    """Engines in the repository whose config.json must state the GPUs of the cluster's nodes."""
    record: Mapping[str, Any] = field(default_factory=dict)  # what --json prints of the files
    notes: Sequence[str] = ()  # what the user should know about the files
    submit: Callable[[], Submitted] | None = None
    """Hands the written files to the cluster, if its options have `submit`."""

    @property
    def script(self) -> Path:
        """What sbatch or kubectl is given."""
        return next(iter(self.files))

    @property
    def next_steps(self) -> Sequence[str]:
        return (f"Start it: {self.command}",)


def gateway_words(address: Address, host: str, repository: Path, *, access: Sequence[str]) -> list[str]:
    """Return what `trtserve gateway` needs to answer other machines for the Triton with these ports on `host`."""
    ports = {"--http-port": address.http_port, "--metrics-port": address.metrics_port, "--port": GATEWAY_PORT}
    return [
        *("--host", "0.0.0.0", "--no-tls", *access, "--url", f"{host}:{address.grpc_port}"),
        *(str(word) for pair in ports.items() for word in pair),
        *("--repository", str(repository)),
    ]


@dataclass(frozen=True, kw_only=True)
class Submitted:
    number: str
    next_steps: Sequence[str]  # lines that say how to follow it


class Cluster(Protocol):
    """A kind of cluster; a module of this package, listed in `trtserve.server.launch.CLUSTERS`."""

    def settings(self, cluster: ClusterSpec, options: Any, spec: ServerSpec) -> Any:
        """Return what `plan_job` needs, from the common options and those of this kind of cluster."""

    def plan_job(
        self, repository: ModelRepository, spec: ServerSpec, cluster: Any, place: Path, *, progress: Progress
    ) -> ClusterJob:
        """Return the files that serve the repository, for the folder or file `place`; nothing is written.

        RepositoryError and UsageError name what prevents that: the repository, the versions of engine and container,
        or a number of nodes and tasks that is not the world size.
        """

    def stop_command(self, place: Path) -> str:
        """Return what stops the server whose files were written to `place`."""


def require_options(spec: ServerSpec, kind: str) -> None:
    """Raise UsageError for options that this kind of cluster would ignore."""
    if given := given_flags(spec, ON_THIS_MACHINE[kind]):
        several = "are for servers" if len(given) > 1 else "is for a server"
        raise UsageError(
            f"{listing(given)} {several} on this machine: --{kind} starts Triton without supervisor, gateway or proxy.",
            hint=INSTEAD[kind],
        )


def inspect_for_cluster(
    repository: ModelRepository, spec: ServerSpec, kind: str, progress: Progress
) -> tuple[str, ServedRepository]:
    """Return the server's name and content. Raises UsageError for a repository that this `kind` cannot serve."""
    require_options(spec, kind)
    name, served = server_name(repository, spec), inspect_repository(repository)
    mode = launch_mode(served, spec)
    alone = isinstance(mode, Single)
    if alone:
        require_sound(repository)  # a repository of the LLM API without its model.yaml looks like any Python model
    if (alone and not served.starts_workers) or not served.needs_gpus:
        raise UsageError(
            f"--{kind} is for engines on GPUs; this repository is served on the CPU.",
            hint="Serve it here: leave the flag out.",
        )
    mode.check(served, spec, on_this_machine=False)
    require_world_size(served, spec, repository, mode.ranks(served, spec))
    if not served.embedded:
        require_fitting_engine(served, spec, progress, repository=repository.path, store=Store())
    return name, served


def ranks_per_node(nodes: int, given: int | None, ranks: int, unit: str) -> int:
    """Return the ranks, or tasks (`unit`), of each node. Raises UsageError unless all together are the server's."""
    each = given or max(1, ranks // nodes)
    if each * nodes != ranks:
        raise UsageError(
            f"--nodes {nodes} × --ntasks-per-node {each} are {each * nodes} {unit}; the server has "
            f"{counted(ranks, 'rank')}.",
            hint="Their product must be the world size of the engine: tensor × pipeline parallel.",
        )
    return each


def gpus_per_node(served: ServedRepository, nodes: int, given: int | None) -> int:
    """Return the GPUs of each node for an engine that starts its workers itself.

    Raises UsageError when they cannot be the same number on each.
    """
    each = served.world_size // nodes
    if each * nodes != served.world_size or given not in (None, each):
        raise UsageError(
            f"--nodes is {nodes}; the model is shared by {counted(served.world_size, 'GPU')}, the same number on each.",
            hint="It is tensor × pipeline parallel: import the model again with another --tp-size or --pp-size.",
        )
    return each


def place_engines(
    repository: ModelRepository,
    served: ServedRepository,
    spec: ServerSpec,
    nodes: Sequence[int],
    gpus: int,
    progress: Progress,
) -> Sequence[EngineNodes]:
    """Return the engines that must state how many GPUs a node has; `nodes` holds the node of each rank.

    Raises RepositoryError when a rank would take a GPU that its node does not give, or that another rank has.
    """
    if served.uses_llmapi or served.starts_workers:
        return ()
    require_node_devices(served.core_models, nodes, gpus, shared=not spec.multi_model)
    return fit_engines(repository.path, served.core_models, progress, nodes=max(nodes) + 1, gpus=gpus)


def is_written(job: ClusterJob) -> bool:
    """Return whether the files are there as `write_job` would write them, but for a name of the shared memory."""
    return (
        not job.engines
        and (job.logs is None or job.logs.is_dir())
        and all(
            path.is_file() and _TOKEN.sub("", path.read_text(encoding="utf-8")) == _TOKEN.sub("", text)
            for path, text in job.files.items()
        )
    )


def write_job(job: ClusterJob) -> None:
    """Write all files, and create the folder of the logs.

    Raises ArtifactError for files that trtserve did not write.
    """
    for path, text in job.files.items():
        with writing(path):
            if path.exists() and _MARK not in path.read_text(encoding="utf-8", errors="replace"):
                raise ArtifactError(
                    f"{path} exists and was not written by trtserve, so it is not overwritten.",
                    hint="Choose another place with --out.",
                )
            path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text, mode=0o644 if path.suffix == ".yaml" else 0o755)
    if job.logs is not None:
        with writing(job.logs):
            job.logs.mkdir(parents=True, exist_ok=True)
    for engine in job.engines:
        engine.write()
