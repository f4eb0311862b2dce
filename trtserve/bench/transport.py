"""How requests travel: over gRPC, by HTTP (generate endpoints, OpenAI's API), or to an executor in this process."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from trtserve.bench.messages import read_response, read_values, request_message, request_tensors
from trtserve.bench.records import DecodedResponse, TrafficRequest
from trtserve.client.endpoint import Endpoint, explain_rpc_error, plain, silent, unreachable
from trtserve.client.grpc_transport import open_channel
from trtserve.client.http_transport import OK, HttpPool, Pressure, generate_body, http_request, model_path, tls_context
from trtserve.client.tensors import ModelDescription
from trtserve.errors import RequestError, UsageError
from trtserve.files import parse_json

ProtocolName = Literal["grpc", "http", "openai", "in-process"]

Chunk = tuple[int, Any]  # time of arrival (ns), and the response as it arrived: it is decoded after the run


@dataclass(frozen=True, kw_only=True)
class OpenAi:
    """A server with OpenAI's API."""

    url: str  # base address, such as `http://localhost:8000/v1`
    model: str
    chat: bool = False  # send prompts to /chat/completions instead of /completions
    ignore_eos: bool = True
    """Send `ignore_eos` and `min_tokens`, which vLLM, SGLang and TensorRT-LLM know and OpenAI itself refuses."""


@dataclass(frozen=True, kw_only=True)
class LoadTarget:
    """The model that requests are sent to, and how. Worker processes receive it as a pickle."""

    protocol: ProtocolName
    endpoint: Endpoint
    model: ModelDescription
    streams: bool  # whether answers arrive piece by piece
    openai: OpenAi | None = None
    engine: Path | None = None  # the engine to run in this process
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


class LoadTransport(ABC):
    """A protocol's connections to one target; used by one event loop."""

    def __init__(self, target: LoadTarget, *, timeout: float) -> None:
        self._target, self._timeout = target, timeout
        self.pressure = Pressure()
        """What its sockets held up so far."""

    @property
    def opened(self) -> int:
        """Number of connections made so far, where more are made when all are busy."""
        return 0

    @abstractmethod
    async def open(self, connections: int) -> None:
        """Connect before the measured window. Raises ServerUnreachableError."""

    @abstractmethod
    def encode(self, request: TrafficRequest, request_id: str) -> Any:
        """Return the message of a request."""

    @abstractmethod
    async def send(self, message: Any, received: list[Chunk], *, limit: int | None = None) -> None:
        """Send one message and append what arrives to `received`, until the answer ends.

        With `limit` the request is cancelled after this many responses. A task that is cancelled cancels the request.
        Raises SendError.
        """

    @abstractmethod
    def read(self, chunk: Chunk) -> DecodedResponse:
        """Decode what `send` received."""

    @abstractmethod
    async def close(self) -> None:
        """Close all connections."""


_SERVICE = "/inference.GRPCInferenceService"


class GrpcLoad(LoadTransport):
    """One HTTP/2 connection to a Triton server, which all calls share."""

    _channel: Any = None
    _call: Any = None

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
                response = await call
                received.append((time.monotonic_ns(), response))
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


_EVENT = b"data:"
_DONE = b"[DONE]"


class _HttpLoad(LoadTransport):
    """Connections to one HTTP port."""

    def __init__(self, target: LoadTarget, host: str, port: int, *, tls: ssl.SSLContext | None, timeout: float) -> None:
        super().__init__(target, timeout=timeout)
        self._where, self._first = f"{host}:{port}", target.endpoint.connect_timeout
        self._pool = HttpPool(host, port, tls=tls, timeout=timeout, connect_timeout=self._first)
        self.pressure = self._pool.pressure

    @property
    def opened(self) -> int:
        return self._pool.opened

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


def openai_headers(endpoint: Endpoint) -> dict[str, str]:
    """Return what carries the API key of a server that was started here, else that of the variable OPENAI_API_KEY."""
    key = endpoint.api_key or os.environ.get("OPENAI_API_KEY")
    return {} if key is None else {"Authorization": f"Bearer {key}"}


class OpenAiLoad(_HttpLoad):
    """Connections to a server with OpenAI's API."""

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
        self._headers = openai_headers(target.endpoint)

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
        """Decode a chunk; usage counts the answer so far, and comes with the last chunk or with every one."""
        time_ns, content = chunk
        if self._target.streams and not content.lstrip().startswith(b"{"):  # an error has the form of a whole answer
            # Other lines keep connections alive (": ping"), or name and number the event.
            lines = (line.strip() for line in content.splitlines())
            content = b"".join(line.removeprefix(_EVENT) for line in lines if line.startswith(_EVENT)).strip()
            if content in (b"", _DONE):
                return DecodedResponse(time_ns=time_ns, text="")
        values = _parse_event(content)
        if "error" in values:
            error = values["error"]
            return DecodedResponse(
                time_ns=time_ns, error=str(error.get("message", error) if isinstance(error, dict) else error)
            )
        choice, usage = next(_objects(values.get("choices")), {}), next(_objects([values.get("usage")]), {})
        message = next(_objects([choice.get("delta"), choice.get("message")]), {})
        marked = _texts_in_markup(message)
        return DecodedResponse(
            time_ns=time_ns,
            text=marked + (_text_of(choice.get("text")) or _text_of(message.get("content"))),
            in_markup=bool(marked),
            tokens=_count_in(usage, "completion_tokens"),
            prompt_tokens=_count_in(usage, "prompt_tokens"),
            finish_reason=_text_of(choice.get("finish_reason")) or None,
        )


def _objects(values: object) -> Iterator[Mapping[str, Any]]:
    """Yield the objects of a list; a server may send anything."""
    yield from (each for each in values if isinstance(each, Mapping)) if isinstance(values, list) else ()


def _count_in(usage: Mapping[str, Any], name: str) -> int | None:
    number = usage.get(name)
    return number if isinstance(number, int) else None


def _texts_in_markup(message: Mapping[str, Any]) -> str:
    """Return the reasoning and the calls of a message or of its part, which servers take out of the model's text."""
    # Some servers send the same reasoning under two names.
    reasoning = (message.get(name) for name in ("reasoning_content", "reasoning", "thinking"))
    calls = [call.get("function") for call in _objects(message.get("tool_calls"))] + [message.get("function_call")]
    parts = [
        next((text for each in reasoning if (text := _text_of(each))), ""),
        *(_text_of(call.get(name)) for call in _objects(calls) for name in ("name", "arguments")),
        _text_of(message.get("refusal")),
    ]
    return "".join(parts)


def _text_of(content: object) -> str:
    """Return the text of a content, which is a text or, in some dialects, a list of parts that have texts."""
    if isinstance(content, list):
        return "".join(map(_text_of, content))
    if isinstance(content, Mapping):
        return next((text for name in ("text", "thinking", "content") if (text := _text_of(content.get(name)))), "")
    return content if isinstance(content, str) else ""


def _parse_event(content: bytes) -> Mapping[str, Any]:
    """Return the JSON object of an event or a body; what is not JSON becomes an `error`."""
    try:
        values = parse_json(content.strip().removeprefix(_EVENT))
    except ValueError:
        return {"error": f"the answer is not JSON: {content[:200]!r}"}
    return values if isinstance(values, Mapping) else {"error": f"the answer is not a JSON object: {content[:200]!r}"}


class InProcessLoad(LoadTransport):
    """One executor; a thread hands its responses to the requests that wait for them."""

    def __init__(self, target: LoadTarget, *, timeout: float) -> None:
        super().__init__(target, timeout=timeout)
        self._open = ExitStack()
        self._waiting: dict[int, tuple[asyncio.Future[None], list[Chunk], dict[int, Any], int | None]] = {}
        self._lock = threading.Lock()
        self._ended = False

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


def make_transport(target: LoadTarget, *, timeout: float) -> LoadTransport:
    if target.protocol == "grpc":
        return GrpcLoad(target, timeout=timeout)
    if target.protocol == "in-process":
        return InProcessLoad(target, timeout=timeout)
    return (OpenAiLoad if target.protocol == "openai" else GenerateLoad)(target, timeout=timeout)
