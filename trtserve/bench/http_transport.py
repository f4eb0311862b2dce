"""HTTP for load: Triton's generate endpoints and OpenAI's API."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from trtserve.bench.messages import read_values, request_tensors
from trtserve.bench.records import DecodedResponse, TrafficRequest
from trtserve.bench.transport import Chunk, LoadTarget, SendError
from trtserve.client.call_errors import plain, silent, unreachable
from trtserve.client.http_pool import OK, HttpPool, Pressure, http_request
from trtserve.client.http_transport import generate_body, model_path, tls_context
from trtserve.errors import UsageError
from trtserve.files import parse_json

_EVENT = b"data:"
_DONE = b"[DONE]"
_KEY = "OPENAI_API_KEY"


class _HttpLoad:
    """Connections to one HTTP port."""

    def __init__(self, target: LoadTarget, host: str, port: int, *, tls: ssl.SSLContext | None, timeout: float) -> None:
        self._target, self._where, self._timeout = target, f"{host}:{port}", timeout
        self._first = target.endpoint.connect_timeout
        self._pool = HttpPool(host, port, tls=tls, timeout=timeout, connect_timeout=self._first)

    @property
    def opened(self) -> int:
        return self._pool.opened

    @property
    def pressure(self) -> Pressure:
        return self._pool.pressure

    async def open(self, connections: int) -> None:
        try:
            await self._pool.open(connections)
        except asyncio.TimeoutError:
            raise silent(self._where, self._first) from None
        except OSError as error:
            raise unreachable(self._where, error.strerror or str(error)) from None

    async def send(self, message: bytes, received: list[Chunk], *, limit: int | None = None) -> None:
        def on_event(time_ns: int, event: bytes) -> bool:
            received.append((time_ns, event))
            return len(received) == limit

        try:
            answer = await self._pool.send(message, on_event if self._target.streams else None)
        except asyncio.TimeoutError:
            raise SendError(f"no complete answer within {self._timeout:g} s") from None
        except OSError as error:
            raise SendError(str(error)) from error
        if answer is not None and answer.status != OK:
            raise SendError(f"status {answer.status}: {answer.body.decode('utf-8', 'replace')[:300]}")
        if answer is not None and answer.body.strip():
            received.append((answer.time_ns, answer.body))

    async def close(self) -> None:
        await self._pool.close()


class GenerateLoad(_HttpLoad):
    """Connections to the HTTP port of a Triton server."""

    def __init__(self, target: LoadTarget, *, timeout: float) -> None:
        endpoint = target.endpoint
        tls = None if endpoint.tls is None else tls_context(endpoint.tls)
        super().__init__(target, endpoint.host, endpoint.http_port, tls=tls, timeout=timeout)
        self._path = f"{model_path(target.model.name)}/{'generate_stream' if target.streams else 'generate'}"

    def encode(self, request: TrafficRequest, request_id: str) -> bytes:
        tensors = request_tensors(self._target.model, request, stream=self._target.streams)
        body = generate_body(tensors, request_id=request_id, model=self._target.model)
        endpoint = self._target.endpoint
        return http_request(endpoint.http, self._path, json.dumps(body).encode(), endpoint.http_headers)

    def read(self, chunk: Chunk) -> DecodedResponse:
        time_ns, content = chunk
        values = _parse_event(content)
        if "error" in values:
            return DecodedResponse(time_ns=time_ns, error=plain(str(values["error"])))
        return read_values(self._target.model, values, time_ns)


class OpenAiLoad(_HttpLoad):
    """Connections to a server with OpenAI's API; the key comes from the variable OPENAI_API_KEY."""

    def __init__(self, target: LoadTarget, *, timeout: float) -> None:
        if target.openai is None:
            raise UsageError("--openai is missing.")
        self._server = target.openai
        address = urlsplit(self._server.url)
        secure = address.scheme == "https"
        tls = ssl.create_default_context() if secure else None
        super().__init__(
            target, address.hostname or "", address.port or (443 if secure else 80), tls=tls, timeout=timeout
        )
        self._host = address.netloc
        self._path = address.path.rstrip("/") + ("/chat/completions" if self._server.chat else "/completions")
        self._headers = {"Authorization": f"Bearer {os.environ[_KEY]}"} if _KEY in os.environ else {}

    def encode(self, request: TrafficRequest, request_id: str) -> bytes:
        del request_id
        server, streams = self._server, self._target.streams
        prompt: dict[str, Any] = {"prompt": request.token_ids.tolist() if request.text is None else request.text}
        if server.chat:
            prompt = {"messages": [{"role": "user", "content": request.text}]}
        body = {"model": server.model, **prompt, "max_tokens": request.output_len, "stream": streams, "temperature": 0}
        if streams:
            body["stream_options"] = {"include_usage": True}
        if server.ignore_eos:
            body |= {"ignore_eos": True, "min_tokens": request.output_len}
        return http_request(self._host, self._path, json.dumps(body).encode(), self._headers)

    def read(self, chunk: Chunk) -> DecodedResponse:
        """Decode a chunk; its usage, which counts the whole answer, comes with the last one."""
        time_ns, content = chunk
        content = content.strip()
        # Comments (": ping") keep connections alive.
        if content.endswith(_DONE) or content.startswith(b":"):
            return DecodedResponse(time_ns=time_ns, text="")
        values = _parse_event(content)
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


def _parse_event(content: bytes) -> Mapping[str, Any]:
    """Return the JSON object of an event or a body; what is not JSON becomes an `error`."""
    try:
        values = parse_json(content.strip().removeprefix(_EVENT))
    except ValueError:
        return {"error": f"the answer is not JSON: {content[:200]!r}"}
    return values if isinstance(values, Mapping) else {"error": f"the answer is not a JSON object: {content[:200]!r}"}
