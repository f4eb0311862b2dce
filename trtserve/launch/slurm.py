"""A server as a job of Slurm: the batch script, the script of each task, and a look at each node before."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trtserve.errors import MachineError, MissingDependencyError, UsageError, counted
from trtserve.launch.base import Setup
from trtserve.launch.nodes import EngineNodes
from trtserve.process import Command, run

JOB, TASK, NODE = "server.sbatch", "task.sh", "node.sh"
SHM_PLACEHOLDER = "@shm@"
"""What a Setup has as its prefix of shared memory, so that each task puts its own there."""

_SUBMIT_TIMEOUT = 120.0
_WORD = re.compile(r"[A-Za-z0-9_.,:=@/+-]+")
_TIME = re.compile(r"(\d+-)?\d+(:\d\d){0,2}")
_MPI = re.compile(r"pmix(_v\d+)?")
# Flags of sbatch that ask for GPUs, or for all that nodes have.
_ASKING = ("--gres=", "--gpus=", "--gpus-per-", "--exclusive", "--tres-per-")


@dataclass(frozen=True, kw_only=True)
class SlurmSpec:
    """What Slurm is asked for; None leaves it to the cluster.

    `ntasks_per_node` None follows from the engine. `gpu_clock` locks the clock of all GPUs to that many MHz, which
    needs sudo on the nodes. `output` is the folder of the logs. `mpi` is what srun calls its PMIx. `flags` go to sbatch
    as they are; unless one of them asks for GPUs or whole nodes, a GPU for each rank is asked for.
    """

    nodes: int = 1
    ntasks_per_node: int | None = None
    account: str | None = None
    partition: str | None = None
    time: str | None = None
    job_name: str | None = None
    gpu_clock: int | None = None
    output: Path | None = None
    mpi: str = "pmix"
    flags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for flag in ("nodes", "ntasks_per_node", "gpu_clock"):
            value = getattr(self, flag)
            if value is not None and value < 1:
                raise UsageError(f"--{flag.replace('_', '-')} is {value}; it must be at least 1.")
        for flag in ("account", "partition", "job_name"):
            value = getattr(self, flag)
            if value is not None and not _WORD.fullmatch(value):
                raise UsageError(f"--{flag.replace('_', '-')} is {value!r}; a word without blanks is expected.")
        if self.time is not None and not _TIME.fullmatch(self.time):
            raise UsageError(f"--time is {self.time!r}; Slurm takes 30, 00:30:00 or 1-00:00:00.")
        if not _MPI.fullmatch(self.mpi):
            raise UsageError(
                f"--mpi is {self.mpi!r}; TensorRT-LLM's Open MPI needs PMIx: pmix, or one of its versions.",
                hint="srun --mpi=list names those that this cluster has, such as pmix_v4.",
            )
        wrong = next((flag for flag in self.flags if not flag.startswith("--") or "\n" in flag), None)
        if wrong is not None:
            raise UsageError(f"--sbatch-flag is {wrong!r}; a long option such as --gpus-per-node=8 is expected.")


@dataclass(frozen=True, kw_only=True)
class Image:
    """The container of every task, as the plug-in pyxis takes it; `mounts` are seen at the same paths inside."""

    name: str
    mounts: tuple[Path, ...] = ()

    @property
    def argument(self) -> str:
        """enroot has a `#` between registry and image, and asks Docker Hub for a name without one.

        A first part with a dot or a port is a registry, as docker has it; a path is that of a squashfs file.
        """
        first, slash, rest = self.name.partition("/")
        registry = bool(slash) and (first == "localhost" or "." in first or ":" in first)
        return f"{first}#{rest}" if registry and "#" not in self.name else self.name


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job before it is written: its files by name, below `folder`; `logs` is made too, which Slurm does not do.

    `engines` are those that must be told about its nodes.
    """

    folder: Path
    logs: Path
    files: Mapping[str, str] = field(default_factory=dict)
    engines: Sequence[EngineNodes] = ()

    @property
    def script(self) -> Path:
        """What sbatch takes."""
        return self.folder / JOB


def tasks_per_node(spec: SlurmSpec, ranks: int) -> int:
    """Tasks on each node, so that there are as many as ranks; UsageError when they are not."""
    each = spec.ntasks_per_node or max(1, ranks // spec.nodes)
    if each * spec.nodes != ranks:
        raise UsageError(
            f"--nodes {spec.nodes} × --ntasks-per-node {each} are {each * spec.nodes} tasks; "
            f"the server has {counted(ranks, 'rank')}.",
            hint="Their product must be the world size of the engine: tensor × pipeline parallel.",
        )
    return each


def gpus_per_node(spec: SlurmSpec, ranks: int, without_gpu: int) -> int:
    """GPUs that each node must give; on several, those without a rank that needs none decide."""
    return tasks_per_node(spec, ranks) - (without_gpu if spec.nodes == 1 else 0)


def compose_job(
    setup: Setup,
    groups: Sequence[tuple[str, ...]],
    environment: Mapping[str, str],
    spec: SlurmSpec,
    *,
    name: str,
    folder: Path,
    image: Image | None = None,
    without_gpu: int = 0,
) -> Job:
    """The scripts of a server whose ranks have the command lines `groups`, composed with SHM_PLACEHOLDER as prefix.

    `without_gpu` ranks need none: an orchestrator whose workers are other ranks.
    UsageError for a folder that Slurm cannot have in its options.
    """
    folder = folder.absolute()
    logs = (spec.output or folder / "logs").absolute()
    for path in (folder, logs, *((*image.mounts, setup.repository.absolute()) if image else ())):
        if not _WORD.fullmatch(str(path)) or "," in str(path) or ":" in str(path):
            raise UsageError(f"Slurm cannot have the path {path} in its options.", hint="Choose one without blanks.")
    each, gpus = tasks_per_node(spec, len(groups)), gpus_per_node(spec, len(groups), without_gpu)
    files = {
        JOB: _job_script(setup, spec, (each, gpus), name=name, folder=folder, logs=logs, image=image),
        NODE: _node_script(setup, each, gpus, name),
        TASK: _task_script(setup, groups, environment, name),
    }
    return Job(folder=folder, logs=logs, files=files)


def _options(spec: SlurmSpec, counts: tuple[int, int], name: str, logs: Path) -> list[str]:
    """The #SBATCH lines."""
    each, gpus = counts
    asked = any(flag.startswith(_ASKING) for flag in spec.flags)
    options = {
        "job-name": spec.job_name or name,
        "output": f"{logs}/%x-%j.out",
        "nodes": str(spec.nodes),
        "ntasks-per-node": str(each),
        "gpus-per-node": None if asked else str(gpus),
        "account": spec.account,
        "partition": spec.partition,
        "time": spec.time,
    }
    lines = [f"#SBATCH --{flag}={value}" for flag, value in options.items() if value is not None]
    return lines + [f"#SBATCH {shlex.quote(flag)}" for flag in spec.flags]


def _job_script(
    setup: Setup,
    spec: SlurmSpec,
    counts: tuple[int, int],
    *,
    name: str,
    folder: Path,
    logs: Path,
    image: Image | None,
) -> str:
    """The batch script; `counts` are tasks and GPUs of a node."""
    # A task is not held to the one core that is the default for each: tritonserver and its stubs are many threads.
    step = [f"srun --mpi={spec.mpi} --kill-on-bad-exit=1 --cpu-bind=none", f"--output={logs}/%x-%j-rank%t.out"]
    step += _image_lines(setup, image)
    once = f"srun --nodes={spec.nodes} --ntasks={spec.nodes} --ntasks-per-node=1 --cpu-bind=none"
    clock = [] if spec.gpu_clock is None else [f"{once} sudo nvidia-smi -lgc {spec.gpu_clock},{spec.gpu_clock}", ""]
    return "\n".join(
        [
            "#!/bin/bash",
            f"# Written by `trtserve start --slurm`: {name}, nodes {spec.nodes}, tasks on each {counts[0]}.",
            *_options(spec, counts, name, logs),
            "set -euo pipefail",
            "",
            "# A node that lacks GPUs or the repository is told before any model is loaded.",
            f"{once} bash {folder / NODE}",
            "",
            *clock,
            "code=0",
            " \\\n    ".join([*step, f"bash {folder / TASK}"]) + " || code=$?",
            "",
            "# A rank that was killed leaves its shared memory.",
            f"{once} bash {folder / NODE} sweep || true",
            'exit "${code}"',
            "",
        ]
    )


def _image_lines(setup: Setup, image: Image | None) -> list[str]:
    if image is None:
        return []
    mounts = ",".join(f"{path}:{path}" for path in image.mounts)
    return [
        f"--container-image={shlex.quote(image.argument)}",
        f"--container-mounts={mounts}",
        f"--container-workdir={setup.repository.absolute()}",
    ]


_NODE = """\
#!/bin/bash
# Written by `trtserve start --slurm`, run once on every node: has it GPUs for its tasks, does it see the repository?
# With `sweep`, once more at the end: the job's shared memory is removed.
set -euo pipefail
if [ "${{1:-}}" = sweep ]; then
    rm -f "/dev/shm/{prefix}_${{SLURM_JOB_ID}}_r"*
    exit 0
fi
gpus="$(nvidia-smi --list-gpus | grep -c '^GPU ' || true)"
if [ "${{gpus}}" -lt {gpus} ]; then
    echo "$(hostname): each task takes a GPU; tasks: {gpus}, GPUs: ${{gpus}}" >&2
    echo "A job has the GPUs that it asks for: --gpus-per-node, --gres=gpu:{gpus} or --exclusive (--sbatch-flag)" >&2
    exit 1
fi
if [ "$(nproc)" -lt $((4 * {each})) ]; then
    echo "$(hostname): $(nproc) CPU cores for {each} ranks are few: ask for more, --sbatch-flag=--cpus-per-task=16" >&2
fi
if [ ! -d {repository} ]; then
    echo "$(hostname): the model repository is not there: "{repository} >&2
    exit 1
fi
"""


def _node_script(setup: Setup, each: int, gpus: int, name: str) -> str:
    repository = shlex.quote(str(setup.repository.absolute()))
    return _NODE.format(each=each, gpus=gpus, repository=repository, prefix=_prefix(name))


def _prefix(name: str) -> str:
    """Beginning of the names of shared memory of a server's jobs."""
    return f"trtserve_{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}"


_TASK = """\
#!/bin/bash
# Written by `trtserve start --slurm`: one task of srun. Rank 0 answers the clients; the others load the core model.
set -uo pipefail
{exports}# Names of shared memory are this rank's and this job's own. They are put in here: what trtllm-llmapi-launch
# starts has no SLURM_ variable any more.
prefix="{prefix}_${{SLURM_JOB_ID}}_r${{SLURM_PROCID}}_"
cd {repository} || exit 1
if [ "${{SLURM_PROCID}}" -eq 0 ]; then
    command=(
{first}
    )
else
    command=(
{others}
    )
fi
stopped=0
"${{command[@]}}" &
server=$!
trap 'stopped=1; kill -TERM "${{server}}" 2>/dev/null' TERM INT
wait "${{server}}"
code=$?
# The signal has ended that wait, and not yet the server. An end that was asked for is no failure: by a bad code srun
# would kill the other tasks before they are done.
if [ "${{stopped}}" -eq 1 ]; then
    wait "${{server}}"
    code=0
fi
rm -f /dev/shm/"${{prefix}}"*
exit "${{code}}"
"""


def _task_script(setup: Setup, groups: Sequence[tuple[str, ...]], environment: Mapping[str, str], name: str) -> str:
    exports = "".join(f"export {key}={shlex.quote(value)}\n" for key, value in environment.items())
    return _TASK.format(
        exports=exports,
        prefix=_prefix(name),
        repository=shlex.quote(str(setup.repository.absolute())),
        first=_words(setup, groups[0]),
        others=_words(setup, groups[-1]),
    )


def _words(setup: Setup, group: tuple[str, ...]) -> str:
    """Words of a bash array, one on each line, with the variable in the place of a rank's prefix.

    Of any rank's: tasks of the LLM API all have rank 0's words.
    """
    prefix = re.compile(re.escape(setup.shm_prefix) + r"r\d+_")
    return "\n".join(f"        {_word(prefix.split(word))}" for word in group)


def _word(parts: Sequence[str]) -> str:
    """What stands around the prefix. Commas are quoted too: they separate nothing in an array, as shellcheck warns."""
    quoted = [f"'{part}'" if "," in part and "'" not in part else shlex.quote(part) if part else "" for part in parts]
    return '"${prefix}"'.join(quoted) or "''"


def submit(job: Job) -> str:
    """Hand the job to sbatch; its number.

    MissingDependencyError without sbatch, MachineError with Slurm's own words when it refuses.
    """
    try:
        ended = run(Command(argv=("sbatch", "--parsable", str(job.script))), timeout=_SUBMIT_TIMEOUT)
    except MissingDependencyError:
        raise MissingDependencyError(
            "--submit runs sbatch, which was not found on PATH.",
            hint=f"Submit the job where Slurm is, usually on a login node: sbatch {job.script}",
        ) from None
    except TimeoutError:
        raise MachineError(f"sbatch did not answer within {_SUBMIT_TIMEOUT:g} s.") from None
    if ended.code != 0:
        said = ended.stderr.strip() or f"code {ended.code}"
        raise MachineError(
            f"Slurm refused the job: {said}",
            hint=f"Options for sbatch: --account, --partition, --time, --sbatch-flag. The script: {job.script}",
        )
    # With several clusters the name of one stands behind a semicolon.
    return ended.stdout.strip().partition(";")[0]
