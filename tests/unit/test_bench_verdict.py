"""Verdicts: what makes figures doubtful, and results that cannot be true."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.bench_records import MS, answered, correlated, report_of
from trtserve.bench.monitoring import OtherPrograms, Samples, WorkerHealth
from trtserve.bench.records import RequestRecord
from trtserve.bench.run import _bounds
from trtserve.bench.statistics import read_goals
from trtserve.bench.targets import Answer, highest_rate, rate_answer
from trtserve.bench.verdict import Calibration, Machine, implausible
from trtserve.errors import UsageError

STEADY = [
    answered(index, intended=index * 50, first=first, scheduled=True)
    for index, first in enumerate(correlated(400, seed=1))
]
CALIBRATION = Calibration(
    protocol="grpc-stream",
    workers=1,
    responses_per_answer=8,
    answers_per_second=1000.0,
    dispatch_p50_ms=0.1,
    dispatch_p99_ms=0.2,
    dispatch_max_ms=0.3,
    floor_p50_ms=0.4,
    floor_p99_ms=0.5,
)


def test_a_steady_run_is_valid() -> None:
    report = report_of(STEADY, calibration=CALIBRATION, health=(WorkerHealth(seconds=20, cpu=0.2),))
    assert report.verdict.judgement == "valid"
    assert dict(report.rows())["Rate / the client's highest"] == f"{report.statistics.requests_per_second / 1000:.3f}"
    ramp = replace(report, spec={"concurrency": 8, "request_rate": 5.0, "ramp_to": 600.0})
    assert dict(ramp.rows())["Rate / the client's highest"] == "0.600"


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"calibration": replace(CALIBRATION, answers_per_second=21.0)}, "of the 21/s that this client reaches"),
        ({"health": (WorkerHealth(seconds=20, cpu=0.97),)}, "used 97% of a core"),
    ],
)
def test_a_client_at_its_limit_is_named(more: dict[str, object], reason: str) -> None:
    verdict = report_of(STEADY, **more).verdict
    assert verdict.judgement == "client-limited"
    assert reason in str(verdict)


@pytest.mark.parametrize(
    ("health", "reason"),
    [
        (WorkerHealth(seconds=20, gc_pause_max_ms=80), "garbage collector"),
        (WorkerHealth(seconds=20, write_blocked_max_ms=40), "could not send for 40.0 ms"),
        (WorkerHealth(seconds=20, crowded_reads=3), "waiting in 3 reads"),
        (WorkerHealth(seconds=20, loop_lag_p99_ms=40), "waited 0.0 s of 20.0 s for a processor, so its times are up"),
    ],
)
def test_a_client_that_was_kept_from_its_work_is_disturbed(health: WorkerHealth, reason: str) -> None:
    verdict = report_of(STEADY, health=(health,), calibration=CALIBRATION).verdict
    assert verdict.judgement == "disturbed"
    assert reason in str(verdict)


@pytest.mark.parametrize(
    ("machine", "begin", "end"),
    [
        (
            {"other_programs": 1.2, "server_here": True},
            "other programs used 1.2 of 2 cores, and",
            "Close",
        ),
        (
            {"other_programs": 0.1, "server_here": True},
            "client and server share this machine (load 18.7 on",
            "Send less",
        ),
        ({"other_programs": None, "server_here": False}, "load 18.7 on 2 cores", "Use more --workers"),
    ],
)
def test_a_client_that_waited_for_a_processor_says_who_had_it(machine: dict[str, object], begin: str, end: str) -> None:
    health = (WorkerHealth(seconds=6.1, run_queue_ms=2200, loop_lag_p99_ms=72), WorkerHealth(worker=1, seconds=6.1))
    machine = {"cpus": 2, "load_average": 18.7, **machine}
    verdict = report_of(STEADY[:100], health=health, machine=machine, calibration=CALIBRATION).verdict
    (reason,) = verdict.reasons
    assert verdict.judgement == "disturbed"
    assert reason.startswith(begin)
    assert " the client waited 2.2 s of 6.1 s for a processor, so its times are up to 72 ms late. " + end in reason


BUSY = {"cpus": 2, "load_average": 8.2, "server_here": True, "other_programs": 0.911, "server_waited": 0.43}


def test_other_programs_that_took_processors_from_the_server_disturb_the_figures() -> None:
    verdict = report_of(STEADY, machine=BUSY, calibration=CALIBRATION, health=(WorkerHealth(seconds=20),)).verdict
    assert str(verdict) == (
        "disturbed: other programs used 0.9 of 2 cores, and the server's threads waited 43% of the time they had work. "
        "Close them (`top` names them), or measure when they are idle."
    )
    unknown = report_of(STEADY, machine=BUSY | {"server_waited": None}, calibration=CALIBRATION).verdict
    assert "the server may have waited for them" in str(unknown)


@pytest.mark.parametrize(
    "calm",
    [
        {"other_programs": 0.2},  # the server competes with itself and the client
        {"server_waited": 0.05},  # it wanted no more than it got
        {"cpus": 64},
        {"server_here": False, "server_waited": None},
    ],
)
def test_other_programs_that_took_nothing_from_the_server_do_not(calm: dict[str, object]) -> None:
    assert report_of(STEADY, machine=BUSY | calm, calibration=CALIBRATION).verdict.valid


def test_100_requests_without_a_trend_are_steady() -> None:
    """MSER-5 sees a change in one of ten such runs, since it looks for the best of many cuts."""
    for seed in range(40):
        run = [
            answered(index, intended=index * 50, first=first) for index, first in enumerate(correlated(100, seed=seed))
        ]
        assert report_of(run).verdict.valid, seed


def test_an_engine_in_this_process_may_use_it_all() -> None:
    busy = (WorkerHealth(seconds=20, cpu=1.9, loop_lag_p99_ms=40),)
    assert report_of(STEADY, health=busy, protocol="in-process").verdict.valid


def test_late_sends_without_a_limit_are_not_the_servers_fault() -> None:
    late = [answered(each.index, intended=each.index * 50, late=30.0, scheduled=True) for each in STEADY]
    assert report_of(late, spec={"concurrency": None}).verdict.judgement == "disturbed"


def test_a_growing_queue_is_overload() -> None:
    queue = [answered(index, intended=index * 50, first=20 + index * 30, scheduled=True) for index in range(300)]
    verdict = report_of(queue, spec={"concurrency": None}).verdict
    assert verdict.judgement == "overloaded"
    assert "queue grew" in str(verdict)
    behind = [answered(index, intended=index * 50, late=index * 20, scheduled=True) for index in range(300)]
    assert report_of(behind).verdict.judgement == "overloaded"


def test_few_answers_and_changing_times_are_not_steady() -> None:
    assert report_of(STEADY[:20]).verdict.judgement == "not-steady"
    changed = [answered(index, intended=index * 200, first=20 if index < 200 else 60) for index in range(400)]
    assert report_of(changed).verdict.judgement == "not-steady"


def test_a_burst_that_is_over_before_its_answers_is_not_steady() -> None:
    """60 requests/s for a second, at a server that takes three seconds for all of them alike."""
    burst = [answered(index, intended=index * 1000 / 60, first=3000.0, scheduled=True) for index in range(60)]
    verdict = report_of(burst, spec={"concurrency": None}).verdict
    assert str(verdict).startswith("not-steady: 60 of 60 requests were still unanswered")
    together = [answered(index, intended=index / 1000, first=500.0) for index in range(60)]
    assert "were still unanswered" in str(report_of(together, spec={"concurrency": 200}).verdict)


BIG = Machine(weight_bytes=16 * 10**9, bytes_per_second=3.35e12, operations_per_second=1e15)


def _doctored(**changes: float) -> list[RequestRecord]:
    settings = {"first": 30.0, "step": 6.0, **changes}
    return [answered(index, intended=index * 50, tokens=32, **settings) for index in range(100)]  # type: ignore[arg-type]


def test_true_records_are_plausible() -> None:
    rows = [{"time_ns": moment * 10 * MS, "in_flight": 0.0} for moment in range(400)]
    records = _doctored()
    for row in rows:
        row["in_flight"] = sum((each.sent_ns or 0) <= row["time_ns"] < each.ended_ns for each in records)
    assert implausible(records, machine=BIG, rows=rows, server_tokens=3300) == []


def test_answers_faster_than_memory_are_refused() -> None:
    (found,) = implausible(_doctored(step=1.0), machine=BIG)
    assert found.startswith("Faster than memory")


def test_cached_answers_are_refused() -> None:
    """Answers that arrive whole, and first tokens before the prompt can have been read."""
    assert "all at once" in implausible(_doctored(step=0.001))[0]
    long = [replace(each, input_tokens=100_000) for each in _doctored(first=1.0)]
    assert any("a cache must have answered" in each for each in implausible(long, machine=BIG))


def test_wrong_token_counts_are_refused() -> None:
    more = [replace(each, requested_tokens=20) for each in _doctored()]
    assert "more tokens than were asked for" in implausible(more)[0]
    text = [replace(each, server_tokens=32, tokenizer_tokens=10) for each in _doctored()]
    assert "it counts wrongly" in implausible(text)[0]
    assert "own counter grew by 500 tokens" in implausible(_doctored(), server_tokens=500)[0]


def test_shortened_times_are_refused() -> None:
    """The requests in flight were counted while the run went on; halved latencies do not fit them (Little's law)."""
    true = _doctored(step=30.0)
    rows: list[dict[str, float]] = [
        {
            "time_ns": moment * 50 * MS,
            "in_flight": sum((each.sent_ns or 0) <= moment * 50 * MS < each.ended_ns for each in true),
        }
        for moment in range(100)
    ]
    assert implausible(true, rows=rows) == []
    assert "Little" not in implausible(true)
    (found,) = implausible(_doctored(step=12.0), rows=rows)
    assert "N = X·R" in found
    report = report_of(_doctored(step=12.0), samples=Samples(rows=rows))
    assert report.verdict.judgement == "implausible"


def test_times_that_run_backwards_are_refused() -> None:
    wrong = [replace(each, ended_ns=each.arrivals[0][0]) for each in _doctored()]
    assert "end before their last token" in implausible(wrong)[0]


def test_goals() -> None:
    goals = read_goals({"ttft": "25ms", "latency": "0.2s"})
    assert goals.limits_ms == {"ttft": 25.0, "latency": 200.0}
    assert goals.met_by(answered(0, intended=0, first=24, step=5, tokens=8))
    assert not goals.met_by(answered(0, intended=0, first=26, step=5, tokens=8))
    assert not goals.met_by(answered(0, intended=0, first=24, step=30, tokens=8))
    report = report_of(
        [answered(index, intended=index * 50, first=20 if index % 4 else 40) for index in range(40)],
        spec={"slo": {"ttft": "25ms"}},
    )
    assert report.statistics.good_answers == 30
    for words in ({"ttft": "soon"}, {"speed": "1ms"}):
        with pytest.raises(UsageError, match="--slo"):
            read_goals(words)


@pytest.mark.parametrize("beyond", ["missed", "unclear"])
@pytest.mark.parametrize("first", [1.0, 37.0, 200.0])
def test_the_highest_rate_is_found(first: float, beyond: Answer) -> None:
    found = highest_rate(lambda rate: "met" if rate <= 40 else beyond, first=first)
    assert found.rate is not None
    assert found.beyond is not None
    assert 38 <= found.rate <= 40 < found.beyond < 42
    assert found.limited_by == ("server" if beyond == "missed" else "client")
    assert highest_rate(lambda _: beyond, first=1.0).rate is None


def test_no_limit_is_named_when_every_rate_meets_the_goals() -> None:
    found = highest_rate(lambda _: "met", first=1.0)
    assert (found.rate, found.beyond, found.limited_by) == (4096, None, None)


def test_a_client_that_fell_behind_cannot_reject_a_rate() -> None:
    records = [answered(index, intended=index * 50, first=20, scheduled=True) for index in range(40)]
    behind = WorkerHealth(worker=0, seconds=2, loop_lag_p99_ms=90)
    for limit, answer in (("25ms", "met"), ("15ms", "unclear")):
        late = report_of(records, spec={"slo": {"ttft": limit}}, health=[behind])
        assert late.verdict.judgement == "disturbed"
        assert rate_answer(late) == answer
    assert rate_answer(report_of(records, spec={"slo": {"ttft": "15ms"}})) == "missed"


@pytest.mark.parametrize(
    "built", [{"trtserve": {"runtime": "torch", "device": "cuda"}}, {}], ids=["torch", "TensorRT-LLM"]
)
def test_engines_on_gpus_are_bound_by_the_memory_of_gpus(built: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(built))
    for rank in range(2):
        (tmp_path / f"rank{rank}.{'safetensors' if built else 'engine'}").write_bytes(b"0" * 500)
    bounds = _bounds(tmp_path, None, "tensorrt_llm")
    assert (bounds.weight_bytes, bounds.bytes_per_second) == (500, 8e12)


@pytest.mark.parametrize(("busy", "wanted"), [(0, 1.0), (1, 0.0)])
def test_programs_on_processors_that_client_and_server_may_not_use_do_not_disturb(
    busy: int, wanted: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter((10.0, 11.0, 12.0))
    clock = iter((0.0, 1.0))
    idle = psutil.cpu_times()._replace(**dict.fromkeys(psutil.cpu_times()._fields, 0.0))

    def times(*, percpu: bool) -> list[Any]:
        assert percpu
        now = next(seconds)
        return [idle._replace(user=now if cpu == busy else 0.0, idle=now) for cpu in range(2)]

    monkeypatch.setattr(psutil, "cpu_times", times)
    monkeypatch.setattr(psutil.Process, "cpu_affinity", lambda _: [0])
    monkeypatch.setattr(psutil.Process, "cpu_times", lambda _: (0.0, 0.0))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))

    assert OtherPrograms(()).processors() == wanted
