"""How to talk to a Triton server: where it is, what a model declares, tensors, and one request over gRPC.

Protocol: KServe v2 (`GRPCInferenceService`) with the messages and the stub that the tritonclient package ships. Its
client class is not used: it needs a thread per stream and a queue per response, which costs two to three times the CPU
time per response, and here the end of the stream is the end of the answer, without a marker response.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from trtserve.errors import UsageError
from trtserve.triton.call_errors import RequestCancelledError, explain_rpc_error, refused, unknown_model
from trtserve.triton.first_contact import CONNECT_TIMEOUT
from trtserve.triton.tensors import Tensor, TensorDescription, decoded

if TYPE_CHECKING:
    import numpy.typing as npt

CORE_MODEL = "tensorrt_llm"
STOP_TIMEOUT = 2.0
END_TIMEOUT = 1.0

# Message limits of gRPC (4 MiB) are smaller than logits; -1 is unlimited.
CHANNEL_OPTIONS = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))


@dataclass(frozen=True, kw_only=True)
class Tls:
    """An encrypted connection: PEM files of the trusted roots (None: the system's) and of the client's own pair."""

    root_certificates: Path | None = None
    private_key: Path | None = None
    certificate_chain: Path | None = None

    def __post_init__(self) -> None:
        if (self.private_key is None) != (self.certificate_chain is None):
            raise UsageError("--private-key and --certificate-chain belong together: one is missing.")


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Where a server answers. `model` is the text model asked by default, `repository` its folder when it is known.

    `connect_timeout` are the seconds that it may take to say what models it has: no work that could take long.
    """

    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    model: str | None = None
    repository: Path | None = None
    tls: Tls | None = None
    connect_timeout: float = CONNECT_TIMEOUT

    @property
    def grpc(self) -> str:
        """Address of the gRPC service, `host:port`."""
        return f"{self.host}:{self.grpc_port}"

    @property
    def http(self) -> str:
        """Address of the HTTP service, `host:port`."""
        return f"{self.host}:{self.http_port}"

    @property
    def in_process(self) -> Client | None:
        """The client of an executor in this very process, where that is asked and no server."""
        return None


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """What a running model declares in its configuration."""

    name: str
    decoupled: bool
    max_batch_size: int
    inputs: Mapping[str, TensorDescription]
    outputs: Mapping[str, TensorDescription]
    parameters: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelDescription:
        """Read the JSON form of `config.pbtxt` (field names as in Triton's model_config.proto)."""
        parameters = config.get("parameters") or {}
        return cls(
            name=config["name"],
            decoupled=bool((config.get("model_transaction_policy") or {}).get("decoupled", False)),
            max_batch_size=int(config.get("max_batch_size", 0)),
            inputs=_tensor_descriptions(config.get("input", ())),
            outputs=_tensor_descriptions(config.get("output", ())),
            parameters={key: value.get("string_value", "") for key, value in parameters.items()},
        )

    def flag(self, parameter: str) -> bool:
        """Truth of a boolean model parameter, by the words that the BLS model accepts."""
        return self.parameters.get(parameter, "").lower() in ("true", "yes", "1", "t")

    def input(self, name: str) -> TensorDescription:
        """The declared input; UsageError with the nearest names when there is none."""
        if name not in self.inputs:
            near = get_close_matches(name, self.inputs, n=3)
            meant = f"Did you mean {' or '.join(repr(each) for each in near)}? " if near else ""
            raise UsageError(
                f"The model {self.name!r} has no input {name!r}.",
                hint=f"{meant}Its inputs: {', '.join(sorted(self.inputs))}.",
            )
        return self.inputs[name]

    def tensor(self, name: str, values: Sequence[Any] | npt.NDArray[Any], *, rows: int = 1) -> Tensor:
        """`values` (of one row) as the input `name`, the same in each of the batch's rows; UsageError if there is none.

        A list is one-dimensional; an array keeps its shape, which must be that of the declared dims.
        """
        declared = self.input(name)
        if isinstance(values, Sequence):
            shape = tuple(len(values) if size < 0 else size for size in declared.dims)
            content: Sequence[Any] | npt.NDArray[Any] = list(values) * rows if rows > 1 else values
        else:
            import numpy as np

            shape, content = values.shape, np.repeat(values[np.newaxis], rows, axis=0)
        return Tensor(name=name, datatype=declared.datatype, shape=self._batch(rows) + shape, values=content)

    def row_tensor(self, name: str, rows: Sequence[Sequence[Any]]) -> Tensor:
        """One list of values per row of the batch, all of one length, as the input `name`."""
        declared = self.input(name)
        shape = (*self._batch(len(rows)), len(rows[0]))
        return Tensor(
            name=name, datatype=declared.datatype, shape=shape, values=[value for row in rows for value in row]
        )

    def _batch(self, rows: int) -> tuple[int, ...]:
        if self.max_batch_size < rows > 1:
            raise UsageError(
                f"The model {self.name!r} takes {max(1, self.max_batch_size)} prompts per request at most, not {rows}.",
                hint="Send them as requests of their own: leave --batch out.",
            )
        return (rows,) if self.max_batch_size > 0 else ()

    def has(self, *names: str) -> bool:
        """Whether one of `names` is an input."""
        return any(name in self.inputs for name in names)

    def first_input(self, *names: str) -> str:
        """The first of `names` that this model declares (inputs were renamed between releases), else the first."""
        return next((name for name in names if name in self.inputs), names[0])


def _tensor_descriptions(entries: Sequence[Mapping[str, Any]]) -> dict[str, TensorDescription]:
    return {
        entry["name"]: TensorDescription(
            name=entry["name"],
            datatype=str(entry["data_type"]).removeprefix("TYPE_").replace("STRING", "BYTES"),
            dims=tuple(int(size) for size in entry["dims"]),
            optional=bool(entry.get("optional", False)),
        )
        for entry in entries
    }


@dataclass(frozen=True, kw_only=True)
class Reply:
    """One response: output name → array (strings in object arrays), and the response's parameters.

    Over Triton's generate endpoint, which tells no shapes, arrays are flat.
    """

    outputs: Mapping[str, npt.NDArray[Any]]
    parameters: Mapping[str, Any] = field(default_factory=dict)


class Client(Protocol):
    """One connection to a server, over either protocol."""

    def describe(self, model: str) -> ModelDescription:
        """Read the configuration of a running model; RequestError naming the models there when it is unknown."""

    def model_names(self) -> list[str]:
        """Names of all models that are ready."""

    def infer(
        self,
        model: ModelDescription,
        tensors: Sequence[Tensor],
        *,
        request_id: str,
        stream: bool,
        outputs: Sequence[str] = (),
    ) -> Iterator[Reply]:
        """Send one request and yield its responses; closing the client ends a request that goes on.

        `outputs` are those wanted; without any, the server sends what it has.
        """

    def cancel(self) -> None:
        """Cancel the request in flight, from another thread: its iterator raises RequestCancelledError."""

    def close(self) -> None:
        """Close the connection."""


def stop_request(client: Client, core: ModelDescription, request_id: str) -> None:
    """Ask the core model to stop the requests of this id: what upstream's client sends for `--stop-after-ms`.

    Needed where a cancelled call does not reach the engine (ensembles look at it only between their steps). An unknown
    id is no error for the server, so this is harmless when the cancellation came first.
    """
    values: dict[str, list[Any]] = {"input_ids": [0], "input_lengths": [0], "request_output_len": [0], "stop": [True]}
    tensors = [core.tensor(name, value) for name, value in values.items()]
    for _ in client.infer(core, tensors, request_id=request_id, stream=core.decoupled):
        pass


def infer_request(model: str, tensors: Sequence[Tensor], *, request_id: str, outputs: Sequence[str] = ()) -> Any:
    """The protobuf message ModelInferRequest; without `outputs` the server sends all of them."""
    from tritonclient.grpc import service_pb2

    request = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    for tensor in tensors:
        request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        request.raw_input_contents.append(tensor.raw())
    for name in outputs:
        request.outputs.add(name=name)
    return request


def reply_of(response: Any) -> Reply:
    """Outputs and parameters of a ModelInferResponse."""
    pairs = zip(response.outputs, response.raw_output_contents, strict=True)
    outputs = {output.name: decoded(output.datatype, output.shape, content) for output, content in pairs}
    parameters = {
        name: getattr(value, str(value.WhichOneof("parameter_choice"))) for name, value in response.parameters.items()
    }
    return Reply(outputs=outputs, parameters=parameters)


def _channel(endpoint: Endpoint) -> Any:
    import grpc

    if endpoint.tls is None:
        return grpc.insecure_channel(endpoint.grpc, options=CHANNEL_OPTIONS)
    credentials = grpc.ssl_channel_credentials(
        root_certificates=_pem(endpoint.tls.root_certificates, "--root-certificates"),
        private_key=_pem(endpoint.tls.private_key, "--private-key"),
        certificate_chain=_pem(endpoint.tls.certificate_chain, "--certificate-chain"),
    )
    return grpc.secure_channel(endpoint.grpc, credentials, options=CHANNEL_OPTIONS)


def _pem(path: Path | None, flag: str) -> bytes | None:
    try:
        return None if path is None else path.read_bytes()
    except OSError as error:
        raise UsageError(f"{flag} is {path}: {error.strerror}.") from None


def _future_cancelled() -> type[BaseException]:
    import grpc

    error: type[BaseException] = grpc.FutureCancelledError
    return error


def _read(call: Any, responses: queue.SimpleQueue[Any]) -> None:
    """Hand on what comes: responses, the error that ends the call, None at its end."""
    try:
        for response in call:
            responses.put(response)
    except Exception as error:  # noqa: BLE001 - whoever takes it raises it
        responses.put(error)
    responses.put(None)


def _settle_unary(call: Any) -> None:
    with suppress(Exception):  # how it ends is of no interest any more
        call.result(timeout=END_TIMEOUT)


class GrpcClient:
    """Blocking client over gRPC: a stream for decoupled models, a unary call for the others.

    Triton refuses the unary call on a decoupled model whatever its number of responses.
    """

    def __init__(self, endpoint: Endpoint, *, timeout: float, compression: str | None = None) -> None:
        # gRPC writes what it meets on the way to stderr by itself; the errors below say it once.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        import grpc
        from tritonclient.grpc import service_pb2_grpc

        self._where = endpoint.grpc
        self._tls = endpoint.tls is not None
        self._timeout = timeout
        self._first = min(timeout, endpoint.connect_timeout)
        self._compression = None if compression is None else grpc.Compression[compression.capitalize()]
        self._channel = _channel(endpoint)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._cancelled = threading.Event()
        self._call: Any = None
        self._settle: Callable[[], None] = lambda: None

    def describe(self, model: str) -> ModelDescription:
        import grpc
        from google.protobuf.json_format import MessageToDict
        from tritonclient.grpc import service_pb2

        try:
            answer = self._stub.ModelConfig(service_pb2.ModelConfigRequest(name=model), timeout=self._first)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                raise unknown_model(model, self._where, self.model_names()) from None
            raise explain_rpc_error(error, self._where, tls=self._tls, first=self._first) from error
        return ModelDescription.from_config(MessageToDict(answer.config, preserving_proto_field_name=True))

    def model_names(self) -> list[str]:
        from tritonclient.grpc import service_pb2

        with self._explained(first=self._first):
            index = self._stub.RepositoryIndex(service_pb2.RepositoryIndexRequest(ready=True), timeout=self._first)
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
        call = self._begun(self._stub.ModelInfer.future(request, timeout=self._timeout, compression=self._compression))
        self._settle = lambda: _settle_unary(call)
        try:
            yield call.result()
        except _future_cancelled() as error:
            raise RequestCancelledError("The request was cancelled.") from error

    def _streamed(self, request: Any) -> Iterator[Any]:
        call = self._begun(
            self._stub.ModelStreamInfer(iter([request]), timeout=self._timeout, compression=self._compression)
        )
        responses: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # An interrupt of the main thread must leave the call as it is, hence it is read by another one.
        reader = threading.Thread(target=_read, args=(call, responses), daemon=True, name="responses")
        self._settle = lambda: reader.join(END_TIMEOUT)
        reader.start()
        while (response := responses.get()) is not None:
            if isinstance(response, Exception):
                raise response
            if response.error_message:
                raise refused(response.error_message)
            yield response.infer_response

    def _begun(self, call: Any) -> Any:
        """Remember the call; a cancellation that came before it is done now."""
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
        """End the channel, and with it a call that goes on; one that was stopped gets the time to end by itself.

        A call that is cancelled at the moment its answer ends can crash the gRPC front end of Triton 2.51.
        """
        self._settle()
        self._channel.close()
