"""Run the sequences of one answer, and send it as a whole or as a stream, until its client goes away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from starlette.types import Receive, Scope, Send

from trtserve.errors import TrtserveError
from trtserve.gateway.openai.answers import (
    DONE,
    ChatAnswer,
    Completion,
    Envelope,
    Json,
    TextPiece,
    TokenUsage,
    event,
    usage_json,
)
from trtserve.gateway.openai.bodies import Sampling, StreamOptions
from trtserve.gateway.openai.errors import ApiError, api_error
from trtserve.gateway.openai.generation import generate
from trtserve.gateway.openai.request import EngineRequest
from trtserve.gateway.openai.served import Backend, ServedModel

Choice = Completion | ChatAnswer
_CLIENT_CLOSED_REQUEST = 499  # nginx's; nobody reads it
T = TypeVar("T")
_FIRST = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 20, 30, 60)
_GAPS = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2)


@dataclass(kw_only=True)
class Sequenced:
    """One sequence of an answer: its request, its choice, and its tokens."""

    request: EngineRequest
    choice: Choice
    usage: TokenUsage = field(default_factory=TokenUsage)


@dataclass(frozen=True, kw_only=True)
class Answering:
    """One answer that is being generated."""

    backend: Backend
    served: ServedModel
    measures: Measures
    envelope: Envelope
    sequences: Sequence[Sequenced]
    """Those of the first prompt, then those of the next one."""
    prompts: int = 1
    kept: int
    """Choices of each prompt that are returned."""

    async def respond(self, request: Request, body: Sampling) -> Response:
        """Return the response. A client that goes away ends the sequences in the engine.

        Raises ApiError or TrtserveError for an error before the first token.
        """
        headers = {"x-request-id": self.envelope.id}
        try:
            if body.stream:
                events = self._events(body.stream_options or StreamOptions())
                first = await while_connected(request.receive, _next(events))
                return EventStream(_from(first, events), headers)
            await while_connected(request.receive, self._collect())
        except ClientGoneError as error:
            return error.response
        choices = [choice.whole() for choice in self._best()]
        return JSONResponse(self.envelope.whole(choices, self._usage()), headers=headers)

    def _usage(self) -> Json | None:
        usages = [each.usage for each in self.sequences]
        return usage_json(usages, usages[:: len(usages) // self.prompts])

    def _best(self) -> list[Choice]:
        """Return the kept choices of each prompt, the likeliest first if there are more, numbered anew."""
        choices = [each.choice for each in self.sequences]
        size = len(choices) // self.prompts
        if size == self.kept:
            return choices
        best: list[Choice] = []
        for start in range(0, len(choices), size):
            group = [choice for choice in choices[start : start + size] if isinstance(choice, Completion)]
            best += sorted(group, key=lambda choice: -choice.mean_log_prob)[: self.kept]
        for index, choice in enumerate(best):
            choice.index = index
        return best

    async def _collect(self) -> None:
        async with aclosing(self._pieces()) as pieces:
            async for sequence, piece in pieces:
                sequence.choice.add(piece)

    async def _events(self, options: StreamOptions) -> AsyncGenerator[bytes, None]:
        """Yield the events of a stream. An error is raised before the first event, and is an event after it."""
        more: Json = {"usage": None} if options.include_usage else {}
        watches = {each.choice.index: self.measures.stopwatch() for each in self.sequences}
        begun = False
        try:
            async with aclosing(self._pieces()) as pieces:
                async for sequence, piece in pieces:
                    watches[sequence.choice.index].piece()
                    if choices := sequence.choice.add(piece):
                        begun = True
                        if options.continuous_usage_stats:
                            more = {"usage": self._usage()}
                        yield b"".join(self.envelope.chunk([choice], **more) for choice in choices)
        except (ApiError, TrtserveError) as error:
            if not begun:
                raise
            yield event((api_error(error) if isinstance(error, TrtserveError) else error).body)
        else:
            if options.include_usage:
                yield self.envelope.chunk([], usage=self._usage())
        yield DONE

    async def _pieces(self) -> AsyncGenerator[tuple[Sequenced, TextPiece], None]:
        """Yield the pieces of all sequences as they come."""
        if len(self.sequences) == 1:
            async with aclosing(self._pieces_of(self.sequences[0])) as pieces:
                async for each in pieces:
                    yield each
            return
        arrived: asyncio.Queue[tuple[Sequenced, TextPiece] | Exception | None] = asyncio.Queue()
        readers = [asyncio.create_task(_read(self._pieces_of(sequence), arrived)) for sequence in self.sequences]
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

    async def _pieces_of(self, sequence: Sequenced) -> AsyncGenerator[tuple[Sequenced, TextPiece], None]:
        async with aclosing(generate(self.backend, self.served, sequence.request, sequence.usage)) as pieces:
            async for piece in pieces:
                yield sequence, piece


async def _read(
    pieces: AsyncGenerator[tuple[Sequenced, TextPiece], None],
    arrived: asyncio.Queue[tuple[Sequenced, TextPiece] | Exception | None],
) -> None:
    """Put all pieces into the queue, then None, or the error that ended them."""
    try:
        async with aclosing(pieces):
            async for each in pieces:
                arrived.put_nowait(each)
    except Exception as error:  # noqa: BLE001 - the reader of the queue raises it
        arrived.put_nowait(error)
    else:
        arrived.put_nowait(None)


async def _next(events: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(events)


async def _from(first: bytes, events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(events):
        yield first
        async for each in events:
            yield each


class ClientGoneError(Exception):
    """The client closed its connection before its answer began."""

    response = Response(status_code=_CLIENT_CLOSED_REQUEST)


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
    """A stream of server-sent events."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], headers: Mapping[str, str] | None = None) -> None:
        # Without this header nginx would collect the events.
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they end or the client goes away."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            with suppress(ClientGoneError, OSError):  # OSError: the server found out first
                await while_connected(receive, self._send_all(send))
        finally:
            await self._events.aclose()

    async def _send_all(self, send: Send) -> None:
        async for each in self._events:
            await send({"type": "http.response.body", "body": each, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class Measures:
    """The metrics of one gateway: the times of the streams of OpenAI's API, and of Triton's generate_stream."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._times = {
            kind: (
                Histogram(
                    f"trtserve_{kind}_time_to_first_token_seconds",
                    "From the request to the first streamed text.",
                    buckets=_FIRST,
                    registry=self._registry,
                ),
                Histogram(
                    f"trtserve_{kind}_inter_token_seconds",
                    "Between two pieces of streamed text.",
                    buckets=_GAPS,
                    registry=self._registry,
                ),
            )
            for kind in ("openai", "generate")
        }

    def page(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def stopwatch(self, kind: Literal["openai", "generate"] = "openai") -> Stopwatch:
        """Return the times of one streamed answer, which begin now."""
        return Stopwatch(*self._times[kind])


class Stopwatch:
    """Observes the time to the first piece and between pieces."""

    def __init__(self, first: Histogram, gaps: Histogram) -> None:
        self._histogram, self._gaps = first, gaps
        self._last = time.perf_counter()

    def piece(self) -> None:
        """Note that a piece came."""
        now = time.perf_counter()
        self._histogram.observe(now - self._last)
        self._histogram, self._last = self._gaps, now
