"""A server as a Slurm job: the batch script, the script of each task, and a check of each node before the start."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtserve.artifacts import ModelRepository
from trtserve.errors import MachineError, MissingDependencyError, UsageError
from trtserve.gateway.settings import read_key
from trtserve.nvidia.containers import SQUASHFS, image_of, vllm_image_of, with_targets
from trtserve.process import Command, run
from trtserve.progress import SILENT, Progress
from trtserve.repository.served import ServedRepository
from trtserve.server.engine_fit import gpu_triton
from trtserve.server.launch.cluster import (
    GATEWAY_PORT,
    ClusterJob,
    Submitted,
    gateway_words,
    gpus_per_node,
    inspect_for_cluster,
    place_engines,
    ranks_per_node,
)
from trtserve.server.launch.commands import (
    PACKAGE_FOLDER,
    LaunchSetup,
    first_address,
    in_this_python,
    in_vllm_image,
    server_setup,
)
from trtserve.server.launch.modes import launch_mode, mpi_ranks, slurm_task
from trtserve.server.render import Verbatim, render
from trtserve.server.repositories import engine_paths, require_sound_files
from trtserve.server.triton.installation import CONTAINER_TRITON, find_triton, prepare_backends
from trtserve.server.triton.tritonserver import unique_prefix
from trtserve.specs import ServerSpec
from trtserve.specs.cluster import ClusterSpec, Nodes, SlurmOptions
from trtserve.store import Store

JOB, TASK, NODE = "server.sbatch", "task.sh", "node.sh"
# The shared-memory prefix that commands are composed with; each task puts its own in its place.
_SHM_PLACEHOLDER = "@shm@"
_SUBMIT_TIMEOUT = 120.0
_WORD = re.compile(r"[A-Za-z0-9_.,:=@/+-]+")
# Flags of sbatch that ask for GPUs, or for whole nodes with all of theirs.
_GPU_FLAGS = ("--gres=", "--gpus=", "--gpus-per-", "--exclusive", "--tres-per-")


@dataclass(frozen=True, kw_only=True)
class SlurmSpec(SlurmOptions, Nodes):
    """What Slurm is asked for; `ntasks_per_node` None follows from the engine."""


@dataclass(frozen=True, kw_only=True)
class Image:
    """The container of every task, as the plug-in pyxis takes it."""

    name: str
    mounts: tuple[Path, ...] = ()  # folders that are visible at the same paths inside

    @property
    def argument(self) -> str:
        """The image as enroot writes it: `#` follows the registry, and a name without one means Docker Hub.

        As in docker, a first part with a dot or a port is a registry; a path is that of a squashfs file.
        """
        first, slash, rest = self.name.partition("/")
        registry = bool(slash) and (first == "localhost" or "." in first or ":" in first)
        return f"{first}#{rest}" if registry and "#" not in self.name else self.name

    @property
    def mount_argument(self) -> str:
        """The mounts as pyxis takes them."""
        return ",".join(f"{path}:{path}" for path in self.mounts)


def settings(cluster: ClusterSpec, options: SlurmOptions, spec: ServerSpec) -> SlurmSpec:
    del spec
    return SlurmSpec(**vars(options), nodes=cluster.nodes, ntasks_per_node=cluster.ntasks_per_node)


def plan_job(
    repository: ModelRepository, spec: ServerSpec, cluster: SlurmSpec, place: Path, *, progress: Progress = SILENT
) -> ClusterJob:
    """Return the scripts of a job that serves the repository, for the folder `place`."""
    name, served = inspect_for_cluster(repository, spec, "slurm", progress)
    if spec.instances > 1:
        raise UsageError("--instances does not go with --slurm: one job is one server.", hint="Submit several jobs.")
    if spec.multi_model and spec.spawn_processes:
        raise UsageError(
            "Under Slurm an orchestrator cannot spawn its workers.",
            hint="Add --disable-spawn-processes, with participant_ids in the repository.",
        )
    require_sound_files(repository, spec, progress)

    folder = place.absolute()
    image = None if spec.container is None else _image(spec.container, repository, served, folder, progress)
    setup = _setup(name, repository.path, served, spec, progress)
    launch = launch_mode(served, spec).compose(setup, served, spec, nodes=cluster.nodes)
    commands = launch.groups
    if served.uses_llmapi and mpi_ranks(served) > 1:
        commands = (slurm_task(setup),) * mpi_ranks(served)

    per_task = gpus_per_node(served, cluster.nodes, None) if served.starts_workers else 1
    tasks = ranks_per_node(cluster.nodes, cluster.ntasks_per_node, len(commands), "tasks")
    # Rank 0, the orchestrator, needs no GPU. On several nodes, the others need one for each task, so all ask for that.
    gpus = tasks - 1 if spec.multi_model and cluster.nodes == 1 else tasks * per_task
    nodes = [rank // tasks for rank in range(len(commands))]
    engines = place_engines(repository, served, spec, nodes, gpus, progress)
    logs = (cluster.output or folder / "logs").absolute()
    _require_plain(folder, logs, *(() if image is None else (*image.mounts, setup.repository.absolute())))
    values: dict[str, Any] = {
        **vars(cluster),
        "tasks": tasks,
        "followers": served.starts_workers and cluster.nodes > 1,
        "mpi": "none" if served.starts_workers else cluster.mpi,
        "gpus": gpus,
        "job_name": cluster.job_name or name,
        "gateway": None if cluster.gateway is None else _gateway(setup, cluster.gateway),
        "repository": setup.repository.absolute(),
        # Each job adds its number.
        "shm_prefix": unique_prefix(re.sub(r"[^A-Za-z0-9_.-]", "_", name)).rstrip("_"),
    }
    job = render(
        "server.sbatch.j2",
        **values,
        logs=logs,
        ask_for_gpus=not any(flag.startswith(_GPU_FLAGS) for flag in cluster.flags),
        image=image,
        node_script=folder / NODE,
        task_script=folder / TASK,
    )
    task = render(
        "task.sh.j2",
        **values,
        environment=launch.command.env,
        first_rank=_array_words(setup, commands[0]),
        other_ranks=_array_words(setup, commands[-1]),
    )
    for warning in _warnings(spec, served, cluster):
        progress.warn(warning)
    files = {folder / JOB: job, folder / NODE: render("node.sh.j2", **values), folder / TASK: task}
    return ClusterJob(
        files=files,
        logs=logs,
        command=f"sbatch {folder / JOB}",
        engines=engines,
        record={"job": folder / JOB, "logs": logs, "number": None},
        submit=lambda: submit(folder / JOB, logs),
    )


def _gateway(setup: LaunchSetup, key_file: Path) -> list[str]:
    """Return the command of the gateway on the first node, which is rank 0's too; its Python is this one."""
    read_key(key_file)
    ports = {"http": setup.address.http_port, "grpc": setup.address.grpc_port, "metrics": setup.address.metrics_port}
    if taken := [name for name, port in ports.items() if port == GATEWAY_PORT]:
        raise UsageError(
            f"--{taken[0]}-port is {GATEWAY_PORT}, where the job's gateway listens.", hint="Choose another for Triton."
        )
    host = "localhost" if setup.address.host == "0.0.0.0" else setup.address.host
    access = ("--api-key-file", str(key_file.absolute()))
    words = gateway_words(setup.address, host, setup.repository.absolute(), access=access)
    return [sys.executable, "-m", "trtserve", "gateway", *words]


def _require_plain(*paths: Path) -> None:
    for path in paths:
        if not _WORD.fullmatch(str(path)) or "," in str(path) or ":" in str(path):
            raise UsageError(
                f"Slurm cannot have the path {path} in its options.",
                hint="Choose one without spaces, commas, colons and other special characters.",
            )


def _warnings(spec: ServerSpec, served: ServedRepository, cluster: SlurmSpec) -> Iterator[str]:
    if cluster.gateway is not None:
        yield f"For its gateway every node must see this Python, {sys.prefix}, and the key file at the same paths."
    elif spec.host.startswith("127.") or spec.host == "localhost":
        yield (
            f"The server will listen on {spec.host}, which only its own node reaches. Use --host 0.0.0.0 for clients "
            "on other machines."
        )
    if served.uses_llmapi and cluster.time is None:
        yield (
            "Without --time a failed server of the LLM API may hold its GPUs as long as the partition allows: its "
            "launcher and workers keep waiting for it."
        )


def _setup(name: str, repository: Path, served: ServedRepository, spec: ServerSpec, progress: Progress) -> LaunchSetup:
    """Return what the tasks have in common; without a container the embedded executor runs in this Python."""
    if served.embedded and spec.container is None:
        store = Store()
        triton = find_triton(served.backends | {"python"})
        progress.step(
            f"Every node must see this Python, {sys.prefix}, and {prepare_backends(triton, store)} at the same paths. "
            "With --container IMAGE the tasks run in an image that has trtserve (`trtserve help how-to/gpus`)."
        )
        own = server_setup(name, repository, served, spec, triton, first_address(spec), _SHM_PLACEHOLDER)
        return in_this_python(own, triton, store)
    if served.starts_workers:
        own = server_setup(name, repository, served, spec, CONTAINER_TRITON, first_address(spec), _SHM_PLACEHOLDER)
        return in_vllm_image(own)
    triton = CONTAINER_TRITON if spec.container else gpu_triton(served, on_this_machine=False)
    if triton.package is not None:  # the nodes do not have the wheel of this Python
        triton = CONTAINER_TRITON
    return server_setup(name, repository, served, spec, triton, first_address(spec), _SHM_PLACEHOLDER)


def _image(
    container: str, repository: ModelRepository, served: ServedRepository, folder: Path, progress: Progress
) -> Image:
    """Return the container of the tasks: a tag, a name, or a squashfs file."""
    if container.endswith(SQUASHFS):
        file = Path(container).absolute()
        if not file.is_file():
            progress.warn(f"The image {file} is not on this machine; the nodes must have it.")
        name = str(file)
    else:
        name = vllm_image_of(container) if served.starts_workers else image_of(container)
    # The scripts of the job are run inside as well.
    package = (PACKAGE_FOLDER,) if served.starts_workers else ()
    paths = with_targets((repository.path, *engine_paths(repository.path, served), folder, *package))
    outer = (path for path in paths if not any(path.is_relative_to(other) for other in paths if other != path))
    return Image(name=name, mounts=tuple(outer))


def _array_words(setup: LaunchSetup, command: Sequence[str]) -> list[Verbatim]:
    """Return the words of a bash array, with a variable in place of the shared-memory prefix of any rank."""
    prefix = re.compile(re.escape(setup.shm_prefix) + r"r\d+_")
    return [Verbatim('"${prefix}"'.join(map(_quoted, prefix.split(word))) or "''") for word in command]


def _quoted(part: str) -> str:
    # shellcheck takes an unquoted comma for a separator.
    return f"'{part}'" if "," in part and "'" not in part else shlex.quote(part) if part else ""


def stop_command(place: Path) -> str:
    del place
    return "scancel NUMBER"


def submit(script: Path, logs: Path) -> Submitted:
    """Hand a job to sbatch.

    Raises MissingDependencyError if sbatch is missing and MachineError with Slurm's own message when it refuses the
    job.
    """
    try:
        ended = run(Command(argv=("sbatch", "--parsable", str(script))), timeout=_SUBMIT_TIMEOUT)
    except MissingDependencyError:
        raise MissingDependencyError(
            "--submit runs sbatch, which was not found on PATH.",
            hint=f"Submit the job where Slurm is, usually on a login node: sbatch {script}",
        ) from None
    except TimeoutError:
        raise MachineError(
            f"sbatch did not answer within {_SUBMIT_TIMEOUT:g} s.", hint="Check the controller: scontrol ping"
        ) from None
    if ended.code != 0:
        message = ended.stderr.strip() or f"code {ended.code}"
        raise MachineError(
            f"Slurm refused the job: {message}",
            hint=f"Options for sbatch: --account, --partition, --time, --sbatch-flag. The script: {script}",
        )
    # Where there are several clusters, the name of one follows a semicolon.
    number = ended.stdout.strip().partition(";")[0]
    return Submitted(
        number=number,
        next_steps=(
            f"Submitted job {number}: squeue -j {number} -o '%T %B' shows its state and the node that answers.",
            f"Logs: {logs}. Stop: scancel {number}",
        ),
    )
