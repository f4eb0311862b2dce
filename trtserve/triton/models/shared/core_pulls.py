"""Answers that wait until they are fetched: how the BLS model streams.

The python backend of Triton 2.51 cannot push a second answer to a model that called another one, when that model
works on several requests at once: the thread that delivers it, one that waits for it and one whose call returns can
block each other for ever (`inner_models.py` of the BLS model says how). A call with one answer takes another way. So
a request with the parameter `answers` = `first` gets its first answer only, as the final one of its call, and each
further one is fetched by a request of the same id with `answers` = `next`; one without tensors says that there are no
more. An error is the last answer too.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

from guarded_sender import GuardedSender

FIRST, NEXT = "first", "next"
_MOST = 4096


def wanted_answers(parameters: str) -> str | None:
    """FIRST, NEXT, or None for all answers as they come; `parameters` are a request's, as JSON. ValueError else."""
    wanted = json.loads(parameters or "{}").get("answers")
    if wanted not in (None, FIRST, NEXT):
        raise ValueError(f"answers is {wanted!r}; expected {FIRST} or {NEXT}.")
    return None if wanted is None else str(wanted)


class FetchedSender:
    """Stands in for the sender of a request: keeps what is sent, and hands out one answer per call."""

    def __init__(self, sender: GuardedSender, ended: Callable[[], None]) -> None:
        """`sender` belongs to the call that gets the first answer; `ended` is called before the last one is sent."""
        self._lock = threading.Lock()
        self._answers: deque[Any] = deque()
        self._waiting: GuardedSender | None = sender
        self._ended = ended

    def send(self, answer: Any = None, *, final: bool) -> None:
        """Keep an answer, or the mere end, until it is asked for."""
        if answer is not None:
            self._answers.append(answer)
        if final and not (answer is not None and answer.has_error()):
            self._answers.append(None)
        self._deliver()

    def fetch(self, sender: GuardedSender) -> None:
        """Answer `sender` with what comes next, now or when it is there."""
        with self._lock:
            self._waiting = sender
        self._deliver()

    def is_cancelled(self) -> bool:
        """False: a model that gives up its call sends a stop request, Triton 2.51 has no other way."""
        return False

    def _deliver(self) -> None:
        with self._lock:
            if self._waiting is None or not self._answers:
                return
            sender, self._waiting = self._waiting, None
            answer = self._answers.popleft()
        if answer is None or answer.has_error():
            self._ended()
        sender.send(answer, final=True)  # waits for the other model, so not under the lock


class FetchedAnswers:
    """The requests whose answers are fetched, by request id."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: OrderedDict[str, FetchedSender] = OrderedDict()

    def sender(self, request_id: str, first: GuardedSender) -> FetchedSender:
        """Where to send the answers of a request, whose first one goes to `first`."""
        return FetchedSender(first, lambda: self._forget(request_id))

    def add(self, request_id: str, sender: FetchedSender) -> None:
        """Let the further answers of a request be fetched. What nobody came for is forgotten in the end."""
        with self._lock:
            self._open[request_id] = sender
            while len(self._open) > _MOST:
                self._open.popitem(last=False)

    def fetch(self, request_id: str, sender: GuardedSender) -> None:
        """Hand out the next answer of a request; ValueError when there is no such request."""
        with self._lock:
            fetched = self._open.get(request_id)
        if fetched is None:
            raise ValueError("There is no request of this id whose answers could be fetched.")
        fetched.fetch(sender)

    def _forget(self, request_id: str) -> None:
        with self._lock:
            self._open.pop(request_id, None)
