"""Which executor requests belong to which Triton request, and the sending of their responses."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import triton_python_backend_utils as pb_utils
from core_pulls import FetchedSender
from core_response import Outputs, Wanted
from guarded_sender import GuardedSender

_REMEMBERED = 1024
_INNER_MARK = "/bls-[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
_INNER_ID = re.compile(f"{_INNER_MARK}$")


def client_id(request_id: str) -> str:
    """The id that the client gave: without what the BLS model put behind it."""
    return _INNER_ID.sub("", request_id)


@dataclass(eq=False)
class Pending:
    """One Triton request that is being answered; `open_rows` maps executor ids to what their outputs depend on.

    `generated` counts the tokens of each sequence, by executor id and number of the sequence.
    """

    request_id: str
    sender: GuardedSender | FetchedSender
    decoupled: bool = True
    open_rows: dict[int, Wanted] = field(default_factory=dict)
    generated: dict[tuple[int, int], int] = field(default_factory=dict)

    def send(self, outputs: Outputs, *, parameters: dict[str, Any] | None = None) -> None:
        """Send the outputs of one executor response, and the end when no row is open any more.

        A decoupled model ends with an empty final response, behind every response that has data. The BLS model has no
        use for it and gets the end with the data: one message less on its way.
        """
        tensors = [pb_utils.Tensor(name, value) for name, value in outputs.items()]
        ended = not self.open_rows
        joined = not self.decoupled or _INNER_ID.search(self.request_id) is not None
        self.sender.send(response(tensors, parameters), final=ended and joined)
        if ended and not joined:
            self.sender.send(final=True)

    def fail(self, message: str) -> None:
        """Send an error in place of a response."""
        self.sender.send(error_response(message), final=not self.open_rows)

    def count(self, executor_id: int, sequence: int, tokens: int, *, repeated: bool) -> int:
        """How many of the `tokens` of a result are new; `repeated` means that each result holds all so far."""
        key = executor_id, sequence
        before = self.generated.get(key, 0)
        # A cancelled request ends with a result without tokens.
        self.generated[key] = max(before, tokens) if repeated else before + tokens
        return self.generated[key] - before

    def total(self, executor_id: int) -> int:
        """Tokens of all sequences of an executor request."""
        return sum(tokens for (number, _), tokens in self.generated.items() if number == executor_id)


def error_response(message: str) -> Any:
    """A response that is an error."""
    return pb_utils.InferenceResponse(output_tensors=[], error=pb_utils.TritonError(message))


@lru_cache(maxsize=1)
def _parameters_supported() -> bool:
    """Whether this Triton's python backend can send response parameters; the one of 24.10 cannot."""
    try:
        pb_utils.InferenceResponse(output_tensors=[], parameters={"probe": "1"})
    except TypeError:
        return False
    return True


def response(tensors: list[Any], parameters: dict[str, Any] | None = None) -> Any:
    """A response, with response parameters where the python backend can carry them."""
    if parameters and _parameters_supported():
        return pb_utils.InferenceResponse(output_tensors=tensors, parameters=parameters)
    return pb_utils.InferenceResponse(output_tensors=tensors)


class PendingTable:
    """All requests that are being answered, by executor id and by Triton request id; safe to use from any thread."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._by_executor_id: dict[int, Pending] = {}
        # Inner ids of the BLS model that ended lately, and whether a stop came since: speculative decoding goes on
        # under the same id, and a stop between two of its rounds must not be lost.
        self._ended: OrderedDict[str, bool] = OrderedDict()

    def add(self, pending: Pending) -> bool:
        """Register a request whose `open_rows` are known; True when its id was stopped before it came.

        The caller holds the lock.
        """
        for executor_id in pending.open_rows:
            self._by_executor_id[executor_id] = pending
        return self._ended.get(pending.request_id, False)

    def find(self, executor_id: int) -> Pending | None:
        """The request that an executor request belongs to."""
        with self.lock:
            return self._by_executor_id.get(executor_id)

    def close(self, executor_id: int) -> None:
        """Forget an executor request that ended."""
        with self.lock:
            pending = self._by_executor_id.pop(executor_id, None)
            if pending is None:
                return
            pending.open_rows.pop(executor_id, None)
            if _INNER_ID.search(pending.request_id):
                self._ended.setdefault(pending.request_id, False)
                while len(self._ended) > _REMEMBERED:
                    self._ended.popitem(last=False)

    def all(self) -> list[Pending]:
        """Every open request once."""
        with self.lock:
            return list(dict.fromkeys(self._by_executor_id.values()))

    def stop(self, request_id: str) -> list[int]:
        """Executor ids to cancel for a stop of a Triton request id, over all requests that carry it.

        The BLS model marks its inner requests `<client's id>/bls-<uuid4>`: a stop with the client's id reaches them
        too. Nothing else behind the slash counts, since it is part of the id of another client.
        """
        inner = re.compile(re.escape(request_id) + _INNER_MARK)
        with self.lock:
            for ended in filter(inner.fullmatch, self._ended):
                self._ended[ended] = True
            return [
                executor_id
                for executor_id, pending in self._by_executor_id.items()
                if pending.request_id == request_id or inner.fullmatch(pending.request_id)
            ]
