"""Answers of the core model that are handed out one per call."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.model_modules import load


@pytest.fixture
def pulls(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(
        sys.modules, "triton_python_backend_utils", SimpleNamespace(TRITONSERVER_RESPONSE_COMPLETE_FINAL=1)
    )
    return load(monkeypatch, "tensorrt_llm", "core_pulls")


class Answer:
    """A response of the python backend."""

    def __init__(self, text: str, *, error: bool = False) -> None:
        self.text = text
        self._error = error

    def has_error(self) -> bool:
        return self._error


class Call:
    """The sender of one call; a call has one answer, which is final."""

    def __init__(self) -> None:
        self.answers: list[str | None] = []

    def send(self, answer: Answer | None = None, *, final: bool) -> None:
        assert final
        self.answers.append(None if answer is None else answer.text)


def opened(pulls: Any) -> tuple[Any, Any, Call]:
    """All requests, the sender of the one with the id `mine`, and its first call."""
    fetched, first = pulls.FetchedAnswers(), Call()
    sender = fetched.sender("mine", first)
    fetched.add("mine", sender)
    return fetched, sender, first


def fetch(fetched: Any) -> Call:
    """The next call."""
    call = Call()
    fetched.fetch("mine", call)
    return call


def test_answers_wait_until_they_are_fetched(pulls: Any) -> None:
    fetched, sender, first = opened(pulls)
    sender.send(Answer("1"), final=False)
    sender.send(Answer("2"), final=False)
    sender.send(final=True)
    assert first.answers == ["1"]
    assert [fetch(fetched).answers, fetch(fetched).answers] == [["2"], [None]]


def test_calls_wait_for_their_answer(pulls: Any) -> None:
    fetched, sender, first = opened(pulls)
    assert first.answers == []
    sender.send(Answer("1"), final=False)
    second = fetch(fetched)
    assert (first.answers, second.answers) == (["1"], [])
    sender.send(Answer("2"), final=False)
    assert second.answers == ["2"]


def test_an_end_that_comes_with_data_follows_it(pulls: Any) -> None:
    fetched, sender, first = opened(pulls)
    sender.send(Answer("1"), final=True)
    assert first.answers == ["1"]
    assert fetch(fetched).answers == [None]


def test_nothing_follows_an_error(pulls: Any) -> None:
    fetched, sender, first = opened(pulls)
    sender.send(Answer("wrong", error=True), final=True)
    assert first.answers == ["wrong"]
    with pytest.raises(ValueError, match="no request of this id"):
        fetch(fetched)


def test_an_ended_request_is_forgotten(pulls: Any) -> None:
    fetched, sender, _ = opened(pulls)
    sender.send(Answer("1"), final=False)
    waiting = fetch(fetched)
    sender.send(final=True)
    assert waiting.answers == [None]
    with pytest.raises(ValueError, match="no request of this id"):
        fetch(fetched)


def test_answers_that_nobody_fetches_are_bounded(pulls: Any) -> None:
    fetched = pulls.FetchedAnswers()
    for number in range(5000):
        fetched.add(str(number), fetched.sender(str(number), Call()))
    assert len(fetched._open) == 4096


@pytest.mark.parametrize(
    ("parameters", "wanted"),
    [("", None), ("{}", None), ('{"answers": "first"}', "first"), ('{"answers":"next"}', "next")],
)
def test_wanted_answers(pulls: Any, parameters: str, wanted: str | None) -> None:
    assert pulls.wanted_answers(parameters) == wanted


def test_other_wishes_are_refused(pulls: Any) -> None:
    with pytest.raises(ValueError, match="answers is 'all'"):
        pulls.wanted_answers('{"answers": "all"}')
