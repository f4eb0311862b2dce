"""Processes that a signal such as SIGSTOP has stopped: whoever waits for them may wait for ever."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress

from trtserve.process import ProcessId

HALTED = "has been stopped by a signal (SIGSTOP)"
_LOOK = 0.5
_LASTING = 3.0


class Halts:
    """Remembers since when processes are stopped: a short stop, as by a debugger, is not a fault."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._since: dict[ProcessId, float] = {}

    def lasting(self, processes: Iterable[ProcessId]) -> list[ProcessId]:
        """Return those of the processes that have been stopped for that long."""
        now = time.monotonic()
        self._since = {each: self._since.get(each, now) for each in processes if each.halted()}
        return [each for each, since in self._since.items() if now - since >= self._seconds]


@contextmanager
def halted_workers_end(pids: Callable[[], Collection[int]]) -> Iterator[set[int]]:
    """Kill those of this process's children `pids` that are stopped for three seconds; yield the pids of these.

    Ctrl-Z stops this process too, and so ends nobody.
    """
    killed: set[int] = set()
    leaving = threading.Event()

    def look() -> None:
        halts = Halts(_LASTING)
        while not leaving.wait(_LOOK):
            workers = [each for pid in pids() if (each := ProcessId.of(pid)) is not None]
            for worker in halts.lasting(workers):
                killed.add(worker.pid)
                with suppress(ProcessLookupError):
                    os.kill(worker.pid, signal.SIGKILL)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield killed
    finally:
        leaving.set()
        thread.join()
