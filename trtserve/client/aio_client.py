"""A client of Triton over gRPC for asyncio: many requests at once over one connection."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from typing import Any

from trtserve.client.call_errors import explain_rpc_error, refused
from trtserve.client.endpoint import Endpoint
from trtserve.client.grpc_client import open_channel, reply_of
from trtserve.client.tensors import Reply


class AioClient:
    """Asks models of one server; make and use it in one event loop."""

    def __init__(self, endpoint: Endpoint) -> None:
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        import grpc
        from tritonclient.grpc import service_pb2_grpc

        self._where = endpoint.grpc
        self._tls = endpoint.tls is not None
        self._metadata = endpoint.grpc_metadata
        self._channel = open_channel(endpoint, grpc.aio)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    async def infer(self, request: Any, *, decoupled: bool, timeout: float) -> AsyncGenerator[Reply, None]:
        """Send the protobuf message `request` and yield the responses.

        Raises RequestError when the server refuses it, ServerUnreachableError when it does not answer.
        """
        import grpc

        try:
            if not decoupled:
                yield reply_of(await self._stub.ModelInfer(request, timeout=timeout, metadata=self._metadata))
                return
            call = self._stub.ModelStreamInfer(iter([request]), timeout=timeout, metadata=self._metadata)
            async for response in call:
                if response.error_message:
                    raise refused(response.error_message)
                yield reply_of(response.infer_response)
        except grpc.RpcError as error:
            raise explain_rpc_error(error, self._where, tls=self._tls) from error

    async def close(self) -> None:
        """Close the connection, which ends running calls."""
        await self._channel.close()
