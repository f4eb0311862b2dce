"""A small HTTP/1.1 client for load: kept-alive connections, and the time of every piece of an answer.

Sockets are read by asyncio and parsed by httptools (Node's parser). General clients spend several times the CPU of a
request on what a load generator does not need.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from trtserve.bench.protocols.base import (
    CROWDED,
    Chunk,
    Pressure,
    RefusedError,
)
from trtserve.client.call_errors import silent, unreachable

_OK = 200
_EVENT_END = b"\n\n"


class HttpPool:
    """Connections to one host, each with one request at a time."""

    def __init__(
        self, host: str, port: int, *, tls: ssl.SSLContext | None, timeout: float, connect_timeout: float
    ) -> None:
        self._host, self._port, self._tls = host, port, tls
        self._timeout, self._connect_timeout = timeout, connect_timeout
        self._idle: deque[_Connection] = deque()
        self.opened = 0
        self.pressure = Pressure()

    async def open(self, connections: int) -> None:
        """Connect; more connections are made when all of these are busy."""
        made = await asyncio.gather(*(self._connect() for _ in range(connections)), return_exceptions=True)
        for each in made:  # after all have ended, because the event loop may be closed next
            if isinstance(each, BaseException):
                raise each
            self._idle.append(each)

    async def _connect(self) -> _Connection:
        where = f"{self._host}:{self._port}"
        loop = asyncio.get_running_loop()
        self.opened += 1
        try:
            making = loop.create_connection(lambda: _Connection(self.pressure), self._host, self._port, ssl=self._tls)
            _, connection = await asyncio.wait_for(making, self._connect_timeout)
        except asyncio.TimeoutError:
            raise silent(where, self._connect_timeout) from None
        except OSError as error:
            raise unreachable(where, error.strerror or str(error)) from None
        return connection

    async def send(self, message: bytes, received: list[Chunk], *, events: bool, limit: int | None) -> None:
        """Send a whole request; `events`: the answer is a stream of server-sent events."""
        while self._idle and not self._idle[0].usable:
            self._idle.popleft()  # closed by the server
        connection = self._idle.popleft() if self._idle else await self._connect()
        try:
            ended = connection.exchange(message, received, events=events, limit=limit)
            # Less work than asyncio.wait_for, which makes a task.
            expiry = asyncio.get_running_loop().call_later(self._timeout, connection.expire, self._timeout)
            try:
                await ended
            finally:
                expiry.cancel()
        finally:
            if connection.usable:
                self._idle.append(connection)
            else:
                connection.abort()

    async def close(self) -> None:
        """Close the idle connections; busy ones are closed by the requests that end."""
        while self._idle:
            self._idle.popleft().abort()


class _Connection(asyncio.Protocol):
    """One connection; httptools calls the `on_…` methods."""

    def __init__(self, pressure: Pressure) -> None:
        self._pressure = pressure
        self._blocked_ns = 0
        self._transport: Any = None
        self._ended: asyncio.Future[None] | None = None
        self._received: list[Chunk] = []
        self._lost = False
        self.usable = False
        """Whether the connection is free for another request."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        # `pause_writing` is called as soon as the socket takes no more.
        self._transport.set_write_buffer_limits(high=0)
        self.usable = True

    def pause_writing(self) -> None:
        self._blocked_ns = time.monotonic_ns()

    def resume_writing(self) -> None:
        blocked = time.monotonic_ns() - self._blocked_ns
        self._pressure.write_blocked_max_ns = max(self._pressure.write_blocked_max_ns, blocked)

    def connection_lost(self, error: Exception | None) -> None:
        self._lost, self.usable = True, False
        self._end(RefusedError("the connection ended before the answer" if error is None else str(error)))

    def exchange(
        self, message: bytes, received: list[Chunk], *, events: bool, limit: int | None
    ) -> asyncio.Future[None]:
        """Write a request; the future is done when its answer has ended."""
        import httptools

        if self._lost:
            raise RefusedError("the connection ended before the request")
        self.usable = False
        self._transport.write(message)  # first of all: what follows costs the request no time
        self._parser = httptools.HttpResponseParser(self)
        self._received, self._events, self._limit, self._pending = received, events, limit, b""
        self._ended = asyncio.get_running_loop().create_future()
        return self._ended

    def data_received(self, data: bytes) -> None:
        self._now = time.monotonic_ns()
        if self._ended is None or self._ended.done():
            return
        if self._events and len(data) >= CROWDED:
            self._pressure.crowded_reads += 1
        try:
            self._parser.feed_data(data)
        except Exception as error:  # noqa: BLE001 - httptools' errors have no base class of their own
            self._end(RefusedError(f"the answer is not HTTP: {error}"))
            self.abort()

    def on_body(self, body: bytes) -> None:
        if not self._events or self._parser.get_status_code() != _OK:
            self._pending += body
            return
        *events, self._pending = (self._pending + body).replace(b"\r\n", b"\n").split(_EVENT_END)
        for event in events:
            self._received.append((self._now, event))
            if len(self._received) == self._limit:
                self._end(None)
                self.abort()
                return

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status != _OK:
            text = self._pending.decode("utf-8", "replace")
            self._end(RefusedError(f"status {status}: {text[:300]}"))
        else:
            if self._pending.strip():
                self._received.append((self._now, self._pending))
            self._end(None)
        self.usable = not self._lost and self._parser.should_keep_alive()

    def _end(self, error: Exception | None) -> None:
        if self._ended is None or self._ended.done():
            return
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)

    def expire(self, seconds: float) -> None:
        """End a request that took too long."""
        self._end(RefusedError(f"no complete answer within {seconds:g} s"))
        self.abort()

    def abort(self) -> None:
        """Close at once, which cancels a running request."""
        self.usable = False
        if self._transport is not None:
            self._transport.abort()


def post(host: str, path: str, body: bytes, headers: Mapping[str, str] | None = None) -> bytes:
    """Return the bytes of a POST request."""
    lines = [f"POST {path} HTTP/1.1", f"Host: {host}", "Content-Type: application/json", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join([*lines, "", ""]).encode() + body
