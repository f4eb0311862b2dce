"""Stop a server: it may finish its requests, its ranks end in order, the rest is killed, and nothing is left behind."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from trtserve.client import metrics
from trtserve.client.metrics import read_heartbeats
from trtserve.errors import ArtifactError, DiskSpaceError, counted
from trtserve.nvidia.containers import DOCKER, ask_container, remove_container
from trtserve.process import ProcessId, exit_code, program, stop, terminate, wait_gone
from trtserve.programs.shared.run_folder import DRAINING
from trtserve.progress import SILENT, Progress
from trtserve.server.discovery import find_server
from trtserve.server.rank_processes import serving_process, sweep_session
from trtserve.server.state import (
    Failure,
    Server,
    await_record,
    change_state,
    forget,
    recorded_server,
    recorded_servers,
    run_folder,
)
from trtserve.server.triton.tritonserver import EXIT_TIMEOUT, STOP_GRACE, metrics_page, stop_triton
from trtserve.store import Store

_PAUSE = 0.1
# Executors count their open requests every second.
_IDLE = 2.0
# A gateway without requests ends within this time. Triton waits a second for the connections that it keeps open.
_GATEWAY_ENDS = 0.6
# A supervisor notices within this time that its server was stopped.
_SUPERVISOR_GRACE = 5.0


def stop_server(
    name: str | None = None, *, drain: float = 0.0, store: Store | None = None, progress: Progress = SILENT
) -> Server:
    """Stop the server `name`, or the only one, with all its processes, ports and shared memory.

    Its running requests get up to `drain` seconds to end; new ones are refused meanwhile. A server that ended
    unexpectedly is cleaned up. Raises ServerNotFoundError, ServerAmbiguousError or ServerStopError.
    """
    store = store or Store()
    if name is not None or not recorded_servers(store):
        await_record(name, store)
    server = None if name is None else recorded_server(name, store)
    if server is None:
        hint = "Name one: `trtserve stop NAME`, or stop them all: `trtserve stop --all`."
        server = find_server(name, store=store, hint=hint)
    progress.step(f"Stopping {server.name} (pid {server.instances[0].process.pid}) …")
    supervisor = server.supervisor
    try:
        # Tells the supervisor that the end is intended.
        server = change_state(server, store, state="draining", stopper=ProcessId.of(os.getpid()))
    except (DiskSpaceError, ArtifactError):
        if supervisor is not None:  # what cannot be written down is asked for by a signal
            stop(supervisor, grace=STOP_GRACE + _SUPERVISOR_GRACE)
    else:
        if drain:
            _drain(server, store, drain, progress)
    end_server(server, store)
    if supervisor is not None and supervisor.pid != os.getpid() and not wait_gone([supervisor], _SUPERVISOR_GRACE):
        stop(supervisor, grace=_SUPERVISOR_GRACE)
    return server


def _drain(server: Server, store: Store, seconds: float, progress: Progress) -> None:
    """Refuse new requests and wait until the running ones have ended, at most `seconds`."""
    folder = run_folder(server.name, store)
    if folder.is_dir():
        (folder / DRAINING).touch()  # what refuses requests over gRPC
    for instance in server.instances:
        if instance.gateway is not None:
            terminate(instance.gateway.process)  # it ends with its last request
    progress.step(f"Refusing new requests; running ones get {seconds:g} s to end …")
    if server.kept is not None:  # it ends with its last request
        wait_gone([each.process for each in server.instances], seconds)
        return
    deadline = time.monotonic() + seconds
    idle_since, shown = time.monotonic(), -1
    while time.monotonic() < deadline and any(instance.process.alive() for instance in server.instances):
        running = _running_requests(server, store)
        if running is None:
            progress.warn("The running requests cannot be counted: Triton finishes what it can by itself.")
            return
        if running:
            idle_since = time.monotonic()
        elif time.monotonic() - idle_since > _IDLE:
            return
        if running != shown:
            progress.step(f"{counted(running, 'request')} running")
            shown = running
        time.sleep(_PAUSE)


def _running_requests(server: Server, store: Store) -> int | None:
    """Return how many requests the core models have, by their heartbeats or else by their gauges; None: unknown."""
    if beats := read_heartbeats(run_folder(server.name, store)):
        return sum(each.open_requests for each in beats)
    pages = [page for instance in server.instances if (page := metrics_page(instance.address)) is not None]
    cores = [core for page in pages for core in metrics.core_metrics(metrics.parse(page))]
    active = [value for core in cores if (value := core.value(metrics.REQUESTS, "active")) is not None]
    return int(sum(active)) if active else None


def end_server(
    server: Server, store: Store, *, urgent: Callable[[], bool] = lambda: False, failure: Failure | None = None
) -> None:
    """End all instances of a server and their proxy; remove their shared memory and mpirun's folders.

    The state becomes stopped, or failed for the reason `failure`. Raises ServerStopError when a process survives.
    """
    roots = server.roots
    grace = STOP_GRACE - EXIT_TIMEOUT + server.exit_timeout
    try:
        served = {instance.process for instance in server.instances}  # one port for many models: the gateway itself
        gateways = [gateway.process for gateway in server.gateways if gateway.process not in served]
        for gateway in gateways:
            terminate(gateway)
        wait_gone(gateways, _GATEWAY_ENDS, urgent)
        _ask_containers(server, urgent, grace)
        # Not the gateways: a second TERM would cut off their requests.
        asked = [serving_process(root) for root in roots if root not in gateways]
        stop_triton(roots, server.shm_prefix, urgent=urgent, asked=asked, grace=grace)
    finally:
        # docker passes the TERM on, but a container that ignores it outlives its client.
        for instance in server.instances:
            if instance.container is not None:
                remove_container(instance.container)
    for root in roots:
        sweep_session(root)
    forget(server, store, failure=failure)


def _ask_containers(server: Server, urgent: Callable[[], bool], grace: float) -> None:
    """Give ranks in containers up to `grace` seconds to end in order; without docker, do nothing."""
    alive = [each for each in server.instances if each.container is not None and each.process.alive()]
    if not alive:
        return
    from trtserve.server.launch.modes import Single

    if server.mode == Single.name:
        return
    asking = [ask_container(str(each.container)) for each in alive] if program(DOCKER) is not None else []
    deadline = time.monotonic() + grace
    try:
        while any(each.process.alive() for each in alive) and time.monotonic() < deadline and not urgent():
            if all(exit_code(process) not in (None, 0) for process in asking):
                return  # docker refused, or has stopped
            time.sleep(_PAUSE)
    finally:
        for process in asking:
            stop(process, grace=_PAUSE)
