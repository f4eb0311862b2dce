"""Triton's HTTP endpoints generate and generate_stream."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from trtserve.bench.messages import read_values, request_tensors
from trtserve.bench.protocols.base import Chunk, Pressure, Target
from trtserve.bench.protocols.http import HttpPool, post
from trtserve.bench.records import Response
from trtserve.bench.requests import TrafficRequest
from trtserve.client.call_errors import plain
from trtserve.client.http_client import generate_body, tls_context
from trtserve.files import parse_json

EVENT = b"data:"


class GenerateTransport:
    """Connections to the HTTP port of a Triton server."""

    def __init__(self, target: Target, *, timeout: float) -> None:
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

    def read(self, chunk: Chunk) -> Response:
        time_ns, content = chunk
        values = parse_event(content)
        if "error" in values:
            return Response(time_ns=time_ns, error=plain(str(values["error"])))
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
