"""gRPC calls for several copies of a server: each is passed on, byte for byte, to the copy with the least to do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc

from trtserve.client.grpc_transport import CHANNEL_OPTIONS
from trtserve.errors import PortInUseError, ServerUnreachableError
from trtserve.gateway.admission import Gate
from trtserve.gateway.replicas import Replica, Replicas
from trtserve.gateway.settings import GatewaySettings

_WAITING = 4  # requests of a stream that its server has not taken yet
_PASSED_ON = ("triton-grpc-protocol-", "traceparent")
_SERVICES = ("/inference.GRPCInferenceService/", "/grpc.health.v1.Health/")


class GrpcFront(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Takes any method of Triton's services. The servers themselves look at keys."""

    def __init__(self, replicas: Replicas, gate: Gate) -> None:
        self._replicas, self._gate = replicas, gate

    def service(self, handler_call_details: Any) -> Any:
        """Return what passes on the calls of a method: one request and one answer are streams of length one."""
        method = handler_call_details.method
        if not method.startswith(_SERVICES):
            return None

        async def passed_on(requests: AsyncIterator[bytes], context: Any) -> None:
            if self._gate.draining:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the server is stopping")
            await _Passage(method, requests, context).run(self._replicas)

        return grpc.stream_stream_rpc_method_handler(passed_on)


class _Passage:
    """One call. What the client has sent is kept until an answer comes, for another server."""

    def __init__(self, method: str, requests: AsyncIterator[bytes], context: Any) -> None:
        self._method, self._requests, self._context = method, requests, context
        self._arrived: asyncio.Queue[bytes | None] = asyncio.Queue(_WAITING)
        self._sent: list[bytes | None] = []
        self._begun = False

    async def run(self, replicas: Replicas) -> None:
        """Pass on the call, and its error if it fails."""
        receiving = asyncio.create_task(self._receive())
        try:
            await replicas.send(self._attempt, begun=lambda: self._begun)
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
            await self._arrived.put(request)
        await self._arrived.put(None)

    async def _feed(self) -> AsyncIterator[bytes]:
        for earlier in list(self._sent):  # by an attempt that failed
            if earlier is None:
                return
            yield earlier
        while True:
            request = await self._arrived.get()
            if not self._begun:
                self._sent.append(request)
            if request is None:
                return
            yield request

    async def _attempt(self, replica: Replica) -> None:
        context = self._context
        metadata = [(key, value) for key, value in context.invocation_metadata() if key.startswith(_PASSED_ON)]
        call = replica.client.raw_call(self._method, self._feed(), metadata=metadata, timeout=context.time_remaining())
        try:
            async for answer in call:
                self._begun = True
                self._sent.clear()
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
    server = grpc.aio.server(options=(*CHANNEL_OPTIONS, ("grpc.so_reuseport", int(settings.processes > 1))))
    server.add_generic_rpc_handlers((GrpcFront(replicas, gate),))
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
