"""Requests whose answers are open, and streams whose waiting tokens are joined into one response."""

from __future__ import annotations

import re
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

from ..shared.senders import FetchedSender, GuardedSender, error_response
from .response import Outputs, Wanted

_REMEMBERED = 1024
_INNER_MARK = "/bls-[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
_INNER_ID = re.compile(f"{_INNER_MARK}$")


def client_id(request_id: str) -> str:
    """Return the id that the client gave, without the suffix that the BLS model adds."""
    return _INNER_ID.sub("", request_id)


@dataclass(eq=False)
class Pending:
    """One Triton request that is being answered."""

    request_id: str
    sender: GuardedSender | FetchedSender
    decoupled: bool = True
    open_rows: dict[int, Wanted] = field(default_factory=dict)
    """Executor id → what the outputs of that batch row depend on; rows that ended are removed."""
    generated: dict[tuple[int, int], int] = field(default_factory=dict)
    """(Executor id, sequence index) → tokens generated so far."""
    began: float = field(default_factory=time.perf_counter)
    last: dict[tuple[int, int], float] = field(default_factory=dict)
    """(Executor id, sequence index) → when its last tokens came."""
    answered: set[int] = field(default_factory=set)  # executor ids that have had a result

    def send(self, outputs: Outputs, *, parameters: dict[str, Any] | None = None) -> None:
        """Send the outputs of one executor response, and the final flag when no row is open any more.

        A decoupled model sends the final flag in an empty response after the data. The BLS model gets it with the
        data, which saves a message.
        """
        tensors = [pb_utils.Tensor(name, value) for name, value in outputs.items()]
        ended = not self.open_rows
        joined = not self.decoupled or _INNER_ID.search(self.request_id) is not None
        self.sender.send(response(tensors, parameters), final=ended and joined)
        if ended and not joined:
            self.sender.send(final=True)

    def fail(self, message: str) -> None:
        """Send an error instead of a response."""
        self.sender.send(error_response(message), final=not self.open_rows)

    def begins(self, executor_id: int) -> bool:
        """Return whether this is the first result of an executor request."""
        first = executor_id not in self.answered
        self.answered.add(executor_id)
        return first

    def count(self, executor_id: int, sequence: int, tokens: int, *, repeated: bool) -> int:
        """Count the tokens of a result and return how many are new; `repeated`: each result holds all so far."""
        key = executor_id, sequence
        before = self.generated.get(key, 0)
        # The last result of a cancelled request has no tokens.
        self.generated[key] = max(before, tokens) if repeated else before + tokens
        return self.generated[key] - before

    def since_last(self, executor_id: int, sequence: int) -> tuple[float, bool]:
        """Return the seconds since the last tokens of a sequence, and whether these are the first ones."""
        key, now = (executor_id, sequence), time.perf_counter()
        before, self.last[key] = self.last.get(key), now
        return now - (self.began if before is None else before), before is None

    def total(self, executor_id: int) -> int:
        """Return the tokens of all sequences of an executor request."""
        return sum(tokens for (number, _), tokens in self.generated.items() if number == executor_id)


@lru_cache(maxsize=1)
def _parameters_supported() -> bool:
    """Return whether this Triton's Python backend can send response parameters; that of 24.10 cannot."""
    try:
        pb_utils.InferenceResponse(output_tensors=[], parameters={"probe": "1"})
    except TypeError:
        return False
    return True


def response(tensors: list[Any], parameters: dict[str, Any] | None = None) -> Any:
    """Return a response, with response parameters if the Python backend supports them."""
    if parameters and _parameters_supported():
        return pb_utils.InferenceResponse(output_tensors=tensors, parameters=parameters)
    return pb_utils.InferenceResponse(output_tensors=tensors)


class PendingTable:
    """All requests that are being answered, by executor id and by Triton request id; thread-safe."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._by_executor_id: dict[int, Pending] = {}
        # Ids of BLS requests that ended lately → whether a stop came since. Speculative decoding sends several rounds
        # under one id, and a stop between two rounds must not be lost.
        self._ended: OrderedDict[str, bool] = OrderedDict()

    def add(self, pending: Pending) -> bool:
        """Register a request whose `open_rows` are known. Return True if a stop for its id came first.

        The caller holds the lock.
        """
        for executor_id in pending.open_rows:
            self._by_executor_id[executor_id] = pending
        return self._ended.get(pending.request_id, False)

    def find(self, executor_id: int) -> Pending | None:
        """Return the request of an executor id, or None when it has ended."""
        found = self._by_executor_id.get(executor_id)
        if found is None:  # it may be about to be added
            with self.lock:
                found = self._by_executor_id.get(executor_id)
        return found

    def close(self, executor_id: int) -> None:
        """Remove an executor request that ended."""
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
        """Return every open request once."""
        with self.lock:
            return list(dict.fromkeys(self._by_executor_id.values()))

    def stop(self, request_id: str) -> list[int]:
        """Return the executor ids to cancel for a stop of a Triton request id.

        The BLS model names its inner requests `<client's id>/bls-<uuid4>`, so a stop with the client's id reaches them
        too. Any other text after a slash is part of another client's id.
        """
        with self.lock:
            for ended in self._ended:
                if client_id(ended) == request_id:
                    self._ended[ended] = True
            return [
                executor_id
                for executor_id, pending in self._by_executor_id.items()
                if request_id in (pending.request_id, client_id(pending.request_id))
            ]


MOST_WAITING = 32  # this many answers at once show that Triton is behind


def joined(answers: Sequence[Any]) -> list[tuple[Any, list[int]]]:
    """Return answers, each with the tokens of the answers before it in the same stream, which are left out.

    Nothing is joined up to MOST_WAITING answers, nor answers that hold more than the tokens of one sequence, such as
    log-probabilities or beams.
    """
    if len(answers) <= MOST_WAITING:
        return [(answer, []) for answer in answers]
    kept: dict[int, tuple[Any, list[int]]] = {}
    waiting: dict[int, tuple[int, int]] = {}  # executor id → sequence, and number in `kept`
    for number, answer in enumerate(answers):
        earlier: list[int] = []
        sequence = _sequence_of_tokens(answer)
        before = waiting.pop(answer.request_id, None)
        if sequence is not None:
            if before is not None and before[0] == sequence:
                previous, tokens = kept.pop(before[1])
                earlier = [*tokens, *previous.result.output_token_ids[0]]
            waiting[answer.request_id] = sequence, number
        kept[number] = answer, earlier
    return list(kept.values())


def _sequence_of_tokens(answer: Any) -> int | None:
    """Return the number of the sequence whose tokens are all that an answer holds, or None."""
    if answer.has_error():
        return None
    result = answer.result
    others = result.cum_log_probs, result.log_probs, result.context_logits, result.generation_logits
    if len(result.output_token_ids) != 1 or any(other is not None for other in others):
        return None
    return int(getattr(result, "sequence_index", 0))  # 0.12 and 0.13 have one sequence


def joined_responses(first: Any, second: Any) -> Any:
    """Return one response with the tokens of two, or None unless both hold only tokens, and of the same sequence."""
    before, after = _tokens(first), _tokens(second)
    if before is None or after is None or before.keys() != after.keys():
        return None
    joined = {
        "output_ids": np.concatenate([before["output_ids"], after["output_ids"]], axis=2),
        "sequence_length": before["sequence_length"] + after["sequence_length"],
    }
    if any(before[name] != after[name] for name in before.keys() - joined.keys()):
        return None
    return pb_utils.InferenceResponse(
        output_tensors=[pb_utils.Tensor(name, value) for name, value in (before | joined).items()]
    )


def _tokens(response: Any) -> dict[str, NDArray[Any]] | None:
    """Return the arrays of a response that holds only the tokens of one sequence and which it is, or None."""
    if response is None or response.has_error():
        return None
    arrays = {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}
    others = arrays.keys() - {"output_ids", "sequence_length", "batch_index", "sequence_index"}
    if hasattr(response, "parameters") and response.parameters() not in ("", "{}"):  # 24.10 has none
        return None
    return None if others or arrays["sequence_length"].size > 1 else arrays
