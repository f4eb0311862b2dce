"""The seam between requests and protocols: an asynchronous transport, and a client on top of it for code that waits.

`grpc_transport.py` and `http_transport.py` are the transports of a server. An executor in this process is a
`SyncClient` of its own, because its interface waits.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

from trtserve.client.endpoint import RequestCancelledError
from trtserve.client.tensors import ModelDescription, Reply, Tensor, stop_tensors

STOP_TIMEOUT = 2.0
_END_TIMEOUT = 1.0

T = TypeVar("T")


class Transport(Protocol):
    """A protocol's connection to one server, made and used in one event loop."""

    async def describe(self, model: str) -> ModelDescription:
        """Read the configuration of a running model; RequestError lists the models when it is unknown."""

    async def model_names(self) -> list[str]:
        """Return the names of all models that are ready."""

    def infer(
        self,
        model: ModelDescription,
        tensors: Sequence[Tensor],
        *,
        request_id: str,
        stream: bool,
        outputs: Sequence[str] = (),
        timeout: float | None = None,
    ) -> AsyncGenerator[Reply, None]:
        """Send one request and yield its responses; a task that is cancelled cancels the request.

        `outputs` limits the outputs; empty: all. `timeout` replaces the transport's own limit for an answer. Raises
        RequestError when the server refuses the request, ServerUnreachableError when it does not answer.
        """

    async def close(self) -> None:
        """Close the connection, which ends running requests."""


class SyncClient(Protocol):
    """A connection for code that waits: the methods of a transport without `await`."""

    def describe(self, model: str) -> ModelDescription: ...
    def model_names(self) -> list[str]: ...
    def infer(
        self,
        model: ModelDescription,
        tensors: Sequence[Tensor],
        *,
        request_id: str,
        stream: bool,
        outputs: Sequence[str] = (),
    ) -> Iterator[Reply]:
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

    def infer(
        self,
        model: ModelDescription,
        tensors: Sequence[Tensor],
        *,
        request_id: str,
        stream: bool,
        outputs: Sequence[str] = (),
    ) -> Iterator[Reply]:
        if self._cancelled.is_set():
            raise RequestCancelledError("The request was cancelled.")
        arrived: queue.SimpleQueue[Reply | None] = queue.SimpleQueue()
        replies = self._transport.infer(model, tensors, request_id=request_id, stream=stream, outputs=outputs)

        async def read() -> None:
            async with aclosing(replies):
                async for reply in replies:
                    arrived.put(reply)

        self._request = request = asyncio.run_coroutine_threadsafe(read(), self._loop)
        request.add_done_callback(lambda _: arrived.put(None))
        while (reply := arrived.get()) is not None:
            yield reply
        # A connection may end just before the cancellation: what the caller asked for is what counts.
        if request.cancelled() or (self._cancelled.is_set() and request.exception() is not None):
            raise RequestCancelledError("The request was cancelled.")
        request.result()

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


def stop_request(client: SyncClient, core: ModelDescription, request_id: str) -> None:
    """Ask the core model to stop the requests with this id, as NVIDIA's client does for `--stop-after-ms`.

    Needed when a cancelled call does not reach the engine (ensembles check for it only between their steps). An
    unknown id is not an error, so this is harmless when the cancellation came first.
    """
    for _ in client.infer(core, stop_tensors(core), request_id=request_id, stream=core.decoupled):
        pass
