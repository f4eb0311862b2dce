"""A day of a fleet in virtual time: requests, shared prefixes, batching, failures and rolling updates.

A step of an engine is not an event. Between two events of a replica its batch stays the same, so all steps between them
are one multiplication. Events are arrivals, starts and ends of answers, failures and updates. Replicas are columns of
arrays, and each has a clock of its own: one operation of NumPy advances all replicas to their next event. Arrivals are
given out in groups of at most a quarter of the replicas, each to the one with the least to do, as the gateway does.
Memory does not grow with requests: times are counted in histograms whose buckets are 2 % wide.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

GROUPS = 4  # arrivals that are given out together are at most this part of the replicas: 1/4
_HIT = 0.95
"""Part of the prefixes that a warm replica could have which the gateway's choice finds (`gateway/balancing.py`)."""
_WIDTH = 1.02
_SMALLEST = 1e-5
_BUCKETS = 1000  # 10 µs to an hour


@dataclass(frozen=True, kw_only=True)
class ReplicaSpeed:
    """How long a replica takes, in seconds."""

    step: float  # a step of one token, besides its sequences
    sequence: float  # each sequence in a step
    prompt_token: float  # each token of a prompt that is not in the cache
    request: float  # each request, besides its tokens: transport and tokenising. It delays that request only.
    slots: int  # sequences in a step; further requests wait


class Arrivals(NamedTuple):
    """Requests in order of time."""

    times: Floats  # seconds after the start [n]
    prompts: Floats  # tokens [n]
    answers: Floats  # tokens [n], at least 1
    shared: Floats  # tokens of the prompt that another request may have left in a cache [n]


@dataclass(frozen=True, order=True)
class Incident:
    """Something that happens to replicas at a moment."""

    seconds: float
    kind: Literal["down", "drain", "up"]
    """down: they end at once; drain: they get no requests any more; up: they serve again, with an empty cache."""
    replicas: tuple[int, ...]


class Histogram:
    """Counts of times in buckets that are 2 % wide."""

    def __init__(self) -> None:
        self.counts = np.zeros(_BUCKETS)

    def add(self, seconds: Floats, weights: Floats | None = None) -> None:
        """Count times."""
        places = (np.log(np.maximum(seconds, _SMALLEST) / _SMALLEST) / math.log(_WIDTH)).astype(np.int64)
        self.counts += np.bincount(np.minimum(places, _BUCKETS - 1), weights, _BUCKETS)

    def quantile(self, quantile: float) -> float | None:
        """Return a percentile in seconds, within 1 %, or None without times."""
        total = self.counts.sum()
        if not total:
            return None
        place = int(np.searchsorted(np.cumsum(self.counts), quantile * total))
        return float(_SMALLEST * _WIDTH ** (min(place, _BUCKETS - 1) + 0.5))


@dataclass
class Simulated:
    """What happened."""

    requests: int = 0
    completed: int = 0
    failed: int = 0  # answers that were cut off by a failure or an update
    tokens: float = 0.0
    events: int = 0
    cached_tokens: float = 0.0
    first: Histogram = field(default_factory=Histogram)  # times to the first token
    gap: Histogram = field(default_factory=Histogram)  # times between tokens
    hours: dict[int, Histogram] = field(default_factory=dict)  # hour → times to the first token
    longest_queue: int = 0
    busy: float = 0.0  # seconds of all replicas with at least one sequence
    seconds: float = 0.0


class Simulation:
    """Replicas that serve requests."""

    def __init__(
        self, replicas: int, speed: ReplicaSpeed, *, prefixes: int = 100, seed: int = 0, hour: float = 3600.0
    ) -> None:
        """Make idle replicas; each has seen a shared prefix after about `prefixes` requests.

        `hour` is the seconds that an hour of the day takes here.
        """
        self._speed, self._prefixes, self._hour = speed, prefixes, hour
        self._random = np.random.default_rng([seed, 33])
        self._count = replicas
        self._clock = np.zeros(replicas)
        self._active = np.zeros(replicas, np.int64)
        self._progress = np.zeros(replicas)
        """Steps that each replica has done."""
        self._stall = np.zeros(replicas)
        """Seconds of prompts that have to be computed before the next step."""
        self._ends = np.full((replicas, speed.slots), np.inf)
        """Progress at which the sequence in each slot ends."""
        self._next = np.full(replicas, np.inf)
        self._queued = np.zeros(replicas, np.int64)
        self._heads = np.zeros(replicas, np.int64)
        self._queue = np.zeros((4, replicas, 16))
        """Rings of waiting requests: arrival, uncached prompt tokens, answer tokens, unused."""
        self._served = np.zeros(replicas)
        self._accepting = np.ones(replicas, bool)
        self._all = np.arange(replicas)
        self.found = Simulated()

    def run(self, arrivals: Iterable[Arrivals], incidents: Sequence[Incident] = (), *, until: float = 0.0) -> Simulated:
        """Serve all requests; `until` is how long the day is at least."""
        pending = list(incidents)
        heapq.heapify(pending)
        for part in arrivals:
            begin, count = 0, len(part.times)
            self.found.requests += count
            while begin < count:
                now = float(part.times[begin])
                while pending and pending[0].seconds <= now:
                    self._happen(heapq.heappop(pending))
                self._advance(self._all, np.full(self._count, now))
                ready = self._accepting.nonzero()[0]
                if not len(ready):  # requests wait in front of the fleet for the next replica
                    if not pending:
                        raise ValueError("no replica is left, and none comes back")
                    self._happen(heapq.heappop(pending))
                    continue
                size = max(1, len(ready) // GROUPS)
                end = min(begin + size, count)
                if pending:
                    end = max(begin + 1, min(end, int(np.searchsorted(part.times, pending[0].seconds))))
                loads = (self._active + self._queued)[ready] + self._random.random(len(ready))
                least = np.argpartition(loads, end - begin - 1)[: end - begin]
                self._arrive(ready[least[np.argsort(loads[least])]], part, slice(begin, end))
                begin = end
        while pending and pending[0].seconds <= until:
            self._happen(heapq.heappop(pending))
        self._advance(self._all, np.full(self._count, np.inf))
        self.found.seconds = max(until, float(np.max(self._clock, initial=0.0)))
        return self.found

    def _happen(self, incident: Incident) -> None:
        replicas = np.array(incident.replicas, np.int64)
        self._advance(self._all, np.full(self._count, incident.seconds))
        self.found.events += len(replicas)
        if incident.kind == "up":
            self._accepting[replicas] = True
            self._clock[replicas] = np.maximum(self._clock[replicas], incident.seconds)
            self._served[replicas] = 0.0
            return
        self._accepting[replicas] = False
        waiting = [(each, place) for each in replicas for place in range(self._queued[each])]
        moved = [self._queue[:, each, (self._heads[each] + place) % self._queue.shape[2]] for each, place in waiting]
        self._queued[replicas] = 0
        if incident.kind == "down":
            self.found.failed += int(self._active[replicas].sum())
            self._active[replicas] = 0
            self._ends[replicas] = np.inf
            self._next[replicas] = np.inf
            self._stall[replicas] = 0.0
        ready = self._accepting.nonzero()[0]
        for request in moved:  # what has not begun goes elsewhere
            if len(ready):
                least = ready[np.argmin((self._active + self._queued)[ready])]
                self._enter(np.array([least]), *(np.array([value]) for value in request[:3]))
            else:
                self.found.failed += 1

    def _arrive(self, chosen: Ints, part: Arrivals, which: slice) -> None:
        times = part.times[which]
        self._advance(chosen, times)
        self.found.events += len(times)
        warm = 1 - np.exp(-self._served[chosen] / self._prefixes)
        hit = self._random.random(len(times)) < _HIT * warm
        cached = np.where(hit, np.minimum(part.shared[which], part.prompts[which] - 1), 0.0)
        self.found.cached_tokens += float(cached.sum())
        self._served[chosen] += 1
        self._enter(chosen, times, part.prompts[which] - cached, part.answers[which])

    def _enter(self, chosen: Ints, times: Floats, prompts: Floats, answers: Floats) -> None:
        """Start requests on replicas with a free slot, and let the others wait."""
        free = self._active[chosen] < self._speed.slots
        if free.all():
            self._start(chosen, times, prompts, answers)
            return
        self._start(chosen[free], times[free], prompts[free], answers[free])
        full = chosen[~free]
        ring = self._queue.shape[2]
        if (self._queued[full] >= ring).any():
            turned = (self._heads[:, None] + np.arange(ring)) % ring
            inside = np.take_along_axis(self._queue, turned[None].repeat(4, axis=0), axis=2)
            self._queue = np.concatenate([inside, np.zeros_like(inside)], axis=2)
            self._heads[:] = 0
            ring *= 2
        places = (self._heads[full] + self._queued[full]) % ring
        for row, values in enumerate((times[~free], prompts[~free], answers[~free])):
            self._queue[row, full, places] = values
        self._queued[full] += 1
        self.found.longest_queue = max(self.found.longest_queue, int(self._queued[full].max()))

    def _start(self, replicas: Ints, arrivals: Floats, prompts: Floats, answers: Floats) -> None:
        """Begin answers at the replicas' clocks; a replica is there once."""
        if not len(replicas):
            return
        speed, active = self._speed, self._active[replicas]
        whole = np.ceil(self._progress[replicas] - 1e-9)
        step = speed.step + speed.sequence * active
        rest = np.where(active > 0, (whole - self._progress[replicas]) * step, 0.0)  # of the step that runs
        prompt = speed.prompt_token * prompts
        first = self._stall[replicas] + rest + prompt + step + speed.sequence
        waited = self._clock[replicas] - arrivals + first + speed.request
        self.found.first.add(waited)
        hours = (arrivals // self._hour).astype(np.int64)
        for hour in {*hours.tolist()}:
            self.found.hours.setdefault(hour, Histogram()).add(waited[hours == hour])
        self.found.gap.add(prompt + step, active.astype(float))  # those that it delays
        self._stall[replicas] += prompt
        slots = self._ends[replicas].argmax(axis=1)  # a free one has no end
        ends = whole + answers
        self._ends[replicas, slots] = ends
        self._next[replicas] = np.minimum(self._next[replicas], ends)
        self._active[replicas] += 1
        self.found.tokens += float(answers.sum())

    def _advance(self, replicas: Ints, until: Floats) -> None:
        """Let the clocks of replicas go on to the moments `until`, with all ends of answers on the way."""
        speed, found = self._speed, self.found
        busy = self._active[replicas] > 0
        idle = replicas[~busy]
        if len(idle):
            self._clock[idle] = np.maximum(self._clock[idle], np.where(np.isinf(until[~busy]), 0, until[~busy]))
        replicas, until = replicas[busy], until[busy]
        while len(replicas):
            clock, active = self._clock[replicas], self._active[replicas]
            room = np.maximum(0.0, until - clock)
            stall = np.minimum(room, self._stall[replicas])
            self._stall[replicas] -= stall
            room -= stall
            step = speed.step + speed.sequence * active
            left = (self._next[replicas] - self._progress[replicas]) * step
            done = np.minimum(room, left)
            steps = done / step
            self._progress[replicas] += steps
            self._clock[replicas] = clock + stall + done
            found.gap.add(step, steps * active)
            found.busy += float(done.sum() + stall.sum())
            ended = left <= room
            replicas, until = replicas[ended], until[ended]
            if len(replicas):
                self._end(replicas)
                still = self._active[replicas] > 0
                gone = ~still & np.isfinite(until)
                self._clock[replicas[gone]] = until[gone]
                replicas, until = replicas[still], until[still]

    def _end(self, replicas: Ints) -> None:
        """End one answer of each replica, and start one that waits."""
        slots = self._ends[replicas].argmin(axis=1)
        self._progress[replicas] = self._ends[replicas, slots]
        self._ends[replicas, slots] = np.inf
        self._next[replicas] = self._ends[replicas].min(axis=1)
        self._active[replicas] -= 1
        self.found.completed += len(replicas)
        self.found.events += len(replicas)
        waiting = replicas[self._queued[replicas] > 0]
        if len(waiting):
            heads = self._heads[waiting]
            requests = self._queue[:3, waiting, heads]
            self._heads[waiting] = (heads + 1) % self._queue.shape[2]
            self._queued[waiting] -= 1
            self._start(waiting, *requests)
