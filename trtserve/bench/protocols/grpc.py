"""gRPC: a stream for decoupled models, a unary call for the others.

asyncio on gRPC's own channel, with messages as bytes: a response costs 35 - 40 µs of CPU, tritonclient's classes two to
three times that. The client shares the machine with the server, so its cost is part of what it measures.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from trtserve.bench.messages import read_response, request_message
from trtserve.bench.protocols.base import (
    Chunk,
    Pressure,
    RefusedError,
    Target,
)
from trtserve.bench.records import Response
from trtserve.bench.requests import TrafficRequest
from trtserve.client.call_errors import explain_rpc_error, plain, silent
from trtserve.client.grpc_client import open_channel

_SERVICE = "/inference.GRPCInferenceService"


class GrpcTransport:
    """One HTTP/2 connection to a Triton server."""

    def __init__(self, target: Target, *, timeout: float) -> None:
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
        import grpc

        endpoint = self._target.endpoint
        self._channel = open_channel(endpoint, grpc.aio)
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
            raise RefusedError(str(explain_rpc_error(error, self._target.endpoint.grpc))) from error
        finally:
            call.cancel()

    def read(self, chunk: Chunk) -> Response:
        from tritonclient.grpc import service_pb2

        time_ns, content = chunk
        if not self._target.model.decoupled:
            return read_response(self._target.model, service_pb2.ModelInferResponse.FromString(content), time_ns)
        streamed = service_pb2.ModelStreamInferResponse.FromString(content)
        if streamed.error_message:
            return Response(time_ns=time_ns, error=plain(streamed.error_message))
        return read_response(self._target.model, streamed.infer_response, time_ns)

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()
