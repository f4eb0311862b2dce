"""Options of `start` for Slurm and Kubernetes, and what becomes of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trtserve.cli.output import TerminalProgress, print_data, print_json, say
from trtserve.errors import UsageError

if TYPE_CHECKING:
    from trtserve.artifacts import ModelRepository
    from trtserve.launch.slurm import Job
    from trtserve.specs import ServerSpec

_BOTH = "Clusters: with --slurm or --kubernetes"
_SLURM = "Slurm"
_KUBERNETES = "Kubernetes"

SlurmOption = Annotated[
    bool, typer.Option("--slurm", help="Write a job of Slurm instead of starting here.", rich_help_panel=_BOTH)
]
KubernetesOption = Annotated[
    bool, typer.Option("--kubernetes", help="Write a manifest for Kubernetes instead.", rich_help_panel=_BOTH)
]
NodesOption = Annotated[int, typer.Option("--nodes", help="Machines of one server.", rich_help_panel=_BOTH)]
TasksOption = Annotated[
    int | None,
    typer.Option(
        "--ntasks-per-node", help="Ranks on each of them; default: world size / nodes.", rich_help_panel=_BOTH
    ),
]
ClusterOutOption = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="PATH",
        help="Folder of the job, or file of the manifest; default: ./NAME.slurm, ./NAME.yaml.",
        rich_help_panel=_BOTH,
    ),
]
SubmitOption = Annotated[
    bool, typer.Option("--submit", help="Hand the job to sbatch and print its number.", rich_help_panel=_SLURM)
]
AccountOption = Annotated[
    str | None, typer.Option("--account", help="Account that pays for the job.", rich_help_panel=_SLURM)
]
PartitionOption = Annotated[
    str | None, typer.Option("--partition", help="Partition to run in.", rich_help_panel=_SLURM)
]
TimeOption = Annotated[
    str | None, typer.Option("--time", help="How long it may run, such as 00:30:00.", rich_help_panel=_SLURM)
]
JobNameOption = Annotated[
    str | None, typer.Option("--job-name", help="Name of the job; default: the server's.", rich_help_panel=_SLURM)
]
OutputOption = Annotated[
    Path | None,
    typer.Option(
        "--output", metavar="DIR", help="Folder of the logs; default: logs beside the job.", rich_help_panel=_SLURM
    ),
]
GpuClockOption = Annotated[
    int | None,
    typer.Option("--gpu-clock", help="Lock the GPUs' clock to that many MHz; needs sudo.", rich_help_panel=_SLURM),
]
MpiOption = Annotated[
    str | None,
    typer.Option("--mpi", help="What srun calls PMIx, see srun --mpi=list; default: pmix.", rich_help_panel=_SLURM),
]
SbatchFlagOption = Annotated[
    list[str] | None,
    typer.Option(
        "--sbatch-flag",
        metavar="FLAG",
        help="A further line for sbatch, such as =--cpus-per-task=16; repeatable.",
        rich_help_panel=_SLURM,
    ),
]
ClaimOption = Annotated[
    str | None,
    typer.Option("--claim", help="PersistentVolumeClaim that holds the repository.", rich_help_panel=_KUBERNETES),
]
MountOption = Annotated[
    str, typer.Option("--mount-path", help="Where that volume is mounted.", rich_help_panel=_KUBERNETES)
]
NamespaceOption = Annotated[
    str | None, typer.Option("--namespace", help="Namespace of all objects.", rich_help_panel=_KUBERNETES)
]
HfSecretOption = Annotated[
    str | None,
    typer.Option("--hf-secret", help="Secret whose key HF_TOKEN is the hub's token.", rich_help_panel=_KUBERNETES),
]
SshSecretOption = Annotated[
    str | None,
    typer.Option(
        "--ssh-secret",
        help="Secret whose key ssh-privatekey lets the leader start ranks on other nodes.",
        rich_help_panel=_KUBERNETES,
    ),
]
WorkerTimeoutOption = Annotated[
    float | None,
    typer.Option(
        "--worker-timeout",
        help="Seconds that the leader of several nodes waits for the others, which pull the image; default: 1800.",
        rich_help_panel=_KUBERNETES,
    ),
]
PullSecretOption = Annotated[
    str | None, typer.Option("--pull-secret", help="Secret for pulling the image.", rich_help_panel=_KUBERNETES)
]

# What means nothing without the flag that it belongs to, and its default.
_BELONGING = {
    "slurm": ("submit", "account", "partition", "time", "job_name", "output", "gpu_clock", "mpi", "sbatch_flags"),
    "kubernetes": ("claim", "namespace", "hf_secret", "ssh_secret", "pull_secret", "worker_timeout"),
}


def require_cluster_options(options: Mapping[str, Any]) -> None:
    """UsageError for options of a cluster that is not asked for, and for two clusters at once."""
    if options["slurm"] and options["kubernetes"]:
        raise UsageError("--slurm and --kubernetes contradict each other; give one.")
    for cluster, names in _BELONGING.items():
        given = next((name for name in names if options[name]), None)
        if given is not None and not options[cluster]:
            flag = given.replace("_", "-").removesuffix("s") if given == "sbatch_flags" else given.replace("_", "-")
            raise UsageError(f"--{flag} belongs to --{cluster}.", hint=f"Give --{cluster} with it.")
    if not (options["slurm"] or options["kubernetes"]):
        for name, unset in (("nodes", 1), ("ntasks_per_node", None), ("out", None)):
            if options[name] != unset:
                raise UsageError(
                    f"--{name.replace('_', '-')} belongs to --slurm and --kubernetes.",
                    hint="Here a server runs on one machine, with as many ranks as its engine has.",
                )
    elif options["detach"] or options["auto_ports"]:
        flag = "--detach" if options["detach"] else "--auto-ports"
        raise UsageError(f"{flag} is for a server on this machine.", hint="Leave it out.")


def write_slurm(repository: ModelRepository, spec: ServerSpec, options: Mapping[str, Any]) -> None:
    """Write, print or submit the job."""
    from trtserve.launch.slurm import SlurmSpec, submit
    from trtserve.start.jobs import plan_job, write_job
    from trtserve.start.plan import server_name

    same = ("nodes", "ntasks_per_node", "account", "partition", "time", "job_name", "gpu_clock", "output")
    more = {} if options["mpi"] is None else {"mpi": options["mpi"]}
    slurm = SlurmSpec(**{name: options[name] for name in same}, **more, flags=tuple(options["sbatch_flags"] or ()))
    folder = options["out"] or Path(f"{server_name(repository, spec)}.slurm")
    job = plan_job(repository, spec, slurm, folder.absolute(), progress=TerminalProgress(quiet=options["quiet"]))
    if options["dry_run"]:
        _print_files({str(job.folder / name): text for name, text in job.files.items()}, json=options["json"])
        return
    write_job(job)
    number = submit(job) if options["submit"] else None
    if options["json"]:
        print_json("start", {"job": job.script, "logs": job.logs, "number": number})
    else:
        print_data(str(job.script) if number is None else number)
    if not options["quiet"]:
        _say_next(job, number)


def _say_next(job: Job, number: str | None) -> None:
    if number is None:
        say(f"Submit it: sbatch {job.script}")
        return
    say(f"Submitted job {number}: squeue -j {number} -o '%T %B' tells its state and the node that answers.")
    say(f"Logs: {job.logs}. Stop: scancel {number}")


def write_kubernetes(repository: ModelRepository, spec: ServerSpec, options: Mapping[str, Any]) -> None:
    """Write or print the manifest."""
    from trtserve.launch.kubernetes import KubernetesSpec
    from trtserve.start.jobs import plan_manifest, write_manifest
    from trtserve.start.plan import server_name

    if options["claim"] is None:
        raise UsageError(
            "--kubernetes needs the volume that holds the repository: --claim NAME.",
            hint="It is a PersistentVolumeClaim; the repository lies in it under its own name.",
        )

    def wishes(image: str) -> KubernetesSpec:
        same = ("claim", "mount_path", "namespace", "nodes", "hf_secret", "ssh_secret", "pull_secret")
        given = {name: options[name] for name in (*same, "ready_timeout")}
        if options["worker_timeout"] is not None:
            given["worker_timeout"] = options["worker_timeout"]
        return KubernetesSpec(
            image=image, gpus_per_node=options["ntasks_per_node"], replicas=options["instances"], **given
        )

    progress = TerminalProgress(quiet=options["quiet"])
    manifest = plan_manifest(repository, spec, wishes, progress=progress)
    file = (options["out"] or Path(f"{server_name(repository, spec)}.yaml")).absolute()
    if options["dry_run"]:
        _print_files({str(file): manifest.text}, json=options["json"])
        return
    write_manifest(manifest, file)
    for note in manifest.notes:
        progress.step(note)
    if options["json"]:
        print_json("start", {"manifest": file, "objects": [each["kind"] for each in manifest.objects]})
    else:
        print_data(str(file))
    if not options["quiet"]:
        say(f"Create it: kubectl apply -f {file}")


def _print_files(files: Mapping[str, str], *, json: bool) -> None:
    if json:
        print_json("start", {"files": dict(files), "dry_run": True})
    elif len(files) == 1:
        print_data("".join(files.values()).rstrip("\n"))
    else:
        print_data("\n".join(f"# --- {path}\n{text}" for path, text in files.items()).rstrip("\n"))
