"""The server process: uvicorn with bounds on connections and headers, which finishes its requests before it ends."""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
import socket
from asyncio import TimerHandle, Transport
from collections import deque
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from trtserve.door.app import HANG_UP, Door
from trtserve.door.settings import DoorSettings, Limits

_LOG = logging.getLogger(__name__)
_BACKLOG = 2048
_POLL = 0.05
_FILES = 65536


def serve(settings: DoorSettings, listening: socket.socket) -> None:
    """Serve on a bound socket until SIGTERM or SIGINT.

    The first signal refuses new requests and waits until those that run have ended; a second one ends at once.
    """
    _raise_file_limit()
    door = Door(settings)
    config = uvicorn.Config(
        door,
        loop="uvloop",
        http=_BoundedProtocol,
        proxy_headers=False,
        ws="none",
        lifespan="on",
        access_log=False,
        log_config=None,
        server_header=False,
        date_header=False,
        backlog=_BACKLOG,
        timeout_keep_alive=round(settings.limits.idle_seconds),
        timeout_graceful_shutdown=1,
        ssl_certfile=settings.certificate,
        ssl_keyfile=settings.private_key,
    )
    _Server(config, door).run(sockets=[listening])


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, door: Door) -> None:
        super().__init__(config)
        self._door = door
        self._draining: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._door.gate.draining or sig == signal.SIGINT:
            super().handle_exit(sig, frame)
            return
        _LOG.info("refusing new requests; %d are running", self._door.gate.running)
        self._door.gate.draining = True

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times a second: end when the last request has ended."""
        if self._door.gate.draining and not self._door.gate.running:
            self.should_exit = True
        return await super().on_tick(counter)


class _BoundedProtocol(HttpToolsProtocol):
    """One connection, with what uvicorn lacks: limits on headers, on chunks, on their time, and on connections."""

    def __init__(self, config: uvicorn.Config, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        self._limits: Limits = config.app.settings.limits  # type: ignore[union-attr]
        self._timer: TimerHandle | None = None
        self._in_headers = False
        self._header_bytes = 0
        self._chunks = 0
        self._unanswered: deque[RequestResponseCycle] = deque()

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.connections:
            transport.abort()
            return
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
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

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {HANG_UP: self.transport.abort}  # type: ignore[dict-item]
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
