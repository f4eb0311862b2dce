"""Answers that the BLS model fetches one by one, and what a model's threads do again and again."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import triton_python_backend_utils as pb_utils

from trtserve.programs.shared import senders as _senders

senders: Any = _senders


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


def opened() -> tuple[Any, Any, Call]:
    """All requests, the sender of the one with the id `mine`, and its first call."""
    fetched, first = senders.FetchedAnswers(), Call()
    sender = fetched.sender("mine", first)
    fetched.add("mine", sender)
    return fetched, sender, first


def fetch(fetched: Any) -> Call:
    """The next call."""
    call = Call()
    fetched.fetch("mine", call)
    return call


def test_answers_wait_until_they_are_fetched() -> None:
    fetched, sender, first = opened()
    sender.send(Answer("1"), final=False)
    sender.send(Answer("2"), final=False)
    sender.send(final=True)
    assert first.answers == ["1"]
    assert [fetch(fetched).answers, fetch(fetched).answers] == [["2"], [None]]


def test_answers_that_wait_are_joined() -> None:
    fetched, first = senders.FetchedAnswers(lambda one, two: two and Answer(one.text + two.text)), Call()
    fetched.add("mine", sender := fetched.sender("mine", first))
    for text in "012":
        sender.send(Answer(text), final=False)
    sender.send(Answer("3"), final=True)
    assert [first.answers, *(fetch(fetched).answers for _ in range(2))] == [["0"], ["123"], [None]]


def test_calls_wait_for_their_answer() -> None:
    fetched, sender, first = opened()
    assert first.answers == []
    sender.send(Answer("1"), final=False)
    second = fetch(fetched)
    assert (first.answers, second.answers) == (["1"], [])
    sender.send(Answer("2"), final=False)
    assert second.answers == ["2"]


def test_the_end_follows_the_last_data() -> None:
    fetched, sender, first = opened()
    sender.send(Answer("1"), final=True)
    assert first.answers == ["1"]
    assert fetch(fetched).answers == [None]


def test_nothing_follows_an_error() -> None:
    fetched, sender, first = opened()
    sender.send(Answer("wrong", error=True), final=True)
    assert first.answers == ["wrong"]
    with pytest.raises(ValueError, match="no open request with this id"):
        fetch(fetched)


def test_an_ended_request_is_forgotten() -> None:
    fetched, sender, _ = opened()
    sender.send(Answer("1"), final=False)
    waiting = fetch(fetched)
    sender.send(final=True)
    assert waiting.answers == [None]
    with pytest.raises(ValueError, match="no open request with this id"):
        fetch(fetched)


def test_the_number_of_unfetched_requests_is_limited() -> None:
    fetched = senders.FetchedAnswers()
    for number in range(5000):
        fetched.add(str(number), fetched.sender(str(number), Call()))
    assert len(fetched._open) == 4096


@pytest.mark.parametrize(
    ("parameters", "wanted"),
    [("", None), ("{}", None), ('{"answers": "first"}', "first"), ('{"answers":"next"}', "next")],
)
def test_wanted_answers(parameters: str, wanted: str | None) -> None:
    assert senders.wanted_answers(parameters) == wanted


def test_other_words_are_refused() -> None:
    with pytest.raises(ValueError, match="answers is 'all'"):
        senders.wanted_answers('{"answers": "all"}')


def test_a_round_that_fails_is_told_and_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(pb_utils.Logger, "log_error", told.append)
    stopping = threading.Event()
    rounds: list[int] = []

    def look() -> None:
        rounds.append(len(rounds))
        if len(rounds) == 1:
            raise LookupError("no such request")
        stopping.set()

    senders.repeat(stopping, 0.001, look)
    assert rounds == [0, 1]
    assert told == ["look failed with LookupError: no such request"]
