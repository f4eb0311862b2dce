"""Start a server once: claim its name and ports, check, launch, and wait until it is ready."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import replace

from trtserve.errors import PortInUseError, ServerStartError, TrtserveError
from trtserve.files import locked
from trtserve.process import ProcessId, exit_code, spawn
from trtserve.process.signals import stop_signals
from trtserve.programs.shared.run_folder import VARIABLE
from trtserve.progress import SILENT, Progress
from trtserve.server.checks import (
    announce_commands,
    check_before_launch,
    refuse_running,
    require_devices,
    require_mpirun,
    require_ports,
)
from trtserve.server.front import await_gateway, spawn_gateway
from trtserve.server.plan import ServerPlan, on_free_ports
from trtserve.server.rank_processes import with_members
from trtserve.server.readiness import require_front, require_members, wait_for_all
from trtserve.server.shutdown import end_server
from trtserve.server.state import (
    Instance,
    ProxyState,
    Server,
    change_state,
    failure_of,
    run_folder,
    start_lock,
    write_state,
)
from trtserve.server.triton.installation import prepare_backends
from trtserve.server.triton.server_log import rotate
from trtserve.server.triton.tritonserver import STACK, kv_blocks
from trtserve.store.rates import timed

_ATTEMPTS = 3


def start_server(plan: ServerPlan, *, progress: Progress = SILENT) -> Server:
    """Start a server that outlives this process and has no supervisor; return it when all its models are ready.

    If startup fails, everything but the log is cleaned up. Raises ServerStartError, PortInUseError or MachineError.
    SIGINT, SIGTERM and SIGHUP during the start stop the server and raise KeyboardInterrupt.
    """
    with stop_signals() as signals:
        return start_once(plan, progress, signals)


def require_startable(plan: ServerPlan) -> None:
    """Check that a server could start, before its repository is built.

    Raises an error for a missing tool, a server of the same name, too few GPUs, or taken ports, unless --auto-ports
    chooses others when the server starts.
    """
    with locked(start_lock(plan.name, plan.store), wait=False):
        refuse_running(plan)
        if not plan.spec.auto_ports:
            require_ports(plan)
        require_mpirun(plan)
        require_devices(plan)


def start_once(
    plan: ServerPlan,
    progress: Progress,
    interrupted: Callable[[], int],
    *,
    supervisor: ProcessId | None = None,
    before: Server | None = None,
    attempts: int = _ATTEMPTS,
) -> Server:
    """Return a ready server; its processes end with this one if it is their `supervisor`.

    A server that crashed or hung by chance while it loaded its models starts again. If another program took a port
    after the check, it starts again on other ports: with --auto-ports, or if the port was a gateway's inner port, which
    the user did not choose.
    `before` is the record of the server that this one replaces.
    """
    try:
        return _start_on_ports(plan, progress, interrupted, supervisor, before)
    except PortInUseError as error:
        if attempts == 1 or not (plan.spec.auto_ports or _lost_behind_a_gateway(plan, error)):
            raise
        progress.warn(f"{error.message.rstrip('.')}. Starting again on other ports.")
        again = on_free_ports(plan)
    except ServerStartError as error:
        if not error.by_chance or attempts == 1:
            raise
        progress.warn("Triton crashed or hung while it loaded the models, as happens on busy machines. Starting again.")
        again = plan
    return start_once(again, progress, interrupted, supervisor=supervisor, before=before, attempts=attempts - 1)


def _lost_behind_a_gateway(plan: ServerPlan, error: PortInUseError) -> bool:
    """Return whether it was the port of Triton's own HTTP service that another program took."""
    inner = (instance.address.inner_http_port for instance in plan.instances)
    return any(port is not None and f":{port}'" in error.message for port in inner)


def _start_on_ports(
    plan: ServerPlan,
    progress: Progress,
    interrupted: Callable[[], int],
    supervisor: ProcessId | None,
    before: Server | None,
) -> Server:
    with locked(start_lock(plan.name, plan.store), wait=False):
        refuse_running(plan)
        require_ports(plan)
        engines = check_before_launch(plan, progress)
        prepare_backends(plan.triton, plan.store)
        if plan.bindings is not None:
            plan.bindings.prepare()
        for engine in engines:
            engine.write()
        announce_commands(plan, progress)
        server = _spawn_all(plan, progress, supervisor, before)
        try:
            for instance, planned in zip(server.instances, plan.instances, strict=True):
                if instance.gateway is not None and planned.gateway is not None:
                    await_gateway(planned.gateway, instance.gateway)
            if server.proxy is not None and plan.proxy is not None:
                await_gateway(plan.proxy, server.proxy.gateway)
            with timed(plan.store, "start", plan.served.engine_bytes):
                wait_for_all(server, plan, timeout=plan.spec.ready_timeout, interrupted=interrupted, progress=progress)
            require_front(server)
            server = with_members(server)
            require_members(server, plan)
            server = change_state(
                server, plan.store, state="ready", ready_since=time.time(), instances=server.instances
            )
            # How much memory was left for the KV cache is known only to the running server's gauges.
            for warning in plan.served.cache_warnings(kv_blocks(server.address)):
                progress.warn(warning)
        except BaseException as error:
            failure = None
            if isinstance(error, TrtserveError):
                failure = failure_of(error, exit_code(server.instances[0].process))
            end_server(server, plan.store, urgent=lambda: interrupted() > 1, failure=failure)
            raise
    return server


def _spawn_all(plan: ServerPlan, progress: Progress, supervisor: ProcessId | None, before: Server | None) -> Server:
    """Start all instances, then the gateway in front of them; each is in the state file before the next one starts."""
    server = Server(
        name=plan.name,
        repository=plan.repository.path.absolute(),
        model=plan.served.model,
        streaming=plan.served.streaming,
        state="starting",
        mode=plan.mode,
        shm_prefix=plan.shm_prefix,
        exit_timeout=plan.spec.exit_timeout,
        instances=(),
        supervisor=supervisor,
        restarts=0 if before is None else before.restarts,
        failure=None if before is None else before.failure,
    )
    bound = supervisor is not None
    folder = run_folder(plan.name, plan.store)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, mode=0o700)
    try:
        for planned in plan.instances:
            progress.step(f"Starting Triton, log: {planned.log}")
            rotate(planned.log)
            command = planned.launch.command
            if planned.container is None:
                command = replace(command, env={**command.env, VARIABLE: str(folder)})
            instance = Instance(
                address=planned.address,
                process=spawn(command, log=planned.log, bound=bound, stack=STACK, private=True),
                log=planned.log,
                container=None if planned.container is None else planned.container.name,
            )
            server = replace(server, instances=(*server.instances, instance))
            write_state(server, plan.store)
            if planned.gateway is not None:
                gateway = spawn_gateway(planned.gateway, instance.process, bound=bound)
                server = replace(server, instances=(*server.instances[:-1], replace(instance, gateway=gateway)))
                write_state(server, plan.store)
        if plan.proxy is not None:
            settings = plan.proxy.settings
            proxy = ProxyState(
                gateway=spawn_gateway(plan.proxy, None, bound=bound),
                http_port=settings.port,
                grpc_port=settings.port + 1,
            )
            server = replace(server, proxy=proxy)
            write_state(server, plan.store)
    except BaseException:
        if server.instances:
            end_server(server, plan.store, urgent=lambda: True)
        raise
    return server
