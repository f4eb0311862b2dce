"""Servers of a setup file that a cluster runs: `up` writes their job or manifest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from trtserve.artifacts import ModelRepository
from trtserve.errors import UsageError
from trtserve.executor.runtimes import RUNTIMES
from trtserve.pipeline.setup_file.content import ClusterSetup, ServerSetup, in_keys
from trtserve.progress import SILENT, Progress
from trtserve.server.launch import CLUSTERS
from trtserve.server.launch.cluster import ClusterJob, is_written, write_job


@dataclass(frozen=True, kw_only=True)
class WrittenJob:
    """The files of a server that a cluster runs."""

    server: str
    model: str
    kind: str
    job: ClusterJob

    @property
    def next_steps(self) -> Sequence[str]:
        """How to start it."""
        return CLUSTERS[self.kind].next_steps(self.job, None)

    def to_json(self) -> dict[str, Any]:
        """Return name, model, kind of cluster, and the files."""
        record = CLUSTERS[self.kind].record(self.job, None)
        return {"name": self.server, "model": self.model, "cluster": self.kind, **record}


def require_cluster(server: ServerSetup, cluster: ClusterSetup, runtime: str) -> None:
    """Raise UsageError for options that no job can have, and for a model that is served on CPUs."""
    with _named(server, cluster):
        CLUSTERS[cluster.kind].settings(cluster.spec, cluster.options, server.spec)
    if RUNTIMES[runtime].device() == "cpu":
        raise UsageError(
            f"Server {server.name} is for {cluster.kind}, which starts engines on GPUs; the runtime {runtime} serves "
            f"{server.model} on the CPU.",
            hint=f"Give the model a runtime for GPUs, such as `runtime: torch`, or leave out `{cluster.kind}`.",
        )


def has_files(server: ServerSetup, cluster: ClusterSetup, repository: ModelRepository) -> bool:
    """Return whether the files are there as `write` would write them."""
    return is_written(_plan(server, cluster, repository, SILENT))


def write(
    server: ServerSetup, cluster: ClusterSetup, repository: ModelRepository, progress: Progress = SILENT
) -> WrittenJob:
    """Write the job or manifest, unless it is there. Raises what `plan_job` of the cluster and `write_job` raise."""
    job = _plan(server, cluster, repository, progress)
    if not is_written(job):
        write_job(job)
    for note in job.notes:
        progress.step(note)
    return WrittenJob(server=server.name, model=server.model, kind=cluster.kind, job=job)


def stop_command(cluster: ClusterSetup) -> str:
    """Return what stops such a server."""
    return CLUSTERS[cluster.kind].stop_command(cluster.place)


def _plan(server: ServerSetup, cluster: ClusterSetup, repository: ModelRepository, progress: Progress) -> ClusterJob:
    module = CLUSTERS[cluster.kind]
    with _named(server, cluster):
        settings = module.settings(cluster.spec, cluster.options, server.spec)
        return module.plan_job(repository, server.spec, settings, cluster.place, progress=progress)


@contextmanager
def _named(server: ServerSetup, cluster: ClusterSetup) -> Iterator[None]:
    """Let a refusal name the server and the keys of the file instead of the flags of `start`."""
    try:
        yield
    except UsageError as error:
        hint = None if error.hint is None else in_keys(error.hint)
        raise UsageError(f"servers.{server.name}.{cluster.kind}: {in_keys(error.message)}", hint=hint) from error
