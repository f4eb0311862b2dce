"""The server process: uvicorn with bounds on connections and headers, which finishes its requests before it ends."""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import signal
import socket
import ssl
import time
from asyncio import TimerHandle, Transport
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from types import FrameType
from typing import Any, ClassVar

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from trtserve.gateway.app import HANG_UP, LET_IN, Entrance, Gateway
from trtserve.gateway.lobby import GivesWay, Lobby
from trtserve.gateway.replicas import SharedState
from trtserve.gateway.settings import GatewaySettings

_LOG = logging.getLogger(__name__)
_BACKLOG = 2048
_POLL = 0.05
_FILES = 65536
_SILENT_SECONDS = 1
_PAUSE = 1.0
_MINUTE = 60.0
_COLLECTED = (50_000, 20, 100)
"""Thresholds of the garbage collector: with Python's own a large body is looked through again and again."""


def serve(
    settings: GatewaySettings, listening: socket.socket, shared: SharedState | None = None, process: int = 0
) -> None:
    """Serve on a bound socket until SIGTERM or SIGINT.

    The first signal refuses new requests and waits until those that run have ended; a second one ends at once.
    """
    serve_application(Gateway(settings, shared, process), listening)


def serve_application(gateway: Entrance, listening: socket.socket) -> None:
    """Serve any application that lets requests in, as `serve` does."""
    settings = gateway.settings
    _raise_file_limit()
    gc.set_threshold(*_COLLECTED)
    gc.collect()
    gc.freeze()  # what is there now stays, and need not be looked at again
    config = uvicorn.Config(
        gateway,
        loop="uvloop",
        http=_BoundedProtocol,
        proxy_headers=False,
        ws="none",
        lifespan="on",
        access_log=False,
        log_config=None,
        server_header=False,
        date_header=False,
        timeout_keep_alive=round(settings.limits.idle_seconds),
        timeout_graceful_shutdown=1,
        ssl_certfile=settings.certificate,
        ssl_keyfile=settings.private_key,
    )
    logging.getLogger("uvicorn.error").addFilter(_Seldom())
    _Server(config, gateway).run(sockets=[listening])


class _Seldom(logging.Filter):
    """Lets a warning through once a minute: clients cause them, with requests that are no HTTP for instance."""

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno != logging.WARNING:
            return True
        now = time.monotonic()
        if now - self._last.get(record.msg, now - _MINUTE) < _MINUTE:
            return False
        self._last[record.msg] = now
        return True


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, gateway: Entrance) -> None:
        super().__init__(config)
        self._gateway = gateway
        self._draining: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._gateway.gate.draining or sig == signal.SIGINT:
            super().handle_exit(sig, frame)
            return
        _LOG.info("refusing new requests; %d are running", self._gateway.gate.running)
        self._gateway.gate.draining = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        state = {"config": self.config, "server_state": self.server_state, "app_state": self.lifespan.state}
        self.servers = [
            _Acceptor(
                each,
                lambda: _BoundedProtocol(**state),  # type: ignore[misc]
                self.config.ssl,
                self._gateway,
                self.server_state.connections,
            )
            for each in sockets or []
        ]

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times a second: end when the last request has ended."""
        if self._gateway.gate.draining and not self._gateway.gate.running:
            self.should_exit = True
        return await super().on_tick(counter)


class _Acceptor:
    """Takes connections from a socket, and makes a protocol for each that has sent the headers of a request.

    uvloop's own server takes all that there are before it does anything else, which a flood of connections makes long.
    """

    def __init__(
        self,
        listening: socket.socket,
        protocol: Callable[[], _BoundedProtocol],
        context: ssl.SSLContext | None,
        gateway: Entrance,
        made: Collection[object],
    ) -> None:
        """`made` are the connections that have a protocol."""
        self._listening, self._protocol, self._context = listening, protocol, context
        self._limits = gateway.settings.limits
        self._loop = asyncio.get_running_loop()
        self._pause: TimerHandle | None = None
        self._beginning: set[_Beginning] = set()
        self._lobby = Lobby(
            self._limits,
            _BoundedProtocol.giving_way,
            lambda: len(made) + len(self._beginning),
            gateway.access.knows,
            self._begin,
            encrypted=context is not None,
        )
        # The kernel keeps a connection to itself until the client sends something or leaves.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, _SILENT_SECONDS)
        listening.listen(_BACKLOG)
        listening.setblocking(False)
        self._resume()

    def close(self) -> None:
        """Take no more connections."""
        self._loop.remove_reader(self._listening)
        self._lobby.close()
        if self._pause is not None:
            self._pause.cancel()

    async def wait_closed(self) -> None:
        """Return at once: uvicorn waits for the connections itself."""

    def _resume(self) -> None:
        self._loop.add_reader(self._listening, self._accept)

    def _accept(self) -> None:
        try:
            self._lobby.accept(self._listening)
        except OSError as error:  # no file descriptor is left
            _LOG.warning("connections wait for %g s: %s", _PAUSE, error)
            self._loop.remove_reader(self._listening)
            self._pause = self._loop.call_later(_PAUSE, self._resume)

    def _begin(self, client: socket.socket, content: bytes) -> None:
        def protocol() -> _BoundedProtocol:
            made = self._protocol()
            made.begins_with = content
            return made

        async def make() -> None:
            # The client may leave, or not speak TLS.
            with suppress(OSError):
                seconds = None if self._context is None else self._limits.header_seconds
                await self._loop.connect_accepted_socket(
                    protocol, client, ssl=self._context, ssl_handshake_timeout=seconds
                )

        beginning = _Beginning(self._loop.create_task(make()), self._beginning)
        _BoundedProtocol.giving_way[beginning] = None


class _Beginning:
    """A connection whose protocol is being made: with TLS, while the two agree on keys."""

    def __init__(self, task: asyncio.Task[None], others: set[_Beginning]) -> None:
        self._task, self._others = task, others
        others.add(self)
        task.add_done_callback(lambda _: self._forget())

    def give_way(self) -> None:
        self._forget()
        self._task.cancel()

    def _forget(self) -> None:
        self._others.discard(self)
        _BoundedProtocol.giving_way.pop(self, None)


class _BoundedProtocol(HttpToolsProtocol):
    """One connection, with what uvicorn lacks: limits on headers, on chunks, on their time, and on connections."""

    giving_way: ClassVar[dict[GivesWay, None]] = {}
    """Connections that are closed when there are too many, the oldest first.

    They wait for a request, or their clients have not shown the key.
    """

    def __init__(self, config: uvicorn.Config, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        settings: GatewaySettings = config.app.settings  # type: ignore[union-attr]
        self._limits, self._has_key = settings.limits, settings.key_file is not None
        self._timer: TimerHandle | None = None
        self._in_headers = False
        self._header_bytes = 0
        self._chunks = 0
        self._unanswered: deque[RequestResponseCycle] = deque()
        self._let_in = False
        self.begins_with = b""
        """What the client sent before there was a protocol."""

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.giving_way[self] = None
        self._start_timer()
        sent, self.begins_with = self.begins_with, b""
        if sent:
            self.data_received(sent)

    def give_way(self) -> None:
        """Close the connection, and leave its room at once to another one."""
        self.connections.discard(self)
        self.giving_way.pop(self, None)
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self.giving_way.pop(self, None)
        # uvicorn tells only the last of several requests that were sent without waiting for answers.
        for cycle in self._unanswered:
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        current: RequestResponseCycle | None = self.cycle
        if current is None or current.response_complete:
            self._start_timer()
        self._header_bytes += len(data)
        super().data_received(data)
        limit = self._limits.header_bytes
        if self._in_headers and self._header_bytes > limit and not self.transport.is_closing():
            self.send_400_response(f"The headers have more than {limit} bytes.")

    def _unsupported_upgrade_warning(self) -> None:
        """Answer a WebSocket's handshake like any request, and write nothing: clients could fill the log."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {HANG_UP: self.transport.abort, LET_IN: self._keep}  # type: ignore[dict-item]
        self._in_headers, self._header_bytes, self._chunks = True, 0, 0
        self._start_timer()

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._stop_timer()
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > self._limits.header_bytes:
            raise ValueError("headers too large")  # uvicorn answers 400 and hangs up
        super().on_headers_complete()
        while self._unanswered and self._unanswered[0].response_complete:
            self._unanswered.popleft()
        self._unanswered.append(self.cycle)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not (self._let_in and self._has_key) and not self.transport.is_closing():
            self.giving_way[self] = None

    def _keep(self) -> None:
        self._let_in = True
        self.giving_way.pop(self, None)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_headers:
            raise ValueError("trailers after the body")  # uvicorn answers 400 and hangs up
        super().on_header(name, value)

    def on_chunk_header(self) -> None:
        self._chunks += 1
        if self._chunks > self._limits.chunks:
            raise ValueError(f"more than {self._limits.chunks} chunks")  # uvicorn answers 400 and hangs up

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self._limits.header_seconds, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _raise_file_limit() -> None:
    """Allow as many open files as there may be connections: many systems start with 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
