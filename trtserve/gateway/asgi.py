"""Requests and answers as ASGI applications see them: whole bodies within limits, and errors of the gateway itself."""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar

from pydantic_core import to_json

from trtserve.gateway.settings import RequestLimits

_LOG = logging.getLogger(__name__)
T = TypeVar("T")
Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
SMALL = 1 << 15
"""Bytes of a body that is read and checked in some milliseconds."""
MOST_VALUES = 1 << 19
"""Values of a JSON body; reading more takes too long."""
MOST_PARTS = 1 << 16
"""Objects, lists and keys of a JSON body: each costs as much as hundreds of characters."""
_PARTS = (b"{", b"[", b":")
_PIECE = 1 << 16  # bytes
_PLAIN = ("", "identity")


def headers_of(scope: Scope) -> dict[str, str]:
    """Return a request's headers by their names in lower case; of several with one name the last one."""
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}


async def send_answer(
    send: Send, status: int, content: object = None, headers: Mapping[str, str] | None = None
) -> None:
    """Send a whole answer: a JSON document, or nothing."""
    body = b"" if content is None else to_json(content)
    pairs = [(name.encode(), value.encode("latin-1", "replace")) for name, value in (headers or {}).items()]
    pairs.append((b"content-length", str(len(body)).encode()))
    if body:
        pairs.append((b"content-type", b"application/json"))
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})


class RefusedError(Exception):
    """The status and the text of an answer."""

    def __init__(self, status: int, text: str, *, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.headers = dict(headers or {})


def without_memory(error: BaseException) -> RefusedError | None:
    """Return the refusal of a request for which this process has no memory, or no thread; None for other errors."""
    if isinstance(error, MemoryError) or "can't start new thread" in str(error):
        return RefusedError(503, "the gateway has no memory left for this request", headers={"retry-after": "1"})
    return None


@contextmanager
def looking_again() -> Iterator[None]:
    """Let a watch look again after a failure, as without memory, threads or file descriptors: it must never end."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever it was, who is watched must not go unwatched
        _LOG.warning("the gateway looks again later: %s: %s", type(error).__name__, error)


async def aside(work: Callable[[], T], body: bytes) -> T:
    """Return what reading a body returns; a large one is read in a thread, beside other requests."""
    return work() if len(body) <= SMALL else await asyncio.to_thread(work)


def require_few(body: bytes, most_values: int = MOST_VALUES) -> None:
    """Raise RefusedError for JSON with more values, or objects, lists and keys, than are read; it is not parsed.

    Reading holds the interpreter, so that nobody else is answered meanwhile.
    """
    if body.count(b",") <= most_values and sum(map(body.count, _PARTS)) <= MOST_PARTS:
        return
    values = parts = start = 0
    in_text = False
    while start < len(body):  # in pieces, so that others get the interpreter in between
        piece = body[start : start + _PIECE]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # the next character belongs to the last backslash
            piece = body[start : start + _PIECE + 1]
        start += len(piece)
        between = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(between[in_text::2])
        in_text ^= len(between) % 2 == 0
        values += outside.count(b",")
        parts += sum(map(outside.count, _PARTS))
        if values > most_values:
            raise RefusedError(400, f"the body has more than {most_values} values")
        if parts > MOST_PARTS:
            raise RefusedError(400, f"the body has more than {MOST_PARTS} objects, lists and keys")


async def receive_body(
    headers: Mapping[str, str], receive: Receive, limits: RequestLimits, reserve: Callable[[int], None]
) -> bytes:
    """Return the whole body, without its Content-Encoding. `reserve` gets its size in bytes before it is kept.

    Raises RefusedError for a body that is too large, too slow, damaged, or not complete.
    """
    announced = headers.get("content-length", "")
    if announced.isdigit() and int(announced) > limits.body_bytes:
        raise RefusedError(413, f"the body has {announced} bytes; at most {limits.body_bytes} are allowed")
    try:
        body = await asyncio.wait_for(_receive_all(receive, limits.body_bytes, reserve), limits.body_seconds)
    except asyncio.TimeoutError:
        raise RefusedError(408, f"the body did not arrive within {limits.body_seconds:g} s") from None
    encoding = headers.get("content-encoding", "").strip().lower()
    content = body if encoding in _PLAIN else await asyncio.to_thread(inflate, body, encoding, limits)
    reserve(max(0, len(content) - len(body)))
    return content


def inflate(body: bytes, encoding: str, limits: RequestLimits) -> bytes:
    """Return a body without its Content-Encoding. Raises RefusedError for damage and for too large a content."""
    if encoding in _PLAIN:
        return body
    if encoding not in ("gzip", "deflate"):
        raise RefusedError(415, f"Content-Encoding is {encoding[:64]!r}; expected gzip, deflate or none")
    stream = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)  # finds out whether the header is gzip's or zlib's
    try:
        content = stream.decompress(body, limits.body_bytes + 1)
    except zlib.error as error:
        raise RefusedError(400, f"the {encoding} body is damaged: {error}") from None
    if len(content) > limits.body_bytes:
        raise RefusedError(413, f"the {encoding} body holds more than {limits.body_bytes} bytes")
    if not stream.eof or stream.unused_data:
        raise RefusedError(
            400, f"the {encoding} body is {'incomplete' if not stream.eof else 'followed by other bytes'}"
        )
    return content


def replayed(body: bytes, receive: Receive) -> Receive:
    """Return a function that gives an application a body that was received, and then what `receive` gives."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


async def _receive_all(receive: Receive, limit: int, reserve: Callable[[int], None]) -> bytes:
    body, more = bytearray(), True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise RefusedError(400, "the client left before the end of the body")
        part = message.get("body", b"")
        reserve(len(part))
        body += part
        more = message.get("more_body", False)
        if len(body) > limit:
            raise RefusedError(413, f"the body has more than {limit} bytes")
    return bytes(body)
