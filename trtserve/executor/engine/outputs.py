"""Build the outputs of a sequence: which tokens to send, and what else was asked for; hold them until fetched."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from trtserve.executor.engine.requests import FinishReason, RequestOutput
from trtserve.executor.engine.sequence import Sequence

Floats = npt.NDArray[np.float32]

_SENT: Floats = np.zeros((0, 0), dtype=np.float32)
"""Replaces logits that were already sent in a stream and are not needed again."""


def next_responses(sequence: Sequence, reason: FinishReason) -> list[RequestOutput]:
    """Return what is new after a step of a streaming sequence, or at the end of any.

    A stream has one response per token, also after a step with several. Only a client that sent draft tokens itself
    gets them in one.
    """
    final = reason is not FinishReason.NOT_FINISHED
    if sequence.search is not None:
        response = _respond_with_beams(sequence, final=final)
        return [] if response is None else [response]
    count = len(sequence.generated)
    if not sequence.streaming or sequence.single_step:
        return [_respond(sequence, count, reason)]
    with_last = final and reason is not FinishReason.END_ID  # the end token is not in the answer
    ends = range(sequence.sent + 1, count + (0 if with_last else 1))
    responses = [_respond(sequence, end, FinishReason.NOT_FINISHED) for end in ends]
    return [*responses, _respond(sequence, count, reason)] if final else responses


def _respond(sequence: Sequence, end: int, reason: FinishReason) -> RequestOutput:
    """Return the response with the generated tokens up to `end`."""
    generated = sequence.generated[:end]
    if sequence.streaming:
        tokens = generated if sequence.return_all else generated[sequence.sent :]
    else:
        tokens = generated if sequence.exclude_input else [*sequence.prompt.tolist(), *generated]
    output = _output(sequence, [tokens], [reason], final=reason is not FinishReason.NOT_FINISHED)
    if sequence.log_probs is not None:
        known = sequence.log_probs[:end]
        output.log_probs, output.cum_log_probs = [[each for each, _ in known]], [known[-1][1] if known else 0.0]
    if sequence.logits is not None:
        output.context_logits = sequence.logits.context
        output.generation_logits = _generation_logits(sequence, end)
    sequence.sent = end
    return output


def ended_response(sequence: Sequence, reason: FinishReason) -> RequestOutput:
    """Return the last response of a sequence that was cancelled or timed out.

    As in TensorRT-LLM, generated tokens that were not sent are dropped; the prompt stays where it belongs to the
    answer.
    """
    count = len(sequence.search.ranked()) if sequence.search is not None else 1
    prompt = [] if sequence.streaming or sequence.exclude_input else sequence.prompt.tolist()
    return _output(sequence, [prompt[:] for _ in range(count)], [reason] * count, final=True)


def error_response(sequence: Sequence, message: str) -> RequestOutput:
    sequence.group.failed = True
    return RequestOutput(request_id=sequence.id, client_id=sequence.client_id, error=message)


def _output(sequence: Sequence, tokens: list[list[int]], reasons: list[FinishReason], *, final: bool) -> RequestOutput:
    if final:
        sequence.group.open -= 1
    metrics = sequence.metrics
    return RequestOutput(
        request_id=sequence.id,
        client_id=sequence.client_id,
        tokens=tokens,
        reasons=reasons,
        index=sequence.index,
        ended=final,
        is_last=final and sequence.group.open == 0,
        iterations=sequence.iterations,
        metrics=None if metrics is None else replace(metrics, blocks=replace(sequence.use)),
    )


def _respond_with_beams(sequence: Sequence, *, final: bool) -> RequestOutput | None:
    """Return all beams, best first; a streamed response repeats all tokens so far."""
    search = sequence.search
    assert search is not None
    if not final and search.longest <= sequence.sent:
        return None
    beams = search.ranked()
    prompt = [] if sequence.streaming or sequence.exclude_input else sequence.prompt.tolist()
    tokens = [[*prompt, *beam.tokens] for beam in beams]
    output = _output(sequence, tokens, [beam.reason for beam in beams], final=final)
    if sequence.log_probs is not None:
        output.cum_log_probs = [beam.cum_log_prob for beam in beams]
        output.log_probs = [beam.log_probs for beam in beams]
    if sequence.logits is not None:
        output.context_logits = sequence.logits.context
        if sequence.logits.generation is not None:
            logits = np.zeros(
                (len(beams), sequence.max_tokens, sequence.logits.generation[0].shape[1]), dtype=np.float32
            )
            for number, beam in enumerate(beams):
                for step, origin in enumerate(beam.origins):
                    logits[number, step] = sequence.logits.generation[step][origin]
            output.generation_logits = logits
    sequence.sent = search.longest
    return output


def _generation_logits(sequence: Sequence, end: int) -> Floats | None:
    """Return f32[1, max_tokens, V], zeros after the last token; for a stream f32[n, 1, V] of the response's tokens.

    A streamed response without a token has the logits of the end token.
    """
    assert sequence.logits is not None
    rows = sequence.logits.generation
    if not rows:
        return None
    if sequence.streaming:
        first = 0 if sequence.return_all else min(sequence.sent, len(rows) - 1)
        last = max(end, first + 1)
        new = np.stack(rows[first:last])
        if not sequence.return_all:
            rows[first:last] = [_SENT] * (last - first)
        return new
    logits = np.zeros((1, sequence.max_tokens, rows[0].shape[1]), dtype=np.float32)
    count = len(sequence.generated)
    if count:
        logits[0, :count] = np.concatenate(rows[:count])
    return logits


class Mailbox:
    """Responses by request id; a request is open until its last response was fetched. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._ready: dict[int, list[RequestOutput]] = {}
        self._open: dict[int, int | None] = {}
        self._highest = 0
        self._closed = False
        self._failure: str | None = None

    def expect(self, clients: Mapping[int, int | None]) -> None:
        """Open request ids (ascending), with the client's ids; only their responses can be fetched by id."""
        with self._changed:
            self._open.update(clients)
            self._highest = max(self._highest, *clients, 0)

    def deliver(self, responses: list[RequestOutput]) -> None:
        """Make `responses` ready and wake all waiting threads."""
        with self._changed:
            for response in responses:
                self._ready.setdefault(response.request_id, []).append(response)
            self._changed.notify_all()

    def close(self) -> None:
        """Wake all waiting threads; fetching never blocks again."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def fail(self, message: str) -> None:
        """Answer every open request with an error; after those, fetching raises RuntimeError.

        Uses the ids known here, because the worker's own lists may be in any state after a failure.
        """
        with self._changed:
            for number, client in self._open.items():
                responses = self._ready.setdefault(number, [])
                if not (responses and _is_last(responses[-1])):
                    responses.append(RequestOutput(request_id=number, client_id=client, error=message))
            self._failure = message
        self.close()

    def count(self, number: int | None) -> int:
        """Return the number of ready responses, of request `number` or of all."""
        with self._changed:
            if number is None:
                return sum(map(len, self._ready.values()))
            return len(self._ready.get(number, ()))

    def fetch(self, number: int | None, timeout: float | None) -> list[RequestOutput]:
        """Return the ready responses of request `number` (None: all), waiting up to `timeout` seconds (None: no limit).

        Raises RuntimeError with the cause when no response can become ready any more.
        """
        with self._changed:
            if number is None:
                self._wait(lambda: bool(self._ready), timeout)
                return [response for each in list(self._ready) for response in self._take(each)]
            if number <= self._highest and number not in self._open:  # its last response was fetched before
                error = f"Request id {number} has already been processed and terminated"
                return [RequestOutput(request_id=number, error=error)]
            self._wait(lambda: number in self._ready, timeout)
            return self._take(number)

    def fetch_each(self, numbers: list[int], timeout: float | None) -> list[list[RequestOutput]]:
        """Return the ready responses of each request; the timeout is for all of them together."""
        deadline = None if timeout is None else time.monotonic() + timeout
        return [
            self.fetch(number, None if deadline is None else max(0.0, deadline - time.monotonic()))
            for number in numbers
        ]

    def _wait(self, ready: Callable[[], bool], timeout: float | None) -> None:
        self._changed.wait_for(lambda: self._closed or ready(), timeout)
        if self._failure is not None and not ready():
            raise RuntimeError(self._failure)

    def _take(self, number: int) -> list[RequestOutput]:
        responses = self._ready.pop(number, [])
        if responses and _is_last(responses[-1]):
            del self._open[number]
        return responses


def _is_last(response: RequestOutput) -> bool:
    return response.is_last or response.error is not None
