"""Response senders: guarded against a crash of Triton, with answers that a calling model fetches, and errors.

In Triton 2.51 a model that calls another one from several threads can deadlock when a call gets more than one answer
(`inner_models.py` explains how). Calls with a single answer are safe. So a request with the parameter `answers` =
`first` gets only its first answer, and what came since is fetched by requests of the same id with `answers` = `next`:
one answer each, with the tokens of all that wait. An answer without tensors, or an error, is the last one.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import triton_python_backend_utils as pb_utils

from .run_folder import STOPPED

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class GuardedSender:
    """Never calls `is_cancelled` during or after the final response.

    The final response frees the server's side of the sender. In Triton 2.51 asking for cancellation at that moment or
    later crashes the whole server.
    """

    def __init__(self, sender: Any) -> None:
        self._sender = sender
        self._lock = threading.Lock()
        self.ended = False
        """Whether the final response was sent or is being sent."""

    def send(self, response: Any = None, *, final: bool) -> None:
        """Send a response; None sends only the final flag."""
        arguments = () if response is None else (response,)
        # Triton frees tensors that were not requested without holding the GIL; this reference makes Python free them.
        kept = [] if response is None else response.output_tensors()  # noqa: F841
        if not final:
            self._sender.send(*arguments)
            return
        with self._lock:
            self.ended = True
            self._sender.send(*arguments, flags=FINAL)

    def is_cancelled(self) -> bool:
        """Return whether the client cancelled; False once the final response was sent.

        Costs a round trip to the server.
        """
        with self._lock:
            return not self.ended and bool(self._sender.is_cancelled())


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


def error_response(message: str) -> Any:
    """Return a response with an error: UNAVAILABLE (503 over HTTP) when the executor has stopped, else INTERNAL."""
    code = (pb_utils.TritonError.UNAVAILABLE,) if STOPPED in message else ()
    return pb_utils.InferenceResponse(output_tensors=[], error=pb_utils.TritonError(message, *code))


_Request = TypeVar("_Request")
_PARTS = 4


class Turns:
    """Chooses the open requests that are asked now whether their clients have gone: a quarter, or up to two.

    A question is a round trip to the server, and many of them in a row keep it from sending tokens.
    """

    def __init__(self) -> None:
        self._turn = 0

    def next(self, requests: Sequence[_Request]) -> Sequence[_Request]:
        """Return the next quarter."""
        self._turn += 1
        return requests[self._turn % _PARTS :: _PARTS] if len(requests) > 2 else requests


def repeat(stopping: threading.Event, period: float, action: Callable[[], None]) -> None:
    """Run `action` every `period` seconds until `stopping` is set; log an action that fails and go on."""
    while not stopping.wait(period):
        try:
            action()
        except Exception as error:  # noqa: BLE001, PERF203 - one failure must not end the thread
            pb_utils.Logger.log_error(f"{action.__name__} failed with {type(error).__name__}: {error}")
