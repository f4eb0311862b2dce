"""The answer of a search: the setup file with the values that won, the front of all trials, and what more would give.

Every file is complete before it has its name, and the setup file comes last: who finds it has the whole answer.
"""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from trtserve.bench.plots import FrontPoint, write_front
from trtserve.bench.targets import figure_of, goal_words
from trtserve.errors import UsageError
from trtserve.files import read_text, replacing, write_json
from trtserve.pipeline.setup_file import model_options
from trtserve.pipeline.setup_file.reading import read_setup
from trtserve.pipeline.tuning.roofline import Offered, Prediction
from trtserve.pipeline.tuning.search import RATE_OF, UNITS, Goal, Search
from trtserve.pipeline.tuning.space import Values, words
from trtserve.pipeline.tuning.trials import Trial

_FIGURES = ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99")


@dataclass(frozen=True, kw_only=True)
class TuneAnswer:
    """What a search says, for people and programs."""

    goal: str
    aim: str
    best: str | None  # configuration and load; None: nothing meets the goal
    values: Mapping[str, Any]  # options that differ from the file
    load: Mapping[str, Any]
    rate: float
    gain: tuple[float, float] | None
    """The 95 % interval of how much better it is than the file's own configuration; None: no difference, or that one
    misses the goal."""
    own_rate: float | None
    reasons: Sequence[str]
    trials: int
    seconds: float
    errors: Mapping[str, Mapping[str, float | None]]
    """Median relative error of the predictions: figure → `first` (before any trial) and `later` (after three)."""
    under: Mapping[str, str]  # each goal alone → the best configuration that was measured under it
    more: Mapping[str, str]  # what a second machine or GPU is expected to give
    refused: Mapping[str, str]
    failed: Mapping[str, str]


def make_answer(search: Search) -> TuneAnswer:
    """Return what the search has found."""
    outcome, goal, trials = search.outcome, search.goal, search.trials
    best = outcome.best
    errors = {
        name: {"first": search.model.errors[0].get(name), "later": search.model.error(name, after=3)}
        for name in (RATE_OF[goal.aim], "ttft_mean", "itl_mean")
        if search.model.errors
    }
    return TuneAnswer(
        goal=goal_words(goal.limits),
        aim=goal.aim,
        best=None if best is None else best.name,
        values={} if best is None else dict(best.candidate.values),
        load={} if best is None else dict(best.load),
        rate=outcome.value,
        gain=outcome.gain,
        own_rate=outcome.own,
        reasons=tuple(outcome.reasons),
        trials=len(trials.done),
        seconds=trials.used,
        errors=errors,
        under=_under(search, goal),
        more={} if best is None else _more(search, best),
        refused=dict(search.space.refused),
        failed=outcome.failed,
    )


def _under(search: Search, goal: Goal) -> dict[str, str]:
    """Return the best trial under each limit alone, under all of them, and under none."""
    subsets = [{}, *({name: limit} for name, limit in goal.limits.items()), dict(goal.limits)]
    found = {}
    for limits in subsets:
        alone = Goal(limits=limits, aim=goal.aim)
        met = [each for each in search.trials.done if alone.missed(partial(figure_of, each.report.statistics)) == 0]
        if met:
            best = max(met, key=search.rate)
            found[goal_words(limits) or "no goal"] = f"{best.name}: {search.rate(best):.4g} {UNITS[goal.aim]}"
    return found


def _more(search: Search, best: Trial) -> dict[str, str]:
    """Return what one more machine or GPU should give, as factors of the model on what was measured."""
    shape = best.candidate.shape
    offered = search.offered(best.load, best.report)
    before = search.model.predict(shape, offered)
    half = replace(shape, weight_bytes=shape.weight_bytes / 2, parameters=shape.parameters / 2)
    doubled = replace(
        offered,
        concurrency=None if offered.concurrency is None else 2 * offered.concurrency,
        rate=None if offered.rate is None else 2 * offered.rate,
    )
    kinds = {
        "a second machine, twice the load": (replace(shape, replicas=2 * shape.replicas), doubled),
        "a second machine, the same load": (replace(shape, replicas=2 * shape.replicas), offered),
        "a second GPU or socket for each rank (tp × 2, its traffic not counted)": (half, offered),
    }
    return {name: _words_of(search, best, before, search.model.predict(*each)) for name, each in kinds.items()}


def _words_of(search: Search, best: Trial, before: Prediction, after: Prediction) -> str:
    goal, name = search.goal, RATE_OF[search.goal.aim]
    parts = [f"{search.rate(best) * after.figure(name) / before.figure(name):.4g} {UNITS[goal.aim]}"]
    for figure in ("ttft_p99", "itl_p99"):
        value = figure_of(best.report.statistics, figure)
        if value is not None and before.figure(figure):
            expected = value * after.figure(figure) / before.figure(figure)
            parts.append(f"{figure.replace('_', ' ')} {expected:.{0 if expected >= 100 else 1}f} ms")
    return ", ".join(parts)


def write_answer(search: Search, answer: TuneAnswer, setup: Path, folder: Path, *, page: bool) -> Path | None:
    """Write tune.json, front.html and the setup file beside `setup`, and return the latter; None without a winner."""
    if page:
        _write_page(search, answer, folder / "front.html")
    write_json(folder / "tune.json", asdict(answer))
    best = search.outcome.best
    if best is None:
        return None
    target = setup.with_name(f"{setup.stem}.tuned{setup.suffix}")
    text = tuned_text(read_text(setup, UsageError), search, answer)
    with replacing(target) as staged:
        staged.write_text(text, encoding="utf-8")
        read_setup(staged)  # what was changed is still a setup file
    return target


def tuned_text(text: str, search: Search, answer: TuneAnswer) -> str:
    """Return the text of the setup file with the winner's values, each below a comment that says why."""
    model, server = search.space.model, search.space.server
    reached = f"{answer.rate:.4g} {UNITS[answer.aim]} with {words(tuple(answer.load.items())) or 'this load'}"
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    title = f"tune, {today}: {reached}" + (f"; goal: {answer.goal}" if answer.goal else "")
    if answer.gain is not None:
        title += f"; {answer.gain[0]:+.0%} to {answer.gain[1]:+.0%} compared with the file before"
    of_model = {key: value for key, value in answer.values.items() if key in model_options()}
    for part, name, values in (
        ("servers", server.name, {key: value for key, value in answer.values.items() if key not in of_model}),
        ("models", model.name, of_model),
    ):
        for key, value in values.items():
            text = _with_value(text, (part, name), key, value, _why(search, answer, key, value))
    return f"# {title}\n{text}"


def _why(search: Search, answer: TuneAnswer, key: str, value: Any) -> str:
    """Return the reason for a value: what the model expects of the winner without it."""
    best, space = search.outcome.best, search.space
    before = search.space.current[key]
    reason = f"tune: {value} instead of {'the default' if before is None else before}"
    rest: Values = tuple(pair for pair in answer.values.items() if pair[0] != key)
    other = next((each for each in space.candidates if dict(each.values) == dict(rest)), None)
    if best is None or other is None:
        return reason
    offered: Offered = search.offered(best.load, best.report)
    name = RATE_OF[answer.aim]
    share = search.model.predict(other.shape, offered).figure(name)
    share /= search.model.predict(best.candidate.shape, offered).figure(name)
    trials = [each for each in search.trials.done if each.candidate is other and each.load == best.load]
    if trials:
        return f"{reason}, with which {search.rate(trials[-1]):.4g} {UNITS[answer.aim]} were measured"
    return f"{reason}, with which {share:.2f} × the rate is expected"


def _with_value(text: str, place: tuple[str, str], key: str, value: Any, comment: str) -> str:
    """Return YAML with `key: value` in the mapping at `place`, below a comment; the rest stays as it is written."""
    node: Any = yaml.compose(text, Loader=yaml.SafeLoader)
    for name in place:
        if node.flow_style:  # the whole file in braces: its words stay, as text
            again = yaml.safe_dump(yaml.load(text, Loader=yaml.BaseLoader), sort_keys=False)
            return _with_value(again, place, key, value, comment)
        node = next(below for at, below in node.value if at.value == name)
    written = yaml.safe_dump(value).removesuffix("...\n").strip()
    if node.flow_style:
        pairs = {at.value: text[below.start_mark.index : below.end_mark.index] for at, below in node.value}
        before = text[: node.start_mark.index].rpartition("\n")[2]
        column = len(before) - len(before.lstrip()) + 2
        lines = [f"{' ' * column}{at}: {below}" for at, below in {**pairs, key: written}.items()]
        place_of = next(number for number, line in enumerate(lines) if line.strip().startswith(f"{key}:"))
        lines.insert(place_of, f"{' ' * column}# {comment}")
        return "{}\n{}{}".format(text[: node.start_mark.index].rstrip(), "\n".join(lines), text[node.end_mark.index :])
    found = next(((at, below) for at, below in node.value if at.value == key), None)
    first = node.value[0][0].start_mark
    pad = " " * first.column
    if found is None:
        start = text.rfind("\n", 0, first.index) + 1
        return f"{text[:start]}{pad}# {comment}\n{pad}{key}: {written}\n{text[start:]}"
    at, below = found
    start = text.rfind("\n", 0, at.start_mark.index) + 1
    changed_line = text[start : below.start_mark.index] + written + text[below.end_mark.index :]
    return f"{text[:start]}{pad}# {comment}\n{changed_line}"


def _write_page(search: Search, answer: TuneAnswer, path: Path) -> None:
    goal = search.goal
    measure = next((name for name in goal.limits if name in _FIGURES), "ttft_p50")
    trials = [each for each in search.trials.done if _latency(each, measure) is not None]
    front = pareto([(search.rate(each), _latency(each, measure) or 0.0) for each in trials])
    points = [
        FrontPoint(
            throughput=search.rate(each),
            ms=_latency(each, measure) or 0.0,
            name=each.name,
            kind="meets the goal" if search.missed(each) == 0 else "misses the goal",
            on_front=place in front,
        )
        for place, each in enumerate(trials)
    ]
    measured = {(each.candidate.values, each.load) for each in trials}
    for candidate, load in itertools.islice(itertools.product(search.space.candidates, search.space.loads), 2000):
        if (candidate.values, load) not in measured:
            offered = search.offered(load)
            points.append(
                FrontPoint(
                    throughput=search.model.expected(RATE_OF[goal.aim], candidate.shape, offered),
                    ms=search.model.expected(measure, candidate.shape, offered),
                    name="; ".join(filter(None, (candidate.name, words(load)))),
                    kind="expected, not tried",
                    on_front=False,
                )
            )
    rows = [
        (
            each.name,
            f"{search.rate(each):.4g}",
            *("" if (value := _latency(each, name)) is None else f"{value:.4g}" for name in _FIGURES),
            "yes" if search.missed(each) == 0 else "no",
            each.report.verdict.judgement,
            each.folder.name,
        )
        for each in search.trials.done
    ]
    columns = ("configuration", UNITS[goal.aim], *(f"{name.replace('_', ' ')} (ms)" for name in _FIGURES))
    write_front(
        points,
        path,
        title="trtserve tune",
        axes=(UNITS[goal.aim], f"{measure.replace('_', ' ')} (ms)"),
        lines=[headline(answer), *answer.reasons, *error_lines(answer)],
        tables=[
            ("Trials", (*columns, "meets the goal", "verdict", "folder"), rows),
            ("The best under each goal", ("goal", "configuration"), list(answer.under.items())),
            ("With more, as the model expects", ("what", "figures"), list(answer.more.items())),
            ("Left out before they were built", ("configuration", "why"), list(answer.refused.items())),
            ("Failed", ("configuration", "why"), list(answer.failed.items())),
        ],
    )


def _latency(trial: Trial, name: str) -> float | None:
    value = figure_of(trial.report.statistics, name)
    return None if value is None or value == float("inf") else value


def pareto(points: Sequence[tuple[float, float]]) -> set[int]:
    """Return the places of the (throughput, latency) that no other point beats in one and equals in the other."""
    found, lowest = set[int](), float("inf")
    for place in sorted(range(len(points)), key=lambda each: (-points[each][0], points[each][1])):
        if points[place][1] < lowest:
            found.add(place)
            lowest = points[place][1]
    return found


def headline(answer: TuneAnswer) -> str:
    if answer.best is None:
        return f"No configuration tried meets {answer.goal}"
    found = f"{answer.best}: {answer.rate:.4g} {UNITS[answer.aim]}"
    if answer.gain is not None:
        found += f", {answer.gain[0]:+.0%} to {answer.gain[1]:+.0%} compared with the file's own configuration"
    return found


def error_lines(answer: TuneAnswer) -> list[str]:
    """Return how far the predictions were off."""
    lines = []
    for name, error in answer.errors.items():
        shown = {"before any trial": error["first"], "after three": error["later"]}
        known = [f"{value:.0%} {when}" for when, value in shown.items() if value is not None]
        if known:
            lines.append(f"Error of the predicted {name.replace('_', ' ')}: {', '.join(known)}.")
    return lines
