"""Calls of the BLS model: one answer per call, read to its end, and kept until Triton has released them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import triton_python_backend_utils as pb_utils

from trtserve.programs.shared import inner_models

ONE = {"input_ids": np.ones((1, 1), dtype=np.int32)}
STREAM = {**ONE, "streaming": np.array([[True]])}


class Answer:
    """A response with one tensor, none at the end, or an error."""

    def __init__(self, number: int = 0, *, error: str = "") -> None:
        self._number, self._error = number, error

    def has_error(self) -> bool:
        return bool(self._error)

    def error(self) -> Any:
        return SimpleNamespace(message=lambda: self._error)

    def output_tensors(self) -> list[Any]:
        number = np.array([self._number])
        return [SimpleNamespace(name=lambda: "output_ids", as_numpy=lambda: number)] if self._number else []


class Core:
    """Answers calls in turn and notes what was asked; each call has one answer."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []

    def request(self, *, inputs: list[Any], parameters: dict[str, str], **_: Any) -> Any:
        stops = "stop" in dict(inputs)
        wanted = "stop" if stops else parameters.get("answers", "all")

        def call(*, decoupled: bool) -> Iterator[Answer]:
            assert decoupled
            self.asked.append(wanted)
            return iter([Answer()] if stops else [self.answers.pop(0)])

        return SimpleNamespace(exec=call)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(core: Core) -> Any:
        monkeypatch.setattr(pb_utils, "InferenceRequest", core.request)
        monkeypatch.setattr(pb_utils, "Tensor", lambda name, value: (name, value))
        monkeypatch.setattr(inner_models, "_finished", type(inner_models._finished)())
        return inner_models

    return use


def numbers(answers: Iterator[dict[str, Any]]) -> list[int]:
    return [int(answer["output_ids"][0]) for answer in answers]


def test_a_request_for_one_answer_is_one_call(calls: Any) -> None:
    core = Core(Answer(7))
    assert numbers(calls(core).call_streamed("core", ONE, ("output_ids",), "id")) == [7]
    assert core.asked == ["all"]


@pytest.mark.parametrize(
    "inputs",
    [STREAM, {"input_ids": np.ones((2, 1), dtype=np.int32)}, {**ONE, "num_return_sequences": np.array([[2]])}],
)
def test_answers_are_fetched_until_an_empty_one(calls: Any, inputs: dict[str, Any]) -> None:
    core = Core(Answer(1), Answer(2), Answer())
    assert numbers(calls(core).call_streamed("core", inputs, ("output_ids",), "id")) == [1, 2]
    assert core.asked == ["first", "next", "next"]


def test_an_error_ends_the_answers(calls: Any) -> None:
    core = Core(Answer(1), Answer(error="full"))
    module = calls(core)
    with pytest.raises(module.InnerModelError, match="full"):
        numbers(module.call_streamed("core", STREAM, ("output_ids",), "id"))
    assert core.asked == ["first", "next"]


def test_an_abandoned_request_is_stopped_and_drained(calls: Any) -> None:
    core = Core(Answer(1), Answer(2), Answer())
    answers = calls(core).call_streamed("core", STREAM, ("output_ids",), "id")
    next(answers)
    answers.close()
    assert core.asked == ["first", "stop", "next", "next"]


def test_finished_calls_are_kept(calls: Any) -> None:
    module = calls(Core(Answer(1), Answer(2), Answer(), Answer(error="full")))
    numbers(module.call_streamed("core", STREAM, ("output_ids",), "id"))
    assert module.finished_calls() == 3
    with pytest.raises(module.InnerModelError):
        numbers(module.call_streamed("core", ONE, ("output_ids",), "id"))
    module.forget_calls(3)
    assert module.finished_calls() == 1
