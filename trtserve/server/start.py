"""Start a server once: claim its name and ports, check, launch, and wait until all its instances are ready.

Until then, report which rank ended or keeps the others waiting.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from trtserve.errors import PortInUseError, ServerStartError, TrtserveError
from trtserve.files import locked
from trtserve.gateway.standstill import Standstill, python_stubs
from trtserve.nvidia.containers import explained
from trtserve.process import ProcessId, exit_code, spawn, tree, wait_gone
from trtserve.process.halts import Halts
from trtserve.process.signals import stop_signals
from trtserve.programs.shared.run_folder import VARIABLE
from trtserve.progress import SILENT, Progress
from trtserve.repository.programs import PACKAGE
from trtserve.server.checks import (
    announce_commands,
    check_before_launch,
    refuse_running,
    require_devices,
    require_mpirun,
    require_ports,
)
from trtserve.server.front import await_gateway, gateway_ended, spawn_gateway
from trtserve.server.launch.modes import LlmApi
from trtserve.server.plan import InstancePlan, ServerPlan, on_free_ports
from trtserve.server.rank_processes import (
    describe_ranks,
    describe_stubs,
    kept_waiting,
    rank_processes,
    stubs_of,
    with_members,
)
from trtserve.server.shutdown import end_server
from trtserve.server.state import (
    Instance,
    ProxyState,
    Server,
    change_state,
    failure_of,
    ready_now,
    run_folder,
    start_lock,
    write_state,
)
from trtserve.server.triton import server_log
from trtserve.server.triton.installation import prepare_backends
from trtserve.server.triton.server_log import last_lines, rotate
from trtserve.server.triton.tritonserver import (
    READY_POLL,
    STACK,
    came_up,
    kv_blocks,
    opened_all_ports,
    protect_shared_memory,
    start_error,
    timeout_error,
)
from trtserve.store import timed

# mpirun ends a job within a moment of a rank that fails, but goes on when a rank ends with code 0.
_RANK_INTERVAL = 1.0
_JOB_END = 3.0
# Triton opens its ports within a moment, and the metrics port last.
_LAST_PORT = 2.0
_TRITON_FAILED = "error: creating server: "
# Triton 2.51 does not always notice that a stub has answered: seen twice in some ten thousand starts, on busy machines,
# with a stub and a server that both waited for a message. Models of trtserve load within seconds of CPU time; idle
# stubs use less than 0.3 s a minute.
_LONGEST = 60.0
_LEAST_WORK = 1.0
_HALTED = 3.0
# A look takes processor time that loading models need: the longer they take, the rarer it is.
_PART, _LONGEST_POLL = 0.02, 0.5


def wait_for_all(
    server: Server, plan: ServerPlan, *, timeout: float, interrupted: Callable[[], int], progress: Progress
) -> None:
    """Wait until every model of every instance is ready. Raises KeyboardInterrupt when `interrupted` counts a signal.

    Reports which models are being loaded.

    Raises ServerStartError when an instance or one of its ranks ends, and after `timeout` seconds, with the rank that
    is missing.
    """
    begin = time.monotonic()
    pairs = zip(server.instances, plan.instances, strict=True)
    # Models of other programs may wait for anything while they load, so only ours are judged.
    own = frozenset(path.parents[1].name for path in plan.repository.path.glob(f"*/*/{PACKAGE}"))
    waiting = [_Waiting(instance.process, planned, own) for instance, planned in pairs]
    loaded = 0
    with progress.task("Loading the models", total=len(plan.served.models), unit="parts") as task:
        while True:
            protect_shared_memory(server.shm_prefix)
            log = server_log.read(plan.instances[0].log)
            steps = server_log.captured(log)
            task.describe(
                ", ".join([*server_log.still_loading(log), *([f"{steps} decode steps captured"] if steps else [])])
            )
            before, loaded = loaded, len(server_log.loaded(log))
            task.advance(loaded - before)
            waiting = [one for one in waiting if not one.ready()]
            if not waiting:
                return
            if interrupted():
                raise KeyboardInterrupt
            waited = time.monotonic() - begin
            time.sleep(min(max(READY_POLL, _PART * waited), _LONGEST_POLL))
            if waited > timeout:
                raise waiting[0].timeout_error(timeout)


def require_front(server: Server) -> None:
    """Raise ServerStartError when a gateway has ended."""
    for gateway in server.gateways:
        if gateway.dead:
            raise gateway_ended(gateway.process, gateway.log)


def require_members(server: Server, plan: ServerPlan) -> None:
    """Raise ServerStartError when a stub or a rank ended while the server became ready."""
    for instance in server.instances:
        running = {stub.model for stub in instance.stubs if stub.alive()}
        if lost := sorted(set(plan.watched_models) - running):
            raise ServerStartError(
                f"The Python stub of {', '.join(lost)} ended while the server became ready. Last lines:\n"
                f"{last_lines(instance.log)}",
                log=instance.log,
                killed=True,
            )
    require_ranks(server, plan)


def require_ranks(server: Server, plan: ServerPlan) -> None:
    """Raise ServerStartError when a rank ended while the server became ready and mpirun keeps running.

    A server whose mpirun ends as well has died like any other. Ranks in a container cannot be seen from here.
    """
    for instance, planned in zip(server.instances, plan.instances, strict=True):
        found, ranks = rank_processes(instance.process), planned.launch.ranks
        missing = [rank for rank in range(ranks) if rank not in found]
        # mpirun would have ended the job by then.
        if ranks > 1 and found and missing and not wait_gone([instance.process], _JOB_END):
            raise ServerStartError(
                f"Rank {missing[0]} of {ranks} ended while the server became ready.\n"
                f"{describe_ranks(found, ranks, server_log.read(planned.log))}",
                log=planned.log,
            )


class _Waiting:
    def __init__(self, root: ProcessId, planned: InstancePlan, own: frozenset[str]) -> None:
        self.root = root
        self.planned = planned
        self._own = own
        """Models that trtserve wrote."""
        self._standstill = Standstill(_LONGEST, _LEAST_WORK)
        self._halts = Halts(_HALTED)
        self._seen: dict[int, ProcessId] = {}
        self._looked = time.monotonic()
        self._lost_since: float | None = None
        self._stub_lost_since: float | None = None
        self._ready_since: float | None = None

    def ready(self) -> bool:
        planned = self.planned
        contained = planned.container is not None
        try:
            ready = came_up(self.root, planned.address, planned.log, contained=contained)
        except ServerStartError as error:
            reason = explained(server_log.read(planned.log)) if contained else None
            raise reason or error from error
        if ready:
            # The metrics port may be switched off, so it is not waited for longer than a moment.
            self._ready_since = self._ready_since or time.monotonic()
            if opened_all_ports(self.root, planned.address, contained=contained):
                return True
            return time.monotonic() - self._ready_since > _LAST_PORT
        # trtllm-llmapi-launch waits for ever for a leader whose tritonserver has failed.
        if planned.launch.mode == LlmApi.name and _TRITON_FAILED in server_log.read(planned.log):
            raise start_error(self.root, planned.log)
        if not contained and time.monotonic() - self._looked > _RANK_INTERVAL:
            self._looked = time.monotonic()
            if halted := self._halts.lasting([self.root, *tree(self.root)]):
                raise ServerStartError(
                    f"A process (pid {halted[0].pid}) was stopped by a signal (SIGSTOP) while the models were loading.",
                    log=self.planned.log,
                    killed=True,
                )
            if planned.launch.ranks > 1:
                self._look_for_ranks()
                text = server_log.read(planned.log)
                logs = {process: "\n".join(server_log.lines_of(text, rank)) for rank, process in self._seen.items()}
                self._look_for_missed_stubs(logs)
            else:
                self._look_for_stubs()
        return False

    def _look_for_missed_stubs(self, logs: Mapping[ProcessId, str]) -> None:
        """Raise ServerStartError when Triton 2.51 waits for ever for a stub that it has not heard.

        `logs` is what each tritonserver, one for each rank, has written.
        """
        loading = {server: server_log.initializing(text) for server, text in logs.items()}
        models = set().union(*loading.values())
        stubs = [stub for server in logs for stub, model in python_stubs(server).items() if model in loading[server]]
        # What a stub has started may load the model for it; a rank that waits for another one works as that one does.
        workers = set().union(*(tree(stub) | {stub} for stub in stubs))
        if models <= self._own and self._standstill.lasts(workers):
            raise ServerStartError(
                f"Triton waits for the Python stub of {', '.join(sorted(models))}, which has nothing left to do. Last "
                f"lines:\n{last_lines(self.planned.log)}",
                log=self.planned.log,
                by_chance=True,
            )

    def _look_for_stubs(self) -> None:
        """Raise ServerStartError when Triton 2.51 waits for ever for a stub, which was killed or not heard."""
        text = server_log.read(self.planned.log)
        self._look_for_missed_stubs({self.root: text})
        lost = sorted(server_log.initializing(text) - {stub.model for stub in stubs_of(self.root)})
        # A model that fails by itself ends its stub too, but Triton says why.
        if not lost or not self.root.alive() or server_log.failures(text):
            self._stub_lost_since = None
            return
        self._stub_lost_since = self._stub_lost_since or self._looked
        if self._looked - self._stub_lost_since >= _JOB_END:
            raise ServerStartError(
                f"The Python stub of {', '.join(lost)} ended while the model was loading. Last lines:\n"
                f"{last_lines(self.planned.log)}",
                log=self.planned.log,
                killed=True,
            )

    def _look_for_ranks(self) -> None:
        self._seen |= rank_processes(self.root)
        lost = [rank for rank, process in self._seen.items() if not process.alive()]
        if not lost or not self.root.alive():
            self._lost_since = None
            return
        self._lost_since = self._lost_since or self._looked
        if self._looked - self._lost_since >= _JOB_END:
            raise ServerStartError(
                f"Rank {lost[0]} of {self.planned.launch.ranks} ended before the server was ready, and mpirun does not "
                f"end the others.{self._report()}",
                log=self.planned.log,
            )

    def timeout_error(self, timeout: float) -> ServerStartError | PortInUseError:
        """Return the error for an instance that is not ready in time."""
        if self.planned.launch.ranks == 1:
            text = server_log.read(self.planned.log)
            stubs = describe_stubs(self.root, server_log.still_loading(text), text)
            return timeout_error(timeout, self.planned.log, f"\n{stubs}")
        if not self.root.alive():
            return start_error(self.root, self.planned.log)
        return timeout_error(timeout, self.planned.log, self._report())

    def _report(self) -> str:
        ranks = self.planned.launch.ranks
        processes = {rank: each for rank, each in rank_processes(self.root).items() if rank < ranks}
        text = server_log.read(self.planned.log)
        return f" {kept_waiting(processes, ranks, text)}\n{describe_ranks(processes, ranks, text)}"


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
            server = change_state(server, plan.store, state="ready", instances=server.instances, **ready_now())
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
                gateway = spawn_gateway(planned.gateway, instance.process, plan.watched_models, bound=bound)
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
