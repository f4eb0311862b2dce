"""How bodies of requests are received: whole, within limits on size, time and the memory of all bodies together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from trtserve.gateway.asgi import Message, Receive
from trtserve.gateway.guard import inflate
from trtserve.gateway.refusals import RefusedError
from trtserve.gateway.settings import Limits


async def receive_body(
    headers: Mapping[str, str], receive: Receive, limits: Limits, reserve: Callable[[int], None]
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
    content = inflate(body, headers.get("content-encoding", "").strip().lower(), limits)
    reserve(max(0, len(content) - len(body)))
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
