"""An engine without a server: run its executor in this process and query it like a server's core model."""

from __future__ import annotations

import importlib.util
import math
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trtserve.artifacts import Engine, Manifest, ModelRepository, looks_like
from trtserve.artifacts.engine_config import EngineConfig
from trtserve.client.endpoint import Endpoint, RequestCancelledError, unknown_model
from trtserve.client.tensors import ModelDescription, ModelRequest, Reply, Tensor, numpy_type, text_array
from trtserve.errors import ArtifactError, MissingDependencyError, RequestError
from trtserve.executor.loaders import is_embedded, merges_ranks
from trtserve.host.machine import install_command
from trtserve.nvidia.releases.installed import PACKAGE
from trtserve.process import Command
from trtserve.programs.core.request import RequestFactory, most_ids, vocabulary_to_wrap
from trtserve.programs.core.response import Wanted, output_arrays
from trtserve.programs.core.settings import executor_config, load_executor_module
from trtserve.programs.shared.parameters import ModelParameters
from trtserve.repository.engines import read_engine, require_engine_files
from trtserve.repository.options import resolve_options
from trtserve.repository.profiles import CORE
from trtserve.server.rank_processes import mpirun_program
from trtserve.specs import RepositorySpec
from trtserve.store import Store

# Open MPI's mpirun sets these for each process.
_WORLD = "OMPI_COMM_WORLD_SIZE"
_RANK = "OMPI_COMM_WORLD_RANK"
_TOKENIZER = Path("preprocessing", "1", "tokenizer")
_AWAIT = timedelta(milliseconds=100)
# What the core model raises for wrong inputs, and executors for requests that they refuse.
_REFUSALS = (ValueError, TypeError, RuntimeError, OverflowError, AttributeError)


@dataclass(frozen=True, kw_only=True)
class LocalEngine:
    path: Path
    config: EngineConfig  # config.json
    tokenizer: Path | None

    @property
    def ranks(self) -> int:
        return 1 if merges_ranks(self.config) else self.config.mapping.ranks

    def needs_mpi(self) -> bool:
        """Return whether mpirun still has to start its ranks."""
        return self.ranks > 1 and _WORLD not in os.environ

    def require_runtime(self) -> None:
        """Raise MissingDependencyError if this Python, which every rank uses, cannot import TensorRT-LLM for it."""
        if not is_embedded(self.config) and importlib.util.find_spec(PACKAGE) is None:
            raise MissingDependencyError(
                f"The engine has {self.ranks} ranks; each needs TensorRT-LLM, which {sys.executable} cannot import.",
                hint="Run this in NVIDIA's container, or serve the engine (`trtserve repo`, `trtserve start`).",
            )

    def is_worker(self) -> bool:
        """Return whether this process is a rank other than the leader, which receives no requests."""
        return self.ranks > 1 and self.rank != 0

    @property
    def rank(self) -> int:
        return int(os.environ.get(_RANK, "0"))

    def under_mpirun(self, arguments: Sequence[str]) -> Command:
        """Return the command that runs this command line once per rank."""
        argv = (
            mpirun_program(),
            "--allow-run-as-root",
            *(("--bind-to", "none") if is_embedded(self.config) else ()),
            "-n",
            str(self.ranks),
            sys.executable,
            "-m",
            "trtserve",
            *arguments,
        )
        return Command(argv=argv)

    def describe(self) -> ModelDescription:
        """Return the description of the core model that a server would have for the engine, without loading it."""
        return ModelDescription.from_config(_model(self))

    @contextmanager
    def endpoint(self, *, timeout: float) -> Iterator[LocalEndpoint]:
        """Load the engine into an executor and yield its endpoint; `timeout` is the limit of an answer in seconds.

        Raises MissingDependencyError when the runtime is not installed and RequestError when the engine cannot be
        loaded.
        """
        client = LocalClient(self.path, _model(self), timeout=timeout)
        try:
            yield LocalEndpoint(client=client, model=CORE)
        finally:
            client.shutdown()

    def run_worker(self) -> None:
        """Run a rank other than the leader until the leader's executor shuts down."""
        LocalClient(self.path, _model(self), timeout=math.inf).shutdown()


def find_local_engine(text: str, tokenizer: Path | None) -> LocalEngine:
    """Return the engine in the folder `text`, in the repository there, or of the imported model `text`.

    Raises RepositoryError for an incomplete or invalid engine and ModelNotFoundError for an unknown name.
    """
    store = Store()
    folder = Path(text).expanduser()
    if folder.is_dir() and looks_like(ModelRepository, folder):
        path = folder / CORE / "1"
    else:
        path = store.find(Engine, text).path
    config = read_engine(path)
    require_engine_files(path, config)
    return LocalEngine(path=path.absolute(), config=config, tokenizer=tokenizer or _tokenizer_of(path, store))


def _tokenizer_of(engine: Path, store: Store) -> Path | None:
    """Return the tokenizer of the import, of the repository or of the model that the engine belongs to."""
    for record in store.recorded():
        if record.engine and Path(record.engine).resolve() == engine.resolve():
            served = Path(record.repository) / _TOKENIZER
            return served if served.is_dir() else Path(record.model)
    inside = engine.parent.parent / _TOKENIZER
    return inside if inside.is_dir() else _tokenizer_of_origin(engine)


def _tokenizer_of_origin(engine: Path) -> Path | None:
    """Follow the manifests from engine to checkpoint to model; return the model's folder if it has a tokenizer."""
    folder = engine
    for fact in ("checkpoint", "model"):
        try:
            made_of = Manifest.read(folder).facts.get(fact)
        except ArtifactError:
            return None
        if made_of is None:
            return None
        folder = Path(made_of)
    return folder if any(folder.glob("tokenizer*")) else None


def _model(engine: LocalEngine) -> dict[str, Any]:
    """Return the configuration that the engine's core model would have in a repository, as JSON."""
    try:
        from google.protobuf.json_format import MessageToDict

        from trtserve.repository.config import build_config
    except ImportError as error:
        raise MissingDependencyError(
            f"The core model's configuration needs a package that is not installed: {error.name}.",
            hint="Install trtserve again: the package is one of its dependencies.",
        ) from error
    spec = RepositorySpec(name="local", triton_backend=None if is_embedded(engine.config) else "python")
    table, options = resolve_options(spec, engine.config, tokenizer=engine.tokenizer)
    message = build_config(table, CORE, options)
    found: dict[str, Any] = MessageToDict(message, preserving_proto_field_name=True)
    return found


class LocalClient:
    """Runs an executor on the engine in `engine`; `model` is the JSON form of the core model's configuration.

    Raises MissingDependencyError when the runtime is not installed and RequestError when the engine cannot be loaded.
    """

    def __init__(self, engine: Path, model: Mapping[str, Any], *, timeout: float) -> None:
        self._description = ModelDescription.from_config(model)
        self._timeout = timeout
        self._running: dict[str, list[int]] = {}
        self._cancelled = threading.Event()
        warnings: list[str] = []
        parameters = ModelParameters(dict(model), engine, warnings.append)
        try:
            self._module = load_executor_module(parameters.text("executor"), parameters.text("executor_release"))
            settings = executor_config(self._module, parameters, dict(model))
            api = self._module.api
            self._executor = api.Executor(engine, api.ModelType.DECODER_ONLY, settings)
        except ImportError as error:
            raise MissingDependencyError(
                f"The executor of this engine cannot be imported: {error}.",
                hint="Run this where the runtime is installed: in NVIDIA's container for engines of TensorRT-LLM, "
                f"{install_command('cpu')} for CPU engines.",
            ) from error
        except (*_REFUSALS, OSError) as error:
            raise RequestError(f"The engine {engine} cannot be loaded: {error}") from error
        self._factory = RequestFactory(
            self._module,
            decoupled=True,
            exclude_input=bool(parameters.switch("exclude_input_in_output")),
            vocabulary=vocabulary_to_wrap(parameters, engine),
            longest=most_ids(engine),
        )

    def shutdown(self) -> None:
        """End the executor; on worker ranks, return when the leader ends."""
        self._running.clear()  # iterators that are closed later have nothing to stop
        self._executor.shutdown()

    def describe(self, model: str) -> ModelDescription:
        """Return the description of the core model. Raises RequestError for any other."""
        if model != self._description.name:
            raise unknown_model(model, "this process", self.model_names())
        return self._description

    def model_names(self) -> list[str]:
        return [self._description.name]

    def infer(self, request: ModelRequest) -> Iterator[Reply]:
        """Send one request to the executor and yield its responses; see `SyncClient.infer`."""
        inputs = {tensor.name: _array(tensor) for tensor in request.tensors}
        if "stop" in inputs and bool(inputs["stop"].any()):
            self._stop(request.id)
            return iter(())
        return self._answers(inputs, request.id, stream=request.stream, outputs=request.outputs)

    def submit(self, tensors: Sequence[Tensor], *, request_id: str) -> dict[int, Any]:
        """Enqueue one request without waiting; return executor id → what its replies depend on, for `reply`."""
        return self._submit({tensor.name: _array(tensor) for tensor in tensors}, request_id)

    def arrived(self) -> Sequence[Any]:
        """Wait a moment for the executor's responses to any request; for a caller that serves all of them itself."""
        responses: Sequence[Any] = self._executor.await_responses(timeout=_AWAIT)
        return responses

    def stop(self, request_id: str) -> None:
        """Cancel a request of `submit`, and forget it."""
        self._stop(request_id)
        self._running.pop(request_id, None)

    def cancel(self) -> None:
        """Cancel the running requests; their iterators raise RequestCancelledError."""
        self._cancelled.set()
        for request_id in list(self._running):
            self._stop(request_id)

    def close(self) -> None:
        """Do nothing: the owner ends the executor with `shutdown`."""

    def _stop(self, request_id: str) -> None:
        for number in self._running.get(request_id, ()):
            self._executor.cancel_request(number)

    def _answers(
        self, inputs: dict[str, npt.NDArray[Any]], request_id: str, *, stream: bool, outputs: Sequence[str]
    ) -> Iterator[Reply]:
        rows = self._submit(inputs, request_id)
        deadline = time.monotonic() + self._timeout
        try:
            while rows:
                if time.monotonic() > deadline:
                    raise RequestError(
                        f"The answer took longer than {self._timeout:g} s.", hint="Raise it with --timeout."
                    )
                for answer in self._executor.await_responses(timeout=_AWAIT):
                    if answer.request_id in rows:
                        yield self.reply(answer, rows, outputs)
        finally:
            self._stop(request_id)  # for an iterator that was closed early; harmless after the end
            self._running.pop(request_id, None)
        if self._cancelled.is_set() and not stream:
            raise RequestCancelledError("The request was cancelled.")

    def _submit(self, inputs: dict[str, npt.NDArray[Any]], request_id: str) -> dict[int, Any]:
        """Enqueue one executor request per row; return executor id → what its outputs depend on."""
        try:
            requests = self._factory.requests(inputs)
            wanted = [self._wanted(request, row, len(requests), inputs) for row, request in enumerate(requests)]
            ids = self._executor.enqueue_requests(requests)
        except _REFUSALS as error:
            raise RequestError(f"The request was refused: {error}") from error
        self._running[request_id] = list(ids)
        return dict(zip(ids, wanted, strict=True))

    def _wanted(self, request: Any, row: int, count: int, inputs: Mapping[str, npt.NDArray[Any]]) -> Any:
        length = len(request.input_token_ids)
        repeats_prompt = not request.streaming and not request.output_config.exclude_input_from_output
        samples = int(inputs["num_return_sequences"].max()) if "num_return_sequences" in inputs else 1
        return Wanted(
            prompt_length=length,
            output_prompt_length=length if repeats_prompt else 0,
            max_tokens=request.max_tokens if self._module.since("0.13") else request.max_new_tokens,
            repeats=request.streaming and request.sampling_config.beam_width > 1,
            finish_reason=True,
            batch_index=row if count > 1 else None,
            numbered=samples > 1 and self._module.since("0.14"),
            count_output=True,
        )

    def reply(self, answer: Any, rows: dict[int, Any], wanted_outputs: Sequence[str] = ()) -> Reply:
        """Return the outputs of an executor's response to a request of `rows`, which lose the id of a final one.

        Raises RequestError for a failed request.
        """
        wanted = rows[answer.request_id]
        if answer.has_error():
            del rows[answer.request_id]
            raise RequestError(f"The executor failed the request: {answer.error_msg}")
        if answer.result.is_final:
            del rows[answer.request_id]
        arrays = output_arrays(self._module, answer.result, wanted)
        found = {name: _texts(array) for name, array in arrays.items()}
        chosen = {name: array for name, array in found.items() if not wanted_outputs or name in wanted_outputs}
        return Reply(outputs=chosen)


@dataclass(frozen=True, kw_only=True)
class LocalEndpoint(Endpoint):
    """An executor in this process instead of a server."""

    client: LocalClient

    @property
    def in_process(self) -> LocalClient:
        return self.client


def _array(tensor: Tensor) -> npt.NDArray[Any]:
    """Return the tensor as the Python backend gives it to a model: strings as bytes."""
    if tensor.datatype == "BYTES":
        flat = np.empty(len(tensor.flat()), dtype=object)
        flat[:] = [str(value).encode() for value in tensor.flat()]
        return flat.reshape(tensor.shape)
    return np.asarray(tensor.values, numpy_type(tensor.datatype)).reshape(tensor.shape)


def _texts(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Decode strings, as a client receives them."""
    if array.dtype != object:
        return array
    return text_array([value.decode(errors="replace") for value in array.reshape(-1)]).reshape(array.shape)
