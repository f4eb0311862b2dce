"""Processes of a server that live and do nothing: stopped by a signal (SIGSTOP), hung, or waiting for each other.

Triton calls their models ready. A gateway asks here for its health page, and the supervisor in order to end them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from trtserve.client.metrics import Heartbeat
from trtserve.process import ProcessId, arguments, parent, tree, work_done

_STUB = "triton_python_backend_stub"
# An executor makes many steps in this time, and shows twice a second that it does.
_STUCK = 0.9
# It may show it late: what it writes can wait for a disk.
_SILENT = 5.0
# An idle executor uses less, with the threads of its model; one that computes uses a whole core.
_LEAST = 0.05


def python_stubs(root: ProcessId) -> dict[ProcessId, str]:
    """Return the Python stubs below a process with the names of their models, from their command lines."""
    found = _running(_STUB, root)
    return {member: Path(words[1]).parents[1].name for member, words in found.items() if len(words) > 1}


def tritonservers(root: ProcessId) -> set[ProcessId]:
    """Return the tritonservers below a process: those of its ranks, or the one behind a launcher."""
    return set(_running("tritonserver", root))


def _running(program: str, root: ProcessId) -> Mapping[ProcessId, Sequence[str]]:
    """Return the processes of a program below another process, with their command lines.

    A fork that becomes a helper has the command line of its parent for a moment.
    """
    found = {}
    for member in tree(root):
        words, above = arguments(member), parent(member)
        if words and Path(words[0]).name == program and above is not None and arguments(above) != words:
            found[member] = words
    return found


class Standstill:
    """Looks again and again whether processes work: use CPU time, or wait for a disk that brings what they ask for."""

    def __init__(self, seconds: float, least: float) -> None:
        self._seconds = seconds
        self._least = least
        self._seen: frozenset[ProcessId] = frozenset()
        self._used = self._since = 0.0

    def lasts(self, processes: Collection[ProcessId]) -> bool:
        """Return whether the same processes have worked for less than `least` seconds in more than `seconds`."""
        seen, used, now = frozenset(processes), sum(map(work_done, processes)), time.monotonic()
        if not seen or seen != self._seen or used - self._used > self._least:
            self._seen, self._used, self._since = seen, used, now
        return now - self._since > self._seconds


class Hangs:
    """Looks for executors that have requests, make no step, and do not work at one either, on any of their ranks.

    A long step is none: whoever compiles a kernel or reads a long prompt uses a core, and so does who waits for a GPU.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._found: dict[int, Standstill] = {}

    def among(self, beats: Iterable[Heartbeat], root: ProcessId) -> Mapping[str, str]:
        """Return the models below `root` that hang → a sentence without its subject."""
        now = time.monotonic()
        stuck = {each.pid: each for each in beats if each.time - each.moved > _STUCK or now - each.time > _SILENT}
        stubs = python_stubs(root) if stuck else {}
        self._found = {pid: self._found.get(pid) or Standstill(self._seconds, _LEAST * self._seconds) for pid in stuck}
        hung = {}
        for pid, beat in stuck.items():
            own = {stub for stub, name in stubs.items() if name == beat.model}
            # Several instances write into one folder.
            if any(stub.pid == pid for stub in own) and self._found[pid].lasts(own.union(*map(tree, own))):
                seconds = now - min(beat.time, beat.moved)
                hung[beat.model] = f"hangs: no step and no work for {seconds:.0f} s, {beat.open_requests} open requests"
        return hung


def gateway_silence(folder: Path, pid: int) -> float | None:
    """Return for how many seconds a gateway's event loop has not turned; None: it has not said so yet, or cannot."""
    try:
        return time.monotonic() - float(_gateway_file(folder, pid).read_bytes())
    except (OSError, ValueError):
        return None


class GatewayBeat:
    """Shows that the event loop of this process, a gateway, turns: the supervisor need not ask over the network."""

    def __init__(self, folder: Path) -> None:
        self._path = _gateway_file(folder, os.getpid())

    def beat(self) -> None:
        """Write the time into a file of fixed size, in place."""
        try:
            handle = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                os.pwrite(handle, f"{time.monotonic():24.3f}".encode(), 0)
            finally:
                os.close(handle)
        except OSError:  # a full disk is not the gateway's fault
            with suppress(OSError):
                self._path.unlink()


def _gateway_file(folder: Path, pid: int) -> Path:
    return folder / f"gateway-{pid}.alive"
