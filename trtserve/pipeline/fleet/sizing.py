"""How many replicas of which shape meet a goal: a queueing model, and the day that its answer is simulated for.

A replica is one server with a batch. With n sequences a step takes a + c·n, and prompts take a part of the time away
from steps. Little's law gives n for a rate. How long requests wait lies between two models: all slots of the fleet
serve one queue (Erlang C), or every replica has a queue of its own. The plan takes the worse one; both are reported.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from trtserve.bench.report import BenchReport, read_report
from trtserve.errors import MissedLimitError, UsageError
from trtserve.pipeline.fleet import Fleet, FleetTraffic, ShapeOption
from trtserve.pipeline.fleet.simulation import GROUPS, Arrivals, Floats, Incident, ReplicaSpeed, Simulated, Simulation

_PART = 50_000  # requests that are drawn at a time
_HOUR = 3600
_TIMES = ("step", "sequence", "prompt_token", "request")
_MOST_REPLICAS = 1 << 20
SIMULATED = 20_000_000
"""Requests of a day that are simulated at most; of a busier fleet a part, with the same part of its requests."""
_MOST_GROUPS = 100_000
"""Groups of arrivals of a day at most: NumPy takes as long for a few replicas as for hundreds. Of a smaller fleet that
has more, only the first minutes of each hour are simulated."""


@dataclass(frozen=True, kw_only=True)
class Waits:
    """Times of one number of replicas, in milliseconds, by the queueing model; without end when overloaded."""

    figures: Mapping[str, float]  # ttft_p50, ttft_p99, itl_p50, itl_p99
    batch: float  # mean sequences in a step

    def meets(self, limits: Mapping[str, float]) -> bool:
        return all(self.figures[name] <= limit for name, limit in limits.items())


@dataclass(frozen=True, kw_only=True)
class Sized:
    """A shape, and what it takes to meet the goal in the busiest hour."""

    shape: str
    replicas: int  # with each its own queue, and figures as bad as they may be
    fewest: int  # with one queue for all, and figures as good as they may be
    spare: int  # further replicas, for nodes that are down and replicas that are updated
    nodes: int  # for all replicas and spare ones
    available: int
    price: float  # of an hour
    expected: Waits  # with `replicas`, each with its own queue
    pooled: Waits

    @property
    def fits(self) -> bool:
        """Whether there are enough nodes."""
        return self.nodes <= self.available


def speed_of(shape: ShapeOption) -> tuple[ReplicaSpeed, float]:
    """Return a replica's speed, and how far its figures may be off, as a part.

    Raises UsageError for results from which it does not follow.
    """
    given = shape.speed
    if given is not None:
        seconds = {name: getattr(given, f"{name}_ms") / 1000 for name in _TIMES}
        return ReplicaSpeed(**seconds, slots=shape.max_batch_size), given.error
    return fitted([read_report(folder) for folder in shape.measured], shape.max_batch_size)


def fitted(reports: Sequence[BenchReport], slots: int) -> tuple[ReplicaSpeed, float]:
    """Return the speed that explains results of one replica at several loads, and its largest relative error.

    A request takes its own steps and the prompts of all that share them, whether these come between its tokens or,
    where requests come in waves, before them. In a closed loop prompts grow with sequences, so what a sequence costs
    comes from the median time between tokens too: if fewer sequences run than half the tokens of an answer, most steps
    read no prompt. The shortest first token has waited for its own prompt and one step.
    """
    found = [report.statistics for report in reports]
    firsts = [each.time_to_first_token_ms.minimum for each in found]
    for report, first in zip(reports, firsts, strict=True):
        if first is None or not report.statistics.requests_per_second:
            raise UsageError(f"The result of {report.model} at {report.load or 'a trace'} has no times of tokens.")
    if len({round(min(slots, each.requests_in_flight), 1) for each in found}) < 2:
        raise UsageError(
            "The speed of a replica follows from results at two loads or more.",
            hint="Measure one replica: trtserve bench token-norm-dist --concurrency 1 --out c1; again with 8, and 32.",
        )
    rows, times = [], []  # columns: step, sequence, prompt token, request; as parts of the measured time
    for each in found:
        prompt, answer = each.input_tokens_per_request, max(1.0, each.output_tokens_per_request)
        batch = min(float(slots), max(1.0, each.requests_in_flight))
        waiting = each.requests_in_flight > slots  # then the next request has come before a slot is free
        rows.append([answer, answer * batch, prompt * batch, 0.0 if waiting else 1.0])
        times.append(min(float(slots), each.requests_in_flight) / each.requests_per_second)
    count = len(rows)
    for each, row in zip(found, rows[:count], strict=True):
        between, answer = each.inter_token_ms.p50, row[0]
        if between and row[1] / answer < answer / 2:
            rows.append([1.0, row[1] / answer, 0.0, 0.0])
            times.append(between / 1000)
    first, prompt = min(
        (first, each.input_tokens_per_request) for first, each in zip(firsts, found, strict=True) if first
    )
    # It counts as much as all loads: whatever they say, a prompt takes no longer.
    rows.append([count * each for each in (1.0, 1.0, prompt, 1.0)])
    times.append(first / 1000)
    matrix = np.array(rows) / np.array(times)[:, None]
    target = np.ones(len(rows))
    target[-1] = count
    step, sequence, prompt_token, request = solved = _not_negative(matrix, target)
    speed = ReplicaSpeed(
        step=max(1e-6, step), sequence=sequence, prompt_token=prompt_token, request=request, slots=slots
    )
    return speed, float(np.max(np.abs(matrix[:count] @ np.array(solved) - 1)))


def _not_negative(matrix: Floats, target: Floats) -> list[float]:
    """Return the least squares solution without negative numbers, for a few columns."""
    best, found = math.inf, np.zeros(matrix.shape[1])
    for chosen in itertools.product((False, True), repeat=matrix.shape[1]):
        solved = np.zeros(matrix.shape[1])
        solved[list(chosen)] = np.linalg.lstsq(matrix[:, list(chosen)], target, rcond=None)[0]
        off = float(((matrix @ solved - target) ** 2).sum())
        if solved.min() >= 0 and off < best:
            best, found = off, solved
    return [float(each) for each in found]


def waits(speed: ReplicaSpeed, traffic: FleetTraffic, rate: float, replicas: int, *, pooled: bool) -> Waits:
    """Return the times of `replicas` that share `rate` requests per second."""
    each = rate / replicas
    prompt = speed.prompt_token * traffic.input_tokens * (1 - 0.95 * traffic.shared_prefix)
    left = 1 - each * prompt - each * traffic.output_tokens * speed.sequence
    batch = each * traffic.output_tokens * speed.step / left if left > 0 else math.inf
    names = ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99")
    if batch >= speed.slots or left <= 0:
        return Waits(figures=dict.fromkeys(names, math.inf), batch=float(speed.slots))
    step = speed.step + speed.sequence * batch
    token = step / max(1e-9, 1 - each * prompt)
    servers = speed.slots * (replicas if pooled else 1)
    offered = batch * (replicas if pooled else 1)
    spread = (traffic.burstiness + traffic.variation**2) / 2
    holding = traffic.output_tokens * token
    waiting = _erlang_c(servers, offered)
    mean = holding / (servers - offered) * max(0.5, spread)
    # Prompts of a replica are computed one after the other.
    prompts = min(0.999, each * prompt)
    queue = prompts * prompt * max(0.5, spread) / (1 - prompts)
    base = speed.request + prompt + 1.5 * step
    width = math.sqrt(math.log1p(traffic.variation**2))  # of the lognormal lengths; no cache has the longest prompt
    largest = speed.prompt_token * traffic.input_tokens * math.exp(2.33 * width - width**2 / 2)
    figures = {
        "ttft_p50": base + queue / 2 + _late(0.5, waiting, mean),
        "ttft_p99": base
        + largest
        - prompt
        + _late(0.01, prompts, queue / max(1e-9, prompts))
        + _late(0.01, waiting, mean),
        "itl_p50": step,
        # A prompt is met by this part of the steps.
        "itl_p99": step + (largest if each * step > 0.01 else 0.0),
    }
    return Waits(figures={name: 1000 * value for name, value in figures.items()}, batch=batch)


def _late(share: float, chance: float, scale: float) -> float:
    """Return the wait that `share` exceed, if `chance` of all wait, exponentially with the mean `scale`."""
    return 0.0 if chance <= share else scale * math.log(chance / share)


def _erlang_c(servers: int, offered: float) -> float:
    """Return the probability of waiting for one of `servers` that `offered` (Erlang) keep busy."""
    blocked = 1.0
    if servers > 100_000:  # far from its limit nobody waits, near it the normal limit holds
        return 0.0 if (servers - offered) / math.sqrt(offered) > 4 else 1.0
    for number in range(1, servers + 1):
        blocked = offered * blocked / (number + offered * blocked)
    busy = offered / servers
    return blocked / (1 - busy * (1 - blocked))


def size(fleet: Fleet) -> list[Sized]:
    """Return every shape that can meet the goal, the cheapest that fits first. Raises MissedLimitError if none can."""
    found = [sized for name in fleet.shapes if (sized := _sized(fleet, name)) is not None]
    if not found:
        raise MissedLimitError(
            f"No shape meets {fleet.goal}, however many replicas there are: one request alone takes longer.",
            hint="Relax the goal, or add a faster shape.",
        )
    return sorted(found, key=lambda each: (not each.fits, each.price, each.nodes))


def _sized(fleet: Fleet, name: str) -> Sized | None:
    shape, rate = fleet.shapes[name], fleet.traffic.requests_per_second
    speed, error = speed_of(shape)
    slow, fast = scaled(speed, 1 + error), scaled(speed, 1 - error)
    replicas = _fewest(slow, fleet, pooled=False)
    if replicas is None:
        return None
    kind = fleet.gpus[shape.gpu]
    down = 0.0
    if fleet.failures is not None:
        hours = fleet.failures.repair_minutes / 60 + shape.load_seconds / _HOUR
        down = hours / (fleet.failures.node_hours + hours)
    share = down + (fleet.update.at_once if fleet.update is not None else 0.0)
    # As many as are expected to be missing, and two standard deviations more.
    missing = replicas * share / max(0.01, 1 - share)
    spare = math.ceil(missing + 2 * math.sqrt(replicas * down)) if share else 0
    whole = replicas + spare
    if shape.gpus > kind.per_node:
        nodes = whole * math.ceil(shape.gpus / kind.per_node)
    else:
        nodes = math.ceil(whole / (kind.per_node // shape.gpus))
    return Sized(
        shape=name,
        replicas=replicas,
        fewest=_fewest(fast, fleet, pooled=True) or replicas,
        spare=spare,
        nodes=nodes,
        available=kind.nodes,
        price=nodes * kind.per_node * kind.price,
        expected=waits(speed, fleet.traffic, rate, replicas, pooled=False),
        pooled=waits(speed, fleet.traffic, rate, replicas, pooled=True),
    )


def scaled(speed: ReplicaSpeed, factor: float) -> ReplicaSpeed:
    """Return a speed whose times are `factor` times as long."""
    return replace(speed, **{name: factor * getattr(speed, name) for name in _TIMES})


def _fewest(speed: ReplicaSpeed, fleet: Fleet, *, pooled: bool) -> int | None:
    """Return the smallest number of replicas that meets the goal, or None if none does."""

    def enough(count: int) -> bool:
        found = waits(speed, fleet.traffic, fleet.traffic.requests_per_second, count, pooled=pooled)
        return found.meets(fleet.limits_ms) and math.isfinite(found.figures["ttft_p50"])

    high = 1
    while not enough(high):
        high *= 2
        if high > _MOST_REPLICAS:
            return None
    return bisect_left(range(high), True, lo=high // 2 + 1, hi=high, key=enough)


@dataclass(frozen=True, kw_only=True)
class SimulatedDay:
    """What happened, and what of the fleet and of its day was simulated."""

    found: Simulated
    replicas: int
    part: float  # part of the replicas, with the same part of the requests
    minutes: float  # of each hour


def simulate(fleet: Fleet, sized: Sized, *, hours: int = 24) -> SimulatedDay:
    """Simulate a day of the planned replicas."""
    shape, traffic = fleet.shapes[sized.shape], fleet.traffic
    speed, _ = speed_of(shape)
    expected = traffic.requests_per_second * _HOUR * sum(traffic.day[hour % 24] for hour in range(hours))
    part = min(1.0, SIMULATED / max(1.0, expected))
    replicas = max(1, round((sized.replicas + sized.spare) * part))
    groups = expected * part / max(1, replicas // GROUPS)
    hour = _HOUR * min(1.0, max(1 / 60, _MOST_GROUPS / max(1.0, groups)))
    random = np.random.default_rng([0, 24])
    simulation = Simulation(replicas, speed, prefixes=traffic.prefixes, hour=hour)
    incidents = _incidents(fleet, shape, replicas, hours, hour, random)
    found = simulation.run(_arrivals(traffic, part, hours, hour, random), incidents, until=hours * hour)
    return SimulatedDay(found=found, replicas=replicas, part=part, minutes=hour / 60)


def _arrivals(
    traffic: FleetTraffic, part: float, hours: int, hour: float, random: np.random.Generator
) -> Iterator[Arrivals]:
    """Yield the requests of a day, second by second; bursts are negative binomial counts."""
    for number in range(hours):
        mean = traffic.requests_per_second * part * traffic.day[number % 24]
        if mean <= 0:
            continue
        whole = int(hour)
        seconds = max(1, min(whole, int(_PART / mean)))
        for start in range(0, whole, seconds):
            length = min(seconds, whole - start)
            # A part of a fleet sees the bursts of the whole fleet, whose relative size does not shrink.
            spread = 1 + (traffic.burstiness - 1) * part
            if spread > 1 + 1e-9:
                counts = random.negative_binomial(mean / (spread - 1), 1 / spread, length)
            else:
                counts = random.poisson(mean, length)
            times = np.sort(np.repeat(np.arange(length, dtype=np.float64), counts) + random.random(counts.sum()))
            if len(times):
                prompts = _lengths(traffic.input_tokens, traffic.variation, len(times), random)
                answers = _lengths(traffic.output_tokens, traffic.variation, len(times), random)
                shared = np.floor(prompts * traffic.shared_prefix)
                yield Arrivals(number * hour + float(start) + times, prompts, answers, shared)


def _lengths(mean: float, variation: float, count: int, random: np.random.Generator) -> Floats:
    """Draw lengths of a lognormal distribution with this mean and relative deviation."""
    width = math.sqrt(math.log1p(variation**2))
    drawn: Floats = np.maximum(1.0, np.round(mean * np.exp(width * random.standard_normal(count) - width**2 / 2)))
    return drawn


def _incidents(
    fleet: Fleet, shape: ShapeOption, replicas: int, hours: int, hour: float, random: np.random.Generator
) -> list[Incident]:
    """Return the failures of nodes and the steps of the update."""
    found: list[Incident] = []
    on_node = max(1, fleet.gpus[shape.gpu].per_node // shape.gpus)
    nodes_each = max(1, math.ceil(shape.gpus / fleet.gpus[shape.gpu].per_node))
    if fleet.failures is not None:
        units = math.ceil(replicas / on_node)
        mean = units * nodes_each * hours * hour / _HOUR / fleet.failures.node_hours
        back = fleet.failures.repair_minutes * 60 + shape.load_seconds
        for moment in np.sort(random.random(random.poisson(mean)) * hours * hour):
            unit = int(random.integers(units))
            members = tuple(range(unit * on_node, min(replicas, (unit + 1) * on_node)))
            found += [Incident(float(moment), "down", members), Incident(float(moment) + back, "up", members)]
    if fleet.update is not None:
        group, moment = max(1, int(replicas * fleet.update.at_once)), fleet.update.hour * hour
        for start in range(0, replicas, group):
            members = tuple(range(start, min(replicas, start + group)))
            stop = moment + fleet.update.drain_seconds
            moment = stop + shape.load_seconds
            found += [
                Incident(moment - shape.load_seconds - fleet.update.drain_seconds, "drain", members),
                Incident(stop, "down", members),
                Incident(moment, "up", members),
            ]
    return found
