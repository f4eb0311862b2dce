"""An engine in virtual time: how long requests take at a load, with given costs of a step.

Requests of a closed loop come in waves, prompts share steps with answers, and a full engine lets others wait:
percentiles follow from that, not from means. Steps between two events are alike and are taken at once, so a run costs a
few events for each request.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

Terms = npt.NDArray[np.float64]
"""Seconds by what they are spent on; the last two of them are requests that come to the engine, and nothing to do."""
StepCost = Callable[[int, int, float], tuple[float, ...]]
"""(sequences, tokens of prompts, tokens in the KV cache) of a step → the terms of its cost but for the last two."""
_MOST = 128
"""Requests of a run: more say little about percentiles."""
_SEED = 33


@dataclass(frozen=True, kw_only=True)
class Offered:
    """What is asked: lengths in tokens, and requests in flight or per second."""

    input_tokens: float
    output_tokens: float
    input_stdev: float = 0.0
    output_stdev: float = 0.0
    concurrency: int | None = None
    rate: float | None = None
    requests: int = 64


@dataclass(slots=True)
class _Request:
    """A request: what is left of its prompt and of its answer, and when the engine gets it."""

    prompt: int
    answer: int
    length: int  # tokens of prompt and answer
    ready: float = 0.0
    sent: float = 0.0
    first: float = 0.0
    end: float = 0.0


@dataclass(frozen=True)
class VirtualRun:
    """What happened to the requests of one engine; an event is some equal steps, or waiting."""

    times: Terms  # seconds at which each request was sent, had its first token, and ended; [requests, 3]
    tokens: Terms  # of each answer; [requests]
    clocks: Terms  # seconds before each event and after the last one; [events + 1]
    costs: Terms  # of one step of each event; [events, terms]
    steps: Terms  # [events]
    given: Terms  # tokens that came, and those of them that follow another one of their answer; [events, 2]
    sending: int  # events until the last request was sent

    @cached_property
    def spent(self) -> Terms:
        """Seconds before each event and after the last one, by what they were spent on; [events + 1, terms]."""
        rows = self.costs * self.steps[:, None]
        return np.concatenate([np.zeros((1, rows.shape[1])), np.cumsum(rows, axis=0)])

    @property
    def terms(self) -> Terms:
        """Seconds until the last request was sent, by what they were spent on."""
        return np.asarray(self.spent[self.sending])

    @property
    def tokens_per_second(self) -> float:
        """Tokens of answers until the last request was sent, in a second."""
        return float(self.given[: self.sending, 0].sum() / self.clocks[self.sending])

    def figure(self, measure: str, quantile: float | None) -> tuple[float, Terms]:
        """Return a quantile, or the mean, of ttft, itl, tpot or latency in seconds, and what they were spent on."""
        if measure == "itl":
            terms, weights = self.costs, self.given[:, 1]
            values = terms.sum(axis=1)
        else:
            begin, end = {"ttft": (0, 1), "latency": (0, 2), "tpot": (1, 2)}[measure]
            parts = np.maximum(1, self.tokens - 1) if measure == "tpot" else np.ones(len(self.tokens))
            # All of these moments are ends of events, or the next event begins after them.
            places = np.searchsorted(self.clocks, self.times)
            values, weights = (self.times[:, end] - self.times[:, begin]) / parts, np.ones(len(parts))
            terms = (self.spent[places[:, end]] - self.spent[places[:, begin]]) / parts[:, None]
        if not weights.any():
            return 0.0, 0 * self.terms
        if quantile is None:
            return float(np.average(values, weights=weights)), np.average(terms, axis=0, weights=weights)
        order = np.argsort(values)
        reached = np.cumsum(weights[order])
        place = order[np.searchsorted(reached, quantile * reached[-1])]
        return float(values[place]), terms[place]


def serve(  # noqa: C901 - what happens in an event, from top to bottom
    offered: Offered, cost: StepCost, *, slots: int, step_tokens: int, overhead: float
) -> VirtualRun:
    """Serve requests and return what happened.

    A step has up to `slots` sequences: first a token of each answer, then as many tokens of prompts as are left of
    `step_tokens`. A request gets to the engine `overhead` seconds after it was sent.
    """
    count = min(offered.requests, _MOST)
    random = np.random.default_rng(_SEED)
    prompts, answers = (
        np.maximum(1, np.rint(random.normal(mean, stdev, count)) if stdev else np.full(count, round(mean)))
        for mean, stdev in ((offered.input_tokens, offered.input_stdev), (offered.output_tokens, offered.output_stdev))
    )
    requests = [_Request(int(a), int(b), int(a + b), overhead) for a, b in zip(prompts, answers, strict=True)]
    at_once = min(count, offered.concurrency or 1)
    if offered.rate is not None:
        for request, time in zip(requests, np.cumsum(random.exponential(1 / offered.rate, count)), strict=True):
            request.sent, request.ready = float(time), float(time) + overhead
        at_once = count
    coming, unsent, active = deque(requests[:at_once]), deque(requests[at_once:]), list[_Request]()
    last = math.inf if offered.rate is None else requests[-1].sent
    nothing = (0.0,) * len(cost(1, 0, 0.0))
    clock, context, sending = 0.0, 0.0, 0
    clocks, costs, steps_of, given = [0.0], list[tuple[float, ...]](), list[int](), list[tuple[int, int]]()
    while coming or active:
        if unsent if at_once < count else clock < last:
            sending = len(costs) + 1
        while coming and len(active) < slots and coming[0].ready <= clock:
            active.append(coming.popleft())
        steps, begun, answering = 1, list[_Request](), list[_Request]()
        if not active:
            idle = max(0.0, coming[0].sent - clock)
            terms = (*nothing, 0.0 if idle else coming[0].ready - clock, idle)
        else:
            answering = [each for each in active if not each.prompt]
            room = left = max(1, step_tokens - len(answering))
            reading = 0
            for each in active:
                if each.prompt and left:
                    taken = min(each.prompt, left)
                    each.prompt -= taken
                    left -= taken
                    reading += 1
                    if not each.prompt:
                        begun.append(each)
            context += room - left
            terms = (*cost(len(answering) + reading, room - left, context), 0.0, 0.0)
            if not reading:
                steps = min(each.answer for each in answering)
                if coming and len(active) < slots:
                    steps = min(steps, max(1, math.ceil((coming[0].ready - clock) / sum(terms))))
                terms = (*cost(len(answering), 0, context + len(answering) * (steps - 1) / 2), 0.0, 0.0)
        clock += sum(terms) * steps
        clocks.append(clock)
        costs.append(terms)
        steps_of.append(steps)
        following = len(answering) * steps
        given.append((following + len(begun), following))
        context += following + len(begun)
        for each in begun:
            each.first = clock
            each.answer -= 1
        for each in answering:
            each.answer -= steps
        for ended in [each for each in active if not each.prompt and not each.answer]:
            ended.end = clock
            context -= ended.length
            active.remove(ended)
            if unsent:
                next_one = unsent.popleft()
                next_one.sent, next_one.ready = clock, clock + overhead
                coming.append(next_one)
    return VirtualRun(
        times=np.array([(each.sent, each.first, each.end) for each in requests]),
        tokens=np.maximum(1, answers),
        clocks=np.array(clocks),
        costs=np.array(costs),
        steps=np.array(steps_of, float),
        given=np.array(given, float),
        sending=sending,
    )
