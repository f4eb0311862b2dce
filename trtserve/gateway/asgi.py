"""The types of ASGI, and answers of its applications."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, TypeAlias

from pydantic_core import to_json

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]


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
