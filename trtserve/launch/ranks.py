"""The ranks of a launch as processes of this machine: which are there, what they use, and what mpirun leaves behind."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from trtserve.machine import gibibytes
from trtserve.process import Identity, arguments, children, environment_of, tree, usage
from trtserve.releases.launcher import LLMAPI_LAUNCH
from trtserve.triton import rank_log, server_log

# Open MPI and PMIx name the rank in the environment of each process that they start.
_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK")


def rank_processes(mpirun: Identity) -> dict[int, Identity]:
    """The living ranks that this mpirun started here, in their order; empty for a process that is no mpirun."""
    found: dict[int, Identity] = {}
    for child in children(mpirun):
        environment = environment_of(child)
        rank = next((environment[name] for name in _RANK_VARIABLES if name in environment), "")
        # Workers that an orchestrator spawns are a world of their own, with ranks that count from 0 again.
        if rank.isdigit():
            found.setdefault(int(rank), child)
    return dict(sorted(found.items()))


def serving_process(root: Identity) -> Identity:
    """The tritonserver of a launch that answers the clients; `root` itself where there is none below it.

    It is the only process that can end a launch in order: mpirun kills its ranks a moment after it is asked to end,
    ranks other than 0 have no handler while they load, and trtllm-llmapi-launch dies without ending its command.
    """
    first = rank_processes(root).get(0)
    if first is None:
        return root
    found = [process for process in (first, *tree(first)) if _is_server(arguments(process))]
    return found[0] if found else first


def _is_server(line: list[str]) -> bool:
    """Whether a command line is tritonserver's; a script has its interpreter in front."""
    words = {Path(word).name for word in line[:3]}
    return "tritonserver" in words and LLMAPI_LAUNCH not in words


def kept_waiting(processes: Mapping[int, Identity], ranks: int, text: str) -> str:
    """Which of `ranks` keeps the others waiting, as far as processes and the log tell: a sentence that ends with `:`.

    A rank without a process does; one that has stopped at a line of its own while others went on probably does.
    """
    gone = next((rank for rank in range(ranks) if rank not in processes), None)
    if gone is not None:
        return f"Rank {gone} keeps the others waiting:"
    silent = rank_log.silent_longest(text, ranks)
    others = {_last_line(text, rank) for rank in range(ranks) if rank != silent}
    if _last_line(text, silent) not in others:
        return f"Rank {silent} has been silent for the longest time and probably keeps the others waiting:"
    return "All ranks have a process, and the log does not tell which of them keeps the others waiting:"


def _last_line(text: str, rank: int) -> str:
    return server_log.plain(next(reversed(rank_log.lines_of(text, rank)), ""))


def describe_ranks(processes: Mapping[int, Identity], ranks: int, text: str) -> str:
    """One line for each rank: its memory, its use of the CPU, and the last line that it wrote to the log `text`."""
    used = usage([processes[rank] for rank in range(ranks) if rank in processes])
    lines = []
    for rank in range(ranks):
        process = processes.get(rank)
        measured = None if process is None else used.get(process)
        state = "no process" if measured is None else f"{gibibytes(measured.memory)}, {measured.cpu:.0f} % CPU"
        last = next(reversed(rank_log.lines_of(text, rank)), "(nothing written)")
        lines.append(f"  rank {rank}: {state}; last line: {last}")
    return "\n".join(lines)


def sweep_session(mpirun: Identity) -> None:
    """Remove the session folder of an mpirun that was killed; only after its processes have ended."""
    base = Path(tempfile.gettempdir())
    for folder in (*base.glob(f"ompi.{mpirun.pid}"), *base.glob(f"ompi.*.{os.getuid()}/pid.{mpirun.pid}")):
        if folder.is_dir() and not folder.is_symlink() and folder.stat().st_uid == os.getuid():
            shutil.rmtree(folder, ignore_errors=True)
