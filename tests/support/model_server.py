"""A real tritonserver on a model repository that a test assembled, and the clients that tests talk to it with."""

from __future__ import annotations

import http.client
import json
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trtserve.errors import PortInUseError, ServerStartError
from trtserve.host.ports import free_ports
from trtserve.process import Command, ProcessId, spawn, stop, tree
from trtserve.process.signals import one_interrupt
from trtserve.server.launch.commands import LaunchSetup, without_mpi
from trtserve.server.launch.modes import Single
from trtserve.server.triton.installation import find_triton, prepare_backends
from trtserve.server.triton.tritonserver import (
    Address,
    stub_environment,
    sweep_shared_memory,
    unique_prefix,
    wait_until_ready,
)
from trtserve.store import Store

Tensors = dict[str, npt.NDArray[Any]]

_TRITON_TYPES = {
    "b": "BOOL",
    "O": "BYTES",
    "uint8": "UINT8",
    "int32": "INT32",
    "int64": "INT64",
    "uint64": "UINT64",
    "float16": "FP16",
    "float32": "FP32",
    "bfloat16": "BF16",
}


@dataclass(frozen=True)
class ModelServer:
    """A server that is ready."""

    address: Address

    def post(self, path: str, body: Mapping[str, Any], timeout: float = 60) -> tuple[int, dict[str, Any]]:
        """Status and JSON of a POST."""
        with closing(self.connection(timeout)) as connection:
            connection.request("POST", path, body=json.dumps(body))
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())

    def generate(self, model: str, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        """Answer of the generate endpoint."""
        return self.post(f"/v2/models/{model}/generate", body)

    def generate_stream(self, model: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Events of the generate_stream endpoint."""
        with closing(self.connection(60)) as connection:
            connection.request("POST", f"/v2/models/{model}/generate_stream", body=json.dumps(body))
            lines = connection.getresponse().read().decode("utf-8").splitlines()
        return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]

    def connection(self, timeout: float) -> http.client.HTTPConnection:
        """A connection to the HTTP port."""
        return http.client.HTTPConnection(self.address.host, self.address.http_port, timeout=timeout)

    def metric(self, family: str, label: str = "") -> float:
        """Sum of a metric's samples whose labels contain `label`."""
        return sum(self._samples(family, label))

    def has_metric(self, family: str, label: str = "") -> bool:
        """Whether a metric has a sample whose labels contain `label`."""
        return bool(self._samples(family, label))

    def _samples(self, family: str, label: str) -> list[float]:
        with closing(
            http.client.HTTPConnection(self.address.host, self.address.metrics_port, timeout=60)
        ) as connection:
            connection.request("GET", "/metrics")
            lines = connection.getresponse().read().decode("utf-8").splitlines()
        return [float(line.split()[-1]) for line in lines if line.startswith(f"{family}{{") and label in line]

    @contextmanager
    def stream(self) -> Iterator[Stream]:
        """A gRPC stream."""
        from tritonclient import grpc

        with closing(grpc.InferenceServerClient(f"{self.address.host}:{self.address.grpc_port}")) as client:
            stream = Stream(client)
            try:
                yield stream
            finally:
                client.stop_stream(cancel_requests=True)

    def infer_http(self, model: str, tensors: Tensors, request_id: str = "") -> Tensors:
        """One KServe call over HTTP, in its binary form."""
        from tritonclient import http

        with closing(http.InferenceServerClient(f"{self.address.host}:{self.address.http_port}")) as client:
            result = client.infer(model, inputs_of(tensors, http), request_id=request_id, timeout=60_000_000)
            return {output["name"]: result.as_numpy(output["name"]) for output in result.get_response()["outputs"]}

    def infer(self, model: str, tensors: Tensors, request_id: str = "", outputs: Sequence[str] = ()) -> Tensors:
        """One unary gRPC call; `outputs` are the requested ones, none for all."""
        from tritonclient import grpc

        asked = {"request_id": request_id, "outputs": _requested(outputs), "client_timeout": 60}
        with closing(grpc.InferenceServerClient(f"{self.address.host}:{self.address.grpc_port}")) as client:
            result = client.infer(model, inputs_of(tensors), **asked)
        return _outputs(result)


class Stream:
    """Requests over one gRPC stream and their answers in the order of arrival."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
        client.start_stream(lambda result, error: self._answers.put((result, error)))

    def send(self, model: str, tensors: Tensors, request_id: str = "", outputs: Sequence[str] = ()) -> None:
        """Send one request; `outputs` are the requested ones, none for all."""
        asked = {"request_id": request_id, "outputs": _requested(outputs), "enable_empty_final_response": True}
        self._client.async_stream_infer(model, inputs_of(tensors), **asked)

    def next(self) -> tuple[Tensors, bool, str]:
        """Tensors, whether it is the final answer, and the request's id; an error is raised."""
        result, error = self._answers.get(timeout=60)
        if error is not None:
            raise error
        response = result.get_response()
        return _outputs(result), response.parameters["triton_final_response"].bool_param, response.id

    def all(self, model: str, tensors: Tensors, request_id: str = "", outputs: Sequence[str] = ()) -> list[Tensors]:
        """Every answer with tensors to one request."""
        self.send(model, tensors, request_id, outputs)
        answers, final = [], False
        while not final:
            found, final, _ = self.next()
            if found:
                answers.append(found)
        return answers


def inputs_of(tensors: Tensors, protocol: Any = None) -> list[Any]:
    """Inputs for `tritonclient.grpc`, or the other `protocol` module."""
    from tritonclient import grpc

    inputs = []
    for name, value in tensors.items():
        kind = _TRITON_TYPES.get(value.dtype.kind) or _TRITON_TYPES[value.dtype.name]
        tensor = (protocol or grpc).InferInput(name, value.shape, kind)
        tensor.set_data_from_numpy(value)
        inputs.append(tensor)
    return inputs


def _requested(outputs: Sequence[str]) -> list[Any] | None:
    from tritonclient import grpc

    return [grpc.InferRequestedOutput(name) for name in outputs] or None


def _outputs(result: Any) -> Tensors:
    return {output.name: result.as_numpy(output.name) for output in result.get_response().outputs}


class _Triton:
    """The process of one server, which can be started again."""

    def __init__(self, command: Callable[[Address], Command], log: Path) -> None:
        self._command, self._log = command, log
        self._process: ProcessId | None = None
        self._stubs: set[ProcessId] = set()
        self.address = _free_address()

    def start(self) -> None:
        """Start it, and wait until it is ready; once more where another program took a port or Triton 2.51 failed."""
        try:
            self._start()
        except PortInUseError:
            self.stop()
            self.address = _free_address()
            self._start()
        except ServerStartError as error:
            # It waits for ever when a Python model gets no CPU for a second while it loads, and may abort then.
            if not (error.by_chance or error.killed or "models still loading" in error.message):
                raise
            self.stop()
            self._start()

    def _start(self) -> None:
        self._process = spawn(self._command(self.address), log=self._log)
        wait_until_ready(self._process, self.address, self._log, timeout=120)
        self._stubs = tree(self._process)

    def stop(self) -> None:
        """Kill it: models need seconds to unload, which other tests look at."""
        if self._process is not None:
            stop(self._process, grace=0)

    def is_whole(self) -> bool:
        """Whether it and the processes of all its models still run.

        A Triton that crashes writes its stack first, and answers meanwhile as if nothing were wrong.
        """
        processes = (self._process, *self._stubs)
        running = all(each is not None and each.alive() for each in processes)
        return running and "\nSignal (" not in self.last_lines()

    def last_lines(self) -> str:
        """The end of its log."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-100:])


_running: list[_Triton] = []


def _free_address() -> Address:
    http_port, grpc_port, metrics_port = free_ports("127.0.0.1", 3)
    return Address(host="127.0.0.1", http_port=http_port, grpc_port=grpc_port, metrics_port=metrics_port)


@contextmanager
def serving(repository: Path, root: Path, *, backends: Path | None = None) -> Iterator[ModelServer]:
    """Start tritonserver on `repository`, wait until it is ready, and end it; `root` receives its log and links.

    `backends` is the folder of its backends, where it is not that of the installation.
    """
    triton, prefix = find_triton(), unique_prefix("test")
    found = backends or prepare_backends(triton, Store(root / "home"))

    def command(address: Address) -> Command:
        setup = LaunchSetup(
            executable=str(triton.executable),
            repository=repository,
            address=address,
            shm_prefix=prefix,
            backends=found,
            environment=stub_environment(),
        )
        return without_mpi(setup, Single.name).command

    process = _Triton(command, root / "triton.log")
    _running.append(process)
    with one_interrupt():  # SIGTERM too must end it
        try:
            process.start()
            yield ModelServer(process.address)
        finally:
            _running.remove(process)
            process.stop()
            sweep_shared_memory(prefix)


def restart_broken() -> list[str]:
    """Start the servers again that have ended, or lost a model's process; return the last lines of their logs."""
    broken = [process for process in _running if not process.is_whole()]
    logs = [process.last_lines() for process in broken]
    for process in broken:
        process.stop()
        process.start()
    return logs


def texts(*values: str) -> npt.NDArray[Any]:
    """BYTES [rows, 1]."""
    return np.array([[value.encode("utf-8")] for value in values], dtype=np.object_)


def integers(*values: int) -> npt.NDArray[Any]:
    """INT32 [rows, 1]."""
    return np.array([[value] for value in values], dtype=np.int32)


def floats(*values: float) -> npt.NDArray[Any]:
    """FP32 [rows, 1]."""
    return np.array([[value] for value in values], dtype=np.float32)


def flags(*values: bool) -> npt.NDArray[Any]:
    """BOOL [rows, 1]."""
    return np.array([[value] for value in values], dtype=np.bool_)
