"""How a server ends: its ranks in order, everything else by force, and nothing of it is left."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from trtserve.launch.container import DOCKER, ask_container, remove_container
from trtserve.launch.ranks import serving_process, sweep_session
from trtserve.process import exit_code, program, stop
from trtserve.progress import SILENT, Progress
from trtserve.servers import Server, find_server, forget, recorded_server, write_state
from trtserve.store import Store
from trtserve.triton.launch import STOP_GRACE, stop_triton
from trtserve.triton.server import EXIT_TIMEOUT

_PAUSE = 0.1


def stop_server(name: str | None = None, *, store: Store | None = None, progress: Progress = SILENT) -> Server:
    """Stop the server `name`, or the only one, with every process, port and shared-memory region that it has.

    A server that ended by itself is cleaned up after. ServerNotFoundError, ServerAmbiguousError, ServerStopError.
    """
    store = store or Store()
    server = None if name is None else recorded_server(name, store)
    if server is None:
        hint = "Name one: `trtserve stop NAME`, or stop them all: `trtserve stop --all`."
        server = find_server(name, store=store, hint=hint)
    progress.step(f"Stopping {server.name} (pid {server.pid}) …")
    # A foreground `start` that supervises this server sees by it that the end is wanted.
    write_state(replace(server, phase="stopping"), store)
    end_server(server, store)
    return server


def end_server(server: Server, store: Store, *, urgent: Callable[[], bool] = lambda: False) -> None:
    """End every instance of a server and their proxy, remove its shared memory, mpirun's folders and its state file.

    ServerStopError when a process survives.
    """
    roots = server.roots
    grace = STOP_GRACE - EXIT_TIMEOUT + server.exit_timeout
    try:
        _ask_containers(server, urgent, grace)
        stop_triton(
            roots, server.shm_prefix, urgent=urgent, asked=[serving_process(root) for root in roots], grace=grace
        )
    finally:
        # docker hands the TERM on; what does not end by it goes on without its client.
        for instance in server.instances:
            if instance.container is not None:
                remove_container(instance.container)
    for root in roots:
        sweep_session(root)
    forget(server, store)


def _ask_containers(server: Server, urgent: Callable[[], bool], grace: float) -> None:
    """Wait for what runs in containers to end in order, as long as `grace` seconds; nothing where docker is gone."""
    several = [each for each in server.instances if each.container is not None and server.mode != "single"]
    alive = [each for each in several if each.identity.alive()]
    asking = [ask_container(str(each.container)) for each in alive] if program(DOCKER) is not None else []
    deadline = time.monotonic() + grace
    try:
        while any(each.identity.alive() for each in alive) and time.monotonic() < deadline and not urgent():
            if all(exit_code(process) not in (None, 0) for process in asking):
                return  # docker refused, or is not there any more
            time.sleep(_PAUSE)
    finally:
        for process in asking:
            stop(process, grace=_PAUSE)
