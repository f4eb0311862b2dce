"""Made-up machines on which `tune` searches in virtual time, and how good what it finds is.

Servers take one step after another, in an engine of this module: what a step costs differs from the search's own model
in several ways, and no two machines are alike. Everything follows from a seed.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np

from tests.support.bench_records import MS, report_of
from trtserve.bench.records import RequestRecord
from trtserve.bench.report import BenchReport
from trtserve.bench.targets import figure_of
from trtserve.pipeline.tuning.roofline import MachineSpeed, ModelShape, SpeedModel
from trtserve.pipeline.tuning.search import Goal, Search, steady_rate
from trtserve.pipeline.tuning.space import Candidate, Space, Values
from trtserve.pipeline.tuning.trials import Bench, Trials
from trtserve.specs import BenchSpec, ServerSpec

LOADS = (1, 2, 4, 8, 16)
GOALS = ("none", "ttft", "itl", "both")
SIZES = {"small": 2e7, "large": 5e8}
"""Parameters of the models."""
SLACK = 1.05
"""A found lane may miss a limit by this factor: no trial can tell more."""
Lane = tuple[Values, Values]


@dataclass(frozen=True, kw_only=True)
class Landscape:
    """A machine with a model, whose true speed the search does not know."""

    speed: MachineSpeed
    """What `doctor --measure` says of it."""
    true: MachineSpeed
    overlap: float
    """0: reading and computing overlap; 1: they add up."""
    ramp: float
    """Tokens of a step at which matrices reach half of their speed."""
    cores: int
    crowding: float
    """What each sequence beyond `cores` costs, as a part of the others."""
    padded: bool
    """Whether a step is as large as the next power of two."""
    slot_cost: float
    """What each slot of the batch costs, used or not, as a part of the step."""
    cliff: float
    """How much slower steps are whose tokens do not fit the machine's cache."""
    cache_tokens: int
    separate_prompts: bool
    """Whether prompts have steps of their own."""
    contention: float
    """What each request in flight adds to the time before the engine has one."""
    int8: float
    """Speed of int8 matrices ÷ what their bytes say."""
    noise: float
    """Standard deviation of the logarithm of a trial's speed."""
    jitter: float
    """The same of a step."""
    start: float
    """Seconds to start a server."""
    build: float
    parameters: float
    prompt: int
    answer: int
    spread: float
    """Standard deviation of the lengths of answers, as a part of their mean."""
    kinds: tuple[str | None, ...]

    @classmethod
    def random(cls, size: str, seed: int) -> Landscape:
        """Draw a machine."""
        random = np.random.default_rng([33, seed, list(SIZES).index(size)])

        def about(value: float, spread: float = 0.35) -> float:
            return float(value * math.exp(spread * random.standard_normal()))

        def either(*values: float) -> float:
            return float(random.choice(np.array(values)))

        speed = MachineSpeed(
            bytes_per_second=about(1e10),
            operations_per_second=about(2e11),
            step_seconds=about(0.004),
            sequence_seconds=about(0.0006),
            request_seconds=about(0.008),
        )
        return cls(
            speed=speed,
            true=replace(
                speed,
                bytes_per_second=about(speed.bytes_per_second),
                operations_per_second=about(speed.operations_per_second),
                step_seconds=about(speed.step_seconds),
                sequence_seconds=about(speed.sequence_seconds),
                request_seconds=about(speed.request_seconds, 0.5),
            ),
            overlap=float(random.uniform()),
            ramp=either(0, 4, 16),
            cores=int(either(2, 4, 64)),
            crowding=either(0.3, 1.0, 2.0),
            padded=bool(random.uniform() < 0.3),
            slot_cost=either(0, 0, 0.05),
            cliff=either(1, 1, 2),
            cache_tokens=int(either(48, 256)),
            separate_prompts=bool(random.uniform() < 0.5),
            contention=either(0, 0.1),
            int8=about(1.0),
            noise=either(0.01, 0.02, 0.04),
            jitter=either(0.02, 0.1, 0.2),
            start=float(random.uniform(1, 4)),
            build=float(random.uniform(0, 2)),
            parameters=SIZES[size],
            prompt=int(either(24, 48, 160)),
            answer=int(either(16, 24, 48)),
            spread=either(0, 0.25),
            kinds=(None, "int8") if random.uniform() < 0.5 else (None,),
        )

    @cached_property
    def shapes(self) -> dict[Values, ModelShape]:
        """What each configuration is made of; the file's own has a batch of 2."""
        shapes = {}
        for kind, batch, tokens in itertools.product(self.kinds, (2, 1, 4, 8, 16), (2048, 64)):
            pairs = (("quantize", kind), ("max_batch_size", batch), ("max_num_tokens", tokens))
            values: Values = tuple((name, value) for name, value in pairs if value not in (None, 2, 2048))
            shapes[values] = ModelShape(
                weight_bytes=self.parameters * (2 if kind is None else 1),
                kv_bytes=100,
                parameters=self.parameters,
                max_batch_size=batch,
                max_num_tokens=tokens,
                kind=kind or "",
            )
        return shapes

    def step(self, shape: ModelShape, sequences: int, prompt_tokens: int, context: float) -> float:
        """Return the seconds of a step."""
        true, tokens = self.true, sequences + prompt_tokens
        if self.padded:
            tokens = 2 ** math.ceil(math.log2(tokens))
        int8 = shape.weight_bytes < 2 * shape.parameters
        read = (shape.weight_bytes + context * shape.kv_bytes) / true.bytes_per_second
        read /= self.int8 if int8 else 1.0
        computed = 2 * shape.parameters * (tokens + self.ramp) / true.operations_per_second
        matrices = max(read, computed) + self.overlap * min(read, computed)
        if tokens > self.cache_tokens:
            matrices *= self.cliff
        crowd = sequences + self.crowding * max(0, sequences - self.cores)
        return (
            true.step_seconds * (1 + self.slot_cost * shape.max_batch_size) + true.sequence_seconds * crowd + matrices
        )

    def serve(self, shape: ModelShape, concurrency: int, requests: int, luck: np.random.Generator) -> BenchReport:
        """Serve requests in a closed loop and return what a client sees."""
        factor = math.exp(self.noise * luck.standard_normal())
        prompts = np.maximum(1, np.rint(luck.normal(self.prompt, self.prompt / 6, requests))).astype(int).tolist()
        answers = np.maximum(1, np.rint(luck.normal(self.answer, self.spread * self.answer, requests))).astype(int)
        server = _Server(
            self, shape, prompts, answers.tolist(), self.true.request_seconds * (1 + self.contention * concurrency)
        )
        jitter = itertools.cycle(np.exp(self.jitter * luck.standard_normal(1024)).tolist())
        for _ in range(min(concurrency, requests)):
            server.send()
        while server.coming or server.active:
            server.step(next(jitter))
        scale = 1000 * MS * factor
        records = [
            RequestRecord(
                index=number,
                input_tokens=prompt,
                requested_tokens=len(server.times[number]),
                intended_ns=round(scale * server.sent[number]),
                sent_ns=round(scale * server.sent[number]),
                ended_ns=round(scale * server.times[number][-1]),
                status="completed",
                scheduled=False,
                streamed=True,
                arrivals=[(round(scale * each), 1) for each in server.times[number]],
            )
            for number, prompt in enumerate(prompts)
        ]
        return report_of(records, spec={"concurrency": concurrency})

    @cached_property
    def truth(self) -> dict[Lane, BenchReport]:
        """What every lane does without luck."""
        calm, lanes = replace(self, noise=0.0), itertools.product(self.shapes, LOADS)
        return {
            (values, (("concurrency", load),)): calm.serve(self.shapes[values], load, 192, np.random.default_rng(1))
            for values, load in lanes
        }

    @cached_property
    def sweep_seconds(self) -> float:
        """How long it takes to measure every lane, each server started once."""
        served = sum(report.statistics.total_latency_ms / 1000 + OVERHEAD for report in self.truth.values())
        return served + len(self.shapes) * (self.start + self.build)

    def limits(self, goal: str) -> dict[str, float]:
        """Return limits that about half of the lanes meet, or a few if there are two; no lane is close to one."""
        names = {"none": (), "ttft": ("ttft_p99",), "itl": ("itl_p99",), "both": ("ttft_p99", "itl_p99")}[goal]
        figures = {name: [figure_of(each.statistics, name) or 0.0 for each in self.truth.values()] for name in names}
        limits = {name: between(values, 0.3, 0.7) for name, values in figures.items()}
        if len(limits) > 1:
            lanes = range(len(self.truth))
            needed = [max(figures[name][lane] / limit for name, limit in limits.items()) for lane in lanes]
            if sum(each <= 1 for each in needed) < 3:
                limits = {name: limit * between(needed, 0.05, 0.3) for name, limit in limits.items()}
        return limits


def between(values: list[float], low: float, high: float) -> float:
    """Return the middle of the widest gap between values, from one part of them to another."""
    ordered = sorted(values)[int(low * len(values)) : int(high * len(values)) + 1]
    below, above = max(itertools.pairwise(ordered), key=lambda pair: pair[1] / pair[0])
    return math.sqrt(below * above)


@dataclass
class _Server:
    """What happens to the requests of one trial, in seconds."""

    landscape: Landscape
    shape: ModelShape
    prompts: list[int]
    answers: list[int]
    wait: float
    """Seconds from sending a request until the engine has it."""
    clock: float = 0.0
    context: int = 0
    sent: list[float] = field(default_factory=list)
    times: list[list[float]] = field(default_factory=list)
    """Of each request, when its tokens came."""
    unread: list[int] = field(default_factory=list)
    coming: deque[tuple[float, int]] = field(default_factory=deque)
    active: list[int] = field(default_factory=list)

    def send(self) -> None:
        """Send the next request, if any is left."""
        number = len(self.sent)
        if number < len(self.prompts):
            self.sent.append(self.clock)
            self.times.append([])
            self.unread.append(self.prompts[number])
            self.coming.append((self.clock + self.wait, number))

    def step(self, jitter: float) -> None:
        """Take one step, or wait for a request."""
        while self.coming and len(self.active) < self.shape.max_batch_size and self.coming[0][0] <= self.clock:
            self.active.append(self.coming.popleft()[1])
        if not self.active:
            self.clock = self.coming[0][0]
            return
        answering = [number for number in self.active if not self.unread[number]]
        if self.landscape.separate_prompts and len(answering) < len(self.active):
            answering = []
        room = left = max(1, self.shape.max_num_tokens - len(answering))
        reading = list[int]()
        for number in self.active:
            part = min(self.unread[number], left)
            if part:
                self.unread[number] -= part
                left -= part
                reading.append(number)
        sequences = len(answering) + len(reading)
        self.clock += jitter * self.landscape.step(self.shape, sequences, room - left, self.context)
        self.context += room - left + len(answering)
        for number in [*answering, *(each for each in reading if not self.unread[each])]:
            self.times[number].append(self.clock)
            if len(self.times[number]) == self.answers[number]:
                self.active.remove(number)
                self.context -= self.prompts[number] + self.answers[number]
                self.send()


OVERHEAD = 0.3
"""Seconds of a trial besides its requests and its server."""


class LandscapeBench(Bench):
    """Servers of a landscape, whose time is virtual."""

    def __init__(self, landscape: Landscape, seed: int, *, equal: bool = False) -> None:
        """With `equal` every configuration is the file's own one, whatever it is called."""
        self.landscape, self.equal, self.random = landscape, equal, np.random.default_rng([7, seed])
        self.clock, self.built, self.running = 0.0, set[Values](), None

    def stop(self) -> None:
        """Nothing runs."""

    def measure(self, plan: Any, server: ServerSpec, spec: BenchSpec) -> BenchReport:
        landscape = self.landscape
        if plan != self.running:
            self.clock += landscape.start + (0.0 if plan in self.built else landscape.build)
            self.running = plan
            self.built.add(plan)
        shape = landscape.shapes[() if self.equal else plan]
        report = landscape.serve(shape, spec.concurrency or 8, spec.num_requests, self.random)
        self.clock += OVERHEAD + report.statistics.total_latency_ms / 1000
        return report


class VirtualTrials(Trials):
    """Trials that leave no files."""

    def _keep(self, report: BenchReport, folder: Path, facts: dict[str, object]) -> None:
        """Keep nothing."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """How good a search was."""

    found: float
    """True rate of what was found ÷ the best true rate; 0 if it misses the goal."""
    own: float | None
    """The same ÷ the file's own configuration at its best load; None: that one misses the goal."""
    time: float
    """÷ the time of a sweep."""
    trials: int
    errors: dict[str, tuple[float | None, float | None]]
    """Figure → error of its predictions before any trial, and after three."""
    search: Search


def score(landscape: Landscape, goal: str, *, seed: int, budget: float = 0.2, equal: bool = False) -> Score:
    """Search a landscape, or one of equals, within a part of the sweep's time."""
    candidates = tuple(
        Candidate(values=values, plan=cast(Any, values), server=ServerSpec(), shape=shape)
        for values, shape in landscape.shapes.items()
    )
    space = Space(
        model=cast(Any, None),
        server=cast(Any, None),
        candidates=candidates,
        loads=tuple((("concurrency", load),) for load in LOADS),
        current={},
        refused={},
    )
    bench = LandscapeBench(landscape, seed, equal=equal)
    spec = BenchSpec(
        num_requests=192,
        input_mean=landscape.prompt,
        input_stdev=round(landscape.prompt / 6),
        output_mean=landscape.answer,
        output_stdev=round(landscape.spread * landscape.answer),
        calibrate=False,
    )
    trials = VirtualTrials(folder=Path(), spec=spec, bench=bench, clock=lambda: bench.clock)
    limits = Goal(limits=landscape.limits(goal), aim="throughput")
    search = Search(space, limits, trials, SpeedModel(landscape.speed), budget=budget * landscape.sweep_seconds)
    outcome = search.run()
    rates = {lane: steady_rate(report, "throughput") for lane, report in landscape.truth.items()}
    misses = {
        lane: limits.missed(lambda name, of=report: figure_of(of.statistics, name))  # type: ignore[misc]
        for lane, report in landscape.truth.items()
    }
    best = max(rate for lane, rate in rates.items() if not misses[lane])
    own = max((rate for lane, rate in rates.items() if not lane[0] and not misses[lane]), default=None)
    lane = None if outcome.best is None else (outcome.best.candidate.values, outcome.best.load)
    found = 0.0 if lane is None or misses[lane] > SLACK - 1 else rates[lane]
    return Score(
        found=found / best,
        own=own and found / own,
        time=bench.clock / landscape.sweep_seconds,
        trials=len(trials.done),
        errors={
            name: (search.model.errors[0].get(name), search.model.error(name, after=3))
            for name in ("tokens_per_second", "ttft_mean", "itl_mean")
        },
        search=search,
    )
