"""`trtserve start` for a cluster: write, print or submit a job or a manifest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trtserve.cli.output import TerminalProgress, print_data, print_json, say
from trtserve.errors import UsageError
from trtserve.specs.cluster import OPTIONS, ClusterSpec
from trtserve.specs.options import Spec, given_flags

if TYPE_CHECKING:
    from trtserve.artifacts import ModelRepository
    from trtserve.specs import ServerSpec


@dataclass(frozen=True, kw_only=True)
class ClusterCall:
    """Cluster options of `start`, and how to report what was written."""

    cluster: ClusterSpec
    options: Mapping[str, Spec]
    """Kind of cluster → its own options."""
    json: bool
    dry_run: bool
    quiet: bool

    def require_cluster(self, *, systemd: bool = False) -> None:
        """Raise UsageError for options of a cluster that was not requested; `--systemd` has an --out too."""
        for name, options in self.options.items():
            if name != self.cluster.kind and (given := given_flags(options)):
                raise UsageError(f"{given[0]} belongs to --{name}.", hint=f"Give --{name} with it.")
        given = given_flags(self.cluster, ("nodes", "ntasks_per_node", *(() if systemd else ("out",))))
        if given and self.cluster.kind is None:
            owners = [*OPTIONS, "systemd"] if given[0] == "--out" else list(OPTIONS)
            raise UsageError(
                f"{given[0]} belongs to {' and '.join(f'--{name}' for name in owners)}.",
                hint="Here a server runs on one machine, with as many ranks as its engine has.",
            )


def write_for_cluster(repository: ModelRepository, spec: ServerSpec, kind: str, call: ClusterCall) -> None:
    """Write, print or submit the files that start the server on a cluster of this kind."""
    from trtserve.server.launch import CLUSTERS
    from trtserve.server.launch.cluster import write_job
    from trtserve.server.state import server_name

    cluster, options = CLUSTERS[kind], call.options[kind]
    settings = cluster.settings(call.cluster, options, spec)
    place = (call.cluster.out or Path(f"{server_name(repository, spec)}{OPTIONS[kind].SUFFIX}")).absolute()
    progress = TerminalProgress(quiet=call.quiet)
    job = cluster.plan_job(repository, spec, settings, place, progress=progress)
    if call.dry_run:
        print_files(job.files, json=call.json)
        return
    write_job(job)
    for note in job.notes:
        progress.step(note)
    submitted = job.submit() if job.submit is not None and getattr(options, "submit", False) else None
    if call.json:
        print_json("start", job.record if submitted is None else {**job.record, "number": submitted.number})
    else:
        print_data(str(job.script) if submitted is None else submitted.number)
    if not call.quiet:
        for line in (submitted or job).next_steps:
            say(line)


def print_files(files: Mapping[Path, str], *, json: bool) -> None:
    """Print the files that a dry run does not write."""
    if json:
        print_json("start", {"files": {str(path): text for path, text in files.items()}, "dry_run": True})
    elif len(files) == 1:
        print_data("".join(files.values()).rstrip("\n"))
    else:
        print_data("\n".join(f"# --- {path}\n{text}" for path, text in files.items()).rstrip("\n"))
