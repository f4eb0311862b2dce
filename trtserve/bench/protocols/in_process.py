"""An executor in this process instead of a server: what the engine does without Triton, protocol and client."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import ExitStack
from typing import Any

from trtserve.bench.messages import read_values, request_tensors
from trtserve.bench.protocols.base import (
    Chunk,
    Pressure,
    RefusedError,
    Target,
)
from trtserve.bench.records import Response
from trtserve.bench.requests import TrafficRequest
from trtserve.errors import RequestError, UsageError
from trtserve.server.local_engine import find_local_engine


class InProcessTransport:
    """One executor; a thread hands its responses to the requests that wait for them."""

    def __init__(self, target: Target, *, timeout: float) -> None:
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
            raise RefusedError(error.message) from error
        numbers = list(rows)
        try:
            await asyncio.wait_for(ended, self._timeout)
        except asyncio.TimeoutError:
            raise RefusedError(f"no complete answer within {self._timeout:g} s") from None
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

    def read(self, chunk: Chunk) -> Response:
        time_ns, (answer, rows) = chunk
        try:
            reply = self._client.reply(answer, dict(rows))  # a turn of a conversation is read twice
        except RequestError as error:
            return Response(time_ns=time_ns, error=error.message)
        outputs = {name: array.reshape(-1).tolist() for name, array in reply.outputs.items()}
        return read_values(self._target.model, outputs, time_ns)

    async def close(self) -> None:
        self._ended = True
        self._reader.join()
        self._open.close()


def _settle(ended: asyncio.Future[None]) -> None:
    if not ended.done():
        ended.set_result(None)
