"""How to talk to a Triton server: where it is, what a model declares, tensors, and one request over gRPC.

Protocol: KServe v2 (`GRPCInferenceService`) with the messages and the stub that the tritonclient package ships. Its
client class is not used: it needs a thread per stream and a queue per response, which costs two to three times the CPU
time per response, and here the end of the stream is the end of the answer, without a marker response.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from trtserve.errors import RequestError, ServerUnreachableError, UsageError

CORE_MODEL = "tensorrt_llm"
STOP_TIMEOUT = 2.0

# Message limits of gRPC (4 MiB) are smaller than logits; -1 is unlimited.
CHANNEL_OPTIONS = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))

_CONNECTION_LOST = re.compile(
    r"failed to connect|connection (refused|reset)|socket closed|http1|dns resolution|errors resolving", re.IGNORECASE
)
_REQUEST_ID = re.compile(r"^\[request id: [^\]]*\] ")
# What gRPC says of a server that answers, but in another protocol.
_OTHER_PROTOCOL = re.compile(r"socket closed|http1|parsing http", re.IGNORECASE)
_FETCHING = "Encountered an error when fetching new request: "
_TOO_LONG = re.compile(r"exceeds maximum input length", re.IGNORECASE)
_STUB_DEAD = re.compile(r"Stub process '[^']*' is not healthy")


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Where a server answers. `model` is the text model asked by default, `repository` its folder when it is known."""

    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    model: str | None = None
    repository: Path | None = None

    @property
    def grpc(self) -> str:
        """Address of the gRPC service, `host:port`."""
        return f"{self.host}:{self.grpc_port}"

    @property
    def http(self) -> str:
        """Address of the HTTP service, `host:port`."""
        return f"{self.host}:{self.http_port}"


@dataclass(frozen=True, kw_only=True)
class TensorDescription:
    """Input or output of a model: Triton type without `TYPE_` (BYTES for strings), dims without the batch axis."""

    name: str
    datatype: str
    dims: tuple[int, ...]
    optional: bool = False


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """Values of one input: `shape` with the batch axis, `values` flat (an array is taken as it is)."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    values: Sequence[Any]

    def raw(self) -> bytes:
        """Content in KServe's raw form: little-endian numbers; strings each behind their 4-byte length."""
        if self.datatype == "BYTES":
            encoded = [str(value).encode() for value in self.values]
            return b"".join(len(text).to_bytes(4, "little") + text for text in encoded)
        import numpy as np
        from tritonclient.utils import triton_to_np_dtype

        return np.asarray(self.values, triton_to_np_dtype(self.datatype)).tobytes()


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

    def tensor(self, name: str, values: Sequence[Any]) -> Tensor:
        """`values` as the input `name` of one request of batch size 1; UsageError when there is no such input."""
        if name not in self.inputs:
            raise UsageError(
                f"The model {self.name!r} has no input {name!r}.", hint=f"Its inputs: {', '.join(sorted(self.inputs))}."
            )
        declared = self.inputs[name]
        batch = (1,) if self.max_batch_size > 0 else ()
        shape = tuple(len(values) if size < 0 else size for size in declared.dims)
        return Tensor(name=name, datatype=declared.datatype, shape=batch + shape, values=values)

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


Reply = Mapping[str, list[Any]]
"""One response: output name → its values, flat."""


class Client(Protocol):
    """One connection to a server, over either protocol."""

    def describe(self, model: str) -> ModelDescription:
        """Read the configuration of a running model; RequestError naming the models there when it is unknown."""

    def model_names(self) -> list[str]:
        """Names of all models that are ready."""

    def infer(
        self, model: ModelDescription, tensors: Sequence[Tensor], *, request_id: str, stream: bool
    ) -> Iterator[Reply]:
        """Send one request and yield its responses; closing the iterator cancels the request."""

    def close(self) -> None:
        """Close the connection."""


def stop_request(client: Client, core: str, request_id: str) -> None:
    """Ask the core model to stop the requests of this id: what upstream's client sends for `--stop-after-ms`.

    Needed where a cancelled call does not reach the engine (ensembles look at it only between their steps). An unknown
    id is no error for the server, so this is harmless when the cancellation came first.
    """
    model = client.describe(core)
    values: dict[str, list[Any]] = {"input_ids": [0], "input_lengths": [0], "request_output_len": [0], "stop": [True]}
    tensors = [model.tensor(name, value) for name, value in values.items()]
    for _ in client.infer(model, tensors, request_id=request_id, stream=model.decoupled):
        pass


def unknown_model(name: str, where: str, available: Sequence[str]) -> RequestError:
    """Error for a model that the server does not have."""
    return RequestError(
        f"The server at {where} has no model {name!r}.", hint=f"Models there: {', '.join(sorted(available)) or 'none'}."
    )


def unreachable(where: str, reason: str, *, hint: str = "") -> ServerUnreachableError:
    """Error for an endpoint that does not answer; `hint` goes before the general one."""
    general = "`trtserve status` lists the running servers, `trtserve start` starts one."
    return ServerUnreachableError(
        f"No Triton server answers at {where}: {reason}.", hint=f"{hint} {general}" if hint else general
    )


def plain(message: str) -> str:
    """The server's error text without its request id, the executor's preamble and the python backend's stack."""
    message = _REQUEST_ID.sub("", message).removeprefix(_FETCHING)
    if "Traceback (most recent call last)" in message:
        return message.strip().splitlines()[-1].strip()
    return message.split("\n\nAt:\n", maxsplit=1)[0].strip()


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


def reply_values(response: Any) -> Reply:
    """Outputs of a ModelInferResponse; strings are decoded as UTF-8, bytes that are not are replaced."""
    pairs = zip(response.outputs, response.raw_output_contents, strict=True)
    return {output.name: _decode(output.datatype, content) for output, content in pairs}


def _decode(datatype: str, content: bytes) -> list[Any]:
    if datatype != "BYTES":
        import numpy as np
        from tritonclient.utils import triton_to_np_dtype

        values: list[Any] = np.frombuffer(content, triton_to_np_dtype(datatype)).tolist()
        return values
    texts, start = [], 0
    while start < len(content):
        length = int.from_bytes(content[start : start + 4], "little")
        texts.append(content[start + 4 : start + 4 + length].decode(errors="replace"))
        start += 4 + length
    return texts


def refused(message: str) -> RequestError:
    """Error for a request that the server answered with an error text."""
    hint = None
    if _STUB_DEAD.search(message):
        hint = "A process of the server has died; `trtserve status` names the server: stop it and start it again."
    elif _TOO_LONG.search(message):
        hint = "Shorten the prompt, or build with a larger --max-input-len."
    return RequestError(plain(message), hint=hint)


def explain_rpc_error(error: Any, where: str) -> RequestError | ServerUnreachableError:
    """Map a failed call to the error that the user sees."""
    import grpc

    details = str(error.details() or "")
    if error.code() is grpc.StatusCode.UNAVAILABLE and _CONNECTION_LOST.search(details):
        other = "If that is the HTTP port, use --protocol http (query) or give the gRPC port."
        reason = details.rsplit(": ", 1)[-1].rstrip("]")
        return unreachable(where, reason, hint=other if _OTHER_PROTOCOL.search(details) else "")
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return RequestError(f"No answer from {where} within the time allowed.", hint="Raise it with --timeout.")
    return refused(details or f"The call failed with {error.code().name}.")


class GrpcClient:
    """Blocking client over gRPC: a stream for decoupled models, a unary call for the others.

    Triton refuses the unary call on a decoupled model whatever its number of responses.
    """

    def __init__(self, endpoint: Endpoint, *, timeout: float) -> None:
        import grpc
        from tritonclient.grpc import service_pb2_grpc

        self._where = endpoint.grpc
        self._timeout = timeout
        self._channel = grpc.insecure_channel(endpoint.grpc, options=CHANNEL_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def describe(self, model: str) -> ModelDescription:
        import grpc
        from google.protobuf.json_format import MessageToDict
        from tritonclient.grpc import service_pb2

        try:
            answer = self._stub.ModelConfig(service_pb2.ModelConfigRequest(name=model), timeout=self._timeout)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                raise unknown_model(model, self._where, self.model_names()) from None
            raise explain_rpc_error(error, self._where) from error
        return ModelDescription.from_config(MessageToDict(answer.config, preserving_proto_field_name=True))

    def model_names(self) -> list[str]:
        from tritonclient.grpc import service_pb2

        with self._explained():
            index = self._stub.RepositoryIndex(service_pb2.RepositoryIndexRequest(ready=True), timeout=self._timeout)
        return [model.name for model in index.models]

    def infer(
        self, model: ModelDescription, tensors: Sequence[Tensor], *, request_id: str, stream: bool
    ) -> Iterator[Reply]:
        request = infer_request(model.name, tensors, request_id=request_id)
        with self._explained():
            responses = self._streamed(request) if model.decoupled else self._unary(request)
            for response in responses:
                yield reply_values(response)

    def _unary(self, request: Any) -> Iterator[Any]:
        call = self._stub.ModelInfer.future(request, timeout=self._timeout)
        try:
            yield call.result()
        finally:
            call.cancel()

    def _streamed(self, request: Any) -> Iterator[Any]:
        call = self._stub.ModelStreamInfer(iter([request]), timeout=self._timeout)
        try:
            for response in call:
                if response.error_message:
                    raise refused(response.error_message)
                yield response.infer_response
        finally:
            call.cancel()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        import grpc

        try:
            yield
        except grpc.RpcError as error:
            raise explain_rpc_error(error, self._where) from error

    def close(self) -> None:
        self._channel.close()
