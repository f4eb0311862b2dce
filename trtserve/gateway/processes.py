"""Several processes behind one port, so that no single thread of Python bounds what a gateway passes on."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
from contextlib import suppress

from trtserve.errors import TrtserveError
from trtserve.gateway.replicas import SharedState
from trtserve.gateway.settings import GatewaySettings
from trtserve.gateway.standstill import GatewayBeat, gateway_silence

_LOG = logging.getLogger(__name__)
_POLL = 0.1
_SILENT = 2.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# A process that is killed this soon after its start is started again after a pause, which doubles each time.
_SOON, _FIRST_PAUSE, _LONGEST_PAUSE = 10.0, 0.1, 30.0


def serve(settings: GatewaySettings, listening: socket.socket) -> int:
    """Serve on a bound socket until a signal, and return the exit code.

    Each of several processes takes connections from the same socket. One that is killed is started again, after a
    growing pause if it was killed at its start.
    """
    if settings.processes == 1:
        from trtserve.gateway.listener import serve as serve_here

        serve_here(settings, listening)
        return 0
    shared = SharedState(settings.processes, settings.run_folder)
    try:
        # prometheus_client reads it when it is imported, and then adds up what all processes count.
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(shared.folder)
        return _Parent(settings, listening, shared).run()
    finally:
        shared.remove()


class _Parent:
    """Forks the processes, passes signals on, and waits. It imports what they need, so that they share its memory."""

    def __init__(self, settings: GatewaySettings, listening: socket.socket, shared: SharedState) -> None:
        self._settings, self._listening, self._shared = settings, listening, shared
        self._running: dict[int, int] = {}
        """Process id → number."""
        self._started: dict[int, float] = {}
        self._pauses: dict[int, float] = {}
        self._due: dict[int, float] = {}
        """Number → when it is started again."""
        self._stopping = False

    def run(self) -> int:
        """Return the exit code."""
        import trtserve.gateway.listener  # noqa: F401 - before the processes are forked

        for each in _SIGNALS:
            signal.signal(each, self._pass_on)
        for number in range(self._settings.processes):
            self._start(number)
        beat = None if self._settings.run_folder is None else GatewayBeat(self._settings.run_folder)
        code = 0
        while self._running or (self._due and not self._stopping):
            for number in [number for number, due in self._due.items() if due <= time.monotonic()]:
                del self._due[number]
                self._start(number)
            pid, status = os.waitpid(-1, os.WNOHANG) if self._running else (0, 0)
            if pid == 0:
                if beat is not None and self._running and self._all_turn():
                    beat.beat()
                time.sleep(_POLL)
                continue
            number = self._running.pop(pid)
            self._forget(pid, number)
            if self._stopping:
                continue
            if os.WIFSIGNALED(status):
                now = time.monotonic()
                soon = now - self._started[number] < _SOON
                pause = min(_LONGEST_PAUSE, self._pauses.get(number, 0.0) * 2 or _FIRST_PAUSE) if soon else 0.0
                self._pauses[number], self._due[number] = pause, now + pause
                text = "process %d was killed by signal %d; starting it again in %g s"
                _LOG.error(text, pid, os.WTERMSIG(status), pause)
            else:
                code = os.WEXITSTATUS(status) or 1
                self._pass_on(signal.SIGTERM, None)
        return code

    def _start(self, number: int) -> None:
        from trtserve.process.signals import end_with_parent

        ask = end_with_parent()
        # A signal waits until it is known to whom it goes: the parent passes it on to the new process too, and that one
        # ends by it until it serves.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        pid = None if self._stopping else os.fork()
        if pid != 0:
            if pid is not None:
                self._running[pid], self._started[number] = number, time.monotonic()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            return
        self._running.clear()
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        code = 1
        try:
            from trtserve.gateway.listener import serve as serve_here

            if ask is not None:
                ask()
            serve_here(self._settings, self._listening, self._shared, number)
            code = 0
        except TrtserveError as error:
            sys.stderr.write(f"error: {error.message}\n")
            code = error.code
        except Exception:  # noqa: BLE001 - the child must end here
            _LOG.exception("process %d failed", number)
        finally:
            os._exit(code)

    def _pass_on(self, number: int, _: object) -> None:
        self._stopping = True
        for pid in self._running:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _forget(self, pid: int, number: int) -> None:
        """Take back what a process that has ended counted in the shared memory."""
        from prometheus_client.multiprocess import mark_process_dead

        self._shared.running[number] = 0
        self._shared.memory.loads[number] = 0
        self._shared.requests[number] = 0
        mark_process_dead(pid, str(self._shared.folder))  # type: ignore[no-untyped-call]

    def _all_turn(self) -> bool:
        folder = self._settings.run_folder
        assert folder is not None
        return all((gateway_silence(folder, pid) or 0.0) < _SILENT for pid in self._running)
