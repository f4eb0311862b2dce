"""Histograms, shared prefixes, conversations and traces: what they send."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from trtserve.bench.records import TrafficLimits
from trtserve.bench.traffic import (
    BLOCK,
    read_histogram,
    read_trace,
    replay,
    sessions,
    shared_prefixes,
    token_from_histogram,
    token_norm_dist,
    with_cancellations,
)
from trtserve.errors import UsageError
from trtserve.specs import BenchSpec

LIMITS = TrafficLimits(vocab_size=500, max_input_len=4000, max_seq_len=5000)


def test_the_example_histogram_has_upstreams_frequencies() -> None:
    spec = BenchSpec(traffic="token-from-histogram", num_requests=5000)
    requests = token_from_histogram(spec, LIMITS).requests
    inputs, outputs = ([len(each.token_ids) for each in requests], [each.output_len for each in requests])
    assert (min(inputs), max(inputs), min(outputs), max(outputs)) == (151, 275, 6, 30)
    assert sum(151 <= length <= 175 for length in inputs) / 5000 == pytest.approx(220 / 885, abs=0.03)
    assert sum(11 <= length <= 15 for length in outputs) / 5000 == pytest.approx(210 / 742, abs=0.03)


def test_histograms_are_read_from_csv_and_json(tmp_path: Path) -> None:
    (tmp_path / "h.csv").write_text("kind,from,to,count\ninput,1,10,3\noutput,5,5,1\n")
    (tmp_path / "h.json").write_text(json.dumps({"input": [[1, 10, 3]], "output": [[5, 5, 1]]}))
    expected = {"input": [(1, 10, 3)], "output": [(5, 5, 1)]}
    assert read_histogram(tmp_path / "h.csv") == read_histogram(tmp_path / "h.json") == expected
    for wrong in ("kind,from,to,count\ninput,1,10,3\n", '{"input": [[5, 1, 1]], "output": [[1, 1, 1]]}', "nothing"):
        (tmp_path / "wrong").write_text(wrong)
        with pytest.raises(UsageError, match="histogram"):
            read_histogram(tmp_path / "wrong")


def test_prompts_share_prefixes_at_the_reuse_rate() -> None:
    spec = BenchSpec(traffic="prefix", num_requests=400, prefix_len=64, num_prefixes=3, reuse_rate=0.75)
    traffic = shared_prefixes(spec, LIMITS)
    beginnings = [each.token_ids[:64].tobytes() for each in traffic.requests]
    counts = sorted((beginnings.count(each) for each in set(beginnings)), reverse=True)
    assert sum(counts[:3]) / 400 == pytest.approx(0.75, abs=0.08)
    assert set(counts[3:]) == {1}
    with pytest.raises(UsageError, match="--prefix-len is 64, but the engine takes prompts of at most 50"):
        shared_prefixes(spec, TrafficLimits(vocab_size=500, max_input_len=50))


def test_conversations_have_the_asked_turns_and_fit_the_engine() -> None:
    spec = BenchSpec(traffic="sessions", num_requests=12, turns=4, input_mean=10, output_mean=10)
    turns = [each.session for each in sessions(spec, LIMITS).requests]
    assert turns == [0] * 4 + [1] * 4 + [2] * 4
    tight = sessions(spec, TrafficLimits(vocab_size=500, max_seq_len=60)).requests
    used: dict[int | None, int] = {}
    for each in tight:
        used[each.session] = used.get(each.session, 0) + len(each.token_ids) + each.output_len
    assert max(used.values()) <= 60
    assert len(used) > 3


def test_access_logs_are_traces(tmp_path: Path) -> None:
    log = tmp_path / "access.jsonl"
    lines = [
        {"time": "2026-11-26T10:00:01.500Z", "status": 200, "usage": {"prompt_tokens": 12, "completion_tokens": 3}},
        {"time": "2026-11-26T10:00:00+00:00", "prompt_tokens": 7, "completion_tokens": 5},
        {"time": "2026-11-26T10:00:00+00:00", "status": 429},
    ]
    log.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    assert [(each.seconds, each.input_len, each.output_len) for each in read_trace(log)] == [(0.0, 7, 5), (1.5, 12, 3)]
    log.write_text('{"prompt_tokens": 7, "completion_tokens": 5}\n', encoding="utf-8")
    with pytest.raises(UsageError, match="no 'time'"):
        read_trace(log)
    log.write_text('{"time": 0, "prompt_tokens": 7, "completion_tokens": 5}\n' * 2, encoding="utf-8")
    assert [each.seconds for each in read_trace(log)] == [0, 0]
    for time in ("1e308", "NaN", "31622401"):
        with log.open("a", encoding="utf-8") as file:
            file.write(f'{{"time": {time}, "prompt_tokens": 7, "completion_tokens": 5}}\n')
        with pytest.raises(UsageError, match="not all within 366 days"):
            read_trace(log)


def test_mooncakes_traces_keep_times_lengths_and_shared_blocks(tmp_path: Path) -> None:
    entries = [
        {"timestamp": 1000, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]},
        {"timestamp": 1500, "input_length": 600, "output_length": 7, "hash_ids": [1, 9]},
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, entries)))
    traffic = replay(BenchSpec(traffic="replay", trace=trace, speed=2.0), LIMITS)
    assert traffic.offsets == (0.0, 0.25)
    first, second = traffic.requests
    assert [(len(each.token_ids), each.output_len) for each in traffic.requests] == [(1100, 5), (600, 7)]
    assert np.array_equal(first.token_ids[:BLOCK], second.token_ids[:BLOCK])
    assert not np.array_equal(first.token_ids[BLOCK:600], second.token_ids[BLOCK:])


def test_azures_traces_are_read(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,374,44\n2023-11-16 18:17:04.0319600,396,109\n"
    )
    first, second = read_trace(trace)
    assert (first.seconds, first.input_len, first.output_len) == (0.0, 374, 44)
    assert second.seconds == pytest.approx(0.052)
    trace.write_text("a,b\n1,2\n")
    with pytest.raises(UsageError, match="not a trace: a request has no 'TIMESTAMP'"):
        read_trace(trace)


def test_a_part_of_the_requests_is_cancelled() -> None:
    spec = BenchSpec(num_requests=1000, output_mean=20, cancel_rate=0.3)
    traffic = with_cancellations(token_norm_dist(spec, LIMITS), spec)
    chosen = [each for each in traffic.requests if each.cancel_after is not None]
    assert len(chosen) / 1000 == pytest.approx(0.3, abs=0.05)
    assert all(1 <= (each.cancel_after or 0) < max(2, each.output_len) for each in chosen)
