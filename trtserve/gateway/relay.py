"""Triton's protocol below /v2: a checked request goes to Triton, its answer to the client, until either side ends."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from typing import Final

from aiohttp import ClientResponse

from trtserve.client.endpoint import refused
from trtserve.client.http_transport import JSON_LENGTH
from trtserve.errors import ServerUnreachableError
from trtserve.files import parse_json
from trtserve.gateway import guard
from trtserve.gateway.admission import Exchange, Gate, stop_until_ended
from trtserve.gateway.asgi import (
    Message,
    Receive,
    RefusedError,
    Scope,
    Send,
    aside,
    headers_of,
    receive_body,
    send_answer,
)
from trtserve.gateway.openai.answering import Measures, Stopwatch
from trtserve.gateway.openai.errors import api_error
from trtserve.gateway.replicas import Replica, Replicas, UnansweredError
from trtserve.gateway.settings import GatewaySettings
from trtserve.gateway.triton import SilentError, TritonHealth, TritonHttp, TritonPath, find_target, read_answer

_LOG = logging.getLogger(__name__)
# https://www.w3.org/TR/trace-context/#traceparent-header
_TRACE = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_JSON_TYPES = ("", "application/json", "text/plain", "application/x-www-form-urlencoded")
"""Types of JSON bodies. curl -d declares a form; large forms crash Triton 2.51, so it gets another type."""
_BINARY_TYPES = (*_JSON_TYPES, "application/octet-stream")
NOT_PASSED_ON: Final = (b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"date", b"server")
"""Headers that are hop by hop, or set by the server itself."""
_OWN_ID = "gateway-"
_STREAM = "text/event-stream"
_EVENTS = re.compile(rb"^data:(?! *{\"error\")", re.MULTILINE)
_ERROR, _FAILED, _UNAVAILABLE = 400, 500, 503
_MAX_DIGITS = 19
_LONGEST_REASON = 500
_LARGEST_JSON, _LARGEST_ERROR = 512 << 20, 8 << 20  # bytes of an answer that is kept before it is passed on
_STOP_SECONDS = 10.0
_STOP_AGAIN = 0.5


class Relay:
    """The application below /v2."""

    def __init__(
        self, settings: GatewaySettings, replicas: Replicas, gate: Gate, health: TritonHealth, measures: Measures
    ) -> None:
        self._settings = settings
        self._limits = settings.limits
        self._replicas = replicas
        self._gate = gate
        self._health = health
        self._measures = measures
        self._stops: set[asyncio.Task[None]] = set()

    @property
    def _triton(self) -> TritonHttp:
        """A Triton that describes its models."""
        for each in self._replicas.in_order:
            if each.http is not None:
                return each.http
        raise RefusedError(503, "no replica has an HTTP port: name one as HOST:PORT:HTTP_PORT")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        target = find_target(scope["method"], scope["raw_path"].decode("ascii"), open_groups=self._settings.open_apis)
        if target.operation in ("live", "ready"):
            reason = await self._health.problem(target)
            await send_answer(send, 503 if reason else 200, {"error": reason} if reason else None)
            return
        if target.operation == "control" and self._replicas.several:
            raise RefusedError(409, "this server has several replicas, and each has settings of its own: ask them")
        with self._gate.memory() as reserve:
            try:
                await self._pass_on(target, scope, receive, send, reserve)
            except ServerUnreachableError as error:
                raise RefusedError(_UNAVAILABLE, error.message, headers={"retry-after": "1"}) from error
        if target.operation == "control":
            self._triton.forget_models()

    async def _pass_on(
        self, target: TritonPath, scope: Scope, receive: Receive, send: Send, reserve: Callable[[int], None]
    ) -> None:
        """Send a request to Triton when its body has been checked, and the answer to the client."""
        exchange: Exchange = scope["state"]["exchange"]
        headers = headers_of(scope)
        streams = target.operation == "generate_stream"
        body = await receive_body(headers, receive, self._limits, reserve)
        checked, own_id = await self._checked(target, headers, body, exchange)
        del body
        labels = target.model or "", checked.adapter
        stopwatch = self._measures.stopwatch("generate", labels) if streams else None
        passed_on = {"Content-Type": "application/json"}
        if checked.json_length is not None:
            passed_on = {"Content-Type": "application/octet-stream", JSON_LENGTH: str(checked.json_length)}
        # A compressed answer could not be freed of an id that the client did not give.
        if "accept-encoding" in headers and not own_id:
            passed_on["Accept-Encoding"] = headers["accept-encoding"]
        if _TRACE.fullmatch(headers.get("traceparent", "")):
            passed_on["traceparent"] = headers["traceparent"]
        watch = asyncio.create_task(end_with_client(receive, exchange.task))
        listening, begun = True, False

        async def to_client(replica: Replica, message: Message) -> None:
            nonlocal begun
            begun = True
            replica.hear()
            if listening:
                await send(message)

        async def relay(replica: Replica) -> None:
            assert replica.http is not None
            exchange.triton = replica.http
            try:
                async with replica.http.send(scope["method"], target.path, checked.content, passed_on) as response:
                    if response.status == _UNAVAILABLE and self._replicas.several:
                        raise UnansweredError(RefusedError(_UNAVAILABLE, await _reason(response)))
                    await _answer(response, own_id, partial(to_client, replica), stopwatch)
            except SilentError as error:
                raise UnansweredError(error) from error

        relaying = asyncio.create_task(self._replicas.send(relay, begun=lambda: begun, needs_http=True))
        try:
            await asyncio.shield(relaying)
        except asyncio.CancelledError:
            listening = False
            self._end(exchange, relaying)
            raise
        finally:
            watch.cancel()

    async def _checked(
        self, target: TritonPath, headers: Mapping[str, str], body: bytes, exchange: Exchange
    ) -> tuple[guard.CheckedBody, str]:
        """Return the body for Triton, and the id that it got here because it needs one to be stopped, or no text."""
        if not target.runs_model or target.model is None:
            return await aside(partial(guard.check_control, body, self._limits), body), ""
        _require_type(headers, _BINARY_TYPES if target.operation == "infer" else _JSON_TYPES)
        model = await self._triton.model(target.model)
        exchange.needs, exchange.closing_ends = model.needs, model.closing_ends
        self._health.require(model.needs)
        if target.operation == "infer":
            open_memory = "shared-memory" in self._settings.open_apis
            length = _json_length(headers)
            check = partial(guard.check_infer, body, length, self._limits, shared_memory=open_memory)
        else:
            check = partial(guard.check_generate, body, self._limits, model.datatypes)
        checked = await aside(check, body)
        own_id = ""
        if not checked.request_id and checked.json_length != 0:
            own_id = _OWN_ID + secrets.token_hex(8)
            checked = checked.with_id(own_id)
        exchange.request_id = checked.request_id
        return checked, own_id

    def _end(self, exchange: Exchange, relaying: asyncio.Task[None]) -> None:
        """End an abandoned request: close the connection where that helps, and stop the request in the engine."""
        stoppable = bool(exchange.request_id and self._settings.core_models)
        if exchange.closing_ends or not stoppable:
            relaying.cancel()
        if stoppable:
            task = asyncio.create_task(self._stop(exchange, relaying))
            self._stops.add(task)
            task.add_done_callback(self._stops.discard)

    async def _stop(self, exchange: Exchange, relaying: asyncio.Task[None]) -> None:
        """Stop a request and read its answer to the end, if the connection is still open.

        Triton 2.51 keeps an ensemble's request for ever if its connection is closed too early. While another client
        waits for the same id, nothing is sent.
        """

        triton = exchange.triton or self._triton

        async def stop() -> None:
            if self._gate.has_other(exchange):
                return
            stops = (triton.stop(exchange.request_id, core) for core in self._settings.core_models)
            for result in await asyncio.gather(*stops, return_exceptions=True):
                if isinstance(result, BaseException):
                    _LOG.warning("request %s could not be stopped: %s", exchange.request_id, result)

        await stop_until_ended(relaying, stop, within=_STOP_SECONDS, pause=_STOP_AGAIN)


async def _answer(response: ClientResponse, own_id: str, send: Send, stopwatch: Stopwatch | None) -> None:
    """Pass Triton's answer on as it arrives, without the id that the client did not give; time its events."""
    added = f'"id":"{own_id}",'.encode()
    headers = [(name, value) for name, value in response.raw_headers if name.lower() not in NOT_PASSED_ON]
    length, status = response.content_length, response.status
    first = b""
    if own_id and response.content_type != _STREAM:
        given = response.headers.get(JSON_LENGTH)
        whole = await _json_part(response, given)
        first = whole.replace(added, b"", 1)
        headers = [pair for pair in headers if pair[0].lower() != JSON_LENGTH.lower().encode()]
        if given is not None:
            headers.append((JSON_LENGTH.encode(), str(len(first)).encode()))
        length = None if length is None else length - len(whole) + len(first)
    elif status >= _ERROR:
        whole = await read_answer(response, _LARGEST_ERROR)
        first = whole.replace(added, b"") if own_id else whole
        length = None if length is None else length - len(whole) + len(first)
    if status >= _ERROR:
        status = _status(first, status)
        headers += [(b"retry-after", b"1")] if status == _UNAVAILABLE else []
    if length is not None:
        headers.append((b"content-length", str(length).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    if first:
        await send({"type": "http.response.body", "body": first, "more_body": True})
    async for chunk in response.content.iter_any():
        if stopwatch is not None and status < _ERROR:
            for _ in _EVENTS.findall(chunk):
                stopwatch.piece()
        body = chunk.replace(added, b"") if own_id else chunk
        await send({"type": "http.response.body", "body": body, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def _json_part(response: ClientResponse, given: str | None) -> bytes:
    """Return the JSON of an answer, which has `given` bytes; None: no tensors follow."""
    if given is None:
        return await read_answer(response, _LARGEST_JSON)
    if given.isascii() and given.isdigit() and len(given) < _MAX_DIGITS and int(given) <= _LARGEST_JSON:
        return await response.content.readexactly(int(given))
    raise SilentError(f"Triton's answer has {given[:100]} bytes of JSON")


def _status(answer: bytes, given: int) -> int:
    """Return the status of an error, of which the request may not be the cause: Triton 2.51 gives 400 for most."""
    if given == HTTPStatus.NOT_FOUND:  # of a model that the client named
        return given
    try:
        content = parse_json(answer.decode())
    except ValueError:
        return given
    text = content.get("error") if isinstance(content, dict) else None
    status = api_error(refused(text)).status if isinstance(text, str) else given
    return status if status in (_FAILED, _UNAVAILABLE) else given


async def _reason(response: ClientResponse) -> str:
    """Return why a server refuses all requests."""
    text = (await response.content.read(_LONGEST_REASON)).decode(errors="replace")
    return f"all replicas are busy or stopping; one reported: {text}"


async def end_with_client(receive: Receive, task: asyncio.Task[object]) -> None:
    """End a request when its client closes the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
    task.cancel()


def _require_type(headers: Mapping[str, str], types: Sequence[str]) -> None:
    given = headers.get("content-type", "").partition(";")[0].strip().lower()
    if given not in types:
        expected = " or ".join(("application/json", *types[len(_JSON_TYPES) :]))
        raise RefusedError(415, f"the header Content-Type is {given[:100]!r}; expected {expected}")


def _json_length(headers: Mapping[str, str]) -> int | None:
    given = headers.get(JSON_LENGTH.lower())
    if given is None:
        return None
    if not (given.isascii() and given.isdigit() and len(given) < _MAX_DIGITS):
        raise RefusedError(400, f"{JSON_LENGTH} must be a number of bytes")
    return int(given)
