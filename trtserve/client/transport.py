"""The seam between requests and protocols: an asynchronous transport, and a client on top of it for code that waits.

`grpc_transport.py` and `http_transport.py` are the transports of a server. An executor in this process is a
`SyncClient` of its own, because its interface waits.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from concurrent.futures import Future, wait
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

from trtserve.client.endpoint import RequestCancelledError
from trtserve.client.tensors import ModelDescription, ModelRequest, Reply

STOP_TIMEOUT = 2.0
_END_TIMEOUT = 1.0

T = TypeVar("T")


class Transport(Protocol):
    """A protocol's connection to one server, made and used in one event loop."""

    async def describe(self, model: str) -> ModelDescription:
        """Read the configuration of a running model; RequestError lists the models when it is unknown."""

    async def model_names(self) -> list[str]:
        """Return the names of all models that are ready."""

    def infer(self, request: ModelRequest) -> AsyncGenerator[Reply, None]:
        """Send one request and yield its responses; a task that is cancelled cancels the request.

        Raises RequestError when the server refuses the request, ServerUnreachableError when it does not answer.
        """

    async def close(self) -> None:
        """Close the connection, which ends running requests."""


class SyncClient(Protocol):
    """A connection for code that waits: the methods of a transport without `await`."""

    def describe(self, model: str) -> ModelDescription: ...
    def model_names(self) -> list[str]: ...
    def infer(self, request: ModelRequest) -> Iterator[Reply]:
        """Send one request and yield its responses; closing the client ends a running request."""

    def cancel(self) -> None:
        """Cancel the running request from another thread: its iterator raises RequestCancelledError."""

    def close(self) -> None: ...


class TransportClient:
    """A SyncClient over a transport, whose event loop runs in a thread.

    So an interrupt of the main thread leaves the running request intact, and there is time to stop it in the engine.
    """

    def __init__(self, make: Callable[[], Transport]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="client")
        self._thread.start()
        self._request: Future[None] | None = None
        self._cancelled = threading.Event()

        async def made() -> Transport:
            return make()

        try:
            self._transport = self._run(made())
        except BaseException:
            self._stop_loop()
            raise

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def describe(self, model: str) -> ModelDescription:
        return self._run(self._transport.describe(model))

    def model_names(self) -> list[str]:
        return self._run(self._transport.model_names())

    def infer(self, request: ModelRequest) -> Iterator[Reply]:
        arrived: queue.SimpleQueue[Reply | None] = queue.SimpleQueue()
        replies = self._transport.infer(request)

        async def read() -> None:
            if self._cancelled.is_set():
                raise asyncio.CancelledError
            async with aclosing(replies):
                async for reply in replies:
                    arrived.put(reply)

        self._request = reading = asyncio.run_coroutine_threadsafe(read(), self._loop)
        reading.add_done_callback(lambda _: arrived.put(None))
        if self._cancelled.is_set():  # after the task began, before `cancel` could find it
            reading.cancel()
        while (reply := arrived.get()) is not None:
            yield reply
        # A connection may end just before the cancellation: what the caller asked for is what counts.
        if reading.cancelled() or (self._cancelled.is_set() and reading.exception() is not None):
            raise RequestCancelledError("The request was cancelled.")
        reading.result()

    def cancel(self) -> None:
        self._cancelled.set()
        if self._request is not None:
            self._request.cancel()

    def close(self) -> None:
        """Close the connection, which ends a running request; one that was stopped first gets a moment to end.

        Cancelling a call at the moment when its answer ends can crash the gRPC front end of Triton 2.51.
        """
        if self._loop.is_closed():
            return
        if self._request is not None:
            wait([self._request], timeout=_END_TIMEOUT)
        self._run(self._end())
        self._stop_loop()

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._transport.close()
        await self._loop.shutdown_asyncgens()

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
