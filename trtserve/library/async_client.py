"""`trtserve.AsyncClient`: many requests at once in one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, closing
from types import TracebackType
from typing import Any

from trtserve.client.aio_client import AioClient
from trtserve.client.answer import Answer
from trtserve.client.generation import Generation
from trtserve.client.grpc_client import infer_request
from trtserve.client.query import (
    connect,
    request_contexts,
    request_id_of,
    stop_in_engine,
)
from trtserve.client.request import RequestContext, request_tensors
from trtserve.client.spec import QuerySpec
from trtserve.errors import RequestError
from trtserve.library.client import require_complete
from trtserve.library.requests import Asker, Prompt, Turns


class AsyncClient(Asker):
    """As `Client`, for asyncio: all requests share one gRPC connection, which the `async with` block closes."""

    _connection: AioClient | None = None

    async def ask(
        self, prompt: Prompt, *, system: str | None = None, history: Turns = (), **options: Any
    ) -> Generation:
        """Return the whole answer. Takes and raises what `Client.ask` does."""
        stream = self._stream(self._spec(prompt, system, history, options))
        return await stream.answer()

    def stream(
        self, prompt: Prompt, *, system: str | None = None, history: Turns = (), **options: Any
    ) -> AsyncTextStream:
        """Return the pieces of the answer's text as they are generated. Takes and raises what `Client.stream` does."""
        return self._stream(self._spec(prompt, system, history, options, stream=True))

    async def close(self) -> None:
        """Close the connection, which ends running requests."""
        if self._connection is not None:
            await self._connection.close()
            self._connection = None

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def _stream(self, spec: QuerySpec) -> AsyncTextStream:
        stream = AsyncTextStream()
        stream.pieces = self._pieces(spec, stream)
        return stream

    async def _pieces(self, spec: QuerySpec, stream: AsyncTextStream) -> AsyncGenerator[str, None]:
        context = await asyncio.to_thread(self._context, spec)
        request_id = request_id_of(spec)
        request = infer_request(
            context.model.name, request_tensors(context), request_id=request_id, outputs=spec.outputs
        )
        self._connection = self._connection or AioClient(self._server)
        answer = Answer(context)
        replies = self._connection.infer(request, decoupled=context.model.decoupled, timeout=spec.timeout)
        try:
            async with aclosing(replies):
                async for reply in replies:
                    if text := answer.add(reply):
                        yield text
        except (asyncio.CancelledError, GeneratorExit, RequestError):
            # As in `trtserve.client.query.stream`: a cancelled call does not reach the engine on every path.
            await asyncio.shield(asyncio.to_thread(stop_in_engine, context, self._server, request_id))
            raise
        stream.received = answer.generation(request_id)

    def _context(self, spec: QuerySpec) -> RequestContext:
        with closing(connect(spec, self._server)) as client:
            return request_contexts(spec, self._server, client)[0]


class AsyncTextStream(AsyncIterator[str]):
    """The pieces of an answer's text. Use an `async with` block where the loop may end early."""

    pieces: AsyncGenerator[str, None]
    received: Generation | None = None

    async def __anext__(self) -> str:
        return await anext(self.pieces)

    async def answer(self) -> Generation:
        """Return the whole answer; reads the pieces that are left. Raises UsageError for a closed stream."""
        async for _ in self:
            pass
        return require_complete(self.received)

    async def close(self) -> None:
        """End the request if it still runs."""
        await self.pieces.aclose()

    async def __aenter__(self) -> AsyncTextStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
