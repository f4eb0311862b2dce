"""A client of an executor in this process, without a server, with the core model's own code."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trtserve.client.base import Endpoint, ModelDescription, Reply
from trtserve.client.call_errors import RequestCancelledError, unknown_model
from trtserve.client.tensors import Tensor, numpy_type, text_array
from trtserve.errors import MissingDependencyError, RequestError
from trtserve.host.install_command import install_command
from trtserve.programs.core.executor_module import load_executor_module
from trtserve.programs.core.request import RequestFactory, vocabulary_to_wrap
from trtserve.programs.core.response import Wanted, output_arrays
from trtserve.programs.core.settings import executor_config
from trtserve.programs.shared.parameters import ModelParameters

_AWAIT = timedelta(milliseconds=100)
# What the core model raises for wrong inputs, and executors for requests that they refuse.
_REFUSALS = (ValueError, TypeError, RuntimeError, OverflowError, AttributeError)


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
        """Return the name of the core model."""
        return [self._description.name]

    def infer(
        self,
        model: ModelDescription,
        tensors: Sequence[Tensor],
        *,
        request_id: str,
        stream: bool,
        outputs: Sequence[str] = (),
    ) -> Iterator[Reply]:
        """Send one request to the executor and yield its responses; see `Client.infer`."""
        del model
        inputs = {tensor.name: _array(tensor) for tensor in tensors}
        if "stop" in inputs and bool(inputs["stop"].any()):
            self._stop(request_id)
            return iter(())
        return self._answers(inputs, request_id, stream=stream, outputs=outputs)

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
