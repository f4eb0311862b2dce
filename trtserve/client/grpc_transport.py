"""Triton over gRPC.

Protocol: KServe v2 (`GRPCInferenceService`) with the messages and the stub that the tritonclient package ships. Its
client classes are not used: they cost two to three times the CPU time per response. Here the end of the stream is the
end of the answer, without a marker response.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtserve.client.endpoint import Endpoint, explain_rpc_error, refused, understood, unknown_model
from trtserve.client.tensors import ModelDescription, ModelRequest, Reply, Tensor, decoded
from trtserve.client.transport import TransportClient
from trtserve.errors import UsageError

if TYPE_CHECKING:
    import numpy.typing as npt

CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 250),
    ("grpc.use_local_subchannel_pool", 1),
)
"""No limit on messages: gRPC's own 4 MiB are too small for logits. A server that was away is found soon: by itself gRPC
waits up to two minutes before it tries again, so that a gateway refused requests while Triton was ready. Channels of
one process share nothing: else a new one repeats the "Connection refused" of another one that waits to try again."""
_RECONNECT_SECONDS = 1.0


def grpc_client(endpoint: Endpoint, *, timeout: float, compression: str | None = None) -> TransportClient:
    """Return a client that waits; `timeout` is the limit of an answer in seconds."""
    return TransportClient(lambda: GrpcTransport(endpoint, timeout=timeout, compression=compression))


class GrpcTransport:
    """One connection for many requests: a stream for decoupled models, a unary call for the others.

    Triton refuses unary calls to decoupled models, even for a single response.
    """

    def __init__(self, endpoint: Endpoint, *, timeout: float, compression: str | None = None) -> None:
        # gRPC would also write to stderr what the errors below report.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        import grpc
        from tritonclient.grpc import service_pb2_grpc

        self._where, self._tls = endpoint.grpc, endpoint.tls is not None
        self._timeout, self._first = timeout, min(timeout, endpoint.connect_timeout)
        self._metadata = endpoint.grpc_metadata
        self._compression = None if compression is None else grpc.Compression[compression.capitalize()]
        self._channel = open_channel(endpoint)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    async def describe(self, model: str) -> ModelDescription:
        import grpc
        from google.protobuf.json_format import MessageToDict
        from tritonclient.grpc import service_pb2

        with self._explained(first=self._first):
            try:
                question = service_pb2.ModelConfigRequest(name=model)
                answer = await self._stub.ModelConfig(question, timeout=self._first, metadata=self._metadata)
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.NOT_FOUND:
                    raise
                raise unknown_model(model, self._where, await self.model_names()) from None
        with understood():
            return ModelDescription.from_config(MessageToDict(answer.config, preserving_proto_field_name=True))

    async def model_names(self) -> list[str]:
        from tritonclient.grpc import service_pb2

        with self._explained(first=self._first):
            question = service_pb2.RepositoryIndexRequest(ready=True)
            index = await self._stub.RepositoryIndex(question, timeout=self._first, metadata=self._metadata)
        return [model.name for model in index.models]

    async def reconnected(self) -> None:
        """Wait while the channel pauses between two tries to connect, when it refuses calls: the server may run."""
        import grpc

        if self._channel.get_state(try_to_connect=True) is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._channel.channel_ready(), _RECONNECT_SECONDS)

    async def infer(self, request: ModelRequest) -> AsyncGenerator[Reply, None]:
        # Whether the answer comes in pieces is among the tensors.
        message = infer_request(request.model.name, request.tensors, request_id=request.id, outputs=request.outputs)
        options = {
            "timeout": self._timeout if request.timeout is None else request.timeout,
            "compression": self._compression,
            "metadata": self._metadata,
        }
        import grpc

        with self._explained():
            await self.reconnected()
            if not request.model.decoupled:
                response = await self._stub.ModelInfer(message, **options)
                with understood():
                    reply = reply_of(response)
                yield reply
                return
            call = self._stub.ModelStreamInfer(iter([message]), **options)
            try:
                while (response := await call.read()) is not grpc.aio.EOF:
                    if response.error_message:
                        raise refused(response.error_message)
                    with understood():
                        reply = reply_of(response.infer_response)
                    yield reply
            finally:
                call.cancel()

    def raw_call(
        self, method: str, requests: AsyncIterator[bytes], *, metadata: Sequence[tuple[str, str]], timeout: float | None
    ) -> Any:
        """Return a call of `grpc.aio` whose requests and answers are serialised messages."""
        return self._channel.stream_stream(method)(requests, metadata=tuple(metadata), timeout=timeout)

    @contextmanager
    def _explained(self, first: float | None = None) -> Iterator[None]:
        import grpc

        try:
            yield
        except grpc.RpcError as error:
            raise explain_rpc_error(error, self._where, tls=self._tls, first=first) from error

    async def close(self) -> None:
        await self._channel.close()


def infer_request(model: str, tensors: Sequence[Tensor], *, request_id: str, outputs: Sequence[str] = ()) -> Any:
    """Return the protobuf message ModelInferRequest; without `outputs` the server sends all of them."""
    from tritonclient.grpc import service_pb2

    request = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    for tensor in tensors:
        request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        request.raw_input_contents.append(tensor.raw())
    for name in outputs:
        request.outputs.add(name=name)
    return request


def reply_of(response: Any) -> Reply:
    """Return outputs and parameters of a ModelInferResponse."""
    given = response.parameters
    parameters = {name: getattr(value, str(value.WhichOneof("parameter_choice"))) for name, value in given.items()}
    return _GrpcReply(outputs=_Outputs(response), parameters=parameters)


class _GrpcReply(Reply):
    """A response whose ids are read without arrays, which cost more than all else that is read of a token."""

    __slots__ = ()
    outputs: _Outputs

    def numbers(self, name: str) -> list[int]:
        described, content = self.outputs.raw[name]
        if described.datatype != "INT32" or len(content) % 4:
            return Reply.numbers(self, name)  # which says what is wrong
        return memoryview(content).cast("i").tolist()


class _Outputs(Mapping[str, "npt.NDArray[Any]"]):
    """The outputs of a response, decoded when they are read: a stream has thousands, and few are."""

    __slots__ = ("raw",)

    def __init__(self, response: Any) -> None:
        """Raises ValueError for a response that does not bring its tensors as raw contents."""
        described, contents = response.outputs, response.raw_output_contents
        if len(described) != len(contents):
            raise ValueError(f"A response has {len(described)} outputs and {len(contents)} contents.")
        self.raw = {each.name: (each, content) for each, content in zip(described, contents, strict=True)}
        """Name → description and content."""

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        described, content = self.raw[name]
        with understood():
            return decoded(described.datatype, described.shape, content)

    def __contains__(self, name: object) -> bool:
        return name in self.raw

    def __iter__(self) -> Iterator[str]:
        return iter(self.raw)

    def __len__(self) -> int:
        return len(self.raw)


def open_channel(endpoint: Endpoint) -> Any:
    """Return a channel of `grpc.aio`. gRPC takes the proxy of the environment to other machines."""
    import grpc

    from trtserve.host.ports import is_here

    options = (*CHANNEL_OPTIONS, ("grpc.enable_http_proxy", int(not is_here(endpoint.host))))
    if endpoint.tls is None:
        return grpc.aio.insecure_channel(endpoint.grpc, options=options)
    credentials = grpc.ssl_channel_credentials(
        root_certificates=_pem(endpoint.tls.root_certificates, "--root-certificates"),
        private_key=_pem(endpoint.tls.private_key, "--private-key"),
        certificate_chain=_pem(endpoint.tls.certificate_chain, "--certificate-chain"),
    )
    name = endpoint.tls.server_name
    named = () if name is None else (("grpc.ssl_target_name_override", name),)
    return grpc.aio.secure_channel(endpoint.grpc, credentials, options=(*options, *named))


def _pem(path: Path | None, flag: str) -> bytes | None:
    try:
        return None if path is None else path.read_bytes()
    except OSError as error:
        raise UsageError(f"{flag} is {path}: {error.strerror}.") from None
