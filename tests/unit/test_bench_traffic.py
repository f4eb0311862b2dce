"""Lengths and arrival times follow their distributions, the seed and the engine's limits."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trtserve.bench.records import (
    Traffic,
    TrafficLimits,
    clip,
    engine_of_repository,
    limits_of_repository,
    override_limits,
)
from trtserve.bench.traffic import Arrivals, arrival_times, token_norm_dist
from trtserve.bench.worker import Load, shares
from trtserve.errors import UsageError
from trtserve.specs import BenchSpec

LIMITS = TrafficLimits(vocab_size=500, max_input_len=1000, max_seq_len=2000)


def _lengths(traffic: Traffic) -> list[tuple[int, int]]:
    return [(len(request.token_ids), request.output_len) for request in traffic.requests]


def test_lengths_follow_the_distribution() -> None:
    spec = BenchSpec(num_requests=2000, input_mean=100, input_stdev=10, output_mean=40, output_stdev=3)
    lengths = np.array(_lengths(token_norm_dist(spec, LIMITS)))
    # ceil adds half a token on average.
    assert lengths.mean(axis=0) == pytest.approx([100.5, 40.5], abs=1)
    assert lengths.std(axis=0) == pytest.approx([10, 3], rel=0.1)


def test_lengths_are_at_least_one() -> None:
    spec = BenchSpec(num_requests=200, input_mean=1, input_stdev=50, output_mean=1, output_stdev=50)
    assert np.array(_lengths(token_norm_dist(spec, LIMITS))).min() == 1


def test_zero_deviation_gives_equal_lengths() -> None:
    spec = BenchSpec(num_requests=3, input_mean=7, input_stdev=0, output_mean=5, output_stdev=0)
    assert _lengths(token_norm_dist(spec, LIMITS)) == [(7, 5)] * 3


def test_same_seed_gives_the_same_requests() -> None:
    first, again, other = (token_norm_dist(BenchSpec(seed=seed), LIMITS) for seed in (5, 5, 6))
    assert all(
        np.array_equal(a.token_ids, b.token_ids) and a.output_len == b.output_len
        for a, b in zip(first.requests, again.requests, strict=True)
    )
    assert _lengths(first) != _lengths(other)


def test_random_ids_are_in_the_vocabulary_and_not_special() -> None:
    limits = TrafficLimits(vocab_size=10, special_ids=frozenset({0, 1, 2, 99}))
    traffic = token_norm_dist(BenchSpec(), limits)
    ids = np.concatenate([request.token_ids for request in traffic.requests])
    assert set(ids.tolist()) == set(range(3, 10))
    assert ids.dtype == np.int32


def test_vocabulary_must_be_known() -> None:
    with pytest.raises(UsageError, match="vocabulary"):
        token_norm_dist(BenchSpec(), TrafficLimits())


@pytest.mark.parametrize(
    ("wanted", "limits", "expected"),
    [
        ((10, 10), TrafficLimits(), (10, 10)),
        ((10, 10), TrafficLimits(max_input_len=4), (4, 10)),
        ((10, 10), TrafficLimits(max_seq_len=15), (10, 5)),
        ((20, 10), TrafficLimits(max_seq_len=15), (14, 1)),
        ((20, 10), TrafficLimits(max_input_len=8, max_seq_len=15), (8, 7)),
    ],
)
def test_lengths_are_cut_to_the_limits(
    wanted: tuple[int, int], limits: TrafficLimits, expected: tuple[int, int]
) -> None:
    assert clip(*wanted, limits) == expected


def test_clipped_requests_are_counted() -> None:
    spec = BenchSpec(num_requests=10, input_mean=50, input_stdev=0, output_mean=20, output_stdev=0)
    traffic = token_norm_dist(spec, TrafficLimits(vocab_size=10, max_input_len=30, max_seq_len=40))
    assert (traffic.clipped_inputs, traffic.clipped_outputs) == (10, 10)
    assert _lengths(traffic) == [(30, 10)] * 10


def test_limits_come_from_the_repository(tmp_path: Path) -> None:
    engine, tokenizer = tmp_path / "tensorrt_llm" / "1", tmp_path / "preprocessing" / "1" / "tokenizer"
    engine.mkdir(parents=True)
    tokenizer.mkdir(parents=True)
    config: dict[str, object] = {
        "pretrained_config": {"vocab_size": 320},
        "build_config": {"max_input_len": 64, "max_seq_len": 128},
    }
    config["trtserve"] = {"compute_precision": "bf16", "kv_precision": "u8", "runtime": "openvino"}
    (engine / "config.json").write_text(json.dumps(config))
    tokens = [{"id": 0, "special": True}, {"id": 5, "special": False}, {"id": 2, "special": True}]
    (tokenizer / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))
    limits = limits_of_repository(tmp_path, "tensorrt_llm")
    assert limits == TrafficLimits(vocab_size=320, max_input_len=64, max_seq_len=128, special_ids=frozenset({0, 2}))
    assert override_limits(limits, BenchSpec(max_seq_len=100)).max_seq_len == 100
    assert limits_of_repository(tmp_path, "other").vocab_size is None
    built, absent = (engine_of_repository(tmp_path, name) for name in ("tensorrt_llm", "other"))
    assert (built.runtime, built.precision) == ("openvino", {"compute_precision": "bf16", "kv_precision": "u8"})
    assert (absent.runtime, absent.precision) == (None, {})


def test_constant_arrivals() -> None:
    assert arrival_times("constant", rate=4, count=4, seed=0) == [0, 0.25, 0.5, 0.75]


def test_a_seed_fixes_exponential_arrivals() -> None:
    first, again, other = (arrival_times("exponential", rate=50, count=5000, seed=seed) for seed in (3, 3, 4))
    gaps = np.diff(first)
    assert gaps.min() > 0
    # Mean and standard deviation of an exponential distribution are equal.
    assert [gaps.mean(), gaps.std()] == pytest.approx([0.02, 0.02], rel=0.05)
    assert first == again != other


def test_single_arrival() -> None:
    assert arrival_times("constant", rate=1, count=1, seed=0) == arrival_times("gamma", rate=1, count=1, seed=0) == [0]


@pytest.mark.parametrize("kind", ["constant", "exponential", "gamma"])
def test_schedules_have_the_asked_rate(kind: Arrivals) -> None:
    times = arrival_times(kind, rate=50, count=20_000, seed=1)
    assert times[0] == 0
    assert times == sorted(times)
    assert len(times) / times[-1] == pytest.approx(50, rel=0.03)


@pytest.mark.parametrize("shape", [0.25, 1.0, 4.0])
def test_burstiness_is_the_spread_of_the_gaps(shape: float) -> None:
    gaps = np.diff(arrival_times("gamma", rate=10, count=20_000, seed=2, burstiness=shape))
    assert gaps.std() / gaps.mean() == pytest.approx(shape**-0.5, rel=0.06)


@pytest.mark.parametrize(("first", "last"), [(10.0, 100.0), (100.0, 10.0)])
def test_ramps_change_the_rate_linearly(first: float, last: float) -> None:
    times = np.array(arrival_times("constant", rate=first, count=2000, seed=0, ramp_to=last))
    rates = 1 / np.diff(times)
    assert rates[0] == pytest.approx(first, rel=0.05)
    assert rates[-1] == pytest.approx(last, rel=0.05)
    middle = rates[np.searchsorted(times, times[-1] / 2)]
    assert middle == pytest.approx((first + last) / 2, rel=0.05)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_requests": 0},
        {"request_rate": 0.0},
        {"request_rate": math.inf},
        {"input_mean": math.nan},
        {"input_stdev": -1},
        {"output_stdev": math.nan},
        {"timeout": 0},
        {"arrivals": "poisson"},
    ],
)
def test_invalid_settings_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="--"):
        BenchSpec(**wrong)  # type: ignore[arg-type]


def test_no_more_users_than_conversations() -> None:
    target: Any = None
    load = Load(target=target, requests=token_norm_dist(BenchSpec(num_requests=5), LIMITS).requests, concurrency=10**9)
    assert [share.load.concurrency for share in shares(load, 2)] == [3, 2]
