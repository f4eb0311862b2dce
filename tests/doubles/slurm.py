"""Doubles of `sbatch`, `srun` and `scancel` on a cluster of one machine.

A job is its own process group; its state is in `scratch/jobs/<id>`. srun starts every task here, with the
variables of its rank; --mpi=pmix adds PMIx's, without it the tasks know nothing of each other (each is a world of one).
Containers are pyxis's: the image must be known, paths outside the mounts do not resolve (mounts.py).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from tests.doubles.containers import CONTAINERS
from tests.doubles.docker import container_environment
from tests.doubles.mounts import Mount, MountError, check_mounts, parse_mount, translate
from tests.doubles.settings import PREFIX, Settings, read_settings, record_call
from tests.doubles.slurm_options import SBATCH, SRUN, OptionError, Parsed, parse, script_options

_PAUSE = 0.05
_NODES, _GPUS_PER_NODE = 2, 8


def _jobs(folder: Path) -> Path:
    return folder / "scratch" / "jobs"


def _fill(pattern: str, job: str, name: str, task: int = 0) -> str:
    for sign, text in (("%j", job), ("%x", name), ("%t", str(task)), ("%n", "0"), ("%N", "node0"), ("%s", "0")):
        pattern = pattern.replace(sign, text)
    if "%" in pattern:
        raise OptionError(f"(strict double) unknown sign in the file name {pattern}")
    return pattern


def _open(path: Path) -> int:
    """Slurm creates no folders: a job with a missing output folder fails silently."""
    if not path.parent.is_dir():
        raise OptionError(f"(strict double) {path.parent} does not exist; Slurm does not make it")
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)


def _layout(parsed: Parsed) -> tuple[int, int]:
    """Nodes and tasks, checked against the cluster and each other."""
    nodes = parsed.count("nodes", int(os.environ.get("SLURM_NNODES", "1")))
    if nodes > _NODES:
        raise OptionError("error: Batch job submission failed: Node count specification invalid")
    per_node = parsed.values.get("ntasks-per-node", os.environ.get("SLURM_NTASKS_PER_NODE"))
    tasks = parsed.count("ntasks", nodes * int(per_node or 1))
    if "ntasks" not in parsed.values and per_node is None:
        tasks = int(os.environ.get("SLURM_NTASKS", str(tasks)))
    if per_node is not None and tasks > nodes * int(per_node):
        raise OptionError(f"error: {tasks} tasks do not fit {nodes} nodes with {per_node} tasks each")
    if tasks > nodes * _GPUS_PER_NODE:
        raise OptionError(f"(strict double) {tasks} tasks on {nodes} nodes: more than GPUs")
    return nodes, tasks


def _gpus(parsed: Parsed, nodes: int, tasks: int) -> int:
    """Return the GPUs of each node: those requested, none by default (GRES are managed); exclusive nodes give all."""
    values = parsed.values
    if "exclusive" in values:
        return _GPUS_PER_NODE
    each = values.get("gpus-per-node", os.environ.get("SLURM_GPUS_PER_NODE"))
    if "gpus-per-task" in values:
        asked = int(values["gpus-per-task"].rpartition(":")[2]) * -(-tasks // nodes)
    elif each is not None:
        asked = int(each.rpartition(":")[2])
    else:
        last = values.get("gres", "0").rpartition(":")[2]
        asked = int(last) if last.isdigit() else 1
    if asked > _GPUS_PER_NODE:
        raise OptionError("error: Batch job submission failed: Requested node configuration is not available")
    return asked


def sbatch(arguments: list[str], folder: Path) -> int:
    """Submit a script: check it, start it in the background, print its number."""
    record_call(folder, "sbatch", arguments)
    read_settings(folder)
    try:
        given = parse(arguments, SBATCH, "sbatch")
        script = _script(given.rest)
        options = parse([*script_options(script.read_text(encoding="utf-8")), *arguments], SBATCH, "sbatch")
        nodes, tasks = _layout(options)
        gpus = _gpus(options, nodes, tasks)
        number = _submit(options, script, given.rest[1:], (nodes, tasks, gpus), folder)
    except OptionError as error:
        sys.stderr.write(f"sbatch: {error}\n")
        return 1
    sys.stdout.write(f"{number}\n" if "parsable" in options.values else f"Submitted batch job {number}\n")
    return 0


def _script(words: list[str]) -> Path:
    if not words:
        raise OptionError("(strict double) no script")
    if not Path(words[0]).exists():
        raise OptionError(f"error: Unable to open file {words[0]}")
    return Path(words[0])


def _submit(options: Parsed, script: Path, words: list[str], counts: tuple[int, int, int], folder: Path) -> str:
    nodes, tasks, gpus = counts
    jobs = _jobs(folder)
    jobs.mkdir(exist_ok=True)
    number = str(1000 + len(list(jobs.iterdir())))
    name = options.values.get("job-name", script.name)
    job = jobs / number
    job.mkdir()
    copy = job / "script"
    copy.write_text(script.read_text(encoding="utf-8"), encoding="utf-8")
    copy.chmod(0o755)
    workdir = Path(options.values.get("chdir", "."))
    output = _open(workdir / _fill(options.values.get("output", "slurm-%j.out"), number, name))
    error = _open(workdir / _fill(options.values["error"], number, name)) if "error" in options.values else output
    environment = {
        **os.environ,
        "SLURM_JOB_ID": number,
        "SLURM_JOB_NAME": name,
        "SLURM_NNODES": str(nodes),
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_NTASKS": str(tasks),
        "SLURM_GPUS_PER_NODE": str(gpus),
        "SLURM_SUBMIT_DIR": str(Path.cwd()),
        "SLURM_JOB_NODELIST": "node0" if nodes == 1 else f"node[0-{nodes - 1}]",
    }
    if "cpus-per-task" in options.values:  # srun does not read it since 22.05
        environment["SLURM_CPUS_PER_TASK"] = options.values["cpus-per-task"]
    if "ntasks-per-node" in options.values:
        environment["SLURM_NTASKS_PER_NODE"] = options.values["ntasks-per-node"]
    # A small parent writes the exit code, for scancel and for the test.
    keeper = f'"$@"; echo $? > {job / "code"}'
    process = subprocess.Popen(
        ["bash", "-c", keeper, "job", str(copy), *words],
        env=environment,
        cwd=workdir,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=error,
        start_new_session=True,
    )
    (job / "pid").write_text(str(process.pid), encoding="utf-8")
    return number


def _binding(parsed: Parsed) -> str:
    """Return how tasks are bound: to the cores of the step, one each by default, where binding is on."""
    kind = parsed.values.get("cpu-bind", "cores")
    return "quiet,none" if kind == "none" else f"quiet,mask_cpu:{parsed.values.get('cpus-per-task', '1')} cores"


def _task_environment(parsed: Parsed, rank: int, tasks: int, nodes: int, base: dict[str, str]) -> dict[str, str]:
    per_node = -(-tasks // nodes)
    environment = {
        **base,
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank % per_node),
        "SLURM_NODEID": str(rank // per_node),
        "SLURM_NTASKS": str(tasks),
        "SLURM_NNODES": str(nodes),
        "SLURM_STEP_ID": "0",
        "SLURM_CPU_BIND": _binding(parsed),
        "SLURM_JOB_ID": os.environ.get("SLURM_JOB_ID", "999"),
    }
    if parsed.values.get("mpi", "none").startswith("pmix"):
        environment["PMIX_RANK"] = str(rank)
        environment["PMIX_NAMESPACE"] = f"slurm.pmix.{environment['SLURM_JOB_ID']}.{os.getpid()}"
    return environment


def _containers(parsed: Parsed, settings: Settings, folder: Path) -> tuple[list[Mount] | None, dict[str, str]]:
    """Return mounts and environment of pyxis's container; None and this environment without one."""
    image = parsed.values.get("container-image")
    if image is None:
        if any(name.startswith("container-") for name in parsed.values):
            raise OptionError("error: pyxis: container options without --container-image")
        return None, dict(os.environ)
    tag = next((tag for tag in CONTAINERS if image.endswith(f"nvidia/tritonserver:{tag}-trtllm-python-py3")), None)
    first, slash, _ = image.removeprefix("docker://").partition("/")
    if image.startswith("/"):
        if not Path(image).is_file():
            raise OptionError(f"error: pyxis: no such file: {image}")
    elif slash and "#" not in first and ("." in first or ":" in first or tag is not None):
        raise OptionError(f"error: pyxis: enroot asks Docker Hub for {image}; '#' is between registry and image")
    elif tag is None and image not in settings.images.split(","):
        raise OptionError(f"error: pyxis: failed to import docker image {image}")
    mounts = [parse_mount(text) for text in parsed.values.get("container-mounts", "").split(",") if text]
    check_mounts(mounts)
    slurm = [name for name in os.environ if name.startswith("SLURM_")]
    return mounts, container_environment(mounts, tag, slurm, folder)


def srun(arguments: list[str], folder: Path) -> int:
    """Run one step: all tasks, their worst exit code."""
    record_call(folder, "srun", arguments)
    settings = read_settings(folder)
    try:
        parsed = parse(arguments, SRUN, "srun")
        nodes, tasks = _layout(parsed)
        mounts, base = _containers(parsed, settings, folder)
        words = parsed.rest if mounts is None else [translate(word, mounts) for word in parsed.rest]
        workdir = parsed.values.get("container-workdir", parsed.values.get("chdir", "."))
        inside = workdir if mounts is None else translate(workdir, mounts)
        if not words:
            sys.stderr.write("srun: fatal: No command given to execute.\n")
            return 1
        gpus = min(_gpus(parsed, nodes, tasks), settings.gpus)
        return _step(parsed, words, Path(inside), nodes, tasks, base | {PREFIX + "GPUS": str(gpus)})
    except (OptionError, MountError) as error:
        sys.stderr.write(f"srun: {error}\n")
        return 1


def _step(parsed: Parsed, words: list[str], workdir: Path, nodes: int, tasks: int, base: dict[str, str]) -> int:
    processes: list[subprocess.Popen[bytes]] = []
    job = os.environ.get("SLURM_JOB_ID", "999")
    for rank in range(tasks):
        output = None
        if "output" in parsed.values:
            output = _open(Path(_fill(parsed.values["output"], job, os.environ.get("SLURM_JOB_NAME", "step"), rank)))
        environment = _task_environment(parsed, rank, tasks, nodes, base)
        processes.append(
            subprocess.Popen(
                words,
                env=environment,
                cwd=workdir,
                stdout=output,
                stderr=output and subprocess.STDOUT,
                start_new_session=True,
            )
        )

    def stop(number: int, _frame: object) -> None:
        _signal(processes, number)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    return _wait(processes, killing=parsed.values.get("kill-on-bad-exit") == "1")


def _signal(processes: list[subprocess.Popen[bytes]], number: int) -> None:
    """slurmstepd signals every process of a task, not only its first."""
    for process in processes:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)


def _wait(processes: list[subprocess.Popen[bytes]], *, killing: bool) -> int:
    """Wait for every task; with --kill-on-bad-exit the first bad one ends the others."""
    while None in [process.poll() for process in processes]:
        bad = [rank for rank, process in enumerate(processes) if process.returncode not in (None, 0)]
        if bad and killing:
            sys.stderr.write(
                f"srun: error: node0: task {bad[0]}: Exited with exit code {processes[bad[0]].returncode}\n"
            )
            _signal(processes, signal.SIGKILL)
        time.sleep(_PAUSE)
    codes = [process.returncode if process.returncode >= 0 else 128 - process.returncode for process in processes]
    return max(codes)


def scancel(arguments: list[str], folder: Path) -> int:
    """End jobs by number: SIGTERM to the job's processes."""
    record_call(folder, "scancel", arguments)
    for number in arguments:
        job = _jobs(folder) / number
        if not job.exists():
            sys.stderr.write(f"scancel: error: Kill job error on job id {number}: Invalid job id specified\n")
            return 1
        if not (job / "code").exists():
            with suppress(ProcessLookupError):  # its processes have ended, and its code is being written
                os.killpg(int((job / "pid").read_text(encoding="utf-8")), signal.SIGTERM)
    return 0
