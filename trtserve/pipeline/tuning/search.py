"""The search: predict, try what may still win, race the best ones against each other, and say why it ends.

A *lane* is a configuration at a load. Short trials explore lanes in the order of the improvement that is expected of
them for their time, and each corrects the predictions of all. When no lane promises enough, or the rest of the budget
is for the race, the best lanes race in fresh trials, each round longer, until the others are significantly worse. Only
these fresh trials decide: the ones that chose the racers would flatter the luckiest. A race without a winner is not the
end: what it measured counts, and the search goes on.

In a race a candidate is out when it is significantly worse. Runs of one candidate differ by more than each run shows,
so the spread between runs is pooled over all candidates with repeated runs. It is at least about the allowance of
`bench compare` while few were repeated. All statements of one race hold together with 95 % (Bonferroni).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from trtserve.bench.compare import DRIFT
from trtserve.bench.report import BenchReport
from trtserve.bench.statistics import LEVEL, Interval, t_quantile
from trtserve.bench.targets import figure_of
from trtserve.errors import TrtserveError, UsageError, counted
from trtserve.files import optional_json_object, write_json
from trtserve.pipeline.import_spec import as_json
from trtserve.pipeline.setup_file import SearchSetup
from trtserve.pipeline.tuning.roofline import ASSUMED, MachineSpeed, Offered, SpeedModel, Terms
from trtserve.pipeline.tuning.space import Space, Values, words
from trtserve.pipeline.tuning.trials import Bench, Trial, Trials
from trtserve.progress import SILENT, Progress
from trtserve.store import Store

Name = TypeVar("Name")
SURE = 0.98  # level at which a winner replaces what it was compared with: at 95 %, three of a hundred equals did
_ASSUMED = (DRIFT / 2) ** 2  # variance of the logarithm of a run's mean, until runs were repeated
_ASSUMED_DEGREES = 8


@dataclass(frozen=True, kw_only=True)
class Run:
    """One measured value, above 0; larger is better."""

    value: float
    error: float = 0.0  # relative standard error within the run


@dataclass
class Race(Generic[Name]):
    """The runs of each candidate; `comparisons` is how many statements are made together."""

    comparisons: int
    runs: dict[Name, list[Run]] = field(default_factory=dict)

    def add(self, name: Name, run: Run) -> None:
        self.runs.setdefault(name, []).append(run)

    def mean(self, name: Name) -> float:
        """Return the geometric mean of a candidate's runs."""
        return math.exp(fmean(math.log(run.value) for run in self.runs[name]))

    @property
    def leader(self) -> Name:
        """The candidate with the highest mean; of equal ones the first."""
        return max(self.runs, key=self.mean)

    def difference(self, name: Name, other: Name, level: float = LEVEL) -> Interval:
        """Return the interval of how much better `name` is than `other`, as a part of the latter."""
        within = fmean(run.error**2 for each in (name, other) for run in self.runs[each])
        errors = math.sqrt(sum(1 / len(self.runs[each]) for each in (name, other)))
        quantile = 1 - (1 - level) / (2 * max(1, self.comparisons))
        half = errors * max(
            t_quantile(quantile, degrees) * math.sqrt(max(variance, within)) for variance, degrees in self._spreads()
        )
        middle = math.log(self.mean(name) / self.mean(other))
        return math.expm1(middle - half), math.expm1(middle + half)

    def beats(self, name: Name, other: Name, level: float = LEVEL) -> bool:
        """Return whether `name` is better beyond the uncertainty."""
        return name != other and self.difference(name, other, level)[0] > 0

    def survivors(self) -> list[Name]:
        """Return the candidates that the leader does not beat, best first."""
        leader = self.leader
        left = [name for name in self.runs if not self.beats(leader, name)]
        return sorted(left, key=self.mean, reverse=True)

    def _spreads(self) -> list[tuple[float, int]]:
        """Return variance and degrees of freedom of the logarithms of runs around the means of their candidates.

        That is once as they are, and once with the assumed ones. A few runs may agree by luck, so the wider interval
        of the two counts.
        """
        total, degrees = 0.0, 0
        for each in self.runs.values():
            logs = [math.log(run.value) for run in each]
            total += sum((value - fmean(logs)) ** 2 for value in logs)
            degrees += len(logs) - 1
        assumed = (total + _ASSUMED * _ASSUMED_DEGREES) / (degrees + _ASSUMED_DEGREES), degrees + _ASSUMED_DEGREES
        return [assumed, (total / degrees, degrees)] if degrees else [assumed]


RATE_OF = {"throughput": "tokens_per_second", "requests": "requests_per_second"}  # what is to be large → its figure
UNITS = {"throughput": "tokens/s", "requests": "requests/s"}
_RACERS = 3  # the most that race, besides the file's own configuration
_ROUNDS = 3
_MORE_ROUNDS = 5  # rounds in which the best one races the file's own configuration until one of them is surely better
_SHORT = 2  # a trial that explores has this part of the requests
_FEWEST = 24
_RACING = 0.5  # part of the budget that is kept for the race, at most
_REPEATS = 3  # trials of a lane while it explores, at most
_LIKELY = 0.5  # how likely a lane must meet the goal to race
_GAIN = 0.003  # part of the rate that another trial must promise
_FAR = 3.0  # deviations below the best one at which a lane beside it is ruled out
_UNLIKELY = 0.05  # how likely such a lane meets the goal at least
_NORMAL = NormalDist()
_ALIKE = 0.02  # part of the rate by which two lanes must differ for a race between them
Lane = tuple[Values, Values]


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What must hold, and what is to be large."""

    limits: Mapping[str, float]
    aim: str

    def missed(self, value_of: Callable[[str], float | None]) -> float:
        """Return the largest part by which a limit is missed; 0 if all are met."""
        return max((self._miss(name, limit, value_of(name)) for name, limit in self.limits.items()), default=0.0)

    @staticmethod
    def _miss(name: str, limit: float, value: float | None) -> float:
        if value is None or value <= 0:
            return 1.0
        ratio = limit / value if name.endswith("_second") or name == "good_share" else value / limit
        return max(0.0, ratio - 1)


@dataclass
class Outcome:
    """What a search has found."""

    best: Trial | None = None  # the last trial of the lane that won; None: no lane meets the goal
    value: float = 0.0  # its rate, over its trials in the race
    own: float | None = None
    """The rate of the file's own configuration in the race, at its best load; None: it misses the goal."""
    gain: Interval | None = None
    """How much better it is than the file's own configuration; None: that one won, or misses the goal."""
    nearest: Trial | None = None  # the trial that came closest to the goal, where none meets it
    reasons: list[str] = field(default_factory=list)  # why the search ended, and what was left out
    failed: dict[str, str] = field(default_factory=dict)  # configuration → why it could not be built or started


def prepare(
    space: Space,
    goal: Goal,
    asked: SearchSetup,
    folder: Path,
    store: Store,
    *,
    budget: float = math.inf,
    progress: Progress = SILENT,
    tell: Callable[[str], None] | None = None,
) -> Search:
    """Return a search whose trials are below `folder`; `tell` gets a line for each result.

    Raises UsageError if another search has used the folder.
    """
    runtime = space.candidates[0].plan.runtime
    speed = MachineSpeed.read(runtime, store)
    if speed is None:
        progress.warn(
            "This machine was not measured: the first predictions are guesses. "
            f"`trtserve doctor --measure --runtime {runtime}` takes a minute, once."
        )
    question = [as_json(space.candidates[0].plan.spec), asdict(space.server.spec), asdict(asked.benchmark.spec)]
    written = hashlib.sha256(json.dumps(question, default=str).encode()).hexdigest()
    path = folder / "question.json"
    if folder.is_dir() and budget < math.inf:
        if optional_json_object(path, UsageError).get("sha256", written) != written:
            raise UsageError(
                f"{folder} has the trials of another model, server or load.",
                hint="Name another folder with --out, or remove this one.",
            )
        write_json(path, {"sha256": written})
    bench = Bench(f"{space.server.name[:90]}-tune", store, progress)
    trials = Trials(folder=folder / "trials", spec=asked.benchmark.spec, bench=bench)
    return Search(space, goal, trials, SpeedModel(speed or ASSUMED), budget=budget, progress=progress, tell=tell)


class Search:
    """Finds the best lane within a budget of seconds."""

    def __init__(
        self,
        space: Space,
        goal: Goal,
        trials: Trials,
        model: SpeedModel,
        *,
        budget: float,
        progress: Progress = SILENT,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        """Prepare it; `budget` counts earlier runs of the same search too."""
        self.space, self.goal, self.trials, self.model = space, goal, trials, model
        self._budget, self._progress, self._tell = budget, progress, tell
        self._candidates = {each.values: each for each in space.candidates}
        self._lanes: list[Lane] = list(itertools.product(self._candidates, space.loads))
        self._tried: dict[Lane, list[Trial]] = {}
        self._lengths: tuple[float, float] | None = None
        self.outcome = Outcome()

    def run(self) -> Outcome:
        """Search until nothing can be better, or the budget is used."""
        races, seen = 0, -1
        while len(self.trials.done) > seen:  # a race without a winner says more about all lanes
            seen, races = len(self.trials.done), races + 1
            self.outcome.reasons.clear()
            afford = self._explore()
            if self._race(races) or not afford:
                break
        return self.outcome

    def forecast(self) -> list[dict[str, Any]]:
        """Return all lanes with their expected rate, the most promising first."""
        names = [RATE_OF[self.goal.aim], *self._limits()]
        rows = []
        for lane, mean in zip(self._lanes, np.exp(self._outlook(self._lanes)[0]), strict=True):
            figures = dict(zip(names, mean.tolist(), strict=True))
            missed = self.goal.missed(lambda name, of=figures: of.get(name, math.inf))  # type: ignore[misc]
            name = self._candidates[lane[0]].name
            rows.append({"configuration": name, "load": words(lane[1]), "rate": mean[0], "missed": missed})
        return sorted(rows, key=lambda row: (row["missed"] > 0, -row["rate"]))

    # What is expected

    def _limits(self) -> list[str]:
        """Return the limits that the model predicts."""
        return [name for name in self.goal.limits if name != "good_share"]

    def _outlook(self, lanes: Sequence[Lane]) -> tuple[Terms, Terms]:
        """Return logarithms and their deviations of the rate and of each figure with a limit: [lanes, figures]."""
        shapes = [(self._candidates[values].shape, self.offered(load)) for values, load in lanes]
        return self.model.outlook(shapes, [RATE_OF[self.goal.aim], *self._limits()])

    def _prospects(self, lanes: Sequence[Lane]) -> tuple[Terms, Terms, Terms]:
        """Return the logarithm of the rate, its deviation, and how likely the goal is met, of each lane."""
        mean, deviation = self._outlook(lanes)
        likely = np.ones(len(lanes))
        for place, name in enumerate(self._limits(), start=1):
            room = (math.log(self.goal.limits[name]) - mean[:, place]) / deviation[:, place]
            likely *= [_NORMAL.cdf(-each if name.endswith("_second") else each) for each in room]
        for place, lane in enumerate(lanes):
            tried = self._tried.get(lane, ())
            shares = [figure_of(trial.report.statistics, "good_share") or 0.0 for trial in tried]
            if shares and max(shares) < self.goal.limits.get("good_share", 0.0):  # the model does not predict it
                likely[place] = 0.0
        return mean[:, 0], deviation[:, 0], likely

    # Exploring

    def _explore(self) -> bool:
        """Try lanes while some may be better; return whether that, and not the budget, is why it ended."""
        while True:
            lane, gain = self._next()
            if lane is None:
                self.outcome.reasons.append(
                    f"No other configuration can be better ({counted(self._left(), 'configuration')} not tried): the "
                    f"expected gain of another trial is {gain:.1%}."
                )
                return True
            if self._tried and not self._affordable([lane], _SHORT, reserve=True):
                self.outcome.reasons.append(
                    f"The budget of {self._budget:.0f} s left no time for "
                    f"{counted(self._left(), 'other configuration')}."
                )
                return False
            try:
                trial = self._trial(lane, self._requests(lane[1], _SHORT))
            except TrtserveError as error:
                if lane[0] == self._lanes[0][0]:
                    raise
                self._give_up(lane, error.message)
                continue
            if not trial.report.statistics.counts.completed:
                self._give_up(lane, "It answered no request.")

    def _give_up(self, lane: Lane, why: str) -> None:
        name = self._candidates[lane[0]].name
        self.outcome.failed[name] = why
        self._progress.warn(f"{name}: {why}")
        self._lanes = [each for each in self._lanes if each[0] != lane[0]]

    def _left(self) -> int:
        return len(self._candidates) - len({values for values, _ in self._tried})

    def _next(self) -> tuple[Lane | None, float]:
        """Return the lane whose trial promises most for its time, and the part by which it may be better.

        That is the expected improvement of the rate (Jones et al., 1998), if the goal is met.
        """
        rate, deviation, likely = self._prospects(self._lanes)
        tried = np.array([lane in self._tried for lane in self._lanes])
        if not self._tried:
            own = [place for place, lane in enumerate(self._lanes) if not lane[0]]
            return self._lanes[max(own, key=lambda place: likely[place] * math.exp(rate[place]))], 1.0
        best = np.where(tried & (likely >= _LIKELY), rate, -math.inf)
        if np.isfinite(best).any():
            far = (rate - best.max()) / deviation
            gain = deviation * [each * _NORMAL.cdf(each) + _NORMAL.pdf(each) for each in far]
            gain[int(best.argmax())] = 0.0
        else:
            gain = np.exp(rate - rate.max())
        gain *= likely
        for place, lane in enumerate(self._lanes):
            if len(self._tried.get(lane, ())) >= _REPEATS:
                gain[place] = 0.0
        if gain.max() < _GAIN:
            # What the terms cannot say may hide a peak: the lanes beside the best one are ruled out first.
            beside = self._beside(int(best.argmax())) & ~tried & (likely > _UNLIKELY)
            beside &= rate + _FAR * deviation > best.max()
            if not np.isfinite(best).any() or not beside.any():
                return None, float(gain.max())
            place = int(np.where(beside, rate, -math.inf).argmax())
            return self._lanes[place], float(gain[place])
        worth = gain / [self._cost(lane, _SHORT, expected) for lane, expected in zip(self._lanes, rate, strict=True)]
        place = int(np.where(gain >= _GAIN, worth, 0.0).argmax())
        return self._lanes[place], float(gain[place])

    def _beside(self, place: int) -> npt.NDArray[np.bool_]:
        """Return which lanes differ from one lane in one thing, and by one step of it."""
        shapes = [self._candidates[values].shape for values, _ in self._lanes]
        loads = [self.offered(load) for _, load in self._lanes]
        columns: list[list[Any]] = [
            [each.max_batch_size for each in shapes],
            [each.max_num_tokens for each in shapes],
            [each.replicas for each in shapes],
            [each.rate or each.concurrency for each in loads],
        ]
        ranks = [np.unique(column, return_inverse=True)[1] for column in columns]
        apart = sum((abs(rank - rank[place]) for rank in ranks), np.zeros(len(shapes)))
        return np.asarray(apart + np.array([each.kind != shapes[place].kind for each in shapes]) == 1)

    def _requests(self, load: Values, part: int) -> int:
        """Return the requests of a trial with one of `part` parts of the whole load, and enough to be steady."""
        whole, loaded = self.trials.spec.num_requests, int(dict(load).get("concurrency") or 1)
        return min(whole, max(whole // part, _FEWEST, 3 * loaded))

    # Time

    def _cost(self, lane: Lane, part: int, rate: float, *, running: bool | None = None) -> float:
        """Return the seconds that a trial should take; `rate` is the logarithm of the expected rate."""
        done = self.trials.done
        each = self._lengths[1] if self._lengths and self.goal.aim == "throughput" else 1.0
        if running is None:
            running = bool(done) and done[-1].candidate.values == lane[0]
        besides: dict[bool, list[float]] = {True: [], False: []}
        for place, trial in enumerate(done):
            same = place > 0 and done[place - 1].candidate is trial.candidate
            besides[same].append(trial.seconds - trial.report.statistics.total_latency_ms / 1000)
        known = besides[running] or besides[not running] or [0.0]
        return max(0.0, fmean(known)) + self._requests(lane[1], part) * each / math.exp(rate)

    def _affordable(self, lanes: Sequence[Lane], part: int, *, reserve: bool = False) -> bool:
        """Return whether trials of the lanes fit the budget, and the race after them if there is a `reserve`."""
        if math.isinf(self._budget):
            return True

        def cost(lanes: Sequence[Lane], part: int, *, running: bool | None = None) -> float:
            rates = self._prospects(lanes)[0].tolist() if lanes else []
            return sum(
                self._cost(*each, running=running) for each in zip(lanes, [part] * len(lanes), rates, strict=True)
            )

        needed = cost(lanes, part)
        if reserve:
            racers = self._racers()[0]
            race = sum(cost(racers, each, running=False) for each in (2, 1))
            needed += min(race, _RACING * self._budget)
        return self.trials.used + needed <= self._budget

    # Racing

    def _racers(self) -> tuple[list[Lane], Lane | None]:
        """Return the lanes that may be the best, and the best one of the file's own configuration."""
        tried = [lane for lane in self._lanes if lane in self._tried]
        rate, deviation, likely = self._prospects(tried)
        ranked = sorted((place for place in range(len(tried)) if likely[place] >= _LIKELY), key=lambda at: -rate[at])
        if not ranked:
            return [], None
        own = next((tried[place] for place in ranked if not tried[place][0]), None)
        first = ranked[0]
        close = [place for place in ranked if rate[first] - rate[place] < 2 * (deviation[first] + deviation[place])]
        kept: dict[Lane, float] = {}
        # Of lanes that differ by less than a race could tell, the one with the fewest changes.
        for place in sorted(close, key=lambda at: len(tried[at][0])):
            if all(tried[place][1] != lane[1] or abs(rate[place] - other) > _ALIKE for lane, other in kept.items()):
                kept[tried[place]] = rate[place]
        racers = sorted(kept, key=lambda lane: -kept[lane])[:_RACERS]
        best = max((tried[place] for place in ranked), key=self._measured)
        if self._measured(best) > (1 + _ALIKE) * max(map(self._measured, racers)):
            racers = [best, *(lane for lane in racers if lane != best)][:_RACERS]
        return racers if own is None or own in racers else [*racers, own], own

    def _measured(self, lane: Lane) -> float:
        """Return the mean rate of a lane's trials."""
        return fmean(self.rate(trial) for trial in self._tried[lane])

    def _race(self, races: int) -> bool:  # noqa: C901 - a race, from its start to its end
        """Measure the best lanes again, in turns, and drop those that are significantly worse; return if one wins."""
        racers, own = self._racers()
        if not racers:
            return self._none_meets()
        # Each is compared with the best one after every round but the first.
        race = Race[Lane](comparisons=max(1, len(racers) - 1) * (_MORE_ROUNDS - 1) * races)
        trials: dict[Lane, list[Trial]] = {lane: [] for lane in racers}
        # The server that runs goes first.
        left = sorted(racers, key=lambda lane: lane[0] != self.trials.done[-1].candidate.values)
        for turn in range(1, _MORE_ROUNDS + 1):
            part = max(1, 4 >> turn)
            if not self._affordable(left, part):
                self.outcome.reasons.append(
                    f"The budget of {self._budget:.0f} s is used; the race had {counted(turn - 1, 'round')}."
                )
                break
            # The other way round in every second round, which cancels steady drift.
            for lane in left if turn % 2 else reversed(left):
                trials[lane].append(self._trial(lane, self._requests(lane[1], part)))
                race.add(lane, self._run(trials[lane][-1]))
            if turn == 1:
                continue  # how far runs of one lane differ is not known yet
            left = [lane for lane in race.survivors() if lane in left and self._holds(trials[lane])] or left[:1]
            if own is None or own in left:
                if own is None or turn >= _ROUNDS or len(left) == 1:
                    break
            elif race.beats(left[0], own, SURE) or not self._holds(trials[own]):
                break  # which of those that are left is best makes no difference that can be seen
            else:
                left = [left[0], own]  # better, but not yet surely
        if not race.runs:  # no time was left: what explored decides, where it is far better
            race, trials = Race(comparisons=len(self._tried)), {lane: self._tried[lane] for lane in racers}
            for lane in racers:
                for trial in trials[lane]:
                    race.add(lane, self._run(trial))
            left = [lane for lane in racers if lane == own or own is None or race.beats(lane, own, SURE)]
        left = [lane for lane in left if self._holds(trials[lane])]
        return self._decide(race, left, own, trials) if left else self._none_meets()

    def _holds(self, trials: Sequence[Trial]) -> bool:
        """Return whether the goal was met in most of the trials."""
        return sum(self.missed(trial) == 0 for trial in trials) * 2 >= len(trials) > 0

    def _decide(
        self, race: Race[Lane], left: Sequence[Lane], own: Lane | None, trials: Mapping[Lane, Sequence[Trial]]
    ) -> bool:
        outcome, winner = self.outcome, max(left, key=race.mean)
        others = [words(lane[0]) or "the file's own" for lane in left if lane != winner]
        if own is not None and self._holds(trials[own]):
            outcome.own = race.mean(own)
            gain = race.difference(winner, own)
            if winner != own and winner[0] and not race.beats(winner, own, SURE):
                low, high = race.difference(winner, own, SURE)
                outcome.reasons.append(
                    f"No sure difference: {words(winner[0])} is between {low:+.1%} and {high:+.1%} of the file's own "
                    "configuration, which is kept."
                )
                winner = own
            elif winner[0]:
                outcome.gain = gain
        if not winner[0]:
            outcome.reasons.append("No other configuration is shown to be better than the file's own, which is kept.")
        elif others:
            outcome.reasons.append(f"Not shown to be worse: {'; '.join(others)}.")
        outcome.best, outcome.value = trials[winner][-1], race.mean(winner)
        return True

    def _none_meets(self) -> bool:
        self.outcome.nearest = min(self.trials.done, key=self.missed)
        self.outcome.reasons.append("No lane that was tried meets the goal.")
        return False

    # One trial

    def _trial(self, lane: Lane, requests: int) -> Trial:
        candidate, load = self._candidates[lane[0]], lane[1]
        name = "; ".join(filter(None, (candidate.name, words(load))))
        trial_name = f"Trial {len(self.trials.done) + 1}: {name}"
        self._progress.step(trial_name)
        trial = self.trials.run(candidate, load, requests=requests, turn=len(self._tried.get(lane, ())))
        if self._tell is not None:
            self._tell(f"{trial_name}: {self.rate(trial):.4g} {UNITS[self.goal.aim]}")
        self._tried.setdefault(lane, []).append(trial)
        statistics = trial.report.statistics
        if not statistics.counts.completed:
            return trial
        if self._lengths is None:
            self._lengths = statistics.input_tokens_per_request, statistics.output_tokens_per_request
        measured = {name: figure_of(statistics, name) or 0.0 for name in (*_LEARNT, *self._limits())}
        measured[RATE_OF[self.goal.aim]] = self.rate(trial)
        self.model.learn(
            candidate.shape, self.offered(load, trial.report), measured, error=relative_error(trial.report)
        )
        return trial

    def offered(self, load: Values, report: BenchReport | None = None) -> Offered:
        """Return what a load means; the rate of a trace is known once it was replayed."""
        spec = self.trials.spec
        own = {name: getattr(spec, name) for name in ("concurrency", "request_rate", "speed")}
        asked: dict[str, Any] = {**own, **dict(load)}
        rate = asked["request_rate"]
        if spec.traffic == "replay":
            recorded = report or next((each.report for each in self.trials.done), None)
            before = float(recorded.spec.get("speed") or 1.0) if recorded else 1.0
            rate = recorded.statistics.requests_per_second / before * float(asked["speed"]) if recorded else None
        lengths = self._lengths or (spec.input_mean, spec.output_mean)
        return Offered(
            input_tokens=lengths[0],
            output_tokens=lengths[1],
            input_stdev=spec.input_stdev,
            output_stdev=spec.output_stdev,
            concurrency=asked.get("concurrency") or 8,
            rate=rate,
            requests=self._requests(load, 1) if report is None else report.statistics.counts.completed,
        )

    def missed(self, trial: Trial) -> float:
        """Return the largest part by which a trial misses a limit; 0 if it meets the goal."""
        return self.goal.missed(lambda name: figure_of(trial.report.statistics, name))

    def rate(self, trial: Trial) -> float:
        """Return what is to be large."""
        return steady_rate(trial.report, self.goal.aim)

    def _run(self, trial: Trial) -> Run:
        return Run(value=max(1e-9, self.rate(trial)), error=relative_error(trial.report))


_LEARNT = ("ttft_mean", "itl_mean")


def steady_rate(report: BenchReport, aim: str) -> float:
    """Return the rate of a trial without its end, when fewer and fewer requests were in flight.

    A short trial in a closed loop would else look slower than a long one.
    """
    statistics, steady = report.statistics, report.statistics.steady
    in_flight = report.spec.get("concurrency") or 1
    if report.open_loop or statistics.counts.completed < 2 * in_flight or steady.seconds <= 0:
        return figure_of(statistics, RATE_OF[aim]) or 0.0
    return steady.output_tokens_per_second if aim == "throughput" else steady.requests_per_second


def relative_error(report: BenchReport) -> float:
    """Return the standard error of a run's rate: tokens in equal slices of the time in which requests were sent.

    Requests in a closed loop come in waves. Slices that cut them differ by more than the rate does, so of two widths
    of slices the one counts that varies less.
    """
    import numpy as np

    sent = [each.sent_ns for each in report.records if each.sent_ns is not None]
    arrivals = [(time, tokens) for each in report.records for time, tokens in each.arrivals]
    if len(sent) < _SLICES or not arrivals or min(sent) == max(sent):
        return 0.0
    times, tokens = np.array(arrivals, float).T
    first = float(times.min())  # before it there is nothing to count
    counts, _ = np.histogram(times, bins=_SLICES, range=(first, max(first + 1, *sent)), weights=tokens)
    if not counts.any():
        return 0.0
    widths = (counts, counts.reshape(-1, 2).sum(axis=1))
    return min(float(each.std(ddof=1) / each.mean() / math.sqrt(len(each))) for each in widths)


_SLICES = 8
