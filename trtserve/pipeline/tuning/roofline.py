"""How fast a configuration should be: a roofline of bytes and operations, with the overheads that a machine has.

The figures of a machine are measured once (`trtserve doctor --measure`). A prediction is a run of an engine in virtual
time whose steps cost a sum of terms. Requests of a closed loop come in waves, prompts share steps with answers, and a
full engine lets others wait: percentiles follow from that, not from means. Steps between two events are alike and are
taken at once, so a run costs a few events for each request. Trials correct the weight of each term, from rates and
times together, and what the terms cannot say: a Gaussian process (Rasmussen and Williams, 2006, section 2.7) over the
logarithms of all figures, with the weights as its linear part. So every prediction has an uncertainty.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from statistics import median

import numpy as np
import numpy.typing as npt

from trtserve.errors import UsageError
from trtserve.files import read_as, write_json
from trtserve.store import Store

Terms = npt.NDArray[np.float64]
"""Seconds by what they are spent on; the last two of them are requests that come to the engine, and nothing to do."""
StepCost = Callable[[int, int, float], tuple[float, ...]]
"""(sequences, tokens of prompts, tokens in the KV cache) of a step → the terms of its cost but for the last two."""
_MOST = 128  # requests of a run: more say little about percentiles
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


_FILE = "speed-{runtime}.json"
_TIMES = ("ttft", "itl", "tpot", "latency")
_TERMS = 5
_DOUBT = 0.4  # standard deviation of the logarithm of a term's weight on a machine that was measured
_GUESS = 1.0  # the same where it was not
_KINDS = 0.5  # how much weights of different kinds of engines differ, as a part of that
_STALE = 0.2  # change of the logarithm of a weight after which the engine in virtual time serves again
_PASSES = 2
_REACH = np.array([1.2, 2.0, 1.2])
"""Doublings of batch, tokens of a step and load over which what the terms cannot say changes."""
_ALIKE = 0.8  # correlation of what the terms cannot say of two figures of one measure, such as a mean and a percentile
_OWN = 0.15  # part of it that no other lane shares
_MISFIT = {"rate": 0.12, "mean": 0.15, "percentile": 0.2}
"""Standard deviation of the logarithm of what the terms cannot say."""
_NOISE = {"rate": 0.02, "mean": 0.03, "percentile": 0.08}  # the same of what differs between two trials of one lane
_SCALES = (0.5, 1.0, 2.0)  # of misfit and noise; the likeliest count


@dataclass(frozen=True, kw_only=True)
class MachineSpeed:
    """What a runtime reaches on this machine."""

    bytes_per_second: float  # at which weights are read when one token is computed
    operations_per_second: float  # in matrices of many tokens
    step_seconds: float  # of a step of the engine besides its matrices
    sequence_seconds: float  # of each sequence in a step: choosing, streaming and counting its token
    request_seconds: float  # of each request before the engine has it: transport, tokenising
    device: str = ""
    measured: str = ""  # UTC, ISO 8601

    @classmethod
    def read(cls, runtime: str, store: Store) -> MachineSpeed | None:
        """Return what `doctor --measure` wrote, or None. Raises UsageError for a file without speeds above 0."""
        path, hint = store.root / _FILE.format(runtime=runtime), "Measure again: trtserve doctor --measure"
        try:
            speed = read_as(path, cls, "the speed of this machine", UsageError, hint=hint)
        except FileNotFoundError:
            return None
        for name, value in asdict(speed).items():
            if isinstance(value, float) and not 0 < value < math.inf:
                raise UsageError(f"{path} has {value:g} {name.replace('_', ' ')}; it must be above 0.", hint=hint)
        return speed

    def write(self, runtime: str, store: Store) -> None:
        write_json(store.root / _FILE.format(runtime=runtime), asdict(self))


ASSUMED = MachineSpeed(
    bytes_per_second=10e9,
    operations_per_second=100e9,
    step_seconds=0.002,
    sequence_seconds=0.0005,
    request_seconds=0.01,
    device="assumed",
)
"""Orders the trials of a machine that was not measured."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What a configuration has to read and compute, on each rank."""

    weight_bytes: float
    kv_bytes: float  # of a token in the KV cache
    parameters: float
    max_batch_size: int
    max_num_tokens: int
    replicas: int = 1
    kind: str = ""  # what else makes the engine, such as its runtime and data type; each kind has weights of its own


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Expected figures of a trial."""

    requests_per_second: float
    tokens_per_second: float
    run: VirtualRun  # of one replica
    held_back: bool = False  # whether it is as fast as requests come

    def figure(self, name: str) -> float:
        """Return a figure by the name of its limit, such as ttft_p99 or tokens_per_second; times in milliseconds."""
        return self.shares(name)[0]

    def shares(self, name: str) -> tuple[float, Terms]:
        """Return a figure, and by which part of itself it grows with each term of a step."""
        if name in ("requests_per_second", "tokens_per_second"):
            free = self.held_back or not self.run.terms.any()
            return float(getattr(self, name)), -self.run.terms / (math.inf if free else self.run.terms.sum())
        measure, _, figure = name.rpartition("_")
        if measure not in _TIMES:
            return 1.0, 0 * self.run.terms
        seconds, terms = self.run.figure(measure, None if figure == "mean" else float(figure[1:]) / 100)
        return 1000 * seconds, terms / (seconds or math.inf)


@dataclass(frozen=True)
class _Points:
    """Figures of lanes, in rows: what the Gaussian process knows of them."""

    place: Terms  # logarithms of batch, tokens of a step and load; [rows, 3]
    terms: Terms  # by which part of itself a figure grows with each term; [rows, 5]
    kind: npt.NDArray[np.str_]
    name: npt.NDArray[np.str_]
    mean: Terms  # logarithm of the figure where all weights are 1

    def misfit(self) -> Terms:
        return np.array([_MISFIT[_sort(name)] for name in self.name])

    def covariance(self, other: _Points, doubt: float, scale: float) -> Terms:
        """Return how the figures vary together."""
        same_kind = self.kind[:, None] == other.kind
        linear = doubt**2 * self.terms @ other.terms.T * (1 + _KINDS**2 * same_kind)
        far = (((self.place[:, None] - other.place) / _REACH) ** 2).sum(axis=2)
        measures = np.array([_measure(each) for each in self.name]), np.array([_measure(each) for each in other.name])
        alike = _ALIKE * (measures[0][:, None] == measures[1]) + (1 - _ALIKE) * (self.name[:, None] == other.name)
        shared = np.exp(-far / 2) * (1 + same_kind) / 2
        apart = scale**2 * alike * ((1 - _OWN) * shared + _OWN * same_kind * (far == 0))
        return np.asarray(linear + apart * np.outer(self.misfit(), other.misfit()))


def _measure(name: str) -> str:
    return "rate" if name.endswith("_second") else name.rpartition("_")[0]


def _sort(name: str) -> str:
    return "rate" if name.endswith("_second") else "mean" if name.endswith("_mean") else "percentile"


@dataclass
class SpeedModel:
    """Predicts trials, and learns from them."""

    speed: MachineSpeed
    errors: list[dict[str, float]] = field(default_factory=list)
    """Of each trial, predicted before it ran: figure → |predicted / measured − 1|."""
    _seen: list[tuple[ModelShape, Offered, str, float]] = field(default_factory=list)
    """Shape, load, figure, and the logarithm of what was measured."""
    _noise: list[float] = field(default_factory=list)
    _weights: dict[str, Terms] = field(default_factory=dict)  # kind of engine → logarithm of the weight of each term
    _runs: dict[tuple[ModelShape, Offered], tuple[Prediction, Terms]] = field(default_factory=dict)
    """Predictions, and the weights that they were made with."""
    _scales: tuple[float, float] = (1.0, 1.0)
    _known: tuple[_Points, Terms, Terms] | None = None
    """What was seen, the inverse of its covariance, and that times how far it is from the mean."""

    @property
    def doubt(self) -> float:
        """Standard deviation of the logarithm of a term's weight before any trial."""
        return _GUESS if self.speed.device == ASSUMED.device else _DOUBT

    def predict(self, shape: ModelShape, offered: Offered) -> Prediction:
        """Return the figures of an engine whose steps cost what is known of the terms."""
        weights = self._weights.get(shape.kind, np.zeros(_TERMS))
        found = self._runs.get((shape, offered))
        if found is None or np.abs(found[1] - weights).max() > _STALE:
            found = self._predict(shape, offered, np.exp(weights)), weights
            self._runs[shape, offered] = found
        return found[0]

    def _predict(self, shape: ModelShape, offered: Offered, weights: Terms) -> Prediction:
        replicas = shape.replicas if offered.rate else min(shape.replicas, offered.concurrency or 1)
        each = replace(
            offered,
            concurrency=math.ceil((offered.concurrency or 1) / replicas),
            rate=offered.rate and offered.rate / replicas,
            requests=math.ceil(offered.requests / replicas),
        )
        speed, (step, sequence, reading, computing, waiting) = self.speed, weights.tolist()

        def cost(sequences: int, prompt_tokens: int, context: float) -> tuple[float, ...]:
            """Return the seconds of a step: its own, its sequences', bytes, and operations."""
            read = (shape.weight_bytes + context * shape.kv_bytes) / speed.bytes_per_second
            computed = 2 * shape.parameters * (sequences + prompt_tokens) / speed.operations_per_second
            # The roofline: reading and computing overlap.
            longer = (reading * read, 0.0) if read > computed else (0.0, computing * computed)
            return step * speed.step_seconds, sequence * sequences * speed.sequence_seconds, *longer

        run = serve(
            each,
            cost,
            slots=shape.max_batch_size,
            step_tokens=shape.max_num_tokens,
            overhead=waiting * speed.request_seconds,
        )
        tokens = replicas * run.tokens_per_second
        rate = tokens / max(1.0, offered.output_tokens)
        if offered.rate is not None and rate > offered.rate:
            rate, tokens = offered.rate, offered.rate * offered.output_tokens
            return Prediction(requests_per_second=rate, tokens_per_second=tokens, run=run, held_back=True)
        return Prediction(requests_per_second=rate, tokens_per_second=tokens, run=run)

    def outlook(self, lanes: Sequence[tuple[ModelShape, Offered]], names: Sequence[str]) -> tuple[Terms, Terms]:
        """Return the logarithms of figures that are expected, and their standard deviations: [lanes, names] each."""
        points = self._points([(*lane, name) for lane in lanes for name in names])
        linear = self.doubt**2 * (1 + _KINDS**2) * (points.terms**2).sum(axis=1)
        mean, variance = points.mean, linear + (self._scales[0] * points.misfit()) ** 2
        if self._known is not None:
            seen, inverse, pull = self._known
            across = points.covariance(seen, self.doubt, self._scales[0])
            mean = mean + across @ pull
            variance = variance - np.einsum("ij,jk,ik->i", across, inverse, across)
        shape = len(lanes), len(names)
        return mean.reshape(shape), np.sqrt(np.maximum(1e-8, variance)).reshape(shape)

    def _points(self, figures: Sequence[tuple[ModelShape, Offered, str]]) -> _Points:
        places, terms, means = [], [], []
        for shape, offered, name in figures:
            figure, shares = self.predict(shape, offered).shares(name)
            load = offered.rate or offered.concurrency or 1
            places.append([math.log2(each) for each in (shape.max_batch_size, shape.max_num_tokens, load)])
            terms.append(shares[:_TERMS])
            means.append(math.log(figure or 1.0) - float(shares[:_TERMS] @ self._runs[shape, offered][1]))
        return _Points(
            place=np.array(places),
            terms=np.array(terms),
            kind=np.array([shape.kind for shape, _, _ in figures]),
            name=np.array([name for _, _, name in figures]),
            mean=np.array(means),
        )

    def expected(self, name: str, shape: ModelShape, offered: Offered) -> float:
        """Return a figure, corrected by what trials have shown."""
        return float(np.exp(self.outlook([(shape, offered)], [name])[0][0, 0]))

    def learn(self, shape: ModelShape, offered: Offered, measured: Mapping[str, float], *, error: float = 0.0) -> None:
        """Count a trial. `measured` are figures by the names of limits, `error` is the relative one of its rate."""
        prediction = self.predict(shape, offered)
        # Answers of one token have no time between tokens.
        found = {name: each for name, each in measured.items() if 0 < each < math.inf and prediction.figure(name)}
        self.errors.append({name: abs(self.expected(name, shape, offered) / found[name] - 1) for name in found})
        for name, value in found.items():
            self._seen.append((shape, offered, name, math.log(value)))
            self._noise.append(math.hypot(error, _NOISE[_sort(name)]))
        for _ in range(_PASSES if self._seen else 0):
            self._fit()

    def error(self, name: str, *, after: int = 0) -> float | None:
        """Return the median error of a figure over the trials that were predicted after this many others."""
        found = [each[name] for each in self.errors[after:] if name in each]
        return median(found) if found else None

    def _fit(self) -> None:
        """Find the weights and what they cannot say, with the likeliest scales."""
        seen = self._points([each[:3] for each in self._seen])
        apart = np.array([each[3] for each in self._seen]) - seen.mean
        noise = np.array(self._noise)
        best = -math.inf
        for scales in itertools.product(_SCALES, _SCALES):
            covariance = seen.covariance(seen, self.doubt, scales[0]) + np.diag((scales[1] * noise) ** 2)
            inverse = np.linalg.inv(covariance)
            pull = inverse @ apart
            likely = -0.5 * float(apart @ pull + np.linalg.slogdet(covariance)[1])
            likely -= 0.5 * sum(math.log2(scale) ** 2 for scale in scales)
            if likely > best:
                best, self._scales, self._known = likely, scales, (seen, inverse, pull)
        _, _, pull = self._known or (seen, apart, apart)
        for kind in set(seen.kind):
            near = 1 + _KINDS**2 * (seen.kind == kind)
            self._weights[kind] = np.clip(self.doubt**2 * (seen.terms * near[:, None]).T @ pull, -2.5, 2.5)
