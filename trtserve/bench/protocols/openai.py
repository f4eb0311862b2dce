"""OpenAI's API: completions or chat completions, streamed as server-sent events."""

from __future__ import annotations

import json
import os
import ssl
from typing import Any
from urllib.parse import urlsplit

from trtserve.bench.protocols.base import Chunk, Pressure, Target
from trtserve.bench.protocols.generate import parse_event
from trtserve.bench.protocols.http import HttpPool, post
from trtserve.bench.records import Response
from trtserve.bench.requests import TrafficRequest
from trtserve.errors import UsageError

_DONE = b"[DONE]"
_KEY = "OPENAI_API_KEY"


class OpenAiTransport:
    """Connections to a server with OpenAI's API; the key comes from the variable OPENAI_API_KEY."""

    def __init__(self, target: Target, *, timeout: float) -> None:
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

    def read(self, chunk: Chunk) -> Response:
        """Decode a chunk; its usage, which counts the whole answer, comes with the last one."""
        time_ns, content = chunk
        content = content.strip()
        # Comments (": ping") keep connections alive.
        if content.endswith(_DONE) or content.startswith(b":"):
            return Response(time_ns=time_ns, text="")
        values = parse_event(content)
        if "error" in values:
            error = values["error"]
            return Response(
                time_ns=time_ns, error=str(error.get("message", error) if isinstance(error, dict) else error)
            )
        choice: dict[str, Any] = next(iter(values.get("choices") or ()), {})
        message = choice.get("delta") or choice.get("message") or {}
        usage = values.get("usage") or {}
        return Response(
            time_ns=time_ns,
            text=choice.get("text") or message.get("content") or message.get("reasoning_content") or "",
            tokens=usage.get("completion_tokens"),
            prompt_tokens=usage.get("prompt_tokens"),
            finish_reason=choice.get("finish_reason"),
        )

    async def close(self) -> None:
        await self._pool.close()
