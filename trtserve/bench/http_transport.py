"""HTTP for load: Triton's generate endpoints and OpenAI's API, and the small HTTP/1.1 client below them.

Connections are kept alive, and every piece of an answer has its time. Sockets are read by asyncio and parsed by
httptools (Node's parser). General clients spend several times the CPU of a request on what a load generator does not
need.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import time
from collections import deque
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlsplit

from trtserve.bench.messages import read_values, request_tensors
from trtserve.bench.records import DecodedResponse, TrafficRequest
from trtserve.bench.transport import CROWDED, Chunk, LoadTarget, Pressure, SendError
from trtserve.client.call_errors import plain, silent, unreachable
from trtserve.client.http_client import generate_body, tls_context
from trtserve.errors import UsageError
from trtserve.files import parse_json

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
        self._end(SendError("the connection ended before the answer" if error is None else str(error)))

    def exchange(
        self, message: bytes, received: list[Chunk], *, events: bool, limit: int | None
    ) -> asyncio.Future[None]:
        """Write a request; the future is done when its answer has ended."""
        import httptools

        if self._lost:
            raise SendError("the connection ended before the request")
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
            self._end(SendError(f"the answer is not HTTP: {error}"))
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
            self._end(SendError(f"status {status}: {text[:300]}"))
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
        self._end(SendError(f"no complete answer within {seconds:g} s"))
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


EVENT = b"data:"


class GenerateTransport:
    """Connections to the HTTP port of a Triton server."""

    def __init__(self, target: LoadTarget, *, timeout: float) -> None:
        endpoint = target.endpoint
        self._target = target
        verb = "generate_stream" if target.streams else "generate"
        self._path = f"/v2/models/{quote(target.model.name, safe='')}/{verb}"
        self._pool = HttpPool(
            endpoint.host,
            endpoint.http_port,
            tls=None if endpoint.tls is None else tls_context(endpoint.tls),
            timeout=timeout,
            connect_timeout=endpoint.connect_timeout,
        )

    @property
    def opened(self) -> int:
        return self._pool.opened

    @property
    def pressure(self) -> Pressure:
        return self._pool.pressure

    async def open(self, connections: int) -> None:
        await self._pool.open(connections)

    def encode(self, request: TrafficRequest, request_id: str) -> bytes:
        tensors = request_tensors(self._target.model, request, stream=self._target.streams)
        body = generate_body(tensors, request_id=request_id, model=self._target.model)
        endpoint = self._target.endpoint
        return post(endpoint.http, self._path, json.dumps(body).encode(), endpoint.http_headers)

    async def send(self, message: bytes, received: list[Chunk], *, limit: int | None = None) -> None:
        await self._pool.send(message, received, events=self._target.streams, limit=limit)

    def read(self, chunk: Chunk) -> DecodedResponse:
        time_ns, content = chunk
        values = parse_event(content)
        if "error" in values:
            return DecodedResponse(time_ns=time_ns, error=plain(str(values["error"])))
        return read_values(self._target.model, values, time_ns)

    async def close(self) -> None:
        await self._pool.close()


def parse_event(content: bytes) -> Mapping[str, Any]:
    """Return the JSON object of an event or a body; what is not JSON becomes an `error`."""
    try:
        values = parse_json(content.strip().removeprefix(EVENT))
    except ValueError:
        return {"error": f"the answer is not JSON: {content[:200]!r}"}
    return values if isinstance(values, Mapping) else {"error": f"the answer is not a JSON object: {content[:200]!r}"}


_DONE = b"[DONE]"
_KEY = "OPENAI_API_KEY"


class OpenAiTransport:
    """Connections to a server with OpenAI's API; the key comes from the variable OPENAI_API_KEY."""

    def __init__(self, target: LoadTarget, *, timeout: float) -> None:
        if target.openai is None:
            raise UsageError("--openai is missing.")
        self._target, self._server = target, target.openai
        address = urlsplit(self._server.url)
        secure = address.scheme == "https"
        self._host = address.netloc
        path = "/chat/completions" if self._server.chat else "/completions"
        self._path = address.path.rstrip("/") + path
        self._headers = {"Authorization": f"Bearer {os.environ[_KEY]}"} if _KEY in os.environ else {}
        self._pool = HttpPool(
            address.hostname or "",
            address.port or (443 if secure else 80),
            tls=ssl.create_default_context() if secure else None,
            timeout=timeout,
            connect_timeout=target.endpoint.connect_timeout,
        )

    @property
    def opened(self) -> int:
        return self._pool.opened

    @property
    def pressure(self) -> Pressure:
        return self._pool.pressure

    async def open(self, connections: int) -> None:
        await self._pool.open(connections)

    def encode(self, request: TrafficRequest, request_id: str) -> bytes:
        server, streams = self._server, self._target.streams
        prompt: dict[str, Any] = {"prompt": request.token_ids.tolist() if request.text is None else request.text}
        if server.chat:
            prompt = {"messages": [{"role": "user", "content": request.text}]}
        body = {"model": server.model, **prompt, "max_tokens": request.output_len, "stream": streams, "temperature": 0}
        if streams:
            body["stream_options"] = {"include_usage": True}
        if server.ignore_eos:
            body |= {"ignore_eos": True, "min_tokens": request.output_len}
        return post(self._host, self._path, json.dumps(body).encode(), self._headers)

    async def send(self, message: bytes, received: list[Chunk], *, limit: int | None = None) -> None:
        await self._pool.send(message, received, events=self._target.streams, limit=limit)

    def read(self, chunk: Chunk) -> DecodedResponse:
        """Decode a chunk; its usage, which counts the whole answer, comes with the last one."""
        time_ns, content = chunk
        content = content.strip()
        # Comments (": ping") keep connections alive.
        if content.endswith(_DONE) or content.startswith(b":"):
            return DecodedResponse(time_ns=time_ns, text="")
        values = parse_event(content)
        if "error" in values:
            error = values["error"]
            return DecodedResponse(
                time_ns=time_ns, error=str(error.get("message", error) if isinstance(error, dict) else error)
            )
        choice: dict[str, Any] = next(iter(values.get("choices") or ()), {})
        message = choice.get("delta") or choice.get("message") or {}
        usage = values.get("usage") or {}
        return DecodedResponse(
            time_ns=time_ns,
            text=choice.get("text") or message.get("content") or message.get("reasoning_content") or "",
            tokens=usage.get("completion_tokens"),
            prompt_tokens=usage.get("prompt_tokens"),
            finish_reason=choice.get("finish_reason"),
        )

    async def close(self) -> None:
        await self._pool.close()
