"""Shared by all clients of a Triton server: the endpoint, model descriptions, replies, and the client interface."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from trtserve.client.call_errors import CONNECT_TIMEOUT
from trtserve.client.grpc_access import grpc_metadata
from trtserve.client.tensors import Tensor, TensorDescription
from trtserve.errors import UsageError
from trtserve.specs.server import GRPC_PORT, HTTP_PORT

if TYPE_CHECKING:
    import numpy.typing as npt

CORE_MODEL = "tensorrt_llm"
STOP_TIMEOUT = 2.0


@dataclass(frozen=True, kw_only=True)
class Tls:
    """The PEM files of an encrypted connection."""

    root_certificates: Path | None = None
    """Trusted roots; None: the system's."""
    private_key: Path | None = None
    certificate_chain: Path | None = None
    server_name: str | None = None
    """Name in the server's certificate; None: that of the host."""

    def __post_init__(self) -> None:
        if (self.private_key is None) != (self.certificate_chain is None):
            raise UsageError("--private-key and --certificate-chain must be given together.")


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """The address of a server and how to connect to it."""

    host: str = "127.0.0.1"
    http_port: int = HTTP_PORT
    grpc_port: int = GRPC_PORT
    model: str | None = None
    """The default text model."""
    repository: Path | None = None
    """The folder of the model repository, if it is known."""
    tls: Tls | None = None
    api_key: str | None = field(default=None, repr=False)
    """API key of the server, or None when it needs none."""
    connect_timeout: float = CONNECT_TIMEOUT
    """Seconds for the first answer, which lists or describes models and so needs no long work."""

    @property
    def grpc(self) -> str:
        """Address of the gRPC service, `host:port`."""
        return f"{self.host}:{self.grpc_port}"

    @property
    def http_headers(self) -> dict[str, str]:
        """Headers of HTTP requests, which carry the API key."""
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}

    @property
    def grpc_metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata of gRPC calls, which carries what the API key stands for there."""
        return grpc_metadata(self.api_key)

    @property
    def http(self) -> str:
        """Address of the HTTP service, `host:port`."""
        return f"{self.host}:{self.http_port}"

    @property
    def in_process(self) -> Client | None:
        """The client of an executor in this process, or None when there is a server."""
        return None


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """The configuration of a running model."""

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
        """Return whether a parameter is true, by the words that the BLS model accepts."""
        return self.parameters.get(parameter, "").lower() in ("true", "yes", "1", "t")

    def input(self, name: str) -> TensorDescription:
        """Return the declared input; UsageError suggests similar names when there is none."""
        if name not in self.inputs:
            similar = get_close_matches(name, self.inputs, n=3)
            suggestion = f"Did you mean {' or '.join(repr(each) for each in similar)}? " if similar else ""
            raise UsageError(
                f"The model {self.name!r} has no input {name!r}.",
                hint=f"{suggestion}Its inputs: {', '.join(sorted(self.inputs))}.",
            )
        return self.inputs[name]

    def tensor(self, name: str, values: Sequence[Any] | npt.NDArray[Any], *, rows: int = 1) -> Tensor:
        """Make the input `name` from the `values` of one row, repeated in each row of the batch.

        A list is one-dimensional; an array must have the declared dims. Raises UsageError when there is no such input.
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
        """Make the input `name` from one list of values per row of the batch, all of the same length."""
        declared = self.input(name)
        shape = (*self._batch(len(rows)), len(rows[0]))
        return Tensor(
            name=name, datatype=declared.datatype, shape=shape, values=[value for row in rows for value in row]
        )

    def _batch(self, rows: int) -> tuple[int, ...]:
        if self.max_batch_size < rows > 1:
            raise UsageError(
                f"The model {self.name!r} takes at most {max(1, self.max_batch_size)} prompts per request, not {rows}.",
                hint="Leave --batch out to send each prompt as its own request.",
            )
        return (rows,) if self.max_batch_size > 0 else ()

    def has(self, *names: str) -> bool:
        """Return whether one of `names` is an input."""
        return any(name in self.inputs for name in names)

    def first_input(self, *names: str) -> str:
        """Return the first of `names` (an input's names in different releases) that the model has, else the first."""
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
    """One response."""

    outputs: Mapping[str, npt.NDArray[Any]]
    """Output name → array; strings in object arrays. Triton's generate endpoint has no shapes: its arrays are flat."""
    parameters: Mapping[str, Any] = field(default_factory=dict)


class Client(Protocol):
    """One connection to a server."""

    def describe(self, model: str) -> ModelDescription:
        """Read the configuration of a running model; RequestError lists the models when it is unknown."""

    def model_names(self) -> list[str]:
        """Return the names of all models that are ready."""

    def infer(
        self,
        model: ModelDescription,
        tensors: Sequence[Tensor],
        *,
        request_id: str,
        stream: bool,
        outputs: Sequence[str] = (),
    ) -> Iterator[Reply]:
        """Send one request and yield its responses; closing the client ends a running request.

        `outputs` limits the outputs; empty: all.
        """

    def cancel(self) -> None:
        """Cancel the running request from another thread: its iterator raises RequestCancelledError."""

    def close(self) -> None:
        """Close the connection."""


def stop_tensors(core: ModelDescription) -> list[Tensor]:
    """Return the inputs of a request that stops the requests with its id in the core model."""
    values: dict[str, list[Any]] = {"input_ids": [0], "input_lengths": [0], "request_output_len": [0], "stop": [True]}
    return [core.tensor(name, value) for name, value in values.items()]


def stop_request(client: Client, core: ModelDescription, request_id: str) -> None:
    """Ask the core model to stop the requests with this id, as NVIDIA's client does for `--stop-after-ms`.

    Needed when a cancelled call does not reach the engine (ensembles check for it only between their steps). An
    unknown id is not an error, so this is harmless when the cancellation came first.
    """
    for _ in client.infer(core, stop_tensors(core), request_id=request_id, stream=core.decoupled):
        pass
