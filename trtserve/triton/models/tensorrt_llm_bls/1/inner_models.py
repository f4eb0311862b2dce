"""The calls that the BLS model makes to the other models of the repository."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

# Triton 2.51 makes arrays of texts in a thread of its own and loses a reference to their type now and then; the last
# one lost ends the process. No process lives long enough to lose these.
_RESERVE = [np.dtype(np.object_)] * 100_000

Tensors = dict[str, NDArray[Any]]
"""Arrays by name; an input in BF16, which NumPy has not, is the `pb_utils.Tensor` itself."""


class InnerModelError(Exception):
    """A model behind the BLS model answered with an error; the text is that model's message."""


def call(model: str, inputs: Tensors, outputs: Sequence[str], request_id: str = "") -> Tensors:
    """Ask a model that answers once."""
    answer = _request(model, inputs, outputs, request_id).exec()
    return _tensors(answer)


def call_streamed(model: str, inputs: Tensors, outputs: Sequence[str], request_id: str) -> Iterator[Tensors]:
    """Ask a model and yield each answer that has tensors; works with either transaction policy.

    The arrays of an answer are gone when the next one is asked for.
    """
    for answer in _request(model, inputs, outputs, request_id).exec(decoupled=True):
        tensors = _tensors(answer)
        if tensors:
            yield tensors


def only(answers: Iterator[Tensors]) -> Tensors:
    """The answer of a model that is asked for one, as copies: the arrays lie in memory that the next answer frees."""
    copies = [{name: np.array(value) for name, value in answer.items()} for answer in answers]
    if len(copies) != 1:
        raise InnerModelError(f"A model behind the BLS model gave {len(copies)} answers to a request for one.")
    return copies[0]


def stop_request(core_model: str, request_id: str) -> None:
    """Stop the request of the core model that has this id; unknown ids do nothing."""
    one = np.ones((1, 1), dtype=np.int32)
    inputs = {
        "input_ids": one,
        "input_lengths": one,
        "request_output_len": one,
        "stop": np.array([[True]]),
    }
    for _ in call_streamed(core_model, inputs, ("output_ids", "sequence_length"), request_id):
        pass


def _request(model: str, inputs: Tensors, outputs: Sequence[str], request_id: str) -> Any:
    return pb_utils.InferenceRequest(
        model_name=model,
        request_id=request_id,
        inputs=[_tensor(name, value) for name, value in inputs.items()],
        requested_output_names=list(outputs),
    )


def _tensor(name: str, value: Any) -> Any:
    """What NumPy cannot hold comes as a tensor of Triton, under the name that the inner model has for it too."""
    return pb_utils.Tensor(name, value) if isinstance(value, np.ndarray) else value


def _tensors(answer: Any) -> Tensors:
    if answer.has_error():
        raise InnerModelError(answer.error().message())
    return {tensor.name(): tensor.as_numpy() for tensor in answer.output_tensors()}
