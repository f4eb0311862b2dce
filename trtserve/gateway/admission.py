"""Which requests are let in: who may send them, how many run, and how long they may take."""

from __future__ import annotations

import asyncio
import hmac
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from trtserve.gateway.asgi import RefusedError, looking_again
from trtserve.gateway.settings import RequestLimits
from trtserve.host.machine import give_memory_back

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from trtserve.gateway.triton import TritonHttp

OPEN_PATHS: Final = ("/", "/health", "/health/ready", "/v2/health/live", "/v2/health/ready")
"""Load balancers ask these without a key, and browsers ask for the page; they reveal nothing.

Such requests take no place, and their bodies are not read.
"""
ADMIN_PATHS: Final = ("/replicas", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")
"""How the paths begin that change the server: they need a key of their own."""
_SHOWN = re.compile(rb"\n(?:authorization: *bearer +|x-api-key:)([^\r\n]*)", re.IGNORECASE)
_OPEN = re.compile(rb"[A-Z]+ (?:%s)[? ]" % b"|".join(re.escape(path.encode()) for path in OPEN_PATHS))
_SWEEP = 0.5
_IDLE_AT_THE_END = 5.0
# Bytes of bodies at the same time after which glibc may keep much that is free again.
_MANY_BYTES = 16 << 20


class Access:
    """The rules of one gateway."""

    def __init__(
        self, key: str | None, *, loopback: bool, origins: Sequence[str] = (), admin_key: str | None = None
    ) -> None:
        """`loopback`: only this machine can connect, so another name in Host is a web page that rebinds its own.

        `origins` are the sites whose pages may use the server. With `admin_key` everything is allowed.
        """
        self._origins = frozenset(origins)
        self._key = None if key is None else key.encode()
        self._admin_key = None if admin_key is None else admin_key.encode()
        self._loopback = loopback

    def check(self, path: str, headers: Mapping[str, str]) -> None:
        """Raise RefusedError for a request that is not allowed."""
        host = headers.get("host", "")
        if self._loopback and not _is_local(host):
            raise RefusedError(
                421, f"the Host {host[:200]!r} is not this machine, and the server listens on loopback only"
            )
        origin = headers.get("origin")
        own = origin is None or origin.partition("://")[2].lower() == host.lower()
        if not own and self._origins.isdisjoint((origin, "*")):
            raise RefusedError(403, "pages of other sites may not use this server")
        keys = [key for key in (self._key, self._admin_key) if key is not None]
        if self._key is not None and path not in OPEN_PATHS and not _has_key(headers, keys):
            text = "Send the API key of this server in the header Authorization: Bearer KEY."
            raise RefusedError(401, text, headers={"www-authenticate": "Bearer"})

    def knows(self, head: bytes) -> bool:
        """Return whether the headers of a request that begins show a key, or none is asked for.

        This decides only who waits: `check` decides who may come in.
        """
        if self._key is None or _OPEN.match(head):
            return True
        keys, shown = filter(None, (self._key, self._admin_key)), _SHOWN.search(head)
        return shown is not None and any(hmac.compare_digest(shown[1].strip(), key) for key in keys)

    def require_admin(self, headers: Mapping[str, str]) -> None:
        """Raise RefusedError for a request without the key of those who may change the server."""
        if self._admin_key is None:
            raise RefusedError(403, "this server cannot be changed: it was started without an admin key")
        if not _has_key(headers, [self._admin_key]):
            text = (
                "Send the admin key of this server: Authorization: Bearer KEY. A started server has it in the file "
                "servers/NAME.gateway/1.admin-key of its store (0.admin-key with --instances), `trtserve gateway` in "
                "the file of its --admin-key-file"
            )
            raise RefusedError(401, text, headers={"www-authenticate": "Bearer"})


def _has_key(headers: Mapping[str, str], keys: Sequence[bytes]) -> bool:
    kind, _, token = headers.get("authorization", "").partition(" ")
    given = token.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")
    return any(hmac.compare_digest(given.encode("latin-1"), key) for key in keys)


def _is_local(host: str) -> bool:
    """Return whether a Host header names this machine; HTTP/1.0 clients send none."""
    try:
        name = (urlsplit(f"//{host}").hostname or "") if host else "localhost"
    except ValueError:  # an open bracket
        return False
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False


@dataclass(eq=False)
class Exchange:
    """One request and its answer."""

    task: asyncio.Task[object]
    started: float = field(default_factory=time.monotonic)
    needs: tuple[str, ...] = ()
    """The model that runs and those that it calls."""
    closing_ends: bool = True
    """Whether Triton ends the request when its connection is closed."""
    request_id: str = ""
    """The id that the client or the gateway gave it."""
    triton: TritonHttp | None = None
    """The server that runs it."""
    idle_since: float | None = None
    """Since when a stream over gRPC has been silent, if all its requests have got an answer, or None."""
    sending_since: float | None = None
    """Since when the client has not read the last part that was sent, or None."""
    log: dict[str, Any] = field(default_factory=dict)
    """What the request log says of it."""
    refusal: RefusedError | None = None
    """Why the gateway ended it."""
    reserve: Callable[[int], None] | None = None
    """Reserves memory until the request ends (`Gate.memory`)."""
    hang_up: Callable[[], None] | None = None
    """Closes the connection without waiting for the client."""

    def end(self, refusal: RefusedError) -> None:
        """End the request; its task tells the client why, if it still can."""
        if self.refusal is None and not self.task.done():
            self.refusal = refusal
            self.task.cancel()


class Gate:
    """Lets requests in while there is room and the server is not stopping."""

    def __init__(self, limits: RequestLimits, counts: NDArray[Any] | None = None, process: int = 0) -> None:
        """`counts` are the running requests of all processes of a gateway, of which this is number `process`."""
        self._limits = limits
        self._counts, self._process = counts, process
        self._open: set[Exchange] = set()
        self._running: set[Exchange] = set()
        self._reserved = 0
        self._most_reserved = 0  # since memory was last given back
        self.draining = False
        """Whether new requests are refused because the server stops."""

    @property
    def running(self) -> int:
        """Number of requests that have not ended."""
        return len(self._running)

    @contextmanager
    def watch(self, exchange: Exchange) -> Iterator[None]:
        """Hold a request to the limits on time while it is open, refused ones and health pages too."""
        self._open.add(exchange)
        try:
            yield
        finally:
            self._open.discard(exchange)

    @contextmanager
    def enter(self, exchange: Exchange) -> Iterator[None]:
        """Count a request while it runs. Raises RefusedError when there is no room for it."""
        if self.draining:
            raise RefusedError(503, "the server is stopping", headers={"retry-after": "5"})
        running = len(self._running) if self._counts is None else int(self._counts.sum())
        if running >= self._limits.requests:
            busy = f"{running} requests are running, as many as this server takes"
            raise RefusedError(503, busy, headers={"retry-after": "1"})
        self._running.add(exchange)
        self._count()
        try:
            yield
        finally:
            self._running.discard(exchange)
            self._count()

    def _count(self) -> None:
        if self._counts is not None:
            self._counts[self._process] = len(self._running)

    def has_other(self, exchange: Exchange) -> bool:
        """Return whether another request has the same id, so that stopping one would stop both."""
        return any(other is not exchange and other.request_id == exchange.request_id != "" for other in self._running)

    @contextmanager
    def memory(self) -> Iterator[Callable[[int], None]]:
        """Yield a function that reserves bytes for a request's body until the request ends.

        It raises RefusedError when the bodies of all requests need too much.
        """
        reserved = 0

        def reserve(size: int) -> None:
            nonlocal reserved
            if self._reserved + size > self._limits.buffered_bytes:
                raise RefusedError(503, "too many large requests at the same time", headers={"retry-after": "1"})
            self._reserved += size
            self._most_reserved = max(self._most_reserved, self._reserved)
            reserved += size

        try:
            yield reserve
        finally:
            self._reserved -= reserved

    def end_all(self, refusal: RefusedError, *, needing: str) -> None:
        """End the requests that need a model."""
        for exchange in list(self._running):
            if needing in exchange.needs:
                exchange.end(refusal)

    async def sweep(self) -> None:
        """End requests that take too long, and those whose clients do not read their answers, until cancelled.

        Also give the memory of many large bodies back to the system once their requests have ended.
        """
        longest, stalled = self._limits.request_seconds, self._limits.stalled_seconds
        while True:
            await asyncio.sleep(_SWEEP)
            with looking_again():
                if self._most_reserved > max(_MANY_BYTES, 8 * self._reserved):
                    self._most_reserved = self._reserved
                    await asyncio.to_thread(give_memory_back)
                now = time.monotonic()
                for exchange in list(self._open):
                    if exchange.sending_since is not None and now - exchange.sending_since > stalled:
                        exchange.end(RefusedError(408, f"the answer was not read for {stalled:g} s"))
                        if exchange.hang_up is not None:
                            exchange.hang_up()
                    elif self.draining and now - (exchange.idle_since or now) > _IDLE_AT_THE_END:
                        exchange.end(RefusedError(503, "the server is stopping"))
                    elif now - exchange.started > longest:
                        exchange.end(RefusedError(504, f"the request took longer than {longest:g} s"))


async def stop_until_ended(
    running: asyncio.Task[None],
    stop: Callable[[], Awaitable[None]],
    *,
    within: float,
    pause: float,
    growth: float = 1.0,
) -> None:
    """Stop a request in the engine until the task that reads its answer has ended; after `within` seconds cancel it.

    The engine does not know a request that has not reached it yet, so it is asked again after `pause` seconds, which
    grow by a factor.
    """
    deadline = time.monotonic() + within
    while True:
        await stop()
        await asyncio.wait({running}, timeout=pause)
        if running.done() or time.monotonic() > deadline:
            break
        pause *= growth
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
