"""Connections to a gRPC server that is not there yet."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from trtserve.client.endpoint import Endpoint
from trtserve.client.grpc_transport import GrpcTransport, open_channel
from trtserve.client.tensors import ModelDescription, ModelRequest
from trtserve.errors import ServerUnreachableError
from trtserve.host.ports import free_ports

LONG = 60.0


def test_a_server_that_was_away_is_found_soon() -> None:
    """gRPC's own pauses between attempts are 1, 1.6, 2.6 and 4.1 seconds."""
    attempts = list[float]()

    async def refuse(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        attempts.append(time.monotonic())
        writer.close()

    async def connect() -> None:
        async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
            channel = open_channel(Endpoint(grpc_port=server.sockets[0].getsockname()[1]))
            while len(attempts) < 5:
                channel.get_state(try_to_connect=True)
                await asyncio.sleep(0.02)
            await channel.close()

    asyncio.run(asyncio.wait_for(connect(), LONG))
    assert attempts[4] - attempts[3] < 2


class Triton(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    async def ModelInfer(self, request: Any, _: object) -> Any:  # noqa: N802 - of the protocol
        return service_pb2.ModelInferResponse(model_name=request.model_name)

    async def RepositoryIndex(self, _: object, __: object) -> Any:  # noqa: N802 - of the protocol
        return service_pb2.RepositoryIndexResponse(models=[{"name": "m"}])


@asynccontextmanager
async def serving(port: int) -> AsyncIterator[None]:
    server = grpc.aio.server()
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Triton(), server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield
    finally:
        await server.stop(None)


def test_a_connection_does_not_repeat_what_another_one_met() -> None:
    """The gateway connects while its Triton loads; a request that comes later must not be refused for it."""

    async def ask() -> None:
        (port,) = free_ports("127.0.0.1", 1)
        early, late = open_channel(Endpoint(grpc_port=port)), GrpcTransport(Endpoint(grpc_port=port), timeout=LONG)
        state = early.get_state(try_to_connect=True)
        while state is not grpc.ChannelConnectivity.TRANSIENT_FAILURE:
            await early.wait_for_state_change(state)
            state = early.get_state(try_to_connect=True)
        async with serving(port):
            assert await late.model_names() == ["m"]
            await late.close()
            await early.close()

    asyncio.run(asyncio.wait_for(ask(), LONG))


def test_a_server_that_has_just_come_is_not_refused() -> None:
    """While gRPC pauses between two tries it refuses calls at once, though the server has come meanwhile."""

    async def ask() -> None:
        (port,) = free_ports("127.0.0.1", 1)
        transport = GrpcTransport(Endpoint(grpc_port=port), timeout=LONG)
        model = ModelDescription(name="m", decoupled=False, max_batch_size=0, inputs={}, outputs={})
        for _ in range(20):
            with pytest.raises(ServerUnreachableError):
                await anext(transport.infer(ModelRequest(model=model, tensors=[], id="")))
            state = transport._channel.get_state()
            if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                break
        async with serving(port):
            reply = await anext(transport.infer(ModelRequest(model=model, tensors=[], id="")))
            assert not reply.outputs
            await transport.close()

    asyncio.run(ask())
