"""The life of a server: checked before it is launched, explained when it does not come up, watched until it ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from trtserve.artifacts import ModelRepository
from trtserve.capacity.rates import timed
from trtserve.capacity.serving import require_servable
from trtserve.errors import PortInUseError, ServerDiedError, ServerStartError
from trtserve.files import locked
from trtserve.interrupts import stop_signals
from trtserve.launch.nodes import fit_engines
from trtserve.launch.ranks import rank_processes, serving_process
from trtserve.process import Identity, children, spawn
from trtserve.progress import SILENT, Progress
from trtserve.servers import (
    Instance,
    Processes,
    RunningProxy,
    Server,
    dead_ranks,
    dead_stubs,
    indented,
    last_words,
    recorded_server,
    write_state,
)
from trtserve.specs import ServerSpec
from trtserve.start.checks import (
    announce,
    announce_commands,
    refuse_running,
    require_devices,
    require_environment,
    require_fitting_engine,
    require_mpirun,
    require_ports,
    require_workers,
)
from trtserve.start.elsewhere import require_sound_elsewhere
from trtserve.start.ending import end_server
from trtserve.start.gpu_memory import require_gpu_memory
from trtserve.start.plan import InstancePlan, Plan, plan_server, with_free_ports
from trtserve.start.proxy import start_proxy, write_proxy
from trtserve.start.readiness import require_ranks, wait_for_all
from trtserve.store import Store
from trtserve.triton import rank_log, server_log
from trtserve.triton.preflight import Served
from trtserve.triton.server import kv_blocks, prepare_backends

_SUPERVISION_INTERVAL = 0.25
# mpirun says within this time which rank it ended the job for.
_EXPLANATION = 5.0
_PORT_ATTEMPTS = 3


def start_server(
    repository: ModelRepository, spec: ServerSpec, *, store: Store | None = None, progress: Progress = SILENT
) -> Server:
    """Start a server that outlives this process, and wait until all its models are ready.

    When it does not come up, nothing stays behind but its log; ServerStartError, PortInUseError, MachineError. SIGINT,
    SIGTERM and SIGHUP meanwhile stop it again and end in KeyboardInterrupt.
    """
    with stop_signals() as signals:
        return _launch(repository, spec, store or Store(), progress, signals, bound=False)


def serve_foreground(
    repository: ModelRepository,
    spec: ServerSpec,
    *,
    on_ready: Callable[[Server], None],
    store: Store | None = None,
    progress: Progress = SILENT,
) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP, then stop in order; a second signal kills at once.

    A server in the foreground does not outlive this process, even when that is killed.

    ServerDiedError with the last lines when the server, one of its ranks or one of its stubs ends by itself.
    """
    store = store or Store()
    with stop_signals() as signals:
        server = _launch(repository, spec, store, progress, signals, bound=True)
        try:
            on_ready(server)
            _supervise(server, store, signals)
            progress.step(f"Stopping {server.name} …")
        finally:
            end_server(server, store, urgent=lambda: signals() > 1)


def require_startable(
    repository: ModelRepository, spec: ServerSpec, served: Served, *, store: Store | None = None
) -> None:
    """Raise what would stop the launch of a repository that is yet to be made, and will hold `served`.

    A tool that is missing, a server of this name, ports that are taken, too few GPUs.
    """
    store = store or Store()
    plan = plan_server(repository, spec, served=served, store=store)
    with _free_place(plan, store):
        require_mpirun(plan)
        require_devices(plan, spec)


@contextmanager
def _free_place(plan: Plan, store: Store) -> Iterator[None]:
    """The server's name and its ports are free, and no other `start` takes the name meanwhile."""
    with locked(store.root / "locks" / f"server-{plan.name}.lock", wait=False):
        refuse_running(plan.name, plan.repository, store)
        require_ports([instance.address for instance in plan.instances], store, plan.proxy)
        yield


def _launch(
    repository: ModelRepository,
    spec: ServerSpec,
    store: Store,
    progress: Progress,
    interrupted: Callable[[], int],
    *,
    bound: bool,
    attempts: int = _PORT_ATTEMPTS,
) -> Server:
    """A ready server; with --auto-ports, one that lost a port after the check is launched again, on others."""
    try:
        return _launch_once(repository, spec, store, progress, interrupted, bound=bound)
    except PortInUseError as error:
        if not spec.auto_ports or attempts == 1:
            raise
        progress.warn(f"{error.message} Starting again on other ports.")
    others = with_free_ports(spec)
    return _launch(repository, others, store, progress, interrupted, bound=bound, attempts=attempts - 1)


def _launch_once(
    repository: ModelRepository,
    spec: ServerSpec,
    store: Store,
    progress: Progress,
    interrupted: Callable[[], int],
    *,
    bound: bool,
) -> Server:
    plan = plan_server(repository, spec, store=store)
    with _free_place(plan, store):
        _prepare(plan, repository, spec, store, progress)
        server = _spawn_all(plan, spec, store, progress, bound=bound)
        try:
            with timed(store, "start", plan.served.engine_bytes):
                wait_for_all(server, plan, timeout=spec.ready_timeout, interrupted=interrupted)
            _require_proxy(server)
            require_ranks(server, plan)
            ready = _with_members(replace(server, phase="running"))
            write_state(ready, store)
            # The gauges know what memory left of the cache, which no file does.
            for warning in plan.served.cache_warnings(kv_blocks(plan.address)):
                progress.warn(warning)
        except BaseException:
            end_server(server, store, urgent=lambda: interrupted() > 1)
            raise
    return ready


def _prepare(plan: Plan, repository: ModelRepository, spec: ServerSpec, store: Store, progress: Progress) -> None:
    """What stands in the way of the launch is raised; what it needs is written."""
    require_sound_elsewhere(repository, spec, progress)
    engines = fit_engines(plan.repository, plan.served.core_models if plan.needs_gpus else (), progress)
    announce(plan, spec, progress)
    require_servable(plan.served, plan.name, progress)
    require_mpirun(plan)
    require_devices(plan, spec)
    if plan.needs_gpus:
        require_gpu_memory(plan, spec)
    require_workers(plan, spec, progress)
    require_fitting_engine(plan, spec, store, progress)
    require_environment(plan, store, progress)
    prepare_backends(plan.triton, store)
    if plan.proxy is not None:
        write_proxy(plan.proxy)
    for engine in engines:
        engine.write()
    announce_commands(plan, progress)


def _spawn_all(plan: Plan, spec: ServerSpec, store: Store, progress: Progress, *, bound: bool) -> Server:
    """All instances as processes, then their proxy; each is in the state file before the next one starts."""
    server: Server | None = None
    try:
        for planned in plan.instances:
            progress.step(f"Starting Triton, log: {planned.log}")
            identity = spawn(planned.launch.command, log=planned.log, bound=bound)
            if server is None:
                server = _server(plan, spec, identity)
            else:
                server = replace(server, more=(*server.more, _instance(planned, identity)))
            write_state(server, store)
        assert server is not None  # a plan has an instance
        if plan.proxy is not None:
            server = replace(server, proxy=start_proxy(plan.proxy, bound=bound))
            write_state(server, store)
    except BaseException:
        if server is not None:
            end_server(server, store, urgent=lambda: True)
        raise
    return server


def _server(plan: Plan, spec: ServerSpec, identity: Identity) -> Server:
    return Server(
        name=plan.name,
        host=plan.address.host,
        http_port=plan.address.http_port,
        grpc_port=plan.address.grpc_port,
        metrics_port=plan.address.metrics_port,
        pid=identity.pid,
        started=identity.started,
        log=plan.log,
        repository=plan.repository,
        model=plan.served.model,
        streaming=plan.served.streaming,
        phase="starting",
        shm_prefix=plan.shm_prefix,
        mode=plan.mode,
        exit_timeout=spec.exit_timeout,
        container=_container(plan.instances[0]),
    )


def _instance(planned: InstancePlan, identity: Identity) -> Instance:
    return Instance(
        http_port=planned.address.http_port,
        grpc_port=planned.address.grpc_port,
        metrics_port=planned.address.metrics_port,
        pid=identity.pid,
        started=identity.started,
        log=planned.log,
        container=_container(planned),
    )


def _container(planned: InstancePlan) -> str | None:
    return None if planned.box is None else planned.box.name


def _with_members(server: Server) -> Server:
    """The server with the ranks and stubs that its instances became ready with."""
    more = (
        replace(instance, ranks=_ranks(instance.identity), stubs=_stubs(instance.identity)) for instance in server.more
    )
    return replace(server, ranks=_ranks(server.identity), stubs=_stubs(server.identity), more=tuple(more))


def _ranks(root: Identity) -> Processes:
    return _known(rank_processes(root).values())


def _stubs(root: Identity) -> Processes:
    """The Python stubs of the tritonserver that answers, and that itself where its rank is another program."""
    serving = serving_process(root)
    ranks = rank_processes(root).values()
    hidden = () if serving in (root, *ranks) else (serving,)
    return _known((*hidden, *children(serving)))


def _known(identities: Iterable[Identity]) -> Processes:
    return tuple((each.pid, each.started) for each in identities)


def _supervise(server: Server, store: Store, signals: Callable[[], int]) -> None:
    """Return on the first signal or when `trtserve stop` ends the server; ServerDiedError when it ends by itself."""
    while not signals():
        for instance in server.instances:
            problem = _problem(instance)
            if problem:
                if _wanted_to_end(server, store):
                    return
                raise _died(server, instance, problem)
        if server.proxy is not None and server.proxy.dead() and not _wanted_to_end(server, store):
            raise ServerDiedError(f"{server.name}: {_proxy_ended(server.proxy)}", log=server.proxy.log)
        time.sleep(_SUPERVISION_INTERVAL)


def _require_proxy(server: Server) -> None:
    if server.proxy is not None and server.proxy.dead():
        raise ServerStartError(_proxy_ended(server.proxy), log=server.proxy.log)


def _wanted_to_end(server: Server, store: Store) -> bool:
    """Whether `trtserve stop` is ending it."""
    recorded = recorded_server(server.name, store)
    return recorded is None or recorded.phase == "stopping"


def _proxy_ended(proxy: RunningProxy) -> str:
    return f"the reverse proxy (nginx) has ended by itself. Last lines:\n{last_words(proxy.log)}"


def _problem(instance: Instance) -> str:
    if not instance.identity.alive():
        return "tritonserver has ended by itself"
    if ranks := dead_ranks(instance):
        return f"rank {ranks[0]} of {len(instance.ranks)} has ended by itself"
    lost = dead_stubs(instance)
    return f"{lost} of {len(instance.stubs)} Python stubs have ended" if lost else ""


def _died(server: Server, instance: Instance, what: str) -> ServerDiedError:
    """The rank that mpirun names, where it names one: at the end of a job the others follow it within a moment."""
    words = last_words(instance.log)
    deadline = time.monotonic() + (_EXPLANATION if instance.ranks else 0)
    while instance.identity.alive() and time.monotonic() < deadline:
        time.sleep(_SUPERVISION_INTERVAL)
    text = server_log.read(instance.log)
    # Ranks in a container are no processes below ours: mpirun's own words are all that tells of them.
    ended = rank_log.first_end(text)
    if instance.ranks or ended is not None:
        rank = ended.rank if ended is not None else next(iter(dead_ranks(instance)), 0)
        what = what if ended is None else f"{ended.sentence}, which ends all ranks"
        lines = server_log.significant("\n".join(rank_log.lines_of(text, rank)))
        words = indented(lines[-5:]) or "  (it wrote nothing)"
    said = "[ERROR]" in words or server_log.failures("\n".join(server_log.significant(text)[-5:]))
    killed = not said if ended is None else ended.code < 0
    hint = "A process that ends without an error line was killed, most often for lack of memory." if killed else None
    which = f"{server.name}, HTTP port {instance.http_port}" if server.more else server.name
    return ServerDiedError(f"{which}: {what}. Last lines:\n{words}", hint=hint, log=instance.log)
