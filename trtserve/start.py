"""The life of a server: checked before it is launched, explained when it does not come up, stopped without a trace."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from trtserve.artifacts import ModelRepository, load_artifact
from trtserve.capacity.rates import timed
from trtserve.capacity.serving import require_servable
from trtserve.doctor import require_machine
from trtserve.errors import (
    ModelNotFoundError,
    PortInUseError,
    ServerDiedError,
    ServerStartError,
    UnsupportedModelError,
    UsageError,
)
from trtserve.machine import differences
from trtserve.ports import ipv4_address, is_free, next_free, owner
from trtserve.process import Command, Identity, arguments, children, spawn, stop_signals
from trtserve.progress import SILENT, Progress
from trtserve.servers import (
    Server,
    condition,
    dead_stubs,
    find_server,
    forget,
    last_words,
    list_servers,
    log_file,
    recorded_server,
    recorded_servers,
    write_state,
)
from trtserve.specs import ServerSpec
from trtserve.store import Store, locked
from trtserve.triton import server_log
from trtserve.triton.launch import stop_triton, wait_until_ready
from trtserve.triton.preflight import Served, inspect_repository, require_loadable
from trtserve.triton.server import (
    Address,
    Triton,
    backend_folder,
    find_triton,
    kv_blocks,
    prepare_backends,
    server_command,
    unique_prefix,
)

__all__ = [
    "Plan",
    "Server",
    "condition",
    "find_log",
    "find_repository",
    "find_server",
    "follow_log",
    "list_servers",
    "plan_server",
    "recorded_servers",
    "serve_foreground",
    "start_server",
    "stop_server",
    "transaction_policy",
    "with_free_ports",
]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_SUPERVISION_INTERVAL = 0.25


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What `start` would do: the server's name, what it serves, and the whole command."""

    name: str
    repository: Path
    served: Served
    address: Address
    triton: Triton
    shm_prefix: str
    log: Path
    command: Command


def find_repository(
    name: str | None = None, *, path: Path | None = None, store: Store | None = None
) -> ModelRepository:
    """The model repository at `path`, or of the import or repository `name`, or of the last import.

    ModelNotFoundError when nothing was imported or made (under that name).
    """
    if path is not None:
        if name is not None:
            raise UsageError(f"Both a name ({name}) and --model-repository were given; give one.")
        return _open(path)
    store = store or Store()
    records = store.recorded()
    chosen = [record for record in records if name is None or record.name == name]
    if chosen:
        return _open(Path(chosen[0].repository))
    made = store.made(ModelRepository)
    if name in made:
        return _open(made[name].path)
    if name is not None and (os.sep in name or Path(name).is_dir()):
        raise _folder_for_name(name)
    what = "Nothing has been imported yet." if name is None else f"Nothing was imported under the name {name}."
    raise ModelNotFoundError(what, hint=_known_names([record.name for record in records], made))


def _known_names(imported: list[str], made: Collection[str]) -> str:
    others = sorted(set(made) - set(imported))
    known = [f"Imported: {', '.join(imported)}."] if imported else []
    known += [f"Made by `trtserve repo`: {', '.join(others)}."] if others else []
    return " ".join(known) or "Import a model: trtserve import demo"


def _folder_for_name(folder: str) -> ModelNotFoundError:
    """A path where the name of an import is expected; a Hugging Face folder has a config.json, a repository has not."""
    if (Path(folder) / "config.json").is_file():
        hint = f"Import the model first: trtserve import {folder}"
    else:
        hint = f"Serve a model repository by its path: trtserve start --model-repository {folder}"
    return ModelNotFoundError(f"{folder} is a path, not the name of an import.", hint=hint)


def plan_server(repository: ModelRepository, spec: ServerSpec, *, store: Store | None = None) -> Plan:
    """Read the repository and compose the command; nothing is written and nothing started.

    RepositoryError, MissingDependencyError and UnsupportedModelError say what stands in the way.
    """
    store = store or Store()
    name = repository.name if spec.name is None else spec.name
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} cannot name a server.", hint="Use letters, digits, '.', '_' and '-': --name NAME")
    served = inspect_repository(repository)
    require_loadable(repository)
    _require_one_process(served, spec)
    triton = find_triton(served.backends | {"python"})
    address = Address(
        host=ipv4_address(spec.host), http_port=spec.http_port, grpc_port=spec.grpc_port, metrics_port=spec.metrics_port
    )
    prefix = unique_prefix(name)
    command = server_command(
        triton,
        repository.path,
        address,
        backends=backend_folder(triton, store),
        shm_prefix=prefix,
        extra_arguments=spec.extra_arguments,
    )
    return Plan(
        name=name,
        repository=repository.path.absolute(),
        served=served,
        address=address,
        triton=triton,
        shm_prefix=prefix,
        log=log_file(name, store),
        command=command,
    )


def start_server(
    repository: ModelRepository, spec: ServerSpec, *, store: Store | None = None, progress: Progress = SILENT
) -> Server:
    """Start a server that outlives this process, and wait until all its models are ready.

    When it does not come up, nothing stays behind but its log; ServerStartError, PortInUseError, MachineError. SIGINT,
    SIGTERM and SIGHUP meanwhile stop it again and end in KeyboardInterrupt.
    """
    with stop_signals() as signals:
        return _launch(repository, spec, store or Store(), progress, signals)


def serve_foreground(
    repository: ModelRepository,
    spec: ServerSpec,
    *,
    on_ready: Callable[[Server], None],
    store: Store | None = None,
    progress: Progress = SILENT,
) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP, then stop in order; a second signal kills at once.

    ServerDiedError with the last lines when the server or one of its stubs ends by itself.
    """
    store = store or Store()
    with stop_signals() as signals:
        server = _launch(repository, spec, store, progress, signals)
        try:
            on_ready(server)
            _supervise(server, store, signals)
            progress.step(f"Stopping {server.name} …")
        finally:
            _end(server, store, urgent=lambda: signals() > 1)


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
    _end(server, store)
    return server


def with_free_ports(spec: ServerSpec) -> ServerSpec:
    """The spec with each taken port replaced by the next free one."""
    taken: list[int] = []
    for port in (spec.http_port, spec.grpc_port, spec.metrics_port):
        taken.append(next_free(ipv4_address(spec.host), port, taken=taken))
    return replace(spec, http_port=taken[0], grpc_port=taken[1], metrics_port=taken[2])


def transaction_policy(streaming: bool) -> str:
    """The switch of `repo` and `import` that makes a repository like this."""
    return "streaming" if streaming else "no-streaming"


def find_log(name: str | None = None, *, store: Store | None = None) -> Path:
    """Log of the server `name`, also when it has ended; without a name, of the only one that runs."""
    store = store or Store()
    if name is not None and log_file(name, store).exists():
        return log_file(name, store)
    return find_server(name, store=store).log


def follow_log(log: Path, *, position: int, pause: Callable[[], None], store: Store | None = None) -> Iterator[str]:
    """Yield what is added to a log after byte `position` until its server has ended."""
    server = recorded_server(log.stem, store or Store())
    return server_log.follow(
        log, position=position, ended=lambda: server is None or not server.identity.alive(), pause=pause
    )


def _require_one_process(served: Served, spec: ServerSpec) -> None:
    ranks = max(served.world_size, spec.world_size or 1)
    if served.runtime != "openvino" and ranks > 1:
        raise UnsupportedModelError(
            f"{ranks} ranks are wanted; only engines of the openvino runtime are served here, by one process.",
            hint="Leave --world-size out, or build the engine with --runtime openvino.",
        )


def _open(path: Path) -> ModelRepository:
    repository = load_artifact(ModelRepository, path)
    return ModelRepository(path=repository.path, manifest=repository.manifest)


def _launch(
    repository: ModelRepository, spec: ServerSpec, store: Store, progress: Progress, interrupted: Callable[[], int]
) -> Server:
    plan = plan_server(repository, spec, store=store)
    with locked(store.root / "locks" / f"server-{plan.name}.lock", wait=False):
        _refuse_running(plan.name, plan.repository, store)
        _require_ports(plan.address, store)
        _announce(plan, spec, progress)
        require_servable(plan.served, plan.name, progress)
        require_machine(store, progress=progress)
        prepare_backends(plan.triton, store)
        progress.step(f"Starting Triton, log: {plan.log}")
        identity = spawn(plan.command, log=plan.log)
        server = _server(plan, identity)
        try:
            write_state(server, store)
            with timed(store, "start", plan.served.engine_bytes):
                wait_until_ready(identity, plan.address, plan.log, timeout=spec.ready_timeout, interrupted=interrupted)
            ready = replace(server, phase="running", stubs=tuple((c.pid, c.started) for c in children(identity)))
            write_state(ready, store)
            # The gauges know what memory left of the cache, which no file does.
            for warning in plan.served.cache_warnings(kv_blocks(plan.address)):
                progress.warn(warning)
        except BaseException:
            _end(server, store, urgent=lambda: interrupted() > 1)
            raise
    return ready


def _server(plan: Plan, identity: Identity) -> Server:
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
    )


def _end(server: Server, store: Store, *, urgent: Callable[[], bool] = lambda: False) -> None:
    stop_triton(server.identity, server.shm_prefix, urgent=urgent)
    forget(server, store)


def _chosen(repository: Path, store: Store) -> str:
    """What names this repository on the command line: its import, else its path."""
    record = next((record for record in store.recorded() if Path(record.repository) == repository), None)
    return f"--model-repository {repository}" if record is None else record.name


def _refuse_running(name: str, repository: Path, store: Store) -> None:
    """A second server of the same name is refused; what a dead one left behind is removed."""
    server = recorded_server(name, store)
    if server is None:
        return
    if server.identity.alive():
        again = f"trtserve start {_chosen(repository, store)} --name OTHER --auto-ports"
        raise ServerStartError(
            f"The server {name} is running already (pid {server.pid}, HTTP port {server.http_port}).",
            hint=f"Stop it with `trtserve stop {name}`, or start a second one: {again}",
        )
    _end(server, store)


def _require_ports(address: Address, store: Store) -> None:
    """Triton itself loads all models first and then names only the first port that is taken."""
    taken = [(flag, port) for flag, port in address.ports.items() if not is_free(address.host, port)]
    if not taken:
        return
    lines = [f"{flag} {port} is taken by {_owner(port, store)}" for flag, port in taken]
    flags = " ".join(f"{flag} PORT" for flag, _ in taken)
    raise PortInUseError(f"{'; '.join(lines)}.", hint=f"Use --auto-ports, or choose others: trtserve start {flags}")


def _owner(port: int, store: Store) -> str:
    identity, words = owner(port)
    server = next((s for s in list_servers(store) if port in s.address.ports.values()), None)
    if server is not None:
        return f"trtserve's server {server.name} (pid {server.pid}; `trtserve stop {server.name}`)"
    if identity is None:
        return "a process that is not visible from here"
    if Path(next(iter(arguments(identity)), "")).name == "tritonserver":
        return f"a Triton server that was not started from this store, {words}"
    return words


def _announce(plan: Plan, spec: ServerSpec, progress: Progress) -> None:
    served = plan.served
    policy, other = transaction_policy(served.streaming), transaction_policy(not served.streaming)
    progress.step(f"{plan.name}: serving {served.model} from {plan.repository}, transaction policy {policy}")
    progress.step(f"(to switch: `trtserve import` or `repo` with --{other})")
    if served.precision:
        progress.step("Engine: " + ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in served.precision.items()))
    ranks = max(served.world_size, spec.world_size or 1)
    if ranks > 1:
        progress.step(f"World size {ranks}: this runtime merges the shards, so one process serves them all.")
    for difference in differences(served.machine):
        progress.warn(difference)


def _supervise(server: Server, store: Store, signals: Callable[[], int]) -> None:
    """Return on the first signal or when `trtserve stop` ends the server; ServerDiedError when it ends by itself."""
    while not signals():
        problem = _problem(server)
        if problem:
            recorded = recorded_server(server.name, store)
            if recorded is None or recorded.phase == "stopping":
                return
            raise _died(server, problem)
        time.sleep(_SUPERVISION_INTERVAL)


def _problem(server: Server) -> str:
    if not server.identity.alive():
        return "tritonserver has ended by itself"
    lost = dead_stubs(server)
    return f"{lost} of {len(server.stubs)} Python stubs have ended" if lost else ""


def _died(server: Server, what: str) -> ServerDiedError:
    return ServerDiedError(
        f"{server.name}: {what}. Last lines:\n{last_words(server.log)}",
        hint="A process that ends without an error line was killed, most often for lack of memory.",
        log=server.log,
    )
