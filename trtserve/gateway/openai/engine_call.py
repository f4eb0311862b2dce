"""One request to Triton: its responses as they come, and its end in the engine when the client has gone."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from trtserve.client.grpc_client import infer_request
from trtserve.client.request import IDS_INPUT
from trtserve.client.tensors import Reply, stop_tensors
from trtserve.client.transport import STOP_TIMEOUT
from trtserve.errors import RequestError, TrtserveError
from trtserve.gateway.openai.request import EngineRequest, with_adapter_weights
from trtserve.gateway.openai.served import Backend, Served
from trtserve.programs.shared.lora_names import NOT_CACHED

# A stop that arrives before its request has no effect: it is repeated, ever more rarely, until the request has ended.
_FIRST_PAUSE = 0.25
_STOPPED_WITHIN = 60.0


class EngineCall:
    """A request that is running.

    A task of its own reads the responses: cancelling a read cancels the call, and that can crash the gRPC front end of
    Triton 2.51 when the answer ends at the same moment. A request is stopped by its id instead.
    """

    def __init__(self, backend: Backend, served: Served, request: EngineRequest) -> None:
        self._backend, self._served, self._request = backend, served, request
        self._id = uuid.uuid4().hex
        self._arrived: asyncio.Queue[Reply | Exception | None] = asyncio.Queue()
        self._reader = backend.spawn(self._read())

    async def replies(self) -> AsyncIterator[list[Reply]]:
        """Yield the responses, all that have arrived at a time. Raises RequestError or ServerUnreachableError."""
        while True:
            arrived = [await self._arrived.get()]
            while not self._arrived.empty():
                arrived.append(self._arrived.get_nowait())
            if replies := [each for each in arrived if isinstance(each, Reply)]:
                yield replies
            if isinstance(error := arrived[-1], Exception):
                raise error
            if error is None:
                return

    def abandon(self) -> None:
        """Stop the request in the engine, unless it has ended."""
        if not self._reader.done():
            self._backend.spawn(self._stop())

    async def _read(self) -> None:
        try:
            await self._read_from(self._request)
        except Exception as error:  # noqa: BLE001 - the reader of the queue raises it
            self._arrived.put_nowait(error)
        else:
            self._arrived.put_nowait(None)

    async def _read_from(self, request: EngineRequest) -> None:
        model = self._served.model
        message = infer_request(
            model.name, list(request.tensors.values()), request_id=self._id, outputs=request.outputs
        )
        try:
            async for reply in self._infer(message, decoupled=model.decoupled, timeout=self._backend.timeout):
                self._arrived.put_nowait(reply)
        except RequestError as error:
            if request.adapter is None or "lora_weights" in request.tensors or NOT_CACHED not in error.message:
                raise
            await self._read_from(with_adapter_weights(self._served, request))

    async def _stop(self) -> None:
        core = self._served.core
        if core is None or IDS_INPUT not in core.inputs:  # the LLM API's model sees that its call was cancelled
            self._reader.cancel()
            return
        message = infer_request(core.name, stop_tensors(core), request_id=self._id)
        deadline, pause = time.monotonic() + _STOPPED_WITHIN, _FIRST_PAUSE
        while not self._reader.done():
            if time.monotonic() > deadline:  # the engine hangs
                self._reader.cancel()
                return
            with suppress(TrtserveError):  # the server may be gone
                async for _ in self._infer(message, decoupled=core.decoupled, timeout=STOP_TIMEOUT):
                    pass
            await asyncio.wait({self._reader}, timeout=pause)
            pause *= 2

    def _infer(self, message: Any, *, decoupled: bool, timeout: float) -> AsyncIterator[Reply]:
        return self._backend.client.infer(message, decoupled=decoupled, timeout=timeout)
