"""Supervise a server: start it, watch it, start it again when it fails, and end it.

The supervisor is the process of `trtserve start`, in the foreground or, with --detach, in the background. Its children
get a SIGTERM from the kernel when it is killed: a server never outlives its supervisor unnoticed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress

from trtserve.client.metrics import read_heartbeats
from trtserve.errors import ServerDiedError, ServerStartError, TrtserveError
from trtserve.gateway.standstill import Hangs, gateway_silence, python_stubs
from trtserve.process import ProcessId, exit_code, stop_all, tree
from trtserve.process.halts import HALTED, Halts
from trtserve.process.signals import stop_signals
from trtserve.progress import SILENT, Progress
from trtserve.server.detach import notify
from trtserve.server.plan import ServerPlan
from trtserve.server.repositories import engine_paths
from trtserve.server.shutdown import end_server
from trtserve.server.start import start_once
from trtserve.server.state import (
    Server,
    change_state,
    failure_of,
    forget,
    is_stopping,
    last_record,
    recorded_server,
    run_folder,
)
from trtserve.server.status import Ended, died_error, ended, named_parts, unready_models
from trtserve.server.triton.server_log import limit_size
from trtserve.server.triton.tritonserver import protect_shared_memory
from trtserve.specs import ServerSpec
from trtserve.store import Store

_INTERVAL = 0.25
# Seconds between two looks at what costs a request to the server.
_PROBE = 2.0
_LONGEST_DELAY = 60.0
_STABLE = 300.0  # a server that was ready for so long has recovered: its next failure is a first one


def serve_foreground(plan: ServerPlan, *, on_ready: Callable[[Server], None], progress: Progress = SILENT) -> None:
    """Serve until SIGINT, SIGTERM, SIGHUP or `trtserve stop`; a second signal kills at once.

    Raises ServerDiedError, with the last lines of the log, when a process of the server ends unexpectedly, unless
    `plan.spec.restart` lets it start again. Raises what `start_server` raises when the first start fails.
    """
    restarts = _Restarts(plan.spec)
    read = plan.repository.path, *engine_paths(plan.repository.path, plan.served)
    with plan.store.in_use(*read), stop_signals() as signals:

        def interrupted() -> int:
            notify("WATCHDOG=1")
            return signals()

        while True:
            try:
                _serve_once(plan, restarts, interrupted, on_ready, progress)
            except TrtserveError as error:  # noqa: PERF203 - seconds lie between two rounds
                server = recorded_server(plan.name, plan.store)
                delay = restarts.delay(error)
                if server is None or delay is None or is_stopping(server, plan.store):
                    raise
                again = f"Starting again in {delay:g} s (restart {restarts.count})."
                progress.warn(f"{error.message}\n{again}")
                change_state(server, plan.store, state="starting", reason=again, restarts=restarts.count)
                if not _waited(delay, server, plan.store, interrupted):
                    forget(server, plan.store)
                    return
            else:
                return


def _serve_once(
    plan: ServerPlan,
    restarts: _Restarts,
    interrupted: Callable[[], int],
    on_ready: Callable[[Server], None],
    progress: Progress,
) -> None:
    """Start the server, watch it until it is stopped or fails, and leave nothing of it behind."""
    before = last_record(plan.name, plan.store) if restarts.count else None
    first = not restarts.was_ready
    server = start_once(plan, progress if first else SILENT, interrupted, supervisor=_myself(), before=before)
    failure = None
    try:
        restarts.became_ready()
        notify(f"READY=1\nSTATUS={server.model} on port {server.endpoint.http_port}")
        if first:
            on_ready(server)
        else:
            progress.step(f"{server.name} is ready again.")
        watch(server, plan.store, interrupted, progress, may_restart=plan.spec.restart != "never")
        notify("STOPPING=1")
        progress.step(f"Stopping {server.name} …")
    except ServerDiedError as error:
        failure = failure_of(error, exit_code(server.instances[0].process))
        restarts.exit_code = failure.exit_code
        raise
    finally:
        end_server(server, plan.store, urgent=lambda: interrupted() > 1, failure=failure)


def watch(
    server: Server,
    store: Store,
    interrupted: Callable[[], int],
    progress: Progress = SILENT,
    *,
    may_restart: bool = False,
) -> None:
    """Return on the first signal and when the server was stopped.

    Raises ServerDiedError when a part of it ends, or stands still and another start may follow. Where none may, such a
    server is degraded: it works again if whoever has stopped the part lets it go on.
    """
    watchman = Watchman(server, store, progress)
    next_probe = time.monotonic() + _PROBE
    complained = ""
    while not interrupted():
        end, standing, probing = None, None, time.monotonic() > next_probe
        with suppress(OSError):  # this process has no file descriptor left: the server is not at fault
            end = ended(server, store)
            standing = watchman.standing(probing)
        if end is None and may_restart:
            end = standing
        if end is not None and not is_stopping(server, store):
            _kill_the_rest(end)
            raise died_error(server, end)
        if end is not None or probing:
            next_probe = time.monotonic() + _PROBE
            try:
                protect_shared_memory(server.shm_prefix)  # of models that were loaded again
                reason = "" if standing is None else standing.what
                reason = "; ".join(f"{model}: {why}" for model, why in unready_models(server, store).items()) or reason
                recorded = change_state(server, store, state="degraded" if reason else "ready", reason=reason)
                if recorded.state in ("draining", "stopped"):
                    _await_stopper(server, store, interrupted)
                    return
                for instance in server.instances:
                    limit_size(instance.log)
                    if instance.gateway is not None:
                        limit_size(instance.gateway.log)
                complaint = reason
            except (TrtserveError, OSError) as error:  # a full disk does not end a server that runs
                complaint = f"the state or the log could not be written: {error}"
            if complaint != complained:
                progress.warn(f"{server.name} is degraded: {complaint}" if complaint else f"{server.name} is ready.")
                complained = complaint
        time.sleep(_INTERVAL)


def _kill_the_rest(end: Ended) -> None:
    """Kill what would not end in order: other ranks, none of which works alone, and processes that stand still.

    mpirun says which rank ended first only when all have.
    """
    if end.instance is not None and end.ranks:
        stop_all(end.instance.ranks, grace=0)
    if end.standing:
        stop_all(end.standing, grace=0)


def _await_stopper(server: Server, store: Store, interrupted: Callable[[], int]) -> None:
    """Return when `trtserve stop` has ended the server, or has ended itself before."""
    while not interrupted():
        recorded = recorded_server(server.name, store)
        if recorded is None or recorded.stopper is None or not recorded.stopper.alive():
            return
        time.sleep(_INTERVAL)


def _waited(seconds: float, server: Server, store: Store, interrupted: Callable[[], int]) -> bool:
    """Wait between two starts; return False when a signal or `trtserve stop` came meanwhile."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if interrupted() or is_stopping(server, store):
            return False
        time.sleep(_INTERVAL)
    return True


def _myself() -> ProcessId | None:
    return ProcessId.of(os.getpid())


class _Restarts:
    """Decides whether and when a server that failed is started again."""

    def __init__(self, spec: ServerSpec) -> None:
        self._policy = spec.restart
        self._limit = spec.restart_limit
        self.count = 0
        """Restarts so far."""
        self.exit_code: int | None = None
        """How the server ended; 0 is a failure only for `--restart always`."""
        self._in_a_row = 0
        self._ready_since: float | None = None
        self.was_ready = False

    def became_ready(self) -> None:
        self._ready_since, self.was_ready = time.monotonic(), True

    def delay(self, error: TrtserveError) -> float | None:
        """Return the seconds to wait before the next start, or None when there is none.

        A first start that fails is repeated only when a process of it was killed: any other reason is still there.
        """
        killed = isinstance(error, ServerStartError) and error.killed
        if self._policy == "never" or not (self.was_ready or killed):
            return None
        if self._ready_since is not None and time.monotonic() - self._ready_since > _STABLE:
            self._in_a_row = 0
        ended_in_order, self.exit_code, self._ready_since = self.exit_code == 0, None, None
        if self._policy == "on-failure" and (ended_in_order or self._in_a_row >= self._limit):
            return None
        self._in_a_row += 1
        self.count += 1
        return min(2.0 ** (self._in_a_row - 1), _LONGEST_DELAY)


# Seconds until a part is ended. Health pages fail before that.
_HALTED = 3.0
_HUNG = 8.0
_SILENT = 60.0
_GATEWAY_SILENT = 15.0
# Requests wait for a helper process that stands still: less than the five seconds after which health pages fail.
_HELPERS = 2.0  # looking for processes that parts have started reads all of /proc
_HALTED_HELPER = 2.0


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
        self._halts, self._helper_halts = Halts(_HALTED), Halts(_HALTED_HELPER)
        self._hangs = [Hangs(_HUNG) for _ in server.instances]
        self._helpers: set[ProcessId] = set()
        self._next_helpers = 0.0
        self._found: Ended | None = None

    def standing(self, thoroughly: bool) -> Ended | None:
        """Return a part that stands still; one that a signal has not stopped only when asked to look `thoroughly`."""
        now = time.monotonic()
        if now > self._next_helpers:
            self._next_helpers = now + _HELPERS
            self._helpers = {each for root in self._server.roots for each in tree(root)} - self._parts.keys()
        if (found := self._halted()) is None and thoroughly:
            self._found = self._hung()
        return found or self._found

    def _halted(self) -> Ended | None:
        """Return a part that a signal has stopped. What a part has started, and has been stopped, is killed."""
        lasting = self._halts.lasting(self._parts)
        if helpers := self._helper_halts.lasting(self._helpers):
            # Whoever started it waits for its answer, and starts another one when it has ended.
            stop_all(helpers, grace=0)
            self._helpers.difference_update(helpers)
            pids = ", ".join(str(helper.pid) for helper in helpers)
            self._progress.warn(f"A helper process (pid {pids}) had been stopped by a signal, and was killed.")
        part = next(iter(lasting), None)
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
