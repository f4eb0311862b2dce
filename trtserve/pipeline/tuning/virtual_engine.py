"""An engine in virtual time: how long requests take at a load, with given costs of a step.

Requests of a closed loop come in waves, prompts share steps with answers, and a full engine lets others wait:
percentiles follow from that, not from means. Steps between two events are alike and are taken at once, so a run costs a
few events for each request.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

Terms = npt.NDArray[np.float64]
"""Seconds by what they are spent on; the last two of them are requests that come to the engine, and nothing to do."""
StepCost = Callable[[int, int, float], Terms]
"""(sequences, tokens of prompts, tokens in the KV cache) of a step → what it costs."""
_MOST = 256
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
class VirtualRequest:
    """A request: when what happened, in seconds, and the tokens that are left of its prompt and of its answer."""

    prompt: int
    answer: int
    tokens: int
    """Of the whole answer."""
    length: int
    """Of prompt and answer."""
    sent: float = 0.0
    ready: float = 0.0
    """When the engine gets it."""
    first: float = 0.0
    end: float = 0.0
    spent: list[Terms] = field(default_factory=list)
    """What the engine had spent when it was sent, had its first token, and ended."""


@dataclass
class VirtualRun:
    """What happened to the requests of one engine."""

    requests: list[VirtualRequest]
    terms: Terms
    """Seconds until the last request was sent, by what they were spent on."""
    tokens: int = 0
    """Tokens of answers until then."""
    gaps: list[tuple[Terms, int]] = field(default_factory=list)
    """Seconds between tokens, and how many tokens came after that time."""

    def figure(self, measure: str, quantile: float | None) -> tuple[float, Terms]:
        """Return a quantile, or the mean, of ttft, itl, tpot or latency in seconds, and what they were spent on."""
        values, weights, terms = self._samples[measure]
        if not weights.any():
            return 0.0, 0 * self.terms
        if quantile is None:
            return float(np.average(values, weights=weights)), np.average(terms, axis=0, weights=weights)
        order = np.argsort(values)
        reached = np.cumsum(weights[order])
        place = order[np.searchsorted(reached, quantile * reached[-1])]
        return float(values[place]), terms[place]

    @cached_property
    def _samples(self) -> Mapping[str, tuple[Terms, Terms, Terms]]:
        rows = np.array([(each.sent, each.first, each.end, each.tokens) for each in self.requests], float)
        sent, first, end, tokens = rows.T
        spent = np.array([each.spent for each in self.requests])
        gaps = np.array([each for each, _ in self.gaps] or [0 * self.terms])
        counts = np.array([count for _, count in self.gaps] or [0], float)
        ones, following = np.ones(len(rows)), np.maximum(1, tokens - 1)
        return {
            "ttft": (first - sent, ones, spent[:, 1] - spent[:, 0]),
            "latency": (end - sent, ones, spent[:, 2] - spent[:, 0]),
            "tpot": ((end - first) / following, ones, (spent[:, 2] - spent[:, 1]) / following[:, None]),
            "itl": (gaps.sum(axis=1), counts, gaps),
        }


def serve(offered: Offered, cost: StepCost, *, slots: int, step_tokens: int, overhead: float) -> VirtualRun:
    """Serve requests and return what happened.

    A step has up to `slots` sequences: first a token of each answer, then as many tokens of prompts as are left of
    `step_tokens`. A request gets to the engine `overhead` seconds after it was sent.
    """
    count = min(offered.requests, _MOST)
    random = np.random.default_rng(_SEED)
    prompts = _lengths(random, count, offered.input_tokens, offered.input_stdev)
    answers = _lengths(random, count, offered.output_tokens, offered.output_stdev)
    requests = [
        VirtualRequest(prompt=prompt, answer=answer, length=prompt + answer, tokens=answer)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    at_once = min(count, offered.concurrency or 1)
    if offered.rate is not None:
        for request, time in zip(requests, np.cumsum(random.exponential(1 / offered.rate, count)), strict=True):
            request.sent = float(time)
        at_once = count
    for request in requests:
        request.ready = request.sent + overhead
    none = np.zeros_like(cost(1, 0, 0.0))
    engine = _Engine(VirtualRun(requests, none), cost, slots, step_tokens, none)
    engine.coming.extend(requests[:at_once])
    unsent = deque(requests[at_once:])
    last = requests[-1].sent or math.inf
    while engine.coming or engine.active:
        engine.counting = bool(unsent) if at_once < count else engine.clock < last
        for ended in engine.advance():
            if unsent:
                following = unsent.popleft()
                following.sent, following.ready = ended.end, ended.end + overhead
                following.spent.append(engine.spent)
                engine.coming.append(following)
    return engine.run


def _lengths(random: np.random.Generator, count: int, mean: float, stdev: float) -> Sequence[int]:
    lengths = (
        np.maximum(1, np.rint(random.normal(mean, stdev, count))) if stdev else np.full(count, max(1, round(mean)))
    )
    return [int(each) for each in lengths]


@dataclass
class _Engine:
    run: VirtualRun
    cost: StepCost
    slots: int
    step_tokens: int
    spent: Terms
    clock: float = 0.0
    counting: bool = True
    coming: deque[VirtualRequest] = field(default_factory=deque)
    """Requests that were sent, in order."""
    active: list[VirtualRequest] = field(default_factory=list)
    context: float = 0.0
    """Tokens in the KV cache."""

    def advance(self) -> list[VirtualRequest]:
        """Go on to the next event and return the requests that ended."""
        for each in itertools.takewhile(lambda request: request.sent <= self.clock, self.coming):
            if not each.spent:
                each.spent.append(self.spent)
        while self.coming and len(self.active) < self.slots and self.coming[0].ready <= self.clock:
            self.active.append(self.coming.popleft())
        if not self.active:
            following, idle = self.coming[0], np.zeros_like(self.spent)
            if following.sent > self.clock:
                idle[-1] = following.sent - self.clock
            else:
                idle[-2] = following.ready - self.clock
            self._spend(idle, 1)
            return []
        answering = [each for each in self.active if not each.prompt]
        reading, tokens = self._read(max(1, self.step_tokens - len(answering)))
        steps = 1
        terms = self.cost(len(answering) + len(reading), tokens, self.context)
        if not reading:
            steps = min(each.answer for each in answering)
            if self.coming and len(self.active) < self.slots:
                steps = min(steps, max(1, math.ceil((self.coming[0].ready - self.clock) / float(terms.sum()))))
            terms = self.cost(len(answering), 0, self.context + len(answering) * (steps - 1) / 2)
        self._spend(terms, steps)
        self.run.gaps.append((terms, len(answering) * steps))
        begun = [each for each in reading if not each.prompt]
        for each in begun:
            each.first = self.clock
            each.spent.append(self.spent)
            each.answer -= 1
        for each in answering:
            each.answer -= steps
        written = len(answering) * steps + len(begun)
        self.context += written
        self.run.tokens += written * self.counting
        return self._ended()

    def _read(self, room: int) -> tuple[list[VirtualRequest], int]:
        """Read as many tokens of prompts as there is room for; return their requests and the tokens."""
        reading, left = [], room
        for each in self.active:
            taken = min(each.prompt, left)
            if taken:
                each.prompt -= taken
                left -= taken
                reading.append(each)
        self.context += room - left
        return reading, room - left

    def _ended(self) -> list[VirtualRequest]:
        """Remove the requests whose answers are complete, and return them."""
        ended = [each for each in self.active if not each.prompt and not each.answer]
        for each in ended:
            each.end = self.clock
            each.spent.append(self.spent)
            self.context -= each.length
            self.active.remove(each)
        return ended

    def _spend(self, terms: Terms, times: int) -> None:
        self.clock += float(terms.sum()) * times
        self.spent = self.spent + terms * times
        if self.counting:
            self.run.terms = self.run.terms + terms * times
