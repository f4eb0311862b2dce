"""The interface of a protocol, and what to measure with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from trtserve.bench.records import Response
from trtserve.bench.requests import TrafficRequest
from trtserve.client.base import Endpoint, ModelDescription

ProtocolName = Literal["grpc", "http", "openai", "in-process"]

Chunk = tuple[int, Any]
"""Time of arrival (ns), and the response as it arrived: it is decoded after the run."""


@dataclass(frozen=True, kw_only=True)
class OpenAi:
    """A server with OpenAI's API."""

    url: str
    """Base address, such as `http://localhost:8000/v1`."""
    model: str
    chat: bool = False
    """Send prompts to /chat/completions instead of /completions."""
    ignore_eos: bool = True
    """Send `ignore_eos` and `min_tokens`, which vLLM, SGLang and TensorRT-LLM know and OpenAI itself refuses."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """The model that requests are sent to, and how. Worker processes receive it as a pickle."""

    protocol: ProtocolName
    endpoint: Endpoint
    model: ModelDescription
    streams: bool
    """Whether answers arrive piece by piece."""
    openai: OpenAi | None = None
    engine: Path | None = None
    """The engine to run in this process."""
    tokenizer: Path | None = None

    @property
    def address(self) -> str:
        """Where requests go, for people."""
        if self.openai is not None:
            return self.openai.url
        if self.engine is not None:
            return f"{self.engine} in this process"
        return self.endpoint.grpc if self.protocol == "grpc" else self.endpoint.http


@dataclass(kw_only=True)
class Pressure:
    """What the sockets of a transport held up; it stays zero where a library hides them (gRPC)."""

    write_blocked_max_ns: int = 0
    """Longest time for which a socket took no more of a request."""
    crowded_reads: int = 0
    """Reads of events that found `CROWDED` bytes or more waiting."""


CROWDED = 32768


class RefusedError(Exception):
    """The server or the connection failed one request."""


class Transport(Protocol):
    """A protocol's connections to one target; used by one event loop."""

    @property
    def opened(self) -> int:
        """Number of connections made so far."""

    @property
    def pressure(self) -> Pressure:
        """What its sockets held up so far."""

    async def open(self, connections: int) -> None:
        """Connect before the measured window. Raises ServerUnreachableError."""

    def encode(self, request: TrafficRequest, request_id: str) -> Any:
        """Return the message of a request."""

    async def send(self, message: Any, received: list[Chunk], *, limit: int | None = None) -> None:
        """Send one message and append what arrives to `received`, until the answer ends.

        With `limit` the request is cancelled after so many responses. A task that is cancelled cancels the request.
        Raises RefusedError.
        """

    def read(self, chunk: Chunk) -> Response:
        """Decode what `send` received."""

    async def close(self) -> None:
        """Close all connections."""


def make_transport(target: Target, *, timeout: float) -> Transport:
    """Return the transport of a target; the packages that it needs are imported here."""
    if target.protocol == "grpc":
        from trtserve.bench.protocols.grpc import GrpcTransport

        return GrpcTransport(target, timeout=timeout)
    if target.protocol == "http":
        from trtserve.bench.protocols.generate import GenerateTransport

        return GenerateTransport(target, timeout=timeout)
    if target.protocol == "openai":
        from trtserve.bench.protocols.openai import OpenAiTransport

        return OpenAiTransport(target, timeout=timeout)
    from trtserve.bench.protocols.in_process import InProcessTransport

    return InProcessTransport(target, timeout=timeout)
