"""Calls from the BLS models to the other models of the repository."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from .arrays import Tensors

_ENGINE_INPUTS: Tensors = dict.fromkeys(
    ("input_ids", "input_lengths", "request_output_len"), np.ones((1, 1), dtype=np.int32)
)
_TEXT_INPUTS: Tensors = {"text_input": np.array([b""], dtype=np.object_)}
_finished: list[Any] = []


class InnerModelError(Exception):
    """A called model answered with an error; the text is that model's message."""


def call(model: str, inputs: Tensors, outputs: Sequence[str], request_id: str = "") -> Tensors:
    """Call a model that answers once."""
    answer = _request(model, inputs, outputs, request_id).exec()
    return _tensors(answer)


def call_streamed(
    model: str, inputs: Tensors, outputs: Sequence[str], request_id: str, *, pushed: bool = False
) -> Iterator[Tensors]:
    """Call a core model and yield each answer that has tensors; works with either transaction policy.

    With `pushed` the core model sends several answers to one call, as NVIDIA's C++ backend does; no other thread of
    this process may call a model until the last answer has arrived. Otherwise the answers are fetched
    (`fetched_answers.py`), because several answers to calls from several threads can deadlock Triton 2.51: a thread
    that waits for the next answer holds its call's mutex while it waits for the GIL; the thread that delivers answers
    waits for that mutex while it holds the mutex of all calls; and a thread whose new call returns waits for the
    latter while it holds the GIL. Calls with a single answer do not take these locks.
    """
    several = len(inputs.get("input_ids", ())) > 1 or np.any(np.greater(inputs.get("num_return_sequences", 1), 1))
    if not (several or np.any(inputs.get("streaming", False))):
        yield from _exchange(_request(model, inputs, outputs, request_id))
        return
    if pushed:
        yield from _pushed(model, inputs, outputs, request_id)
        return
    answers = _exchange(_request(model, inputs, outputs, request_id, answers="first"))
    following = _request(model, _placeholders(inputs), outputs, request_id, answers="next")
    ended = False
    try:
        while answers:
            yield from answers
            answers = _exchange(following)
        ended = True
    except InnerModelError:
        ended = True
        raise
    finally:
        if not ended:  # the caller does not want the rest
            _stop(model, request_id, inputs, outputs)
            with suppress(InnerModelError):
                while _exchange(following):
                    pass


def finished_calls() -> int:
    """Return how many finished call objects are still kept."""
    return len(_finished)


def forget_calls(count: int) -> None:
    """Drop the first `count` finished calls.

    Triton 2.51 releases a finished call a little later, in its own thread. If Python had dropped the call before,
    that thread would free the arrays of its answers without the GIL, which sooner or later corrupts the process's
    memory. The same thread also runs `is_cancelled`, in order: once that returns, Triton has released every call that
    finished before it.
    """
    del _finished[:count]


def only(answers: Iterator[Tensors]) -> Tensors:
    """Return the only answer, as copies, because the next answer frees the arrays' memory."""
    copies = [{name: np.array(value) for name, value in answer.items()} for answer in answers]
    if len(copies) != 1:
        raise InnerModelError(f"The BLS model expected one answer from an inner model and got {len(copies)}.")
    return copies[0]


def stop_request(core_model: str, request_id: str) -> None:
    """Stop the core model's request with this id; an unknown id does nothing."""
    _stop(core_model, request_id, _ENGINE_INPUTS, ("output_ids", "sequence_length"))


def stop_text_request(model: str, request_id: str) -> None:
    """Stop a request of a model that takes text, such as that of the LLM API, which answers with an error."""
    with suppress(InnerModelError):
        _stop(model, request_id, _TEXT_INPUTS, ("text_output",))


def _stop(model: str, request_id: str, like: Tensors, outputs: Sequence[str]) -> None:
    batch = () if "text_input" in like else (1,)
    inputs = {**_placeholders(like), "stop": np.full((*batch, 1), True)}
    for _ in call_streamed(model, inputs, outputs, request_id):
        pass


def _placeholders(inputs: Tensors) -> Tensors:
    """Return the inputs that the called model requires of every request."""
    return _TEXT_INPUTS if "text_input" in inputs else _ENGINE_INPUTS


def _exchange(request: Any) -> list[Tensors]:
    """Return the answers of one call, read to its end: only then does Triton release it."""
    call = request.exec(decoupled=True)
    try:
        return [tensors for answer in call if (tensors := _tensors(answer))]
    finally:
        while next(call, None) is not None:
            pass
        _finished.append(call)


def _pushed(model: str, inputs: Tensors, outputs: Sequence[str], request_id: str) -> Iterator[Tensors]:
    call = _request(model, inputs, outputs, request_id).exec(decoupled=True)
    ended = False
    try:
        for answer in call:
            if tensors := _tensors(answer):
                yield tensors
        ended = True
    finally:
        if not ended:  # an error, which other rows may follow, or the caller does not want the rest
            _stop(model, request_id, inputs, outputs)
            while next(call, None) is not None:
                pass
        _finished.append(call)


def _request(model: str, inputs: Tensors, outputs: Sequence[str], request_id: str, **parameters: str) -> Any:
    return pb_utils.InferenceRequest(
        model_name=model,
        request_id=request_id,
        inputs=[_tensor(name, value) for name, value in inputs.items()],
        requested_output_names=list(outputs),
        parameters=parameters,
    )


def _tensor(name: str, value: Any) -> Any:
    """Wrap an array; a BF16 input is a Triton tensor already, and has the same name in the inner model."""
    return pb_utils.Tensor(name, value) if isinstance(value, np.ndarray) else value


def _tensors(answer: Any) -> Tensors:
    if answer.has_error():
        raise InnerModelError(answer.error().message())
    return {tensor.name(): tensor.as_numpy() for tensor in answer.output_tensors()}
