"""Which servers run on this machine: one state file each, believed only for the process that it was written for."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from trtserve.errors import ServerAmbiguousError, ServerNotFoundError
from trtserve.files import write_json
from trtserve.process import Identity, tree
from trtserve.store import Store
from trtserve.triton import server as triton_server
from trtserve.triton import server_log

Phase = Literal["starting", "running", "stopping"]
Condition = Literal["starting", "running", "stopping", "failed"]


Processes = tuple[tuple[int, float], ...]


@dataclass(frozen=True, kw_only=True)
class Instance:
    """One of several launches that make up a server: its ports, its root process and what belongs to it.

    `container` is the name of the container that the root process, a `docker run`, runs it in.
    """

    http_port: int
    grpc_port: int
    metrics_port: int
    pid: int
    started: float
    log: Path
    stubs: Processes = ()
    ranks: Processes = ()
    container: str | None = None

    @property
    def identity(self) -> Identity:
        """The root process."""
        return Identity(pid=self.pid, started=self.started)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Instance:
        """The instance of a state file's content."""
        return cls(
            **{
                **content,
                "log": Path(content["log"]),
                "stubs": _processes(content["stubs"]),
                "ranks": _processes(content["ranks"]),
            }
        )


@dataclass(frozen=True, kw_only=True)
class RunningProxy:
    """The reverse proxy of several instances: its configuration, log and ports.

    `pid` and `started` identify nginx; None where it is not installed, so that nothing listens on the ports.
    """

    file: Path
    log: Path
    http_port: int
    grpc_port: int
    pid: int | None = None
    started: float | None = None

    @property
    def identity(self) -> Identity | None:
        """nginx, where `start` runs it."""
        return None if self.pid is None or self.started is None else Identity(pid=self.pid, started=self.started)

    def dead(self) -> bool:
        """Whether it was started and has ended."""
        return self.identity is not None and not self.identity.alive()

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> RunningProxy:
        """The proxy of a state file's content."""
        return cls(**{**content, "file": Path(content["file"]), "log": Path(content["log"])})


@dataclass(frozen=True, kw_only=True)
class Server:
    """One server, as its state file `$TRTSERVE_HOME/servers/<name>.json` has it.

    `pid` and `started` (psutil's create_time) identify the root process: tritonserver, or the mpirun of its ranks.
    `stubs` are the Python stubs that it had when it became ready, as (pid, started), `ranks` mpirun's processes in
    their order. `model` is the text model that is asked by default, `streaming` says whether core and BLS are
    decoupled. `shm_prefix` begins the names of all its shared-memory regions. `mode` is that of its launch,
    `exit_timeout` the seconds that Triton has to end in order, `container` the container it is in. `more` are the
    further instances of the same model, `proxy` the one endpoint of them all.
    """

    name: str
    host: str
    http_port: int
    grpc_port: int
    metrics_port: int
    pid: int
    started: float
    log: Path
    repository: Path
    model: str
    streaming: bool
    phase: Phase
    shm_prefix: str
    stubs: Processes = ()
    ranks: Processes = ()
    mode: str = "single"
    exit_timeout: int = triton_server.EXIT_TIMEOUT
    container: str | None = None
    more: tuple[Instance, ...] = ()
    proxy: RunningProxy | None = None

    @property
    def identity(self) -> Identity:
        """The root process of the first instance."""
        return Identity(pid=self.pid, started=self.started)

    @property
    def instances(self) -> tuple[Instance, ...]:
        """All instances, the first included."""
        own = {field: getattr(self, field) for field in Instance.__dataclass_fields__}
        return (Instance(**own), *self.more)

    def alive(self) -> bool:
        """True while one of its instances lives."""
        return any(instance.identity.alive() for instance in self.instances)

    @property
    def address(self) -> triton_server.Address:
        """Interface and ports."""
        return triton_server.Address(
            host=self.host, http_port=self.http_port, grpc_port=self.grpc_port, metrics_port=self.metrics_port
        )

    @property
    def endpoint(self) -> triton_server.Address:
        """Where clients ask: at the reverse proxy, where one runs. The metrics are those of the first instance."""
        if self.proxy is None or self.proxy.identity is None:
            return self.address
        return replace(self.address, http_port=self.proxy.http_port, grpc_port=self.proxy.grpc_port)

    @property
    def roots(self) -> tuple[Identity, ...]:
        """The processes that were started for it, of which all others come."""
        proxy = None if self.proxy is None else self.proxy.identity
        return (*(instance.identity for instance in self.instances), *(() if proxy is None else (proxy,)))

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Server:
        """The server of a state file's content."""
        paths = {key: Path(content[key]) for key in ("log", "repository")}
        processes = {key: _processes(content[key]) for key in ("stubs", "ranks")}
        more = tuple(Instance.from_json(each) for each in content["more"])
        proxy = None if content["proxy"] is None else RunningProxy.from_json(content["proxy"])
        return cls(**{**content, **paths, **processes, "more": more, "proxy": proxy})


def _processes(content: Iterable[Sequence[float]]) -> Processes:
    return tuple((int(pid), float(started)) for pid, started in content)


def write_state(server: Server, store: Store) -> None:
    """Replace the server's state file."""
    write_json(state_file(server.name, store), asdict(server))


def state_file(name: str, store: Store) -> Path:
    """Place of the state file of the server `name`."""
    return store.servers / f"{name}.json"


def log_file(name: str, store: Store, instance: int = 1) -> Path:
    """Place of the log of the server `name`, or of a further instance of it; it outlives the server.

    No server's name has an @ in it.
    """
    return store.servers / (f"{name}.log" if instance == 1 else f"{name}@{instance}.log")


def recorded_servers(store: Store | None = None) -> list[Server]:
    """All servers with a state file, also those that have ended without being stopped."""
    folder = (store or Store()).servers
    servers = (_read(path) for path in sorted(folder.glob("*.json")) if not path.name.startswith("."))
    return [server for server in servers if server is not None]


def list_servers(store: Store | None = None) -> list[Server]:
    """All servers of which a process is alive."""
    return [server for server in recorded_servers(store) if server.alive()]


def condition(server: Server) -> tuple[Condition, str]:
    """Whether a server starts, runs or has failed, with the reason for the last."""
    if not server.alive():
        return "failed", "tritonserver has ended without being stopped"
    if server.phase == "stopping":
        return "stopping", ""
    for instance in server.instances:
        if not instance.identity.alive():
            return "failed", f"the instance on HTTP port {instance.http_port} has ended"
        if lost := dead_ranks(instance):
            return "failed", f"rank {', '.join(map(str, lost))} of {len(instance.ranks)} has ended"
        if stubs := dead_stubs(instance):
            return "failed", f"{stubs} of {len(instance.stubs)} Python stubs have ended; requests to their models fail"
    if server.proxy is not None and server.proxy.dead():
        return "failed", "its reverse proxy (nginx) has ended"
    if server.phase == "running" or triton_server.is_ready(server.address):
        return "running", ""
    return "starting", ""


def telling_log(server: Server) -> Path:
    """The log that says why a server has failed: of the instance, or the reverse proxy, that `condition` speaks of."""
    for instance in server.instances:
        if not instance.identity.alive() or dead_ranks(instance) or dead_stubs(instance):
            return instance.log
    return server.proxy.log if server.proxy is not None and server.proxy.dead() else server.log


def dead_stubs(instance: Instance) -> int:
    """How many of the stubs that an instance became ready with have ended."""
    return len(_dead(instance.stubs))


def dead_ranks(instance: Instance) -> list[int]:
    """Which of the ranks that an instance became ready with have ended."""
    return _dead(instance.ranks)


def _dead(processes: Processes) -> list[int]:
    identities = (Identity(pid=pid, started=started) for pid, started in processes)
    return [number for number, identity in enumerate(identities) if not identity.alive()]


def find_server(name: str | None = None, *, store: Store | None = None, hint: str = "") -> Server:
    """The living server `name`; without a name, the only one.

    ServerNotFoundError when there is none, ServerAmbiguousError (with `hint`) when none was named of several.
    """
    store = store or Store()
    living = list_servers(store)
    if name is not None:
        found = next((server for server in living if server.name == name), None)
        if found is None:
            raise _not_found(name, living, store)
        return found
    if not living:
        raise _none_running(store)
    if len(living) > 1:
        names = ", ".join(server.name for server in living)
        raise ServerAmbiguousError(
            f"{len(living)} servers are running: {names}.",
            hint=hint or "Name one of them: --server NAME for query and bench, NAME alone for metrics and logs.",
        )
    return living[0]


def forget(server: Server, store: Store) -> None:
    """Remove the state file and the shared memory of a server that has ended; its log stays.

    The file of a later server of the same name stays too.
    """
    triton_server.sweep_shared_memory(server.shm_prefix)
    recorded = recorded_server(server.name, store)
    if recorded is None or recorded.identity.matches(server.identity):
        state_file(server.name, store).unlink(missing_ok=True)
        shutil.rmtree(store.servers / f"{server.name}.proxy", ignore_errors=True)


def recorded_server(name: str, store: Store) -> Server | None:
    """The server of this name with a state file, dead or alive."""
    return _read(state_file(name, store))


def last_words(log: Path, count: int = 5) -> str:
    """The last significant lines of a log, indented for a message."""
    return indented(server_log.significant(server_log.read(log))[-count:])


def indented(lines: Iterable[str]) -> str:
    """Lines of a log without their headers, for a message."""
    return "\n".join(f"  {words}" for line in lines if (words := server_log.plain(line)))


def _read(path: Path) -> Server | None:
    """A state file; None for one that is not there or that another version wrote."""
    try:
        return Server.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, json.JSONDecodeError, KeyError, TypeError, ValueError):
        return None


def _not_found(name: str, living: list[Server], store: Store) -> ServerNotFoundError:
    dead = recorded_server(name, store)
    if dead is not None:
        if not any(root.alive() or tree(root) for root in dead.roots):
            forget(dead, store)
        return ServerNotFoundError(
            f"The server {name} has ended without being stopped. Its last lines:\n{last_words(dead.log)}",
            hint=f"Start it again: trtserve start --name {name} --model-repository {dead.repository}",
            log=dead.log,
        )
    if living:
        names = ", ".join(server.name for server in living)
        return ServerNotFoundError(f"No server {name} is running; running: {names}.", hint="Name one of these.")
    return ServerNotFoundError(f"No server {name} is running, nor any other.", hint=_how_to_start(store))


def _none_running(store: Store) -> ServerNotFoundError:
    dead = recorded_servers(store)
    message = "No server is running."
    if dead:
        message += f" {', '.join(server.name for server in dead)} ended without being stopped: see `trtserve status`."
    return ServerNotFoundError(message, hint=_how_to_start(store))


def _how_to_start(store: Store) -> str:
    words = "Import a model and start it: trtserve import demo && trtserve start --detach"
    if store.recorded():
        words = "Start one: trtserve start --detach"
    return f"{words}{chosen_store()}"


def chosen_store() -> str:
    """Words for a message: which store was looked into, where the user chose one; servers of others are not seen."""
    home = os.environ.get("TRTSERVE_HOME")
    return f" (only the store of $TRTSERVE_HOME was looked into: {home})" if home else ""
