"""The copies of a server behind one gateway: where they are, whether they answer, and who gets the next request."""

from __future__ import annotations

import asyncio
import logging
import re
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from http import HTTPStatus
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from trtserve.client.endpoint import Endpoint, UnavailableError
from trtserve.client.grpc_transport import GrpcTransport
from trtserve.errors import ServerUnreachableError, TrtserveError, UsageError
from trtserve.files import locked, read_as, write_json
from trtserve.gateway.asgi import RefusedError
from trtserve.gateway.balancing import MOST_REPLICAS, Balancer, BalancerMemory, Ids, shared_array
from trtserve.gateway.triton import TritonHttp

_LOG = logging.getLogger(__name__)
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]{1,253}):(\d{1,5})(?::(\d{1,5}))?")
_PROBE_SECONDS, _PROBE_PAUSE = 2.0, 1.0
_LOOK = 0.25
_MOST_TRIES = 3  # replicas for one request: one that ends engines must not end them all
_WHAT = "the replicas of a gateway"
T = TypeVar("T")
ReplicaState = Literal["ready", "down", "drained"]


class UnansweredError(Exception):
    """A replica refused a request, or went away, before its answer began: another one can be asked."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(frozen=True, kw_only=True)
class ReplicaAddress:
    """Where a copy is."""

    host: str
    grpc_port: int
    http_port: int | None = None
    """Port of Triton's HTTP service, or of a gateway in front of it; None: it gets no request of Triton's protocol."""
    drained: bool = False
    """Whether it gets no new request."""
    removed: bool = False

    @classmethod
    def parse(cls, text: str, flag: str = "--replica") -> ReplicaAddress:
        """Return the address in `HOST:GRPC_PORT` or `HOST:GRPC_PORT:HTTP_PORT`. Raises UsageError for another text."""
        found = _ADDRESS.fullmatch(text)
        ports = [int(port) for port in found.groups()[1:] if port] if found else []
        if found is None or not all(0 < port < 1 << 16 for port in ports):
            raise UsageError(
                f"{flag} is {text[:300]!r}; expected HOST:PORT, or HOST:PORT:HTTP_PORT.",
                hint="PORT is that of gRPC, such as 8001; Triton's protocol over HTTP also needs HTTP_PORT.",
            )
        return cls(host=found[1], grpc_port=ports[0], http_port=ports[1] if len(ports) > 1 else None)

    @property
    def name(self) -> str:
        """What clients and logs call it."""
        return f"{self.host}:{self.grpc_port}"


@dataclass(frozen=True, kw_only=True)
class _Table:
    replicas: tuple[ReplicaAddress, ...]


class SharedState:
    """What the processes of one gateway share. It is made before they are forked."""

    def __init__(self, processes: int = 1, parent: Path | None = None) -> None:
        """`parent` is the folder for `folder`, or None for the system's."""
        self._parent = parent
        self.processes = processes
        self.memory = BalancerMemory(processes=processes)
        self.running = shared_array((processes, MOST_REPLICAS), np.int32)
        """Requests that each process has on each replica."""
        self.down = shared_array((MOST_REPLICAS,), np.bool_)
        """Replicas that did not answer the last time that the first process asked."""
        self.heard = shared_array((MOST_REPLICAS,), np.float64)
        """When each replica sent the latest piece of an answer, in seconds of the monotonic clock."""
        self.requests = shared_array((processes,), np.int32)
        """Requests of each process."""

    @cached_property
    def folder(self) -> Path:
        """A folder for files of these processes, which only this user can read; several make it before they fork."""
        return Path(tempfile.mkdtemp(prefix="trtserve-gateway-", dir=self._parent))

    def remove(self) -> None:
        """Remove the folder, if there is one."""
        if "folder" in self.__dict__:
            shutil.rmtree(self.folder, ignore_errors=True)


@dataclass(eq=False)
class Replica:
    """One copy, as one process sees it."""

    number: int
    address: ReplicaAddress
    endpoint: Endpoint
    timeout: float
    heard: NDArray[np.float64]
    """Its entry in the shared state."""
    http: TritonHttp | None = None
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while it does not answer."""

    @cached_property
    def client(self) -> GrpcTransport:
        """The gRPC connection, which belongs to the event loop that asks for it first."""
        return GrpcTransport(self.endpoint, timeout=self.timeout)

    def hear(self) -> None:
        """Note that a piece of an answer came, so that one which is only slow does not count as lost."""
        self.heard[0] = time.monotonic()

    async def close(self) -> None:
        """Close the connections."""
        if "client" in self.__dict__:
            await self.client.close()
        if self.http is not None:
            await self.http.close()


class Replicas:
    """The copies of one server. Every process of a gateway has such an object; a file says which copies there are."""

    def __init__(
        self,
        endpoint: Endpoint,
        addresses: Sequence[ReplicaAddress] = (),
        *,
        timeout: float = 600.0,
        http: Callable[[ReplicaAddress], TritonHttp | None] = lambda _: None,
        shared: SharedState | None = None,
        process: int = 0,
    ) -> None:
        """`endpoint` is the first copy, and says how all are reached: key, certificate and model are the same.

        `http` makes the connection to the HTTP service of a copy.
        """
        self._endpoint, self._timeout, self._http = endpoint, timeout, http
        self._shared, self._process = shared or SharedState(), process
        host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
        first = ReplicaAddress(host=host, grpc_port=endpoint.grpc_port, http_port=endpoint.http_port)
        self._table = _Table(replicas=(first, *addresses))
        self._written: tuple[int, int] | None = None
        self._all: dict[int, Replica] = {}
        self.balancer = Balancer(1, memory=self._shared.memory, process=process)
        self._apply()

    @property
    def _file(self) -> Path:
        return self._shared.folder / "replicas.json"

    @property
    def several(self) -> bool:
        """Whether there is a choice."""
        return len(self._all) > 1

    @property
    def in_order(self) -> list[Replica]:
        """The copies, for questions about the models: those that answer come first."""
        return sorted(self._all.values(), key=lambda each: each.lost.is_set())

    @property
    def first(self) -> Replica:
        """A copy that answers, if there is one."""
        return self.in_order[0]

    def problem(self) -> str | None:
        """Return why no request can be answered, or None."""
        if any(state == "ready" for state in map(self.state, self._all.values())):
            return None
        return "no replica is ready: " + ", ".join(
            f"{each.address.name} is {self.state(each)}" for each in list(self._all.values())[:8]
        )

    def state(self, replica: Replica) -> ReplicaState:
        """Return how a copy is."""
        if replica.address.drained:
            return "drained"
        return "down" if replica.lost.is_set() or self.balancer.is_down(replica.number) else "ready"

    async def send(
        self,
        attempt: Callable[[Replica], Awaitable[T]],
        ids: Ids = (),
        *,
        begun: Callable[[], bool] = lambda: False,
        needs_http: bool = False,
    ) -> T:
        """Run a request on the copy that fits best; on another one if that fails before the answer has begun.

        A copy that stops answering meanwhile counts as one that fails. At most three are tried. Raises what the last
        attempt raised, and ServerUnreachableError if no copy can take the request.
        """
        tried: list[int] = []
        unfit = [each.number for each in self._all.values() if needs_http and each.http is None]
        while True:
            share = self.balancer.choose(ids, without=[*tried, *unfit])
            replica = self._all[share.replica]
            self._count(replica, 1)
            try:
                return await (attempt(replica) if len(self._all) == 1 else _unless_lost(attempt, replica, begun))
            except (ServerUnreachableError, UnavailableError, UnansweredError) as error:
                self.balancer.failed(share.replica)
                tried.append(share.replica)
                others_left = len({*tried, *unfit, *self.balancer.closed}) < self.balancer.count
                if begun() or len(tried) == _MOST_TRIES or not others_left:
                    raise error.error if isinstance(error, UnansweredError) else error from None
            finally:
                self._count(replica, -1)
                self.balancer.end(share)

    def _count(self, replica: Replica, more: int) -> None:
        self._shared.running[self._process, replica.number] += more

    def listed(self) -> list[dict[str, Any]]:
        """Return the copies for JSON: `address`, `http_port`, `state`, `running` requests and `tokens` to work on."""
        loads = self.balancer.loads
        return [
            {
                "address": each.address.name,
                "http_port": each.address.http_port,
                "state": self.state(each),
                "running": int(self._shared.running[:, number].sum()),
                "tokens": round(max(0.0, loads[number])),
            }
            for number, each in sorted(self._all.items())
        ]

    def page(self) -> bytes:
        """Return metrics of the copies in Prometheus' text format, or nothing for a single one."""
        if not self.several:
            return b""
        found = self.listed()
        lines = []
        for name, key in (("running_requests", "running"), ("outstanding_tokens", "tokens")):
            lines += [f"# TYPE trtserve_replica_{name} gauge"]
            lines += [f'trtserve_replica_{name}{{replica="{each["address"]}"}} {each[key]}' for each in found]
        lines += ["# TYPE trtserve_replica_ready gauge"]
        lines += [
            f'trtserve_replica_ready{{replica="{each["address"]}"}} {int(each["state"] == "ready")}' for each in found
        ]
        return ("\n".join(lines) + "\n").encode()

    def change(self, action: Literal["add", "remove", "drain", "resume"], text: str) -> None:
        """Change the copies, for all processes. Raises UsageError for an address that is not there, or is already."""
        asked = ReplicaAddress.parse(text, "the replica")
        with locked(self._file.with_suffix(".change")):
            written = self._file.exists()
            table = list((read_as(self._file, _Table, _WHAT) if written else self._table).replicas)
            present = [number for number, each in enumerate(table) if each.name == asked.name and not each.removed]
            if action == "add":
                if present:
                    raise UsageError(f"{asked.name} is a replica already.")
                free = next((number for number, each in enumerate(table) if each.removed), None)
                if free is None and len(table) >= MOST_REPLICAS:
                    raise UsageError(f"A gateway has at most {MOST_REPLICAS} replicas.")
                if free is None:
                    table.append(asked)
                else:
                    table[free] = asked
            elif not present:
                names = ", ".join(each.name for each in table if not each.removed)
                raise UsageError(f"{asked.name} is not a replica of this gateway; it has {names}.")
            elif action == "remove":
                if sum(not each.removed for each in table) == 1:
                    raise UsageError(f"{asked.name} is the only replica; it stays.")
                table[present[0]] = replace(table[present[0]], removed=True)
            else:
                table[present[0]] = replace(table[present[0]], drained=action == "drain")
            write_json(self._file, {"replicas": [vars(each) for each in table]}, private=True)

    async def watch(self, needed: Collection[str]) -> None:
        """Look again and again for changes, and, in the first process, whether the copies answer, until cancelled.

        `needed` are the models that a copy must have ready, as soon as they are known; until then, any.
        """
        probing: dict[int, asyncio.Task[None]] = {}
        try:
            while True:
                self.apply()
                if self._process == 0 and self.several:
                    for each in list(self._all.values()):
                        if each.number not in probing or probing[each.number].done():
                            probing[each.number] = asyncio.create_task(self._probe(each, needed))
                for each in self._all.values():
                    self._note(each, down=bool(self._shared.down[each.number]) and self.several)
                await asyncio.sleep(_LOOK)
        finally:
            for task in probing.values():
                task.cancel()

    async def _probe(self, replica: Replica, needed: Collection[str]) -> None:
        began = time.monotonic()
        try:
            ready = await asyncio.wait_for(_says_ready(replica, needed), _PROBE_SECONDS)
        except Exception as error:  # noqa: BLE001 - whatever it is, the copy did not say that it is ready
            if not isinstance(error, (TrtserveError, asyncio.TimeoutError)):
                _LOG.warning("replica %s could not be asked whether it is ready: %r", replica.address.name, error)
            # With many streams it, or this process, may be too busy to answer in time.
            ready = isinstance(error, asyncio.TimeoutError) and replica.heard[0] >= began
        self._shared.down[replica.number] = not ready
        self._note(replica, down=not ready)
        await asyncio.sleep(max(_PROBE_PAUSE, len(self._all) / 200))

    def _note(self, replica: Replica, *, down: bool) -> None:
        if down == replica.lost.is_set():
            return
        _LOG.log(
            logging.ERROR if down else logging.INFO,
            "replica %s is%s ready",
            replica.address.name,
            " not" if down else "",
        )
        if down:
            replica.lost.set()
            self.balancer.forget(replica.number)
        else:
            replica.lost.clear()
            self.balancer.answered(replica.number)
        self._close_some()

    def apply(self) -> None:
        """Read the file if a process has changed it, and do what it says."""
        if "folder" not in self._shared.__dict__:
            return
        with suppress(FileNotFoundError):
            found = self._file.stat()
            written = (found.st_mtime_ns, found.st_ino)  # two changes may come within one tick of the clock
            if written != self._written:
                self._table = read_as(self._file, _Table, _WHAT)
                self._written = written
                self._apply()

    def _apply(self) -> None:
        """Connect to the copies that are new, and leave those that are gone when their requests have ended."""
        self.balancer.count, fresh = len(self._table.replicas), not self._all
        for number, address in enumerate(self._table.replicas):
            known = self._all.get(number)
            if known is not None and (address.removed or known.address.name != address.name):
                del self._all[number]
                self._leave(known)
                known = None
            if address.removed:
                continue
            if known is None:
                endpoint = replace(self._endpoint, host=address.host.strip("[]"), grpc_port=address.grpc_port)
                if not fresh:  # another one may have had this number
                    self.balancer.forget(number)
                    self.balancer.answered(number)
                    self._shared.down[number] = False
                heard = self._shared.heard[number : number + 1]
                self._all[number] = Replica(number, address, endpoint, self._timeout, heard, self._http(address))
            else:
                known.address = address
        self._close_some()

    def _close_some(self) -> None:
        """Tell the balancer who gets no request. Copies that are down get some only while no other one is left."""
        open_ones = [each for each in self._all.values() if not each.address.drained]
        working = [each.number for each in open_ones if not each.lost.is_set()]
        chosen = set(working or [each.number for each in open_ones])
        self.balancer.closed = {number for number in range(self.balancer.count) if number not in chosen}

    def _leave(self, replica: Replica) -> None:
        async def leave() -> None:
            while self._shared.running[self._process, replica.number] > 0:
                await asyncio.sleep(_LOOK)
            await replica.close()

        with suppress(RuntimeError):  # no loop runs yet, so nothing is connected
            self._leaving = asyncio.get_running_loop().create_task(leave())

    async def close(self) -> None:
        """Close all connections."""
        for each in self._all.values():
            await each.close()
        if self._shared.processes == 1:
            self._shared.remove()


async def _says_ready(replica: Replica, needed: Collection[str]) -> bool:
    """Ask over HTTP, where a gateway looks at processes too, and else over gRPC."""
    if replica.http is not None:
        with suppress(RefusedError):  # nobody listens there
            async with replica.http.send("GET", "/v2/health/ready") as response:
                return response.status == HTTPStatus.OK
    names = set(await replica.client.model_names())
    return bool(names) and names.issuperset(needed)


async def _unless_lost(attempt: Callable[[Replica], Awaitable[T]], replica: Replica, begun: Callable[[], bool]) -> T:
    """Return what an attempt returns. One whose copy stops answering is ended."""
    running = asyncio.ensure_future(attempt(replica))
    lost = asyncio.ensure_future(replica.lost.wait())
    try:
        await asyncio.wait({running, lost}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            return running.result()
        raise ServerUnreachableError(
            f"The replica {replica.address.name} stopped answering{' in the middle of an answer' if begun() else ''}."
        )
    finally:
        lost.cancel()
        if not running.done():
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


def addresses_of(texts: Iterable[str]) -> tuple[ReplicaAddress, ...]:
    """Return the addresses in texts. Raises UsageError for one that is none, or is there twice."""
    found = tuple(map(ReplicaAddress.parse, texts))
    names = [each.name for each in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"--replica {twice} is given twice.")
    return found
