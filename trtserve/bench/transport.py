"""How requests travel: the interface, gRPC, and an executor in this process; `http_transport.py` has HTTP."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from trtserve.bench.messages import read_response, read_values, request_message, request_tensors
from trtserve.bench.records import DecodedResponse, TrafficRequest
from trtserve.client.call_errors import explain_rpc_error, plain, silent
from trtserve.client.endpoint import Endpoint
from trtserve.client.grpc_transport import open_channel
from trtserve.client.http_pool import Pressure
from trtserve.client.tensors import ModelDescription
from trtserve.errors import RequestError, UsageError

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
class LoadTarget:
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


class SendError(Exception):
    """The server or the connection failed one request."""


class LoadTransport(Protocol):
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

        With `limit` the request is cancelled after this many responses. A task that is cancelled cancels the request.
        Raises SendError.
        """

    def read(self, chunk: Chunk) -> DecodedResponse:
        """Decode what `send` received."""

    async def close(self) -> None:
        """Close all connections."""


_SERVICE = "/inference.GRPCInferenceService"


class GrpcLoad:
    """One HTTP/2 connection to a Triton server."""

    def __init__(self, target: LoadTarget, *, timeout: float) -> None:
        self._target = target
        self._timeout = timeout
        self._channel: Any = None
        self._call: Any = None

    @property
    def opened(self) -> int:
        return 1  # all calls share it

    @property
    def pressure(self) -> Pressure:
        return Pressure()

    async def open(self, connections: int) -> None:

        endpoint = self._target.endpoint
        self._channel = open_channel(endpoint)
        try:
            await asyncio.wait_for(self._channel.channel_ready(), endpoint.connect_timeout)
        except asyncio.TimeoutError:
            raise silent(endpoint.grpc, endpoint.connect_timeout) from None
        if self._target.model.decoupled:
            # One message goes out, so that the call needs no task for its sending side; on the wire it is the same.
            self._call = self._channel.unary_stream(f"{_SERVICE}/ModelStreamInfer")
        else:
            self._call = self._channel.unary_unary(f"{_SERVICE}/ModelInfer")

    def encode(self, request: TrafficRequest, request_id: str) -> bytes:
        message = request_message(self._target.model, request, request_id=request_id, stream=self._target.streams)
        encoded: bytes = message.SerializeToString()
        return encoded

    async def send(self, message: bytes, received: list[Chunk], *, limit: int | None = None) -> None:
        import grpc

        call = self._call(message, timeout=self._timeout, metadata=self._target.endpoint.grpc_metadata)
        try:
            if not self._target.model.decoupled:
                received.append((0, await call))
                received[-1] = (time.monotonic_ns(), received[-1][1])
                return
            while (response := await call.read()) is not grpc.aio.EOF:
                received.append((time.monotonic_ns(), response))
                if len(received) == limit:
                    return
        except grpc.aio.AioRpcError as error:
            raise SendError(str(explain_rpc_error(error, self._target.endpoint.grpc))) from error
        finally:
            call.cancel()

    def read(self, chunk: Chunk) -> DecodedResponse:
        from tritonclient.grpc import service_pb2

        time_ns, content = chunk
        if not self._target.model.decoupled:
            return read_response(self._target.model, service_pb2.ModelInferResponse.FromString(content), time_ns)
        streamed = service_pb2.ModelStreamInferResponse.FromString(content)
        if streamed.error_message:
            return DecodedResponse(time_ns=time_ns, error=plain(streamed.error_message))
        return read_response(self._target.model, streamed.infer_response, time_ns)

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()


class InProcessLoad:
    """One executor; a thread hands its responses to the requests that wait for them."""

    def __init__(self, target: LoadTarget, *, timeout: float) -> None:
        self._target, self._timeout = target, timeout
        self._open = ExitStack()
        self._waiting: dict[int, tuple[asyncio.Future[None], list[Chunk], dict[int, Any], int | None]] = {}
        self._lock = threading.Lock()
        self._ended = False

    @property
    def opened(self) -> int:
        return 0

    @property
    def pressure(self) -> Pressure:
        return Pressure()

    async def open(self, connections: int) -> None:
        from trtserve.server.local_engine import find_local_engine  # loads what runs engines

        engine = find_local_engine(str(self._target.engine), self._target.tokenizer)
        if engine.ranks > 1:
            raise UsageError(
                f"The engine {engine.path} has {engine.ranks} ranks; --in-process measures engines of one rank.",
                hint="Serve it and measure the server: trtserve start, then trtserve bench.",
            )
        self._client = self._open.enter_context(engine.endpoint(timeout=self._timeout)).client
        self._loop = asyncio.get_running_loop()
        self._reader = threading.Thread(target=self._read_all, name="executor responses", daemon=True)
        self._reader.start()

    def encode(self, request: TrafficRequest, request_id: str) -> Any:
        return request_id, request_tensors(self._target.model, request, stream=self._target.streams)

    async def send(self, message: Any, received: list[Chunk], *, limit: int | None = None) -> None:
        request_id, tensors = message
        ended = self._loop.create_future()
        try:
            with self._lock:  # so that no response comes before the request is known
                rows = self._client.submit(tensors, request_id=request_id)
                self._waiting.update(dict.fromkeys(rows, (ended, received, rows, limit)))
        except RequestError as error:
            raise SendError(error.message) from error
        numbers = list(rows)
        try:
            await asyncio.wait_for(ended, self._timeout)
        except asyncio.TimeoutError:
            raise SendError(f"no complete answer within {self._timeout:g} s") from None
        finally:
            self._client.stop(request_id)
            with self._lock:
                for number in numbers:
                    self._waiting.pop(number, None)

    def _read_all(self) -> None:
        while not self._ended:
            for answer in self._client.arrived():
                now = time.monotonic_ns()
                with self._lock:
                    waiting = self._waiting.get(answer.request_id)
                if waiting is None:
                    continue
                ended, received, rows, limit = waiting
                wanted = dict(rows)  # `reply` removes the ids of final answers
                received.append((now, (answer, wanted)))
                if answer.has_error() or answer.result.is_final or len(received) == limit:
                    self._loop.call_soon_threadsafe(_settle, ended)

    def read(self, chunk: Chunk) -> DecodedResponse:
        time_ns, (answer, rows) = chunk
        try:
            reply = self._client.reply(answer, dict(rows))  # a turn of a conversation is read twice
        except RequestError as error:
            return DecodedResponse(time_ns=time_ns, error=error.message)
        outputs = {name: array.reshape(-1).tolist() for name, array in reply.outputs.items()}
        return read_values(self._target.model, outputs, time_ns)

    async def close(self) -> None:
        self._ended = True
        self._reader.join()
        self._open.close()


def _settle(ended: asyncio.Future[None]) -> None:
    if not ended.done():
        ended.set_result(None)
