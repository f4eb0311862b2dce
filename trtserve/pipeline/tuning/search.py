"""The search: predict, try what may still win, race the best ones against each other, and say why it ends.

A *lane* is a configuration at a load. Short trials explore lanes in the order of the prediction, which each trial
corrects. A lane is not tried when even its prediction and the error of predictions so far leave it below the best one.
Then the best lanes race in fresh trials, each round twice as long, until the others are significantly worse. Only these
fresh trials decide: the ones that chose the racers would flatter the luckiest.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trtserve.bench.report import BenchReport
from trtserve.bench.statistics import Interval
from trtserve.bench.targets import figure_of
from trtserve.errors import TrtserveError, UsageError, counted
from trtserve.files import optional_json_object, write_json
from trtserve.pipeline.import_spec import as_json
from trtserve.pipeline.setup_file.content import SearchSetup
from trtserve.pipeline.tuning.race import Race, Run
from trtserve.pipeline.tuning.roofline import ASSUMED, MachineSpeed, SpeedModel
from trtserve.pipeline.tuning.space import Candidate, Space, Values, words
from trtserve.pipeline.tuning.trials import Bench, Trial, Trials
from trtserve.pipeline.tuning.virtual_engine import Offered
from trtserve.progress import SILENT, Progress
from trtserve.store import Store

RATE_OF = {"throughput": "tokens_per_second", "requests": "requests_per_second"}
"""What is to be large → its figure."""
UNITS = {"throughput": "tokens/s", "requests": "requests/s"}
_RACERS = 3
"""The most that race, besides the file's own configuration."""
_ROUNDS = 3
_SHORT = 4
"""A trial that explores has this part of the requests."""
_FEWEST = 24
_EXPLORING = 0.6
"""Part of the budget after which nothing new is tried: the rest is for the race."""
_LOADS_EACH = 3
"""Loads that a configuration is tried at while it explores, at most."""
_ALIKE = 0.02
"""Part of the rate by which two lanes must differ for a race between them."""
Lane = tuple[Values, Values]


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What must hold, and what is to be large."""

    limits: Mapping[str, float]
    aim: str

    def missed(self, value_of: Callable[[str], float | None], slack: float = 0.0) -> float:
        """Return the largest part by which a limit is missed beyond `slack`; 0 if all are met."""
        return max((self._miss(name, limit, value_of(name), slack) for name, limit in self.limits.items()), default=0.0)

    @staticmethod
    def _miss(name: str, limit: float, value: float | None, slack: float) -> float:
        if value is None or value <= 0:
            return 1.0
        ratio = limit / value if name.endswith("_second") or name == "good_share" else value / limit
        return max(0.0, ratio - 1 - slack)


@dataclass
class Outcome:
    """What a search has found."""

    best: Trial | None = None
    """The last trial of the lane that won; None: no lane meets the goal."""
    value: float = 0.0
    """Its rate, over its trials in the race."""
    own: float | None = None
    """The rate of the file's own configuration in the race, at its best load; None: it misses the goal."""
    gain: Interval | None = None
    """How much better it is than the file's own configuration; None: that one won, or misses the goal."""
    nearest: Trial | None = None
    """The trial that came closest to the goal, where none meets it."""
    reasons: list[str] = field(default_factory=list)
    """Why the search ended, and what was left out."""
    failed: dict[str, str] = field(default_factory=dict)
    """Configuration → why it could not be built or started."""


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
        self._explored: dict[Lane, Trial] = {}
        self._lengths: tuple[float, float] = (self.trials.spec.input_mean, self.trials.spec.output_mean)
        self.outcome = Outcome()

    def run(self) -> Outcome:
        """Search until nothing can be better, or the budget is used."""
        self._explore()
        met = [lane for lane, trial in self._explored.items() if self._meets(trial.report)]
        if not met:
            self._none_meets()
            return self.outcome
        ranked = sorted(met, key=self._explored_rate, reverse=True)
        first = Race[Lane](comparisons=len(ranked))
        for lane in ranked:
            first.add(lane, self._run(self._explored[lane].report))
        racers = self._distinct(first.survivors())[:_RACERS]
        own = next((lane for lane in ranked if not lane[0]), None)
        if own is not None and own not in racers:
            racers.append(own)
        self._race(racers, own, first)
        return self.outcome

    def _distinct(self, lanes: Sequence[Lane]) -> list[Lane]:
        """Leave out lanes that differ from a better one by less than a race could tell, as the model expects."""
        kept: dict[Lane, float] = {}
        for lane in sorted(lanes, key=lambda each: len(each[0])):
            expected = self._prospect(self._candidates[lane[0]], lane[1])
            if all(lane[1] != other[1] or abs(expected / rate - 1) > _ALIKE for other, rate in kept.items()):
                kept[lane] = expected
        return [lane for lane in lanes if lane in kept]

    def forecast(self) -> list[dict[str, Any]]:
        """Return all lanes with their expected rate, the most promising first."""
        rows = []
        for candidate, load in itertools.product(self.space.candidates, self.space.loads):
            prediction = self.model.predict(candidate.shape, self.offered(load))
            missed = self.goal.missed(lambda name, of=prediction: self.model.expected(name, of))  # type: ignore[misc]
            rate = self.model.expected(RATE_OF[self.goal.aim], prediction)
            rows.append({"configuration": candidate.name, "load": words(load), "rate": rate, "missed": missed})
        return sorted(rows, key=lambda row: (row["missed"] > 0, -row["rate"]))

    # Exploring

    def _explore(self) -> None:
        """Try lanes until no other can be better than the best one, by the prediction and its errors."""
        order: Iterator[Candidate | None] = iter((self.space.candidates[0],))
        tried: set[Values] = set()
        while True:
            candidate = next(order, None) or self._next(tried)
            if candidate is None:
                return
            tried.add(candidate.values)
            if self._spent(1, _EXPLORING):
                left = len(self._candidates) - len(tried) + 1
                self.outcome.reasons.append(
                    f"The budget of {self._budget:.0f} s left no time for {counted(left, 'other configuration')}."
                )
                return
            try:
                self._explore_loads(candidate)
            except TrtserveError as error:
                if candidate is self.space.candidates[0]:
                    raise
                self.outcome.failed[candidate.name] = error.message
                self._progress.warn(f"{candidate.name}: {error.message}")

    def _next(self, tried: set[Values]) -> Candidate | None:
        """Return the configuration with the best prospect, or None when none can beat the best lane."""
        left = [each for each in self.space.candidates if each.values not in tried]
        if not left:
            self.outcome.reasons.append("Every configuration was tried.")
            return None
        prospects = {each.values: max(self._prospect(each, load) for load in self.space.loads) for each in left}
        best = max(left, key=lambda each: prospects[each.values])
        rates = [self._rate(trial.report) for trial in self._explored.values() if self._meets(trial.report)]
        hope = prospects[best.values] * (1 + self.model.margin)
        if rates and hope < max(rates) * 1.02:
            self.outcome.reasons.append(
                f"No other configuration can be better ({len(left)} left): the best should reach "
                f"{prospects[best.values]:.4g}, at most {hope:.4g} by the errors of the predictions; "
                f"{max(rates):.4g} was measured."
            )
            return None
        return best

    def _prospect(self, candidate: Candidate, load: Values) -> float:
        """Return the expected rate; a lane that should miss the goal by far gets little."""
        offered = self.offered(load)
        prediction = self.model.predict(candidate.shape, offered)
        missed = self.goal.missed(lambda name: self.model.expected(name, prediction), slack=self.model.margin / 2)
        return self.model.expected(RATE_OF[self.goal.aim], prediction) / (1 + 4 * missed)

    def _explore_loads(self, candidate: Candidate) -> None:
        """Try the most promising load, then those that the corrected prediction prefers to it."""
        for _ in range(min(_LOADS_EACH, len(self.space.loads))):
            lanes = [(candidate.values, load) for load in self.space.loads]
            # Measured lanes count with their figures, others with their prospects.
            worth = {lane: self._worth(lane, candidate) for lane in lanes}
            # Of loads that should do as well the largest: what waits hides what a request costs besides.
            most = max(worth.values()) * (1 - _ALIKE)
            lane = [each for each in lanes if worth[each] >= most][-1]
            if lane in self._explored or self._spent(1, _EXPLORING):
                return
            self._explored[lane] = self._trial(lane, self._requests(lane[1], _SHORT))

    def _worth(self, lane: Lane, candidate: Candidate) -> float:
        trial = self._explored.get(lane)
        if trial is None:
            return self._prospect(candidate, lane[1])
        missed = self.goal.missed(lambda name: figure_of(trial.report.statistics, name))
        return self._rate(trial.report) / (1 + 4 * missed)

    def _requests(self, load: Values, part: int) -> int:
        """Return the requests of a trial that has one of `part` parts of the whole load, and enough to be steady."""
        whole, loaded = self.trials.spec.num_requests, int(dict(load).get("concurrency") or 1)
        return min(whole, max(whole // part, _FEWEST, 3 * loaded))

    # Racing

    def _race(self, racers: Sequence[Lane], own: Lane | None, first: Race[Lane]) -> None:
        """Measure the racers again, in turns, and drop those that are significantly worse."""
        # Each is compared with the best one after the second round, and after the third.
        race, last = Race[Lane](comparisons=max(1, len(racers) - 1) * (_ROUNDS - 1)), dict(self._explored)
        # The server that runs goes first.
        left = sorted(racers, key=lambda lane: lane[0] != self.trials.done[-1].candidate.values)
        misses: dict[Lane, list[float]] = {}
        for turn in range(1, _ROUNDS + 1):
            if len(left) == 1 and turn > 1:
                break
            if self._spent(len(left)):
                self.outcome.reasons.append(
                    f"The budget of {self._budget:.0f} s is used; the race had {counted(turn - 1, 'round')}."
                )
                break
            # The other way round in every second round, which cancels steady drift.
            for lane in left if turn % 2 else reversed(left):
                last[lane] = self._trial(lane, self._requests(lane[1], max(1, 4 >> turn)), turn=turn)
                race.add(lane, self._run(last[lane].report))
                report = last[lane].report
                misses.setdefault(lane, []).append(
                    self.goal.missed(lambda name, report=report: figure_of(report.statistics, name))  # type: ignore[misc]
                )
            if turn == 1:
                continue  # how far runs of one lane differ is not known yet
            left = [lane for lane in race.survivors() if lane in left and self._holds(misses[lane])] or left[:1]
            if len(left) > 1 and own not in left:
                break  # which of those is best makes no difference that can be seen
        if not race.runs:  # what explored has to do: the best one must be far better
            race, left = first, [lane for lane in racers if lane == own or own is None or first.beats(lane, own)]
            misses = {lane: [0.0] for lane in left}
        self._decide(race, left, own, last, misses)

    @staticmethod
    def _holds(misses: Sequence[float]) -> bool:
        """Return whether the goal was met in most of the trials."""
        return sum(miss == 0 for miss in misses) * 2 >= len(misses)

    def _decide(
        self,
        race: Race[Lane],
        left: Sequence[Lane],
        own: Lane | None,
        last: Mapping[Lane, Trial],
        misses: Mapping[Lane, Sequence[float]],
    ) -> None:
        outcome = self.outcome
        if not any(self._holds(each) for each in misses.values()):
            self._none_meets()
            return
        winner = max((lane for lane in left), key=race.mean)
        others = [words(lane[0]) or "the file's own" for lane in left if lane != winner]
        if own is not None and self._holds(misses.get(own, ())):
            outcome.own = race.mean(own)
            gain = race.difference(winner, own)
            if winner != own and winner[0] and gain[0] <= 0:
                outcome.reasons.append(
                    f"No difference: {words(winner[0])} is between {gain[0]:+.0%} and {gain[1]:+.0%} of the file's own "
                    "configuration, which is kept."
                )
                winner = own
            elif winner[0]:
                outcome.gain = gain
        if not winner[0]:
            outcome.reasons.append("No other configuration is shown to be better than the file's own, which is kept.")
        elif others:
            outcome.reasons.append(f"Not shown to be worse: {'; '.join(others)}.")
        outcome.best, outcome.value = last[winner], race.mean(winner)

    def _none_meets(self) -> None:
        self.outcome.nearest = min(
            self.trials.done, key=lambda each: self.goal.missed(lambda name: figure_of(each.report.statistics, name))
        )
        self.outcome.reasons.append("No lane that was tried meets the goal.")

    # One trial

    def _trial(self, lane: Lane, requests: int, *, turn: int = 0) -> Trial:
        candidate, load = self._candidates[lane[0]], lane[1]
        name = "; ".join(filter(None, (candidate.name, words(load))))
        trial_name = f"Trial {len(self.trials.done) + 1}: {name}"
        self._progress.step(trial_name)
        trial = self.trials.run(candidate, load, requests=requests, turn=turn)
        if self._tell is not None:
            self._tell(f"{trial_name}: {self._rate(trial.report):.4g} {UNITS[self.goal.aim]}")
        statistics = trial.report.statistics
        if not statistics.counts.completed:
            return trial
        self._lengths = statistics.input_tokens_per_request, statistics.output_tokens_per_request
        measured = {name: figure_of(statistics, name) or 0.0 for name in {*_LEARNT, *self.goal.limits}}
        measured |= {RATE_OF[aim]: steady_rate(trial.report, aim) for aim in RATE_OF}
        measured.pop("good_share", None)
        self.model.learn(candidate.shape, self.offered(load, trial.report), measured)
        return trial

    def offered(self, load: Values, report: BenchReport | None = None) -> Offered:
        """Return what a load means; the rate of a trace is known once it was replayed."""
        asked: dict[str, Any] = {**_spec_load(self.trials.spec), **dict(load)}
        rate = asked.get("request_rate")
        if self.trials.spec.traffic == "replay":
            recorded = report or next((each.report for each in self.trials.done), None)
            own = float(recorded.spec.get("speed") or 1.0) if recorded else 1.0
            rate = recorded.statistics.requests_per_second / own * float(asked["speed"]) if recorded else None
        spec = self.trials.spec
        return Offered(
            input_tokens=self._lengths[0],
            output_tokens=self._lengths[1],
            input_stdev=spec.input_stdev,
            output_stdev=spec.output_stdev,
            concurrency=asked.get("concurrency") or 8,
            rate=rate,
            requests=self._requests(load, 1) if report is None else report.statistics.counts.completed,
        )

    def _meets(self, report: BenchReport) -> bool:
        return self.goal.missed(lambda name: figure_of(report.statistics, name)) == 0 and self._rate(report) > 0

    def _rate(self, report: BenchReport) -> float:
        return steady_rate(report, self.goal.aim)

    def _explored_rate(self, lane: Lane) -> float:
        return self._rate(self._explored[lane].report)

    def _run(self, report: BenchReport) -> Run:
        return Run(value=max(1e-9, self._rate(report)), error=relative_error(report))

    def _spent(self, trials: int, part: float = 1.0) -> bool:
        """Return whether this many more trials would use more than this part of the budget."""
        done = self.trials.done
        usual = self.trials.used / len(done) if done else 0.0
        return bool(done) and self.trials.used + trials * usual > part * self._budget


_LEARNT = ("requests_per_second", "tokens_per_second", "ttft_mean", "itl_mean")


def _spec_load(spec: Any) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in ("concurrency", "request_rate", "speed")}


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
