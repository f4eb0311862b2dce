"""The state file of each server: how it is, which processes belong to it, and why it last failed.

The file outlives the server and its supervisor. It is replaced in one rename, and a process in it is known by pid and
start time, so that a later process with the same pid is never mistaken for it.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from trtserve.artifacts import ModelRepository
from trtserve.errors import ArtifactError, LockedError, TrtserveError, UsageError
from trtserve.files import child, decode_as, locked, read_json_object, write_json
from trtserve.process import ProcessId, since_boot
from trtserve.programs.shared.run_folder import SOCKETS
from trtserve.server.triton import tritonserver as triton_server
from trtserve.server.triton.tritonserver import Address
from trtserve.specs import ServerSpec
from trtserve.store import Store

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_SCHEMA = 2
# A supervisor writes the state every two seconds.
_REPAIRED = 4.0
_CHECKED_WITHIN, _PAUSE = 60.0, 0.1

State = Literal["starting", "ready", "degraded", "draining", "stopped", "failed"]
"""starting: it loads, or waits to be started again; ready: every model answers; degraded: its processes live, and some
model does not answer; draining: `stop` is ending it; stopped and failed: none of its processes is left."""


@dataclass(frozen=True, kw_only=True)
class Stub(ProcessId):
    """A process that runs one instance of a Python model."""

    model: str = ""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a server ended, or was started again."""

    time: float  # seconds since the epoch
    message: str  # what ended, with the last lines of its log
    exit_code: int | None = None  # exit code of the process that was launched, negative for a signal; None: unknown
    log: Path | None = None  # log of the part that ended


@dataclass(frozen=True, kw_only=True)
class GatewayState:
    """The process that answers HTTP clients in front of one instance."""

    process: ProcessId
    log: Path
    settings: Path  # file with its settings, which only this user can read
    encrypted: bool = False  # whether clients must use HTTPS

    @property
    def dead(self) -> bool:
        return not self.process.alive()


@dataclass(frozen=True, kw_only=True)
class Instance:
    """One launch of a server's model, with the processes that belong to it."""

    address: Address  # interface and ports
    process: ProcessId
    """What was started: tritonserver, the mpirun of its ranks, or the `docker run` of its container."""
    log: Path
    stubs: tuple[Stub, ...] = ()  # Python stubs, as far as they have been seen
    ranks: tuple[ProcessId, ...] = ()  # mpirun's ranks, in their order, or empty without mpirun
    container: str | None = None  # name of the container that the processes run in
    gateway: GatewayState | None = None  # what answers its HTTP clients, or None when Triton does so itself

    @property
    def dead_ranks(self) -> list[int]:
        """Ranks that have ended since the instance became ready."""
        return [rank for rank, process in enumerate(self.ranks) if not process.alive()]

    @property
    def dead_stubs(self) -> list[Stub]:
        """Stubs that have ended since the instance became ready."""
        return [stub for stub in self.stubs if not stub.alive()]


@dataclass(frozen=True, kw_only=True)
class ProxyState:
    """The gateway in front of several instances."""

    gateway: GatewayState
    http_port: int
    grpc_port: int


@dataclass(frozen=True, kw_only=True)
class Server:
    """One server, as its state file `$TRTSERVE_HOME/servers/<name>.json` describes it."""

    name: str
    repository: Path
    model: str  # text model that is asked by default
    streaming: bool  # whether the core model and BLS are decoupled
    state: State  # what the supervisor or `stop` wrote last; `server_state` also looks at the processes
    reason: str = ""  # why it is degraded, or what it is waiting for
    mode: str = "single"  # launch mode of each instance
    shm_prefix: str  # start of the names of all its shared-memory regions
    exit_timeout: int = triton_server.EXIT_TIMEOUT  # seconds that Triton has to finish its requests before it ends
    instances: tuple[Instance, ...]
    proxy: ProxyState | None = None  # one endpoint for all instances
    supervisor: ProcessId | None = None
    """The `trtserve start` that watches it; None: it was started from Python code that does not watch it."""
    stopper: ProcessId | None = None  # the process that is ending it
    restarts: int = 0  # how often its supervisor has started it again
    ready_since: float | None = None  # when it last became ready, in seconds since the epoch
    ready_at: float | None = None  # the same in seconds after the boot, which nobody can set
    failure: Failure | None = None  # the last failure, also one that it has recovered from
    kept: Mapping[str, str] | None = None
    """Of one port for many models: name → loaded, unloaded, loading or unloading."""
    schema: int = _SCHEMA

    def alive(self) -> bool:
        """Return whether a process of one of its instances runs, or its supervisor is going to start one."""
        if self.state in ("stopped", "failed"):
            return False
        supervised = self.supervisor is not None and self.supervisor.alive()
        return supervised or any(instance.process.alive() for instance in self.instances)

    @property
    def address(self) -> Address:
        return self.instances[0].address

    @property
    def endpoint(self) -> Address:
        """Where clients send requests: the gateway of several instances. The metrics are those of the first one."""
        if self.proxy is None:
            return self.address
        return replace(self.address, http_port=self.proxy.http_port, grpc_port=self.proxy.grpc_port)

    @property
    def gateway(self) -> GatewayState | None:
        """What answers HTTP clients, or None when Triton does so itself."""
        return self.instances[0].gateway if self.proxy is None else self.proxy.gateway

    @property
    def gateways(self) -> tuple[GatewayState, ...]:
        """That and those of the instances behind it; what clients talk to comes first."""
        front = () if self.proxy is None else (self.proxy.gateway,)
        return (*front, *(each.gateway for each in self.instances if each.gateway is not None))

    @property
    def url(self) -> str:
        """Where clients of this machine send HTTP requests."""
        gateway = self.gateway
        scheme = "https" if gateway is not None and gateway.encrypted else "http"
        return f"{scheme}://{triton_server.client_host(self.endpoint.host)}:{self.endpoint.http_port}"

    @property
    def roots(self) -> tuple[ProcessId, ...]:
        """The processes that were started for it; all others descend from these. What answers clients comes first."""
        gateways = (each.process for each in self.gateways)
        return tuple(dict.fromkeys((*gateways, *(instance.process for instance in self.instances))))

    @property
    def ports(self) -> set[int]:
        """All its ports, those of the proxy included."""
        own = {port for instance in self.instances for port in instance.address.ports.values()}
        return own if self.proxy is None else own | {self.proxy.http_port, self.proxy.grpc_port}


def server_name(repository: ModelRepository, spec: ServerSpec) -> str:
    """Return the server's name. Raises UsageError for a name that cannot be part of file names."""
    name = repository.name if spec.name is None else spec.name
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} cannot name a server.", hint="Use at most 100 letters, digits, '.', '_' and '-': --name NAME"
        )
    return name


def transaction_policy(streaming: bool) -> str:
    """Return the switch of `repo` and `import` that makes such a repository."""
    return "streaming" if streaming else "no-streaming"


def how_answers_come(streaming: bool) -> str:
    """Return the same in words, for people."""
    return "streamed" if streaming else "in one piece"


def state_file(name: str, store: Store) -> Path:
    return child(store.servers, f"{name}.json")


def log_file(name: str, store: Store, instance: int = 1) -> Path:
    """Return the path of the log of the server `name`, or of a further instance of it; it outlives the server."""
    # Names of servers contain no @.
    return child(store.servers, f"{name}.log" if instance == 1 else f"{name}@{instance}.log")


def gateway_folder(name: str, store: Store) -> Path:
    """Return the folder with the settings of a server's gateways."""
    return child(store.servers, f"{name}.gateway")


def run_folder(name: str, store: Store) -> Path:
    """Return the folder through which the models of a server and its supervisor see each other."""
    return child(store.servers, f"{name}.run")


def write_state(server: Server, store: Store) -> None:
    write_json(state_file(server.name, store), asdict(server), private=True)


def change_state(server: Server, store: Store, **changes: Any) -> Server:
    """Change fields in the server's state file, and return what it holds then.

    A server that is being stopped is left alone, as is the file of a later server of the same name.
    """
    with locked(store.root / "locks" / f"state-{server.name}.lock"):
        recorded = last_record(server.name, store)
        if recorded is not None:
            if recorded.shm_prefix != server.shm_prefix:
                return server
            if recorded.state in ("draining", "stopped") and changes.get("state") != "stopped":
                return recorded
            server = recorded
        changed = replace(server, **changes)
        if changed != recorded:
            write_state(changed, store)
    return changed


def last_record(name: str, store: Store) -> Server | None:
    """Return what the state file of this name holds, also of a server that was stopped."""
    if not _NAME.fullmatch(name):  # a user may ask for any
        return None
    return _read(state_file(name, store))


def recorded_server(name: str, store: Store) -> Server | None:
    """Return the server of this name that was not stopped, dead or alive."""
    server = last_record(name, store)
    return None if server is None or server.state == "stopped" else server


def recorded_servers(store: Store | None = None) -> list[Server]:
    """Return all servers that were not stopped, including those that ended by themselves."""
    folder = (store or Store()).servers
    _await_repairs(folder)
    servers = (_read(path) for path in sorted(folder.glob("*.json")) if not path.name.startswith("."))
    return [server for server in servers if server is not None and server.state != "stopped"]


def _await_repairs(folder: Path) -> None:
    """Wait for state files that are damaged or were removed under a server: its supervisor writes them again.

    A server has its run folder from before its first state until it has been stopped.
    """
    deadline = time.monotonic() + _REPAIRED
    while any(_read(each.with_suffix(".json")) is None for each in folder.glob("*.run")):
        if time.monotonic() > deadline:
            return
        time.sleep(_REPAIRED / 50)


def list_servers(store: Store | None = None) -> list[Server]:
    return [server for server in recorded_servers(store) if server.alive()]


def is_stopping(server: Server, store: Store) -> bool:
    """Return whether `trtserve stop` is ending the server, or has ended it."""
    recorded = last_record(server.name, store)
    if recorded is None:  # damaged, or removed under a server that runs: its supervisor writes it again
        return not (run_folder(server.name, store).is_dir() or state_file(server.name, store).exists())
    return recorded.state in ("stopped", "draining")


def forget(server: Server, store: Store, *, failure: Failure | None = None) -> None:
    """Remove what a server that has ended leaves behind; its log and its state, stopped or failed, stay.

    The files of a later server of the same name stay too.
    """
    triton_server.sweep_shared_memory(server.shm_prefix)
    recorded = last_record(server.name, store)
    if recorded is None or recorded.shm_prefix == server.shm_prefix:
        shutil.rmtree(child(store.servers, f"{server.name}.proxy"), ignore_errors=True)
        shutil.rmtree(gateway_folder(server.name, store), ignore_errors=True)
        shutil.rmtree(child(store.servers, f"{server.name}.door"), ignore_errors=True)  # as it was called before
        folder = run_folder(server.name, store)
        for link in folder.glob(f"{SOCKETS}*"):
            with suppress(OSError):
                if (target := link.readlink()).name == link.name:
                    shutil.rmtree(target, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)
        ended: dict[str, Any] = {"instances": server.instances, "reason": "", "stopper": None}
        ended |= dict.fromkeys(ready_now())
        if failure is not None:
            ended["failure"] = failure
        try:
            change_state(server, store, state="stopped" if failure is None else "failed", **ended)
        except TrtserveError:  # the disk is full, or the store read-only: no state is better than an old one
            state_file(server.name, store).unlink(missing_ok=True)


def ready_now() -> dict[str, Any]:
    """Return the fields of a server that has just become ready."""
    return {"ready_since": time.time(), "ready_at": since_boot()}


def failure_of(error: TrtserveError, exit_code: int | None = None) -> Failure:
    message = "\n".join(filter(None, (error.message, error.hint)))
    return Failure(time=time.time(), message=message, exit_code=exit_code, log=error.log)


def start_lock(name: str, store: Store) -> Path:
    """Return the lock file that whoever starts a server of this name holds meanwhile."""
    return store.root / "locks" / f"server-{name}.lock"


def launch_lock(name: str, store: Store) -> Path:
    """Return the lock file that a supervisor in the background shares with its launcher, from its first moment."""
    return store.root / "locks" / f"launch-{name}.lock"


def await_record(name: str | None, store: Store) -> None:
    """Wait while another process begins to start the server `name`, or any server, and has not recorded it yet.

    Raises LockedError when that takes longer than a minute.
    """
    if name is None:
        launches = (store.root / "locks").glob("launch-*.lock")
        for each in sorted(lock.stem.removeprefix("launch-") for lock in launches):
            await_record(each, store)
        return
    if not _NAME.fullmatch(name):  # of no server
        return
    locks = (launch_lock(name, store), start_lock(name, store))
    deadline = time.monotonic() + _CHECKED_WITHIN
    while (server := recorded_server(name, store)) is None or not server.alive():
        if not any(lock.exists() and _is_held(lock) for lock in locks):
            return
        if time.monotonic() > deadline:
            raise LockedError(
                f"Another process has been about to start the server {name} for a minute.",
                hint="Wait until it has started, or end that process; then try again.",
            )
        time.sleep(_PAUSE)


def _is_held(lock: Path) -> bool:
    try:
        with locked(lock, wait=False):
            return False
    except LockedError:
        return True


def _read(path: Path) -> Server | None:
    """Return the server of a state file, or None when the file is missing or another version wrote it."""
    try:
        content = read_json_object(path)
        for instance in content["instances"]:
            if "door" in instance:  # what the gateway was called before 2026-11-26
                instance["gateway"] = instance.pop("door")
        proxy = content.get("proxy") or {}
        if "process" in proxy:  # nginx, until 2026-11-26, which `stop` must still end
            behind = content["instances"][0].get("gateway") or {"settings": str(Path(proxy["file"]).parent)}
            nginx = {**behind, "process": proxy["process"], "log": proxy["log"]}
            ports = {port: proxy[port] for port in ("http_port", "grpc_port")}
            content["proxy"] = {"gateway": nginx, **ports} if proxy["process"] else None
        server = decode_as(content, Server, "the state of a server", path)
    except (FileNotFoundError, KeyError, TypeError, ValueError, ArtifactError):
        return None
    return server if server.instances and server.schema == _SCHEMA else None
