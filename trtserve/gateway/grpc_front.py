"""gRPC calls for several copies of a server: each is passed on, byte for byte, to the copy with the least to do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc

from trtserve.client.grpc_transport import CHANNEL_OPTIONS
from trtserve.errors import PortInUseError, ServerUnreachableError
from trtserve.gateway.admission import Exchange, Gate
from trtserve.gateway.asgi import RefusedError
from trtserve.gateway.replicas import Replica, Replicas
from trtserve.gateway.settings import GatewaySettings

_WAITING = 4  # requests of a stream that its server has not taken yet
_PASSED_ON = ("triton-grpc-protocol-", "traceparent")
_HEALTH = "/grpc.health.v1.Health/"
_SERVICES = ("/inference.GRPCInferenceService/", _HEALTH)
_UNCOUNTED = ("/inference.GRPCInferenceService/ServerLive", "/inference.GRPCInferenceService/ServerReady", _HEALTH)
"""Load balancers ask these; as over HTTP they take no place."""


class GrpcFront(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Takes any method of Triton's services. The servers themselves look at keys.

    A call counts among the requests of the gateway while it is open, a stream for as long as its client keeps it. It
    may be silent for as long as a request over HTTP may take, and for seconds when the gateway is to end.
    """

    def __init__(self, replicas: Replicas, gate: Gate, kept_bytes: int) -> None:
        """`kept_bytes` of what a client sends before the answer begins are kept for another server."""
        self._replicas, self._gate, self._kept_bytes = replicas, gate, kept_bytes

    def service(self, handler_call_details: Any) -> Any:
        """Return what passes on the calls of a method: one request and one answer are streams of length one."""
        method = handler_call_details.method
        if not method.startswith(_SERVICES):
            return None

        async def passed_on(requests: AsyncIterator[bytes], context: Any) -> None:
            task = asyncio.current_task()
            assert task is not None
            exchange = Exchange(task=task)
            passage = _Passage(method, requests, context, self._kept_bytes, exchange)
            if method.startswith(_UNCOUNTED) and not self._gate.draining:
                await passage.run(self._replicas)
                return
            try:
                with self._gate.enter(exchange), self._gate.watch(exchange):
                    await passage.run(self._replicas)
            except RefusedError as refusal:
                await context.abort(grpc.StatusCode.UNAVAILABLE, refusal.text)
            except asyncio.CancelledError:
                if exchange.refusal is None:  # the client has gone
                    raise
                await context.abort(grpc.StatusCode.UNAVAILABLE, exchange.refusal.text)

        return grpc.stream_stream_rpc_method_handler(passed_on)


class _Passage:
    """One call. What the client has sent is kept until an answer comes, for another server, unless it is too much."""

    def __init__(
        self, method: str, requests: AsyncIterator[bytes], context: Any, kept_bytes: int, exchange: Exchange
    ) -> None:
        self._method, self._requests, self._context = method, requests, context
        self._room, self._exchange = kept_bytes, exchange
        self._unanswered = 0
        self._spoken()
        self._arrived: asyncio.Queue[bytes | None] = asyncio.Queue(_WAITING)
        self._sent: list[bytes | None] = []
        self._settled = False
        """Whether the call stays with its server: an answer has begun, or the client has sent too much to be kept."""

    async def run(self, replicas: Replicas) -> None:
        """Pass on the call, and its error if it fails."""
        receiving = asyncio.create_task(self._receive())
        try:
            await replicas.send(self._attempt, begun=lambda: self._settled)
        except grpc.RpcError as error:
            await self._context.abort(error.code(), error.details() or "")
        except ServerUnreachableError as error:
            await self._context.abort(grpc.StatusCode.UNAVAILABLE, error.message)
        finally:
            receiving.cancel()
            with suppress(asyncio.CancelledError, grpc.RpcError):
                await receiving

    async def _receive(self) -> None:
        """Take what the client sends: a read of gRPC must not be cancelled with an attempt."""
        async for request in self._requests:
            self._spoken(asked=1)
            await self._arrived.put(request)
        await self._arrived.put(None)

    async def _feed(self) -> AsyncIterator[bytes]:
        for earlier in list(self._sent):  # by an attempt that failed
            if earlier is None:
                return
            yield earlier
        while True:
            request = await self._arrived.get()
            if not self._settled:
                self._room -= len(request or b"")
                self._sent.append(request)
                if self._room < 0:
                    self._settle()
            if request is None:
                return
            yield request

    def _spoken(self, *, asked: int = 0, answered: int = 0) -> None:
        """Note that a message came; the first answer to a request counts, since more may or may not follow."""
        self._unanswered = max(0, self._unanswered + asked - answered)
        self._exchange.started = time.monotonic()
        self._exchange.idle_since = None if self._unanswered else self._exchange.started

    def _settle(self) -> None:
        self._settled = True
        self._sent.clear()

    async def _attempt(self, replica: Replica) -> None:
        context = self._context
        metadata = [(key, value) for key, value in context.invocation_metadata() if key.startswith(_PASSED_ON)]
        await replica.client.reconnected()
        call = replica.client.raw_call(self._method, self._feed(), metadata=metadata, timeout=context.time_remaining())
        try:
            async for answer in call:
                replica.hear()
                self._settle()
                self._spoken(answered=1)
                await context.write(answer)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                raise ServerUnreachableError(str(error.details())) from error
            raise
        finally:
            call.cancel()


async def serve_grpc(settings: GatewaySettings, replicas: Replicas, gate: Gate) -> Any:
    """Start the service on its port, and return it. Raises PortInUseError when it cannot listen there."""
    # Several processes listen on the port; a single one wants it for itself.
    most = settings.limits.body_bytes
    options = {
        **dict(CHANNEL_OPTIONS),
        "grpc.so_reuseport": int(settings.processes > 1),
        "grpc.max_receive_message_length": most,
    }
    server = grpc.aio.server(options=tuple(options.items()))
    server.add_generic_rpc_handlers((GrpcFront(replicas, gate, kept_bytes=most),))
    where = f"{settings.host}:{settings.grpc_front_port}"
    try:
        if settings.certificate is None or settings.private_key is None:
            server.add_insecure_port(where)
        else:
            pair = settings.private_key.read_bytes(), settings.certificate.read_bytes()
            server.add_secure_port(where, grpc.ssl_server_credentials([pair]))
    except RuntimeError as error:
        raise PortInUseError(f"The gRPC port {settings.grpc_front_port} cannot be opened: {error}") from error
    await server.start()
    return server
