"""A small HTTP/1.1 client: kept-alive connections, and the time of every piece of an answer.

Sockets are read by asyncio and parsed by httptools (Node's parser). General clients take longer to import than a whole
request needs, and spend several times its CPU on what a load generator does not need.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

OK = 200
CROWDED = 32768
_EVENT_ENDS = (b"\n\n", b"\n\r\n")
MOST_BYTES = 2 << 30
"""Of an answer that is kept whole, as gRPC's messages have at most."""
_MOST_HEAD, _MOST_EVENT = 1 << 20, 64 << 20


class NotHttpError(ConnectionError):
    """The port answered with something else than HTTP."""


class LargeAnswerError(ConnectionError):
    """The answer has more bytes than any that is meant."""


class ConnectionEndedError(ConnectionError):
    """The connection ended before the answer did; `begun`: in the middle of it."""

    def __init__(self, message: str, *, begun: bool) -> None:
        super().__init__(message)
        self.begun = begun


class ConnectTimeoutError(asyncio.TimeoutError):
    """No connection was made in time: the request was not sent."""


@dataclass(frozen=True, kw_only=True)
class HttpAnswer:
    status: int
    headers: Mapping[bytes, bytes]
    """By their names in small letters."""
    body: bytes
    """What was not handed over as an event."""
    time_ns: int
    """When its last bytes arrived."""


@dataclass(kw_only=True)
class Pressure:
    """What the sockets of a load generator held up; it stays zero where a library hides them (gRPC)."""

    write_blocked_max_ns: int = 0
    """Longest time for which a socket took no more of a request."""
    crowded_reads: int = 0
    """Reads of events that found `CROWDED` bytes or more waiting."""


OnEvent = Callable[[int, bytes], bool]
"""Takes the time of arrival (ns) and an event; returns whether it wants no more, which cancels the request."""


class HttpPool:
    """Connections to one host, each with one request at a time."""

    def __init__(
        self, host: str, port: int, *, tls: ssl.SSLContext | None, timeout: float, connect_timeout: float
    ) -> None:
        self._host, self._port, self._tls = host, port, tls
        self._timeout, self._connect_timeout = timeout, connect_timeout
        self._idle: deque[_HttpConnection] = deque()
        self.opened = 0
        self.pressure = Pressure()

    async def open(self, connections: int) -> None:
        """Connect; more connections are made when all of these are busy. Raises OSError and asyncio.TimeoutError."""
        made = await asyncio.gather(*(self._connect() for _ in range(connections)), return_exceptions=True)
        for each in made:  # after all have ended, because the event loop may be closed next
            if isinstance(each, BaseException):
                raise each
            self._idle.append(each)

    async def _connect(self) -> _HttpConnection:
        loop = asyncio.get_running_loop()
        self.opened += 1
        making = loop.create_connection(lambda: _HttpConnection(self.pressure), self._host, self._port, ssl=self._tls)
        try:
            _, connection = await asyncio.wait_for(making, self._connect_timeout)
        except asyncio.TimeoutError:
            raise ConnectTimeoutError(f"no connection within {self._connect_timeout:g} s") from None
        return connection

    async def send(
        self,
        message: bytes,
        on_event: OnEvent | None = None,
        *,
        timeout: float | None = None,
        most: int = MOST_BYTES,
    ) -> HttpAnswer | None:
        """Send a whole request and return its answer, or None when `on_event` wanted no more of it.

        With `on_event` the answer is a stream of server-sent events, unless its status is an error. Raises OSError,
        LargeAnswerError for more than `most` bytes, and asyncio.TimeoutError after `timeout` seconds, or those of the
        pool.
        """
        while self._idle and not self._idle[0].usable:
            self._idle.popleft()  # closed by the server
        connection = self._idle.popleft() if self._idle else await self._connect()
        try:
            ended = connection.exchange(message, on_event, most)
            # Less work than asyncio.wait_for, which makes a task.
            seconds = self._timeout if timeout is None else timeout
            expiry = asyncio.get_running_loop().call_later(seconds, connection.expire)
            try:
                return await ended
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


class _HttpConnection(asyncio.Protocol):
    """One connection; httptools calls the `on_…` methods."""

    def __init__(self, pressure: Pressure) -> None:
        self._pressure = pressure
        self._blocked_ns = 0
        self._transport: Any = None
        self._ended: asyncio.Future[HttpAnswer | None] | None = None
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
        if self._ended is not None:
            place = "in the middle of" if self._begun else "before"
            self._fail(error or ConnectionEndedError(f"the connection ended {place} the answer", begun=self._begun))

    def exchange(self, message: bytes, on_event: OnEvent | None, most: int) -> asyncio.Future[HttpAnswer | None]:
        """Write a request; the future is done when its answer has ended."""
        import httptools

        if self._lost:
            raise ConnectionEndedError("the connection ended before the request", begun=False)
        self.usable = False
        self._transport.write(message)  # first of all: what follows costs the request no time
        self._parser = httptools.HttpResponseParser(self)
        self._on_event, self._pending, self._body = on_event, bytearray(), bytearray()
        self._headers, self._begun = dict[bytes, bytes](), False
        self._most, self._head = most, 0
        self._ended = asyncio.get_running_loop().create_future()
        return self._ended

    def data_received(self, data: bytes) -> None:
        self._now = time.monotonic_ns()
        if self._ended is None or self._ended.done():
            return
        self._begun = True
        if self._on_event is not None and len(data) >= CROWDED:
            self._pressure.crowded_reads += 1
        try:
            self._parser.feed_data(data)
        except Exception as error:  # noqa: BLE001 - httptools' errors have no base class of their own
            self._fail(NotHttpError(f"the answer is not HTTP: {error}"))
            self.abort()
        if self._head >= 0:
            self._head += len(data)
        if self._head > _MOST_HEAD or len(self._pending) > _MOST_EVENT or len(self._body) > self._most:
            self._fail(LargeAnswerError("the answer has more bytes than any that is expected"))
            self.abort()

    def on_headers_complete(self) -> None:
        self._head = -1

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_body(self, body: bytes) -> None:
        if self._on_event is None or self._parser.get_status_code() != OK:
            self._body += body
            return
        begin = max(0, len(self._pending) - 2)
        self._pending += body
        if all(self._pending.find(end, begin) < 0 for end in _EVENT_ENDS):
            return  # so that a long event is looked through once
        *events, self._pending = self._pending.replace(b"\r\n", b"\n").split(_EVENT_ENDS[0])
        for event in events:
            if self._on_event(self._now, bytes(event)):
                self._end(None)
                self.abort()
                return

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        self._end(
            HttpAnswer(status=status, headers=self._headers, body=bytes(self._body or self._pending), time_ns=self._now)
        )
        self.usable = not self._lost and self._parser.should_keep_alive()

    def _end(self, answer: HttpAnswer | None) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(answer)

    def _fail(self, error: Exception) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(error)

    def expire(self) -> None:
        """End a request that took too long."""
        self._fail(asyncio.TimeoutError())
        self.abort()

    def abort(self) -> None:
        """Close at once, which cancels a running request."""
        self.usable = False
        if self._transport is not None:
            self._transport.abort()


def http_request(
    host: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None, *, method: str = "POST"
) -> bytes:
    """Return the bytes of a request, whose body is JSON unless `headers` say otherwise."""
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}"]
    if body is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join([*lines, "", ""]).encode() + (body or b"")
