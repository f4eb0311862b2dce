"""Parts of a server that live but do nothing: the supervisor ends them where a start may follow."""

from __future__ import annotations

import time
from contextlib import suppress

from trtserve.client.metrics import read_heartbeats
from trtserve.gateway.standstill import Halts, Hangs, gateway_silence, python_stubs
from trtserve.process import ProcessId, stop_all, tree
from trtserve.progress import Progress
from trtserve.server.state import Server, run_folder
from trtserve.server.status import HALTED, Ended, named_parts
from trtserve.store import Store

# Seconds until a part is ended. Health pages fail before that.
_HALTED = 3.0
_HUNG = 8.0
_SILENT = 60.0
_GATEWAY_SILENT = 15.0
# Looking for processes that parts have started reads all of /proc.
_HELPERS = 5.0


class Watchman:
    """Looks again and again at the processes of a server that has become ready."""

    def __init__(self, server: Server, store: Store, progress: Progress) -> None:
        self._server = server
        self._folder = run_folder(server.name, store)
        self._progress = progress
        self._parts = named_parts(server)
        with suppress(OSError):  # no file descriptor is left
            for instance in server.instances:  # those of the other ranks too
                stubs = python_stubs(instance.process).items()
                self._parts |= {stub: f"the Python stub of {model}" for stub, model in stubs if stub not in self._parts}
        self._halts, self._hangs = Halts(_HALTED), [Hangs(_HUNG) for _ in server.instances]
        self._helpers: set[ProcessId] = set()
        self._next_helpers = 0.0
        self._found: Ended | None = None

    def standing(self, thoroughly: bool) -> Ended | None:
        """Return a part that stands still; one that a signal has not stopped only when asked to look `thoroughly`."""
        if (found := self._halted()) is None and thoroughly:
            now = time.monotonic()
            if now > self._next_helpers:
                self._next_helpers = now + _HELPERS
                self._helpers = {each for root in self._server.roots for each in tree(root)} - self._parts.keys()
            self._found = self._hung()
        return found or self._found

    def _halted(self) -> Ended | None:
        """Return a part that a signal has stopped. What a part has started, and has been stopped, is killed."""
        lasting = self._halts.lasting([*self._parts, *self._helpers])
        if helpers := self._helpers.intersection(lasting):
            # Whoever started it waits for its answer, and starts another one when it has ended.
            stop_all(helpers, grace=0)
            self._helpers -= helpers
            pids = ", ".join(str(helper.pid) for helper in helpers)
            self._progress.warn(f"A helper process (pid {pids}) had been stopped by a signal, and was killed.")
        part = next((each for each in lasting if each in self._parts), None)
        return None if part is None else self._ended(f"{self._parts[part]} (pid {part.pid}) {HALTED}", part)

    def _hung(self) -> Ended | None:
        beats, now = read_heartbeats(self._folder), time.monotonic()
        for hangs, instance in zip(self._hangs, self._server.instances, strict=True):
            for model, why in hangs.among(beats, instance.process).items():
                stubs = [stub for stub, name in python_stubs(instance.process).items() if name == model]
                return self._ended(f"the executor of {model} {why}", *stubs)
        for beat in beats:
            if now - beat.time > _SILENT:
                return self._ended(
                    f"{beat.model} (pid {beat.pid}) has shown no sign of life for {now - beat.time:.0f} s"
                )
        for gateway in self._server.gateways:
            silence = gateway_silence(self._folder, gateway.process.pid)
            if silence is not None and silence > _GATEWAY_SILENT:
                return self._ended(f"its gateway has answered no request for {silence:.0f} s", gateway.process)
        return None

    def _ended(self, what: str, *processes: ProcessId) -> Ended:
        instance = self._server.instances[0]
        return Ended(what=what, log=instance.log, instance=instance, explained=True, standing=processes)
