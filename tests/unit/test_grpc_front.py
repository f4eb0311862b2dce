"""gRPC calls on their way through a gateway: they are counted, bounded, and finished before it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from tests.support.gateways import settings_of
from trtserve.errors import ServerUnreachableError
from trtserve.gateway.admission import Gate
from trtserve.gateway.grpc_front import serve_grpc
from trtserve.gateway.settings import RequestLimits
from trtserve.host.ports import free_ports

HOST = "127.0.0.1"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
LIVE = "/inference.GRPCInferenceService/ServerLive"
LIMITS = RequestLimits(requests=1, body_bytes=1000)


class Call:
    """A call to a server that answers `done` once it may."""

    def __init__(self, requests: AsyncIterator[bytes], server: Server) -> None:
        self._requests, self._server = requests, server

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for request in self._requests:
            self._server.received.append(request)
            if len(self._server.received) == self._server.fails_after:
                raise ServerUnreachableError("it is gone")
        await self._server.may_answer.wait()
        yield b"done"

    def cancel(self) -> None:
        """Nothing runs."""


class Server:
    """A server, its client, and the copies of it: two, which are the same."""

    def __init__(self, fails_after: int = 0) -> None:
        self.client = self
        self.fails_after = fails_after
        self.received: list[bytes] = []
        self.may_answer = asyncio.Event()

    async def reconnected(self) -> None: ...

    def hear(self) -> None: ...

    def raw_call(self, method: str, requests: AsyncIterator[bytes], **_: Any) -> Call:
        return Call(requests, self)

    async def send(self, attempt: Callable[[Any], Awaitable[None]], *, begun: Callable[[], bool]) -> None:
        try:
            await attempt(self)
        except ServerUnreachableError:
            if begun():
                raise
            await attempt(self)


@asynccontextmanager
async def front(server: Server) -> AsyncIterator[tuple[Gate, Callable[..., Any]]]:
    """A gateway's gate, and what calls it."""
    gate, (port,) = Gate(LIMITS), free_ports(HOST, 1)
    settings = settings_of(limits=LIMITS, grpc_front_port=port)
    serving = await serve_grpc(settings, server, gate)  # type: ignore[arg-type]
    async with grpc.aio.insecure_channel(f"{HOST}:{port}") as channel:

        async def call(*messages: bytes, method: str = STREAM, requests: Any = None) -> list[bytes]:
            sent = iter(messages) if requests is None else requests
            return [answer async for answer in channel.stream_stream(method)(sent, timeout=20)]

        try:
            yield gate, call
        finally:
            await serving.stop(0)


async def silence() -> AsyncIterator[bytes]:
    """Send nothing: gRPC's client ends with an error of its own where a message meets a call that was refused."""
    await asyncio.sleep(1)
    yield b""


def test_calls_take_a_place_until_they_end() -> None:
    async def scenario() -> None:
        server = Server()
        async with front(server) as (gate, call):
            first = asyncio.create_task(call(b"a"))
            while not server.received:
                await asyncio.sleep(0.01)
            assert gate.running == 1  # what the gateway's end waits for
            with pytest.raises(grpc.RpcError, match="1 requests are running"):
                await call(requests=silence())
            server.may_answer.set()
            assert await call(b"", method=LIVE) == [b"done"]
            assert await first == [b"done"]
            assert gate.running == 0
            gate.draining = True
            for method in (STREAM, LIVE):
                with pytest.raises(grpc.RpcError, match="the server is stopping"):
                    await call(method=method, requests=silence())

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_message_is_as_large_as_a_body_may_be() -> None:
    async def scenario() -> None:
        server = Server()
        server.may_answer.set()
        async with front(server) as (_, call):
            assert await call(bytes(1000)) == [b"done"]
            with pytest.raises(grpc.RpcError) as refused:
                await call(bytes(1001))
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

    asyncio.run(asyncio.wait_for(scenario(), 60))


@pytest.mark.parametrize(("size", "moves"), [(300, True), (600, False)])
def test_a_call_moves_on_while_what_was_sent_is_kept(size: int, moves: bool) -> None:
    async def scenario() -> None:
        server = Server(fails_after=2)
        server.may_answer.set()
        async with front(server) as (_, call):
            sent = [bytes([1]) * size, bytes([2]) * size]
            if moves:
                assert await call(*sent) == [b"done"]
                assert server.received == sent + sent
            else:
                with pytest.raises(grpc.RpcError, match="it is gone"):
                    await call(*sent)

    asyncio.run(asyncio.wait_for(scenario(), 60))


@pytest.mark.parametrize("answered", [True, False])
def test_a_silent_stream_does_not_hold_up_the_end(answered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One with an open question does: its answer may take long."""
    monkeypatch.setattr("trtserve.gateway.admission._IDLE_AT_THE_END", 0.3)

    async def scenario() -> None:
        server, open_end = Server(), asyncio.Event()

        async def requests() -> AsyncIterator[bytes]:
            if not answered:
                yield b"a"
            await open_end.wait()

        async with front(server) as (gate, call):
            sweeping = asyncio.create_task(gate.sweep())
            stream = asyncio.create_task(call(requests=requests()))
            while not gate.running:
                await asyncio.sleep(0.01)
            gate.draining = True
            if answered:
                with pytest.raises(grpc.RpcError, match="the server is stopping"):
                    await stream
            else:
                await asyncio.sleep(1.5)
                assert gate.running == 1
                server.may_answer.set()
                open_end.set()
                assert await stream == [b"done"]
            assert gate.running == 0
            sweeping.cancel()

    asyncio.run(asyncio.wait_for(scenario(), 60))
