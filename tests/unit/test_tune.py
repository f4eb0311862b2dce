"""A search finds the best configuration in few trials, says why it ends, and continues after an interrupt."""

from __future__ import annotations

import itertools
import json
import math
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import yaml

from tests.support.bench_records import answered, report_of
from tests.support.executors import executors
from tests.support.fake_model import VOCAB
from tests.support.setup_schema import validate_setup
from tests.support.tuning_landscapes import VirtualTrials
from tests.support.virtual_replicas import ANSWER, PROMPT, HeldModel, VirtualReplica
from tests.support.virtual_replicas import SPEED as SPEED_OF_REPLICA
from trtserve.bench.report import BenchReport
from trtserve.bench.statistics import percentile
from trtserve.bench.targets import goal_words, read_goal
from trtserve.cli import run
from trtserve.errors import UsageError
from trtserve.executor.api import KvCacheConfig, Request
from trtserve.pipeline.setup_file.reading import read_setup
from trtserve.pipeline.tuning.answer import headline, make_answer, pareto, write_answer
from trtserve.pipeline.tuning.roofline import MachineSpeed, ModelShape, Offered, SpeedModel, serve
from trtserve.pipeline.tuning.search import SURE, Goal, Race, Run, Search
from trtserve.pipeline.tuning.space import Candidate, Space, Values, find_space
from trtserve.pipeline.tuning.trials import Bench, Trials, measure_speed
from trtserve.specs import BenchSpec, ServerSpec
from trtserve.store import Store

TEXT = """\
models:
  demo: # the small one
    source: demo
    max_batch_size: 2 # as before

servers: {demo: {model: demo, auto_ports: true}}

tune:
  demo:
    server: demo
    goal: ttft p99 < 500 ms
    num_requests: 96
    ranges:
      max_batch_size: [1, 2, 4, 8, 16]
      max_num_tokens: [null, 16]
      concurrency: [1, 4, 16]
"""
SPEED = MachineSpeed(
    bytes_per_second=20e9,
    operations_per_second=1e12,
    step_seconds=0.004,
    sequence_seconds=0.0005,
    request_seconds=0.005,
)
TRUTH = replace(SPEED, step_seconds=0.006, sequence_seconds=0.0009, request_seconds=0.002)


class MadeUpBench(Bench):
    """Servers whose speed is that of a roofline with other figures, and noise."""

    def __init__(
        self, shapes: dict[Any, ModelShape], *, noise: float = 0.02, stop_after: int | None = None, failing: int = 0
    ) -> None:
        self.shapes, self.noise, self.stop_after, self.failing = shapes, noise, stop_after, failing
        self.random = np.random.default_rng(7)
        self.measured = 0

    def stop(self) -> None:
        """Nothing runs."""

    def measure(self, plan: Any, server: ServerSpec, spec: BenchSpec) -> BenchReport:
        if self.measured == self.stop_after:
            raise KeyboardInterrupt
        self.measured += 1
        concurrency = spec.concurrency or 8
        offered = Offered(input_tokens=16, output_tokens=8, concurrency=concurrency, requests=spec.num_requests)
        run = SpeedModel(TRUTH).predict(self.shapes[plan], offered).run
        luck = 1000 * math.exp(self.noise * self.random.standard_normal())
        records = [
            answered(
                number,
                intended=luck * sent,
                first=luck * (first - sent),
                step=luck * (end - first) / 7,
            )
            for number, (sent, first, end) in enumerate(run.times.tolist())
        ]
        if self.shapes[plan].max_batch_size == self.failing:
            records = [replace(each, status="failed", arrivals=[]) for each in records]
        return report_of(records, spec={"concurrency": concurrency})


def search_of(tmp_path: Path, goal: str, *, budget: float = 1e9, **bench: Any) -> Search:
    """A search over made-up servers of the file's model."""
    (tmp_path / "setup.yaml").write_text(TEXT, encoding="utf-8")
    setup = read_setup(tmp_path / "setup.yaml")
    candidates, shapes = [], {}
    for batch, tokens in itertools.product((2, 1, 4, 8, 16), (None, 16)):
        pairs = (("max_batch_size", batch), ("max_num_tokens", tokens))
        values: Values = tuple((name, value) for name, value in pairs if value not in (2, None))
        shape = ModelShape(
            weight_bytes=2e7, kv_bytes=100, parameters=1e7, max_batch_size=batch, max_num_tokens=tokens or 2048
        )
        shapes[values] = shape
        candidates.append(Candidate(values=values, plan=cast(Any, values), server=ServerSpec(), shape=shape))
    space = Space(
        model=setup.models[0],
        server=setup.servers[0],
        candidates=tuple(candidates),
        loads=tuple((("concurrency", each),) for each in (1, 4, 16)),
        current={"max_batch_size": 2, "max_num_tokens": None},
        refused={},
    )
    spec = setup.searches[0].benchmark.spec
    trials = Trials(folder=tmp_path / "trials", spec=spec, bench=MadeUpBench(shapes, **bench))
    return Search(space, Goal(limits=read_goal(goal), aim="throughput"), trials, SpeedModel(SPEED), budget=budget)


def best_rate(search: Search) -> float:
    """The highest true rate of all lanes within the goal."""
    rates = []
    for candidate, load in itertools.product(search.space.candidates, search.space.loads):
        offered = Offered(input_tokens=16, output_tokens=8, concurrency=dict(load)["concurrency"])
        found = SpeedModel(TRUTH).predict(candidate.shape, offered)
        if search.goal.missed(lambda name, of=found: 1.03 * of.figure(name)) == 0:  # type: ignore[misc]
            rates.append(found.tokens_per_second)
    return max(rates)


@pytest.mark.parametrize("goal", ["", "ttft p99 < 60 ms", "latency p99 < 150 ms"])
def test_a_search_finds_the_best_in_few_trials(tmp_path: Path, goal: str) -> None:
    search = search_of(tmp_path, goal)
    outcome = search.run()
    assert outcome.best is not None
    assert outcome.value >= 0.9 * best_rate(search)
    explored = {(trial.candidate.values, trial.load) for trial in search.trials.done}
    assert len(explored) < 15  # of 30 lanes
    answer = make_answer(search)
    assert answer.best == outcome.best.name
    assert any("can be better" in reason for reason in answer.reasons)
    assert answer.errors["tokens_per_second"]["first"]


def test_what_was_measured_to_be_faster_races_though_the_model_sees_no_difference(tmp_path: Path) -> None:
    """The model of speed takes each configuration with fewer tokens for its equal, which is slower."""
    search = search_of(tmp_path, "")
    shapes = cast(MadeUpBench, search.trials.bench).shapes
    slow = {values: replace(shape, weight_bytes=2e8) for values, shape in shapes.items()}
    fewer = {each.values: "max_num_tokens" in dict(each.values) for each in search.space.candidates}
    same = tuple(replace(each, shape=replace(each.shape, max_num_tokens=2048)) for each in search.space.candidates)
    fast = {values: replace(shape, max_num_tokens=2048) for values, shape in shapes.items()}
    search.trials.bench = MadeUpBench({values: (fast if fewer[values] else slow)[values] for values in shapes})
    space = replace(search.space, candidates=same)
    outcome = Search(space, search.goal, search.trials, SpeedModel(SPEED), budget=1e9).run()
    measured = {each.candidate.values for each in search.trials.done}
    assert any(fewer[values] for values in measured)
    assert outcome.best is not None
    assert fewer[outcome.best.candidate.values]


def test_predictions_are_corrected_by_trials(tmp_path: Path) -> None:
    search = search_of(tmp_path, "", noise=0.01)
    search.run()
    first, later = search.model.errors[0]["tokens_per_second"], search.model.error("tokens_per_second", after=3)
    assert later is not None
    assert later < 0.1 < first


@pytest.mark.parametrize("concurrency", [3, 12, 30])
def test_the_virtual_engine_agrees_with_a_real_one_in_a_closed_loop(concurrency: int) -> None:
    """Times to the first token and the whole time of 60 requests; the real engine's steps end in virtual time."""
    random, sent, firsts = np.random.default_rng(1), list[float](), dict[int, float]()
    with executors(HeldModel) as start:
        cache = KvCacheConfig(enable_block_reuse=False)
        executor, model = start(
            batch=SPEED_OF_REPLICA.slots, seq_len=PROMPT + ANSWER, tokens=2048, kv_cache_config=cache
        )
        replica = VirtualReplica(executor, cast(HeldModel, model))

        def send(now: float, count: int) -> None:
            """Send requests, all before the engine takes its next step."""
            requests = []
            for number in range(len(sent), len(sent) + count):
                replica.left[number] = ANSWER
                prompt = [*divmod(number, VOCAB), *random.integers(0, VOCAB, PROMPT - 2).tolist()]
                requests.append(Request(prompt, ANSWER))
            sent.extend([now] * count)
            executor.enqueue_requests(requests)

        now = 0.0
        send(now, concurrency)
        while replica.left:
            now = replica.begin(now)
            for request in replica.step:
                firsts.setdefault(request, now - sent[request])
                replica.left[request] -= 1
            ended = [request for request in replica.step if not replica.left[request]]
            for request in ended:
                del replica.left[request]
            if ended and len(sent) < 60:
                send(now, min(len(ended), 60 - len(sent)))
            replica.model.may_end.release()

    def cost(sequences: int, prompt_tokens: int, _: float) -> tuple[float, ...]:
        step = SPEED_OF_REPLICA
        return step.step, step.sequence * sequences, step.prompt_token * prompt_tokens

    offered = Offered(input_tokens=PROMPT, output_tokens=ANSWER, concurrency=concurrency, requests=60)
    run = serve(offered, cost, slots=SPEED_OF_REPLICA.slots, step_tokens=2048, overhead=0.0)
    assert run.times.max() == pytest.approx(now, rel=0.05)
    real = sorted(firsts.values())
    for quantile in (0.5, 0.9):
        assert run.figure("ttft", quantile)[0] == pytest.approx(percentile(real, quantile), rel=0.1)


def test_a_server_that_answers_nothing_ends_no_search(tmp_path: Path) -> None:
    search = search_of(tmp_path, "", failing=16)
    outcome = search.run()
    assert any(not trial.report.statistics.counts.completed for trial in search.trials.done)
    assert outcome.best is not None
    assert dict(outcome.best.candidate.values).get("max_batch_size") != 16


def test_answers_of_about_one_token_have_no_time_between_tokens() -> None:
    model, shape = (
        SpeedModel(SPEED),
        ModelShape(weight_bytes=2e7, kv_bytes=1, parameters=1e7, max_batch_size=4, max_num_tokens=2048),
    )
    offered = Offered(input_tokens=16, output_tokens=1.3, concurrency=4)
    model.learn(shape, offered, {"itl_p50": 5.0, "requests_per_second": 50.0})
    assert model.expected("requests_per_second", shape, offered) == pytest.approx(50, rel=0.3)


def test_requests_that_come_on_a_schedule_wait_where_the_engine_is_full() -> None:
    def cost(sequences: int, prompt_tokens: int, _: float) -> tuple[float, ...]:
        return (0.1,)

    def first(rate: float) -> float:
        offered = Offered(input_tokens=8, output_tokens=10, rate=rate, requests=200)
        return serve(offered, cost, slots=2, step_tokens=2048, overhead=0.05).figure("ttft", 0.5)[0]

    assert first(0.1) == pytest.approx(0.15, abs=0.01)  # the overhead and a step
    assert first(10.0) > 10  # two requests a second is all that it can do


def test_an_interrupted_search_continues(tmp_path: Path) -> None:
    first = search_of(tmp_path, "", stop_after=3)
    with pytest.raises(KeyboardInterrupt):
        first.run()
    (tmp_path / "trials" / ".half.partial").mkdir()
    again = search_of(tmp_path, "")
    again.run()
    assert [trial.earlier for trial in again.trials.done[:4]] == [True, True, True, False]
    assert cast(MadeUpBench, again.trials.bench).measured == len(again.trials.done) - 3
    once_more = search_of(tmp_path, "", stop_after=0)  # everything is there: nothing is measured
    assert once_more.run().value == pytest.approx(again.outcome.value)


def test_a_budget_ends_a_search(tmp_path: Path) -> None:
    search = search_of(tmp_path, "", budget=0.0)
    outcome = search.run()
    assert len(search.trials.done) == 1
    assert outcome.best is not None
    assert any(reason.endswith("left no time for 9 other configurations.") for reason in outcome.reasons)
    (tmp_path / "pair").mkdir()
    fresh = search_of(tmp_path / "pair", "")
    pair = replace(fresh.space, candidates=fresh.space.candidates[:2])
    small = Search(pair, fresh.goal, fresh.trials, SpeedModel(SPEED), budget=0.0)
    assert "left no time for 1 other configuration." in " ".join(small.run().reasons)


def test_a_goal_that_nothing_meets(tmp_path: Path) -> None:
    search = search_of(tmp_path, "ttft p99 < 1 ms")
    outcome = search.run()
    assert outcome.best is None
    assert outcome.nearest is not None
    assert headline(make_answer(search)) == "No configuration tried meets ttft p99 < 1 ms"
    assert write_answer(search, make_answer(search), tmp_path / "setup.yaml", tmp_path, page=False) is None


def test_equal_configurations_keep_the_file(tmp_path: Path) -> None:
    """An A/A search of a few lanes; `make bench ARGS="--only landscapes"` has a hundred of all sizes."""
    for number in range(3):
        whole = search_of(tmp_path, "", noise=0.05)
        space = replace(whole.space, candidates=whole.space.candidates[:5:2], loads=whole.space.loads[:2])
        bench = cast(MadeUpBench, whole.trials.bench)
        bench.shapes = dict.fromkeys(bench.shapes, bench.shapes[()])
        bench.random = np.random.default_rng(number)
        trials = VirtualTrials(folder=tmp_path, spec=whole.trials.spec, bench=bench)
        outcome = Search(space, whole.goal, trials, SpeedModel(SPEED), budget=1e9).run()
        assert len({trial.candidate.values for trial in trials.done}) > 1
        assert outcome.best is not None
        assert not outcome.best.candidate.values


def test_what_is_not_surely_better_is_said_with_an_interval_that_has_no_difference_in_it(tmp_path: Path) -> None:
    search = search_of(tmp_path, "")
    search.run()
    own, other = (next(lane for lane in search._tried if bool(lane[0]) is changed) for changed in (False, True))
    race = Race[Any](comparisons=1)
    for lane, rate in ((own, 100.0), (other, 104.0)):
        for part in (0.99, 1.0, 1.01):
            race.add(lane, Run(value=part * rate))
    assert race.beats(other, own)
    assert not race.beats(other, own, SURE)
    search._decide(race, [own, other], own, search._tried)
    (reason,) = (each for each in search.outcome.reasons if each.startswith("No sure difference"))
    assert "is between -" in reason


def test_the_setup_file_says_what_was_changed_and_why(tmp_path: Path) -> None:
    search = search_of(tmp_path, "")
    search.run()
    written = write_answer(search, make_answer(search), tmp_path / "setup.yaml", tmp_path, page=False)
    assert written == tmp_path / "setup.tuned.yaml"
    text = written.read_text(encoding="utf-8")
    assert "    # tune: 16 instead of 2, with which" in text
    assert "    max_batch_size: 16 # as before\n" in text
    assert text.startswith("# tune, 20")
    assert read_setup(written).models[0].build.max_batch_size == 16
    assert (tmp_path / "tune.json").is_file()
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.needs("vl_convert")
def test_the_page_shows_the_front(tmp_path: Path) -> None:
    search = search_of(tmp_path, "ttft p99 < 60 ms")
    search.run()
    write_answer(search, make_answer(search), tmp_path / "setup.yaml", tmp_path, page=True)
    page = (tmp_path / "front.html").read_text(encoding="utf-8")
    for words in ("<svg", "The best under each goal", "a second machine, twice the load", "expected, not tried"):
        assert words in page


def test_the_machine_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo's times, made with known overheads, give these overheads."""
    monkeypatch.setenv("TRTSERVE_HOME", str(tmp_path))
    monkeypatch.setattr("trtserve.executor.openvino.runtime.OpenvinoRuntime.matrix_speed", lambda _: (5e9, 7e11))
    monkeypatch.setattr("trtserve.pipeline.tuning.trials.plan_import", lambda spec, **_: spec)

    class Demo(MadeUpBench):
        def __init__(self, *_: object) -> None:
            super().__init__({})

        def measure(self, plan: Any, server: ServerSpec, spec: BenchSpec) -> BenchReport:
            count = spec.concurrency or 1
            step, first = 4 + 0.5 * count, 30.0
            each = (first / count if count > 1 else first) + 64 * step / count
            records = [
                answered(number, intended=number * each, first=first, step=step, tokens=64)
                for number in range(spec.num_requests)
            ]
            return report_of(records)

    monkeypatch.setattr("trtserve.pipeline.tuning.trials.Bench", Demo)
    name, speed = measure_speed("openvino")
    assert name == "openvino"
    assert speed == MachineSpeed.read("openvino", Store())
    assert (speed.bytes_per_second, speed.operations_per_second) == (5e9, 7e11)
    assert speed.step_seconds == pytest.approx(0.004, rel=0.15)
    assert speed.sequence_seconds == pytest.approx(0.0005, rel=0.5)
    assert speed.request_seconds == pytest.approx(0.030 - 0.0045, rel=0.1)  # less the step of its first token


@pytest.mark.parametrize("value", [0.0, -1.0])
def test_a_machine_without_speed_has_to_be_measured_again(
    value: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRTSERVE_HOME", str(tmp_path))
    replace(SPEED, bytes_per_second=value).write("openvino", Store())
    (tmp_path / "setup.yaml").write_text(TEXT, encoding="utf-8")
    assert run(["tune", str(tmp_path / "setup.yaml"), "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert f"has {value:g} bytes per second; it must be above 0." in said
    assert "Measure again: trtserve doctor --measure" in said


def test_doctor_names_the_figures(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("trtserve.pipeline.tuning.trials.measure_speed", lambda *_, **__: ("openvino", SPEED))
    assert run(["doctor", "--measure"]) == 0
    (row,) = (each for each in capsys.readouterr().out.splitlines() if "fixed cost of a step" in each)
    assert "4 ms" in row


@pytest.mark.parametrize("arguments", [[], ["--goal", "ttft p99 < 9 s", "--max", "requests"]])
def test_a_dry_run_lists_the_lanes(
    tmp_path: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRTSERVE_HOME", str(tmp_path / "store"))
    (tmp_path / "setup.yaml").write_text(TEXT, encoding="utf-8")
    assert run(["tune", str(tmp_path / "setup.yaml"), "--dry-run", "--json", *arguments]) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    assert len(result["lanes"]) == 30
    assert run(["tune", str(tmp_path / "setup.yaml"), "--dry-run", *arguments]) == 0
    said = capsys.readouterr()
    assert "… and 10 more" in said.err
    assert "This machine was not measured" in said.err
    assert "the figures are guesses" in said.err
    after = shlex.join(["trtserve", "tune", str(tmp_path / "setup.yaml"), *arguments])
    assert said.err.splitlines()[-1] == f"Next: {after}"
    # Each of the 30 lanes has one of these loads.
    assert sum("concurrency" in row for row in said.out.splitlines()) == 20
    assert list(tmp_path.glob("*.tune")) == []


def test_a_folder_belongs_to_one_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRTSERVE_HOME", str(tmp_path / "store"))
    file, folder = tmp_path / "setup.yaml", tmp_path / "demo.tune"
    file.write_text(TEXT, encoding="utf-8")
    folder.mkdir()
    (folder / "question.json").write_text('{"sha256": "of another"}', encoding="utf-8")
    assert run(["tune", str(file)]) == 2
    assert "the trials of another model, server or load" in capsys.readouterr().err
    assert run(["tune", str(file), "--search", "other"]) == 2
    assert "has the searches demo" in capsys.readouterr().err


def test_the_front() -> None:
    assert pareto([(10, 5), (8, 4), (9, 6), (12, 9), (10, 7)]) == {0, 1, 3}


def test_goals() -> None:
    limits = read_goal("ttft p99 < 0.5 s, itl p50 <= 40 ms, tokens_per_second > 50")
    assert limits == {"ttft_p99": 500.0, "itl_p50": 40.0, "tokens_per_second": 50.0}
    assert read_goal(goal_words(limits)) == limits
    for wrong in ("ttft p99 > 5 ms", "ttft < 5 ms", "speed p99 < 5 ms", "ttft p99 < soon", "tokens_per_second < 5"):
        with pytest.raises(UsageError):
            read_goal(wrong)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("max_batch_size: 4", "must be a list of values"),
        ("max_batch_size: [0]", "it must be at least 1"),
        ("max_batch_sizes: [4]", "has no key"),
        ("max_batch_size: []", "must be a list of values"),
    ],
)
def test_wrong_ranges_are_refused(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "setup.yaml"
    path.write_text(TEXT.replace("max_batch_size: [1, 2, 4, 8, 16]", line), encoding="utf-8")
    with pytest.raises(UsageError, match=message):
        read_setup(path)


def test_the_schema_knows_searches(tmp_path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    validate_setup(yaml.safe_load(TEXT))
    with pytest.raises(jsonschema.ValidationError):
        validate_setup(yaml.safe_load(TEXT.replace("[1, 2, 4, 8, 16]", "[many]")))


def test_data_types_have_costs_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTSERVE_HOME", str(tmp_path / "store"))
    path = tmp_path / "setup.yaml"
    ranges = "quantize: [none, int8]\n      max_batch_size: [2, 4]\n      concurrency: [1]\n"
    path.write_text(TEXT[: TEXT.index("max_batch_size: [")] + ranges, encoding="utf-8")
    setup = read_setup(path)
    space = find_space(setup, setup.searches[0], store=Store())
    assert [each.shape.kind for each in space.candidates] == ["", "", "quantize int8", "quantize int8"]


def test_what_cannot_work_is_left_out_before_it_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTSERVE_HOME", str(tmp_path / "store"))
    path = tmp_path / "setup.yaml"
    ranges = "max_batch_size: [2, 4]\n      max_num_tokens: [null, 3]\n      concurrency: [1]\n"
    path.write_text(TEXT[: TEXT.index("max_batch_size: [")] + ranges, encoding="utf-8")
    setup = read_setup(path)
    space = find_space(setup, setup.searches[0], store=Store())
    assert {each.shape.kind for each in space.candidates} == {""}  # the model of speed knows batch and tokens itself
    assert [each.name for each in space.candidates] == ["as in the file", "max_num_tokens 3", "max_batch_size 4"]
    assert "each of 4 requests needs one" in space.refused["max_batch_size 4, max_num_tokens 3"]
    assert space.candidates[0].shape.max_num_tokens == 2048
