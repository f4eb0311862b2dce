"""Run the sequences of one answer, and send it as a whole or as a stream, until its client goes away."""

from __future__ import annotations

import asyncio
import os
import re
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from starlette.types import Receive, Scope, Send

from trtserve.client.metrics import KV_BLOCKS, REQUESTS, core_metrics, parse
from trtserve.errors import TrtserveError
from trtserve.gateway.openai.answers import (
    DONE,
    ChatAnswer,
    Completion,
    Envelope,
    Json,
    Message,
    TextPiece,
    TokenUsage,
    event,
    usage_json,
)
from trtserve.gateway.openai.bodies import StreamOptions
from trtserve.gateway.openai.errors import ApiError, api_error
from trtserve.gateway.openai.generation import generate
from trtserve.gateway.openai.request import EngineRequest
from trtserve.gateway.openai.served import Backend, ServedModel

_AT_ONCE = 64  # sequences of one answer; others of it wait outside the engine, where they hold up nobody else
_CLIENT_CLOSED_REQUEST = 499  # nginx's; nobody reads it
T = TypeVar("T")
A = TypeVar("A", bound=Completion | Message)
_FIRST = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 20, 30, 60)
_GAPS = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2)
_WHOLE = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)


@dataclass(kw_only=True)
class Sequenced(Generic[A]):
    """One sequence of an answer: its request, what it has become so far, and its tokens."""

    request: EngineRequest
    answer: A
    usage: TokenUsage = field(default_factory=TokenUsage)


class Form(ABC, Generic[A]):
    """One API's form of an answer: a JSON document, or events of a stream."""

    media_type = "text/event-stream"

    def __init__(self, sequences: Sequence[Sequenced[A]], *, id: str | None = None) -> None:  # noqa: A002 - the field's word
        """`id` is the name of the request, for the header `x-request-id`."""
        self.sequences = sequences
        self.id = id or uuid.uuid4().hex

    @abstractmethod
    def whole(self) -> Json:
        """Return the document, once every sequence is complete."""

    @abstractmethod
    def collect(self, sequence: Sequenced[A], piece: TextPiece) -> None:
        """Add a piece to the document."""

    @abstractmethod
    def events(self, sequence: Sequenced[A], piece: TextPiece) -> bytes:
        """Return the events that a piece makes, those that begin the stream before the first ones."""

    @abstractmethod
    def end(self) -> bytes:
        """Return the events that end a complete stream."""

    @abstractmethod
    def failed(self, error: ApiError) -> bytes:
        """Return the events that end a stream with an error."""


class ChoicesForm(Form[Any]):
    """OpenAI's completions and chats: choices in chunks."""

    def __init__(
        self,
        sequences: Sequence[Sequenced[Completion] | Sequenced[ChatAnswer]],
        envelope: Envelope,
        options: StreamOptions,
        *,
        prompts: int = 1,
        kept: int | None = None,
        prompt_ids: Sequence[int] | None = None,
    ) -> None:
        """`sequences`: those of the first prompt, then those of the next one. `kept`: choices of each prompt.

        `prompt_ids` are told if the client wants them.
        """
        super().__init__(sequences, id=envelope.id)
        self._envelope, self._options, self._prompts = envelope, options, prompts
        self._kept = kept or len(sequences) // prompts
        self._head: Json = {} if prompt_ids is None else {"prompt_token_ids": list(prompt_ids)}
        self._more: Json = {"usage": None} if options.include_usage else {}

    def whole(self) -> Json:
        """Return the document."""
        best = self._best()
        if isinstance(best[0], ChatAnswer):
            prompt = [each.by_id() for each in best[0].prompt]
            self._head["prompt_logprobs"] = prompt or None
        return self._envelope.whole([choice.whole() for choice in best], self._usage()) | self._head

    def collect(self, sequence: Sequenced[Any], piece: TextPiece) -> None:
        """Add a piece."""
        sequence.answer.chunks(piece)

    def events(self, sequence: Sequenced[Any], piece: TextPiece) -> bytes:
        """Return a chunk for each choice."""
        choices = sequence.answer.chunks(piece)
        if choices and self._more and self._options.continuous_usage_stats:
            self._more = {"usage": self._usage()}
        if choices and self._head:  # told once
            first, self._head = self._envelope.chunk(choices[:1], self._more | self._head), {}
            return first + b"".join([self._envelope.chunk([choice], self._more) for choice in choices[1:]])
        return b"".join([self._envelope.chunk([choice], self._more) for choice in choices])

    def end(self) -> bytes:
        """Return the usage if it is wanted, and the last event."""
        return (self._envelope.chunk([], {"usage": self._usage()}) if self._options.include_usage else b"") + DONE

    def failed(self, error: ApiError) -> bytes:
        """Return the error, and the last event."""
        return event(error.body) + DONE

    def _usage(self) -> Json | None:
        usages = [each.usage for each in self.sequences]
        usage = usage_json(usages, usages[:: len(usages) // self._prompts])
        if usage is not None and any(
            isinstance(each.answer, Message) and each.answer.reasoning for each in self.sequences
        ):
            tokens = sum(each.answer.reasoning_tokens for each in self.sequences)
            usage["completion_tokens_details"] = {"reasoning_tokens": tokens}
        return usage

    def _best(self) -> list[Any]:
        """Return the kept choices of each prompt, the likeliest first if there are more, numbered anew."""
        choices = [each.answer for each in self.sequences]
        size = len(choices) // self._prompts
        if size == self._kept:
            return choices
        best: list[Any] = []
        for start in range(0, len(choices), size):
            best += sorted(choices[start : start + size], key=lambda choice: -choice.mean_log_prob)[: self._kept]
        for index, choice in enumerate(best):
            choice.index = index
        return best


@dataclass(frozen=True, kw_only=True)
class Answering:
    """One answer that is being generated."""

    backend: Backend
    served: ServedModel
    measures: Measures
    form: Form[Any]
    note: dict[str, Any] = field(default_factory=dict)
    """What the request log will say of it."""

    @property
    def sequences(self) -> Sequence[Sequenced[Any]]:
        """What is generated."""
        return self.form.sequences

    async def respond(self, request: Request, *, stream: bool) -> Response:
        """Return the response. A client that goes away ends the sequences in the engine.

        Raises ApiError or TrtserveError for an error before the first token.
        """
        headers = {"x-request-id": self.form.id}
        if stream:
            events = self._events()
            first = await while_connected(request.receive, _next(events))
            return EventStream(first, events, headers, self.form.media_type)
        await while_connected(request.receive, self._collect())
        return JSONResponse(self.form.whole(), headers=headers)

    @property
    def _labels(self) -> tuple[str, str]:
        """The model and the adapter, or no text."""
        return self.served.name, self.sequences[0].request.adapter or ""

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Count the answer, and note at its end what the request log says of it."""
        try:
            with self.measures.answer(self._labels, self.sequences):
                yield
        finally:
            first = self.sequences[0]
            self.note.update(id=self.form.id, model=self.served.name, adapter=first.request.adapter)
            self.note.update(
                prompt_tokens=sum(each.usage.prompt_tokens or 0 for each in self.sequences),
                completion_tokens=sum(each.usage.completion_tokens or 0 for each in self.sequences),
                finish_reason=first.answer.finish_reason or "abort",
            )
            if "request" in self.note:
                self.note["answers"] = [each.answer.text for each in self.sequences]

    async def _collect(self) -> None:
        with self._counted():
            async with aclosing(self._pieces()) as pieces:
                async for sequence, piece in pieces:
                    self.form.collect(sequence, piece)

    async def _events(self) -> AsyncGenerator[bytes, None]:
        """Yield the events of a stream. An error is raised before the first event, and is an event after it."""
        watches = {id(each): self.measures.stopwatch("openai", self._labels) for each in self.sequences}
        began, begun = time.perf_counter(), False
        try:
            with self._counted():
                async with aclosing(self._pieces()) as pieces:
                    async for sequence, piece in pieces:
                        watches[id(sequence)].piece()
                        if events := self.form.events(sequence, piece):
                            if not begun:
                                begun = True
                                self.note["first_text_seconds"] = round(time.perf_counter() - began, 4)
                            yield events
        except (ApiError, TrtserveError) as error:
            if not begun:
                raise
            yield self.form.failed(api_error(error) if isinstance(error, TrtserveError) else error)
        else:
            yield self.form.end()

    def _pieces(self) -> AsyncGenerator[tuple[Sequenced[Any], TextPiece], None]:
        """Yield the pieces of all sequences as they come."""
        return self._pieces_of(self.sequences[0]) if len(self.sequences) == 1 else self._mixed()

    async def _mixed(self) -> AsyncGenerator[tuple[Sequenced[Any], TextPiece], None]:
        arrived: asyncio.Queue[tuple[Sequenced[Any], TextPiece] | Exception | None] = asyncio.Queue()
        turns = asyncio.Semaphore(_AT_ONCE)
        readers = [asyncio.create_task(_read(self._pieces_of(each), arrived, turns)) for each in self.sequences]
        try:
            for _ in readers:  # each ends with None or with an error
                while (item := await arrived.get()) is not None:
                    if isinstance(item, Exception):
                        raise item
                    yield item
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)

    def _pieces_of(self, sequence: Sequenced[Any]) -> AsyncGenerator[tuple[Sequenced[Any], TextPiece], None]:
        # Not a generator around a generator: that costs a twentieth of what a token costs.
        return generate(self.backend, self.served, sequence.request, sequence.usage, sequence)


async def _read(
    pieces: AsyncGenerator[tuple[Sequenced[Any], TextPiece], None],
    arrived: asyncio.Queue[tuple[Sequenced[Any], TextPiece] | Exception | None],
    turns: asyncio.Semaphore,
) -> None:
    """Put all pieces into the queue, then None, or the error that ended them. They begin when it is their turn."""
    try:
        async with turns, aclosing(pieces):
            async for each in pieces:
                arrived.put_nowait(each)
    except Exception as error:  # noqa: BLE001 - the reader of the queue raises it
        arrived.put_nowait(error)
    else:
        arrived.put_nowait(None)


async def _next(events: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(events)


class ClientGoneError(ApiError):
    """The client closed its connection before its answer began."""

    def __init__(self) -> None:
        super().__init__("The client closed its connection.", status=_CLIENT_CLOSED_REQUEST)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, which is cancelled when the client goes away; then raise ClientGoneError."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        for task in (working, gone):
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A stream of server-sent events, or of lines."""

    def __init__(
        self, first: bytes, events: AsyncGenerator[bytes, None], headers: Mapping[str, str], media_type: str
    ) -> None:
        # Without this header nginx would collect the events.
        kept = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers}
        super().__init__(headers=kept, media_type=media_type)
        del self.headers["content-length"]
        self._first, self._events = first, events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they end or the client goes away."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        # The layers of Starlette have seen that the answer has begun; events have nothing for them.
        direct = scope.get("state", {}).get("send", send)
        try:
            with suppress(ClientGoneError, OSError):  # OSError: the server found out first
                await while_connected(receive, self._send_all(direct))
        finally:
            await self._events.aclose()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for each in self._events:
            await send({"type": "http.response.body", "body": each, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class Measures:
    """The metrics of one gateway: the times of the streams of OpenAI's API, and of Triton's generate_stream."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        one: dict[str, Any] = {"labelnames": ["model_name", "adapter"], "registry": self._registry}
        self._times = {
            kind: (
                Histogram(
                    f"trtserve_{kind}_time_to_first_token_seconds",
                    "From the request to the first streamed text.",
                    buckets=_FIRST,
                    **one,
                ),
                Histogram(
                    f"trtserve_{kind}_inter_token_seconds", "Between two pieces of streamed text.", buckets=_GAPS, **one
                ),
            )
            for kind in ("openai", "generate")
        }
        # The names that dashboards of vLLM read, for all APIs below /v1.
        self._whole = Histogram("vllm:e2e_request_latency_seconds", "Of whole answers.", buckets=_WHOLE, **one)
        self._running = Gauge(
            "vllm:num_requests_running",
            "Answers that are being made or wait for it.",
            multiprocess_mode="livesum",
            **one,
        )
        self._prompt = Counter("vllm:prompt_tokens", "Tokens of prompts.", **one)
        self._generated = Counter("vllm:generation_tokens", "Tokens of answers.", **one)
        self._ended = Counter(
            "vllm:request_success",
            "Answers that have ended.",
            labelnames=["model_name", "adapter", "finished_reason"],
            registry=self._registry,
        )

    def page(self, adapters: int = 0) -> bytes:
        """Return the metrics in Prometheus' text format, those of all processes of this gateway.

        `adapters` is how many the server has.
        """
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            registry = CollectorRegistry()
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
            return _with_names_of_vllm(generate_latest(registry).decode(), adapters)
        return _with_names_of_vllm(generate_latest(self._registry).decode(), adapters)

    @contextmanager
    def answer(self, labels: tuple[str, str], sequences: Sequence[Sequenced[Any]]) -> Iterator[None]:
        """Count an answer while it is made, and its tokens at its end."""
        began = time.perf_counter()
        running = self._running.labels(*labels)
        running.inc()
        try:
            yield
        finally:
            running.dec()
            self._whole.labels(*labels).observe(time.perf_counter() - began)
            for each in sequences:
                self._prompt.labels(*labels).inc(each.usage.prompt_tokens or 0)
                self._generated.labels(*labels).inc(each.usage.completion_tokens or 0)
                self._ended.labels(*labels, each.answer.finish_reason or "abort").inc()

    def stopwatch(self, kind: Literal["openai", "generate"], labels: tuple[str, str]) -> Stopwatch:
        """Return the times of one streamed answer of a model and an adapter, or no text; they begin now."""
        return Stopwatch(*self._times[kind], labels)


_NAMES_OF_VLLM = {
    "trtserve_openai_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "trtserve_openai_inter_token_seconds": "vllm:inter_token_latency_seconds",
}
_QUEUED = re.compile("^nv_trtserve_queue_seconds(_.*)$", re.MULTILINE)
_RUNNING = re.compile(r'^vllm:num_requests_running{adapter="([^"]+)",.*} ([1-9].*)$', re.MULTILINE)


def _with_names_of_vllm(page: str, adapters: int) -> bytes:
    """Return a page with the histograms that vLLM names otherwise, and its line of the adapters that are at work."""
    again = [
        line.replace(name, other)
        for name, other in _NAMES_OF_VLLM.items()
        for line in page.splitlines(keepends=True)
        if name in line
    ]
    running = ",".join(sorted({adapter for adapter, _ in _RUNNING.findall(page)}))
    # The engine takes adapters in while it runs, so that none waits for a place.
    info = f'{{max_lora="{adapters}",running_lora_adapters="{running}",waiting_lora_adapters=""}} {time.time():.3f}'
    info = f"# TYPE vllm:lora_requests_info gauge\nvllm:lora_requests_info{info}\n"
    return f"{page}{''.join(again)}{info}".encode()


def engine_page(content: bytes) -> bytes:
    """Return what Triton's page says of the engines under the names that vLLM's have.

    Dashboards read them, and the picker of the Gateway API's inference extension.
    """
    page = content.decode(errors="replace")
    cores, lines = core_metrics(parse(page)), list[str]()
    used = {
        core.model: (core.value(KV_BLOCKS, "used") or 0) / most
        for core in cores
        if (most := core.value(KV_BLOCKS, "max"))
    }
    waiting = {core.model: core.value(REQUESTS, "waiting") or 0 for core in cores}
    for name, values in (
        ("num_requests_waiting", waiting),
        ("kv_cache_usage_perc", used),
        ("gpu_cache_usage_perc", used),
    ):
        lines.append(f"# TYPE vllm:{name} gauge")
        lines += [f'vllm:{name}{{model_name="{model}"}} {value:g}' for model, value in values.items()]
    if queued := _QUEUED.findall(page):
        lines.append("# TYPE vllm:request_queue_time_seconds histogram")
        lines += [f"vllm:request_queue_time_seconds{line.replace('model=', 'model_name=')}" for line in queued]
    return ("\n".join(lines) + "\n").encode()


class Stopwatch:
    """Observes the time to the first piece and between pieces."""

    def __init__(self, first: Histogram, later: Histogram, labels: tuple[str, str]) -> None:
        """`labels` are used with the first piece: only then is it known that there is such an adapter."""
        self._first, self._later, self._labels = first, later, labels
        self._now: Histogram | None = None
        self._last = time.perf_counter()

    def piece(self) -> None:
        """Note that a piece came."""
        now = time.perf_counter()
        if self._now is None:
            self._first.labels(*self._labels).observe(now - self._last)
            self._now = self._later.labels(*self._labels)
        else:
            self._now.observe(now - self._last)
        self._last = now
