"""Run the sequences of one answer, and send it as a whole or as a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from trtserve.errors import TrtserveError
from trtserve.gateway.openai.answers import (
    DONE,
    ChatAnswer,
    Completion,
    Envelope,
    Json,
    event,
    usage_json,
)
from trtserve.gateway.openai.connection import ClientGoneError, EventStream, while_connected
from trtserve.gateway.openai.errors import ApiError, api_error
from trtserve.gateway.openai.generation import Piece, Usage, generate
from trtserve.gateway.openai.measures import Measures
from trtserve.gateway.openai.request import EngineRequest
from trtserve.gateway.openai.served import Backend, Served

Choice = Completion | ChatAnswer


@dataclass(kw_only=True)
class Sequenced:
    """One sequence of an answer: its request, its choice, and its tokens."""

    request: EngineRequest
    choice: Choice
    usage: Usage = field(default_factory=Usage)


@dataclass(frozen=True, kw_only=True)
class Answering:
    """One answer that is being generated."""

    backend: Backend
    served: Served
    measures: Measures
    envelope: Envelope
    sequences: Sequence[Sequenced]
    """Those of the first prompt, then those of the next one."""
    prompts: int = 1
    kept: int
    """Choices of each prompt that are returned."""

    async def respond(self, request: Request, *, stream: bool, usage_in_stream: bool) -> Response:
        """Return the response. A client that goes away ends the sequences in the engine.

        Raises ApiError or TrtserveError for an error before the first token.
        """
        headers = {"x-request-id": self.envelope.id}
        try:
            if stream:
                events = self._events(usage_in_stream=usage_in_stream)
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

    async def _events(self, *, usage_in_stream: bool) -> AsyncGenerator[bytes, None]:
        """Yield the events of a stream. An error is raised before the first event, and is an event after it."""
        more: Json = {"usage": None} if usage_in_stream else {}
        watches = {each.choice.index: self.measures.stopwatch() for each in self.sequences}
        begun = False
        try:
            async with aclosing(self._pieces()) as pieces:
                async for sequence, piece in pieces:
                    watches[sequence.choice.index].piece()
                    if choices := sequence.choice.add(piece):
                        begun = True
                        yield b"".join(self.envelope.chunk([choice], **more) for choice in choices)
        except (ApiError, TrtserveError) as error:
            if not begun:
                raise
            yield event((api_error(error) if isinstance(error, TrtserveError) else error).body)
        else:
            if usage_in_stream:
                yield self.envelope.chunk([], usage=self._usage())
        yield DONE

    async def _pieces(self) -> AsyncGenerator[tuple[Sequenced, Piece], None]:
        """Yield the pieces of all sequences as they come."""
        if len(self.sequences) == 1:
            async with aclosing(self._pieces_of(self.sequences[0])) as pieces:
                async for each in pieces:
                    yield each
            return
        arrived: asyncio.Queue[tuple[Sequenced, Piece] | Exception | None] = asyncio.Queue()
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

    async def _pieces_of(self, sequence: Sequenced) -> AsyncGenerator[tuple[Sequenced, Piece], None]:
        async with aclosing(generate(self.backend, self.served, sequence.request, sequence.usage)) as pieces:
            async for piece in pieces:
                yield sequence, piece


async def _read(
    pieces: AsyncGenerator[tuple[Sequenced, Piece], None],
    arrived: asyncio.Queue[tuple[Sequenced, Piece] | Exception | None],
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
