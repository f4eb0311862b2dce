"""The calls that the BLS model makes to the other models of the repository."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

Tensors = dict[str, NDArray[Any]]
"""Arrays by name; an input in BF16, which NumPy has not, is the `pb_utils.Tensor` itself."""

_ENGINE_INPUTS: Tensors = dict.fromkeys(
    ("input_ids", "input_lengths", "request_output_len"), np.ones((1, 1), dtype=np.int32)
)
_TEXT_INPUTS: Tensors = {"text_input": np.array([b""], dtype=np.object_)}
_finished: list[Any] = []


class InnerModelError(Exception):
    """A model behind the BLS model answered with an error; the text is that model's message."""


def call(model: str, inputs: Tensors, outputs: Sequence[str], request_id: str = "") -> Tensors:
    """Ask a model that answers once."""
    answer = _request(model, inputs, outputs, request_id).exec()
    return _tensors(answer)


def call_streamed(
    model: str, inputs: Tensors, outputs: Sequence[str], request_id: str, *, pushed: bool = False
) -> Iterator[Tensors]:
    """Ask a core model and yield each answer that has tensors; works with either transaction policy.

    `pushed` takes several answers as they come, which is how NVIDIA's C++ backend sends them; no other thread of this
    process may call a model until the last one is there. Otherwise they are fetched one by one (`core_pulls.py` of the
    core model), since Triton 2.51 cannot push them to several threads: a thread that waits for the next answer of a
    call takes that call's mutex along when it waits for Python's lock (GIL); the thread that delivers answers waits for
    that mutex and holds the one of all calls; and a thread whose new call returns waits for the latter and holds the
    GIL. A call with one answer is delivered without all that.
    """
    if not _answers_often(inputs):
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
        if not ended:  # nobody wants the rest
            _stop(model, request_id, inputs, outputs)
            _fetch_rest(following)


def finished_calls() -> int:
    """How many calls ended whose objects are still kept."""
    return len(_finished)


def forget_calls(count: int) -> None:
    """Drop the first `count` finished calls.

    Triton 2.51 lets go of a finished call in a thread of its own, a little later. Had Python dropped it before, the
    arrays of its answers would be freed there, without the GIL: sooner or later that corrupts the memory of the
    process. That thread also carries out `is_cancelled`, in order: what ended before such a question was sent is no
    longer Triton's when the answer is there.
    """
    del _finished[:count]


def only(answers: Iterator[Tensors]) -> Tensors:
    """The answer of a model that is asked for one, as copies: the arrays lie in memory that the next answer frees."""
    copies = [{name: np.array(value) for name, value in answer.items()} for answer in answers]
    if len(copies) != 1:
        raise InnerModelError(f"A model behind the BLS model gave {len(copies)} answers to a request for one.")
    return copies[0]


def stop_request(core_model: str, request_id: str) -> None:
    """Stop the request of the core model that has this id; unknown ids do nothing."""
    _stop(core_model, request_id, _ENGINE_INPUTS, ("output_ids", "sequence_length"))


def stop_text_request(model: str, request_id: str) -> None:
    """The same for a model that takes texts, such as that of the LLM API, which ends it with an error."""
    with suppress(InnerModelError):
        _stop(model, request_id, _TEXT_INPUTS, ("text_output",))


def _stop(model: str, request_id: str, like: Tensors, outputs: Sequence[str]) -> None:
    batch = () if "text_input" in like else (1,)
    inputs = {**_placeholders(like), "stop": np.full((*batch, 1), True)}
    for _ in call_streamed(model, inputs, outputs, request_id):
        pass


def _placeholders(inputs: Tensors) -> Tensors:
    """What the configuration of the model that takes `inputs` demands of every request."""
    return _TEXT_INPUTS if "text_input" in inputs else _ENGINE_INPUTS


def _answers_often(inputs: Tensors) -> bool:
    """Whether the core model may answer a request more than once."""
    several = len(inputs.get("input_ids", ())) > 1 or np.any(np.greater(inputs.get("num_return_sequences", 1), 1))
    return bool(several or np.any(inputs.get("streaming", False)))


def _exchange(request: Any) -> list[Tensors]:
    """What one call brings; it is always read to its end, since only then Triton lets go of it."""
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
        if not ended:  # an error, after which there may be more rows, or nobody wants the rest
            _stop(model, request_id, inputs, outputs)
            while next(call, None) is not None:
                pass
        _finished.append(call)


def _fetch_rest(following: Any) -> None:
    with suppress(InnerModelError):
        while _exchange(following):
            pass


def _request(model: str, inputs: Tensors, outputs: Sequence[str], request_id: str, **parameters: str) -> Any:
    return pb_utils.InferenceRequest(
        model_name=model,
        request_id=request_id,
        inputs=[_tensor(name, value) for name, value in inputs.items()],
        requested_output_names=list(outputs),
        parameters=parameters,
    )


def _tensor(name: str, value: Any) -> Any:
    """What NumPy cannot hold comes as a tensor of Triton, under the name that the inner model has for it too."""
    return pb_utils.Tensor(name, value) if isinstance(value, np.ndarray) else value


def _tensors(answer: Any) -> Tensors:
    if answer.has_error():
        raise InnerModelError(answer.error().message())
    return {tensor.name(): tensor.as_numpy() for tensor in answer.output_tensors()}
