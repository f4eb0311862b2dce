"""Triton over HTTP, on a small HTTP/1.1 client: kept-alive connections, and the time of every piece of an answer.

Sockets are read by asyncio and parsed by httptools (Node's parser). General clients take longer to import than a whole
request needs, and spend several times its CPU on what a load generator does not need.

Decoupled models answer at generate and generate_stream, the others at infer, which does not serve decoupled ones;
generate takes flat values only. Errors may arrive with status 200 once a reply has begun. Sources: Triton's
docs/protocol/extension_generate.md and extension_binary_data.md.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

from trtserve.client.endpoint import (
    Endpoint,
    Tls,
    other_protocol,
    refused,
    silent,
    tls_problem,
    understood,
    unknown_model,
    unreachable,
)
from trtserve.client.tensors import ModelDescription, ModelRequest, Reply, Tensor, decoded, generate_shape, text_array
from trtserve.client.transport import TransportClient
from trtserve.errors import RequestError, UsageError
from trtserve.files import parse_json

OK = 200
CROWDED = 32768
_EVENT_ENDS = (b"\n\n", b"\n\r\n")
MOST_BYTES = 2 << 30  # of an answer that is kept whole, as gRPC's messages have at most
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
    headers: Mapping[bytes, bytes]  # by their names in small letters
    body: bytes  # what was not handed over as an event
    time_ns: int  # when its last bytes arrived


@dataclass(kw_only=True)
class Pressure:
    """What the sockets of a load generator held up; it stays zero where a library hides them (gRPC)."""

    write_blocked_max_ns: int = 0  # longest time for which a socket took no more of a request
    crowded_reads: int = 0  # reads of events that found `CROWDED` bytes or more waiting


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
        self, message: bytes, on_event: OnEvent | None = None, *, timeout: float | None = None, most: int = MOST_BYTES
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


_EVENT = "data:"
_MOST_DESCRIBED = 64 << 20
JSON_LENGTH = "Inference-Header-Content-Length"
# Keys in the answer of generate that are neither outputs nor parameters of the response.
_ENVELOPE = ("id", "model_name", "model_version")


def http_client(endpoint: Endpoint, *, timeout: float) -> TransportClient:
    """Return a client that waits; `timeout` is the limit of an answer in seconds."""
    return TransportClient(lambda: HttpTransport(endpoint, timeout=timeout))


class HttpTransport:
    """Connections to the HTTP port, encrypted or not."""

    def __init__(self, endpoint: Endpoint, *, timeout: float) -> None:
        self._endpoint, self._where = endpoint, endpoint.http
        self._timeout, self._first = timeout, min(timeout, endpoint.connect_timeout)
        self._pool = HttpPool(
            endpoint.host,
            endpoint.http_port,
            tls=None if endpoint.tls is None else tls_context(endpoint.tls),
            timeout=timeout,
            connect_timeout=timeout,
        )

    async def describe(self, model: str) -> ModelDescription:
        status, text = await self._first_answer("GET", f"{model_path(model)}/config")
        if status == HTTPStatus.NOT_FOUND or (status >= HTTPStatus.BAD_REQUEST and "unknown model" in text):
            raise unknown_model(model, self._where, await self.model_names())
        with understood():
            return ModelDescription.from_config(_checked(status, text))

    async def model_names(self) -> list[str]:
        status, text = await self._first_answer("POST", "/v2/repository/index", b'{"ready": true}')
        with understood():
            return [str(entry["name"]) for entry in _checked(status, text)]

    async def _first_answer(self, method: str, path: str, body: bytes | None = None) -> tuple[int, str]:
        message = http_request(self._where, path, body, self._endpoint.http_headers, method=method)
        with self._explained(first=True):
            answer = await asyncio.wait_for(self._pool.send(message, most=_MOST_DESCRIBED), self._first)
        assert answer is not None
        return answer.status, _text(answer.body)

    async def infer(self, request: ModelRequest) -> AsyncGenerator[Reply, None]:
        model, headers = request.model, dict[str, str]()
        if not model.decoupled:
            verb, (body, length) = "infer", infer_body(request.tensors, request_id=request.id, outputs=request.outputs)
            headers = {JSON_LENGTH: str(length)}
        elif request.outputs:
            raise UsageError("--requested-outputs needs --protocol grpc: the HTTP generate endpoint sends all outputs.")
        else:
            verb = "generate_stream" if request.stream else "generate"
            body = json.dumps(generate_body(request.tensors, request_id=request.id, model=model)).encode()
        path = f"{model_path(model.name)}/{verb}"
        message = http_request(self._where, path, body, {**self._endpoint.http_headers, **headers})
        arrived: asyncio.Queue[bytes | None] = asyncio.Queue()

        def on_event(_: int, event: bytes) -> bool:
            arrived.put_nowait(event)
            return False

        sending = asyncio.ensure_future(
            self._pool.send(message, on_event if verb == "generate_stream" else None, timeout=request.timeout)
        )
        sending.add_done_callback(lambda _: arrived.put_nowait(None))
        try:
            while (event := await arrived.get()) is not None:
                if event.strip():
                    with understood():
                        reply = _reply(_checked(HTTPStatus.OK, _text(event)), model)
                    yield reply
            with self._explained():
                answer = sending.result()
        finally:
            sending.cancel()
        if answer is None:
            return
        if verb != "infer" and not answer.body.strip():
            return
        with understood():
            reply = (
                _infer_reply(answer) if verb == "infer" else _reply(_checked(answer.status, _text(answer.body)), model)
            )
        yield reply

    @contextmanager
    def _explained(self, *, first: bool = False) -> Iterator[None]:
        try:
            yield
        except asyncio.TimeoutError as error:
            if first:
                raise silent(self._where, self._first) from error
            message = f"No answer from {self._where} within {self._timeout:g} s."
            raise RequestError(message, hint="Raise it with --timeout.") from error
        except OSError as error:
            raise self._lost(error) from error

    def _lost(self, error: OSError) -> Exception:
        """Return the error for a connection that failed, or ended before the answer."""
        if isinstance(error, ConnectionEndedError) and error.begun:
            return unreachable(self._where, str(error))
        # An encrypted port ends the connection, or answers with bytes that are not HTTP.
        if self._endpoint.tls is None and isinstance(error, ConnectionError):
            other = other_protocol(self._where, "HTTP")
            if other is not None:
                return other
        hint, reason = "", getattr(error, "verify_message", "") or str(error) or type(error).__name__
        if isinstance(error, NotHttpError):
            reason = "the port does not speak HTTP"
            hint = "If that is the gRPC port, use --protocol grpc (query) or give the HTTP port."
        elif isinstance(error, ssl.SSLCertVerificationError):
            hint = "Name the roots that signed this server's certificate with --root-certificates."
        elif isinstance(error, ssl.SSLError):
            hint = "Try without --ssl: Triton itself has no encryption over HTTP."
        return unreachable(self._where, reason, hint=hint)

    async def close(self) -> None:
        await self._pool.close()


def generate_body(tensors: Sequence[Tensor], *, request_id: str, model: ModelDescription) -> dict[str, Any]:
    """Return the JSON body for generate and generate_stream: scalars for single values, flat lists for several.

    Raises UsageError for a tensor that the endpoint would give another shape.
    """
    for tensor in tensors:
        declared = model.inputs[tensor.name].dims
        dims = (-1, *declared) if model.max_batch_size > 0 else declared
        if generate_shape(dims, len(tensor.flat())) != tensor.shape:
            raise UsageError(
                f"The input {tensor.name!r} with shape {list(tensor.shape)} cannot be sent over HTTP to {model.name!r}:"
                " its generate endpoint takes flat values only.",
                hint="Use --protocol grpc.",
            )
    values = {tensor.name: tensor.flat() for tensor in tensors}
    body: dict[str, Any] = {name: value[0] if len(value) == 1 else value for name, value in values.items()}
    return {**body, "id": request_id}


def infer_body(tensors: Sequence[Tensor], *, request_id: str, outputs: Sequence[str] = ()) -> tuple[bytes, int]:
    """Return the body of an infer request with binary tensors, and the length of its JSON part."""
    contents = [tensor.raw() for tensor in tensors]
    inputs = [
        {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": list(tensor.shape),
            "parameters": {"binary_data_size": len(content)},
        }
        for tensor, content in zip(tensors, contents, strict=True)
    ]
    head: dict[str, Any] = {"id": request_id, "inputs": inputs, "parameters": {"binary_data_output": True}}
    if outputs:
        head["outputs"] = [{"name": name, "parameters": {"binary_data": True}} for name in outputs]
    encoded = json.dumps(head).encode()
    return b"".join([encoded, *contents]), len(encoded)


def model_path(model: str) -> str:
    """Return the path of a model; its name may be any text that a user types."""
    return f"/v2/models/{quote(model, safe='')}"


def _text(content: bytes) -> str:
    """Decode a body; invalid UTF-8 shows as replacement characters."""
    return content.decode("utf-8", errors="replace")


def tls_context(tls: Tls) -> ssl.SSLContext:
    """Return what an encrypted connection trusts and shows. Raises UsageError for files that cannot be used."""
    try:
        context = ssl.create_default_context(cafile=tls.root_certificates)
        if tls.server_name is not None:  # the roots are the server's own certificate, whatever the host is called
            context.check_hostname = False
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        if tls.certificate_chain is not None:
            context.load_cert_chain(tls.certificate_chain, tls.private_key)
    except OSError as error:  # also for files without a certificate
        files = (tls.root_certificates, tls.private_key, tls.certificate_chain)
        named = ", ".join(str(path) for path in files if path is not None)
        raise UsageError(f"The certificates ({named}) cannot be used: {tls_problem(error)}.") from None
    return context


def _checked(status: int, text: str) -> Any:
    """Return the parsed body. Raises RequestError when it reports an error, whatever the status."""
    try:
        content = parse_json(text.strip().removeprefix(_EVENT))
    except ValueError:
        raise RequestError(
            f"The server answered with status {status} and a body that is not JSON: {text[:200]!r}."
        ) from None
    if isinstance(content, Mapping) and "error" in content:
        raise refused(str(content["error"]))
    if status >= HTTPStatus.BAD_REQUEST:
        raise RequestError(f"The server answered with status {status}: {text[:200]}.")
    return content


def _reply(content: Mapping[str, Any], model: ModelDescription) -> Reply:
    """Return the outputs of a generate answer as flat arrays, and its other values as parameters."""
    import numpy as np

    outputs = {}
    for name in content.keys() & model.outputs.keys():
        values = content[name] if isinstance(content[name], list) else [content[name]]
        # Without a type, because generate writes NaN as text.
        if model.outputs[name].datatype == "BYTES":  # JSON can have half a character, as gRPC cannot
            outputs[name] = text_array([str(value).encode(errors="replace").decode() for value in values])
        else:
            outputs[name] = np.asarray(values)
    parameters = {name: content[name] for name in content.keys() - model.outputs.keys() - set(_ENVELOPE)}
    return Reply(outputs=outputs, parameters=parameters)


def _infer_reply(answer: HttpAnswer) -> Reply:
    """Return the outputs of an infer answer, whose binary tensors follow its JSON part in order."""
    length = int(answer.headers.get(JSON_LENGTH.lower().encode(), len(answer.body)))
    head = _checked(answer.status, _text(answer.body[:length]))
    outputs, start = {}, length
    for output in head.get("outputs", ()):
        end = start + int(output["parameters"]["binary_data_size"])
        outputs[output["name"]] = decoded(output["datatype"], output["shape"], answer.body[start:end])
        start = end
    return Reply(outputs=outputs, parameters=head.get("parameters", {}))
