"""Answers that the calling model fetches: how the BLS model streams.

In Triton 2.51 a model that calls another one from several threads can deadlock when a call gets more than one answer
(`inner_models.py` explains how). Calls with a single answer are safe. So a request with the parameter `answers` =
`first` gets only its first answer, and what came since is fetched by requests of the same id with `answers` = `next`:
one answer each, with the tokens of all that wait. An answer without tensors, or an error, is the last one.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

from .guarded_sender import GuardedSender

Join = Callable[[Any, Any], Any]
"""Makes one answer of two, or returns None when they must stay two; None is also the answer after the last."""

FIRST, NEXT = "first", "next"
_MOST = 4096


def wanted_answers(parameters: str) -> str | None:
    """Return FIRST, NEXT, or None for all answers at once, from a request's JSON parameters.

    Raises ValueError for any other word.
    """
    wanted = json.loads(parameters or "{}").get("answers")
    if wanted not in (None, FIRST, NEXT):
        raise ValueError(f"answers is {wanted!r}; expected {FIRST} or {NEXT}.")
    return None if wanted is None else str(wanted)


class FetchedSender:
    """A response sender that keeps the answers of one request and hands out one per call."""

    def __init__(self, sender: GuardedSender, join: Join, ended: Callable[[], None]) -> None:
        """`sender` gets the first answer; `ended` is called before the last one is sent."""
        self._join = join
        self._lock = threading.Lock()
        self._answers: deque[Any] = deque()
        self._waiting: GuardedSender | None = sender
        self._ended = ended

    def send(self, answer: Any = None, *, final: bool) -> None:
        """Keep an answer (None: only the end) until it is fetched."""
        if answer is not None:
            self._answers.append(answer)
        if final and not (answer is not None and answer.has_error()):
            self._answers.append(None)
        self._deliver()

    def fetch(self, sender: GuardedSender) -> None:
        """Send the next answer to `sender`, now or as soon as there is one."""
        with self._lock:
            self._waiting = sender
        self._deliver()

    def is_cancelled(self) -> bool:
        """Always False: in Triton 2.51 a calling model can only send a stop request."""
        return False

    def _deliver(self) -> None:
        with self._lock:
            if self._waiting is None or not self._answers:
                return
            sender, self._waiting = self._waiting, None
            answer = self._answers.popleft()
            while self._answers and (both := self._join(answer, self._answers[0])) is not None:
                answer = both
                self._answers.popleft()
        if answer is None or answer.has_error():
            self._ended()
        sender.send(answer, final=True)  # outside the lock, because it waits for the other model


class FetchedAnswers:
    """The open requests whose answers are fetched, by request id."""

    def __init__(self, join: Join = lambda _first, _second: None) -> None:
        self._join = join
        self._lock = threading.Lock()
        self._open: OrderedDict[str, FetchedSender] = OrderedDict()

    def sender(self, request_id: str, first: GuardedSender) -> FetchedSender:
        """Return a sender for the answers of a request; `first` gets the first one."""
        return FetchedSender(first, self._join, lambda: self._forget(request_id))

    def add(self, request_id: str, sender: FetchedSender) -> None:
        """Make the further answers of a request available. Only the newest requests are kept."""
        with self._lock:
            self._open[request_id] = sender
            while len(self._open) > _MOST:
                self._open.popitem(last=False)

    def fetch(self, request_id: str, sender: GuardedSender) -> None:
        """Send the next answer of a request to `sender`. Raises ValueError when there is no such request."""
        with self._lock:
            fetched = self._open.get(request_id)
        if fetched is None:
            raise ValueError("There is no open request with this id, so there are no answers to fetch.")
        fetched.fetch(sender)

    def _forget(self, request_id: str) -> None:
        with self._lock:
            self._open.pop(request_id, None)
