"""A client of Triton over gRPC.

Protocol: KServe v2 (`GRPCInferenceService`) with the messages and the stub that the tritonclient package ships. Its
client class is not used: it needs a thread per stream and a queue per response, which costs two to three times the CPU
time per response. Here the end of the stream is the end of the answer, without a marker response.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from trtserve.client.call_errors import RequestCancelledError, explain_rpc_error, refused, unknown_model
from trtserve.client.endpoint import Endpoint
from trtserve.client.tensors import ModelDescription, Reply, Tensor, decoded
from trtserve.errors import UsageError

CHANNEL_OPTIONS = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))
"""No limit on messages: gRPC's own 4 MiB are too small for logits."""

_END_TIMEOUT = 1.0


class GrpcClient:
    """Blocking client over gRPC: a stream for decoupled models, a unary call for the others.

    Triton refuses unary calls to decoupled models, even for a single response.
    """

    def __init__(self, endpoint: Endpoint, *, timeout: float, compression: str | None = None) -> None:
        # gRPC would also write to stderr what the errors below report.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        import grpc
        from tritonclient.grpc import service_pb2_grpc

        self._where = endpoint.grpc
        self._tls = endpoint.tls is not None
        self._metadata = endpoint.grpc_metadata
        self._first = min(timeout, endpoint.connect_timeout)
        chosen = None if compression is None else grpc.Compression[compression.capitalize()]
        self._options = {"timeout": timeout, "compression": chosen, "metadata": endpoint.grpc_metadata}
        self._channel = open_channel(endpoint, grpc)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._cancelled = threading.Event()
        self._call: Any = None
        self._settle: Callable[[], None] = lambda: None

    def describe(self, model: str) -> ModelDescription:
        import grpc
        from google.protobuf.json_format import MessageToDict
        from tritonclient.grpc import service_pb2

        try:
            question = service_pb2.ModelConfigRequest(name=model)
            answer = self._stub.ModelConfig(question, timeout=self._first, metadata=self._metadata)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                raise unknown_model(model, self._where, self.model_names()) from None
            raise explain_rpc_error(error, self._where, tls=self._tls, first=self._first) from error
        return ModelDescription.from_config(MessageToDict(answer.config, preserving_proto_field_name=True))

    def model_names(self) -> list[str]:
        from tritonclient.grpc import service_pb2

        with self._explained(first=self._first):
            question = service_pb2.RepositoryIndexRequest(ready=True)
            index = self._stub.RepositoryIndex(question, timeout=self._first, metadata=self._metadata)
        return [model.name for model in index.models]

    def infer(
        self,
        model: ModelDescription,
        tensors: Sequence[Tensor],
        *,
        request_id: str,
        stream: bool,
        outputs: Sequence[str] = (),
    ) -> Iterator[Reply]:
        request = infer_request(model.name, tensors, request_id=request_id, outputs=outputs)
        with self._explained():
            responses = self._streamed(request) if model.decoupled else self._unary(request)
            for response in responses:
                yield reply_of(response)

    def cancel(self) -> None:
        self._cancelled.set()
        if self._call is not None:
            self._call.cancel()

    def _unary(self, request: Any) -> Iterator[Any]:
        import grpc

        call = self._begun(self._stub.ModelInfer.future(request, **self._options))
        self._settle = lambda: _settle_unary(call)
        try:
            yield call.result()
        except grpc.FutureCancelledError as error:
            raise RequestCancelledError("The request was cancelled.") from error

    def _streamed(self, request: Any) -> Iterator[Any]:
        call = self._begun(self._stub.ModelStreamInfer(iter([request]), **self._options))
        responses: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # Read in another thread, so that an interrupt of the main thread leaves the call intact.
        reader = threading.Thread(target=_read, args=(call, responses), daemon=True, name="responses")
        self._settle = lambda: reader.join(_END_TIMEOUT)
        reader.start()
        while (response := responses.get()) is not None:
            if isinstance(response, Exception):
                raise response
            if response.error_message:
                raise refused(response.error_message)
            yield response.infer_response

    def _begun(self, call: Any) -> Any:
        """Remember the call, and cancel it if `cancel` was called before."""
        self._call = call
        if self._cancelled.is_set():
            call.cancel()
        return call

    @contextmanager
    def _explained(self, first: float | None = None) -> Iterator[None]:
        import grpc

        try:
            yield
        except grpc.RpcError as error:
            raise explain_rpc_error(error, self._where, tls=self._tls, first=first) from error

    def close(self) -> None:
        """Close the channel, which ends a running call; a stopped call first gets a moment to end.

        Cancelling a call at the moment when its answer ends can crash the gRPC front end of Triton 2.51.
        """
        self._settle()
        self._channel.close()


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
    pairs = zip(response.outputs, response.raw_output_contents, strict=True)
    outputs = {output.name: decoded(output.datatype, output.shape, content) for output, content in pairs}
    parameters = {
        name: getattr(value, str(value.WhichOneof("parameter_choice"))) for name, value in response.parameters.items()
    }
    return Reply(outputs=outputs, parameters=parameters)


def open_channel(endpoint: Endpoint, api: Any) -> Any:
    """Return a channel of `api`, which is `grpc` or `grpc.aio`."""
    import grpc

    if endpoint.tls is None:
        return api.insecure_channel(endpoint.grpc, options=CHANNEL_OPTIONS)
    credentials = grpc.ssl_channel_credentials(
        root_certificates=_pem(endpoint.tls.root_certificates, "--root-certificates"),
        private_key=_pem(endpoint.tls.private_key, "--private-key"),
        certificate_chain=_pem(endpoint.tls.certificate_chain, "--certificate-chain"),
    )
    name = endpoint.tls.server_name
    named = () if name is None else (("grpc.ssl_target_name_override", name),)
    return api.secure_channel(endpoint.grpc, credentials, options=(*CHANNEL_OPTIONS, *named))


def _pem(path: Path | None, flag: str) -> bytes | None:
    try:
        return None if path is None else path.read_bytes()
    except OSError as error:
        raise UsageError(f"{flag} is {path}: {error.strerror}.") from None


def _read(call: Any, responses: queue.SimpleQueue[Any]) -> None:
    """Put the responses into the queue, then the error that ends the call, if any, then None."""
    try:
        for response in call:
            responses.put(response)
    except Exception as error:  # noqa: BLE001 - the reader of the queue raises it
        responses.put(error)
    responses.put(None)


def _settle_unary(call: Any) -> None:
    with suppress(Exception):  # its result is not needed any more
        call.result(timeout=_END_TIMEOUT)
