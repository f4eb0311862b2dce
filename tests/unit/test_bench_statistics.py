"""Statistics and report, checked against figures worked out by hand and against NumPy."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from tests.support.described_models import described
from trtserve.bench.exports import write_result
from trtserve.bench.messages import core_tensors, read_response
from trtserve.bench.records import RequestRecord, Status, TrafficRequest
from trtserve.bench.report import BenchReport, notes_on
from trtserve.bench.statistics import compute, percentile, summarize, token_gaps
from trtserve.client.tensors import Tensor

MS = 1_000_000


def record(
    *,
    intended: int = 0,
    sent: int | None = 0,
    ended: int = 10,
    arrivals: list[tuple[int, int]] | None = None,
    status: Status = "completed",
    scheduled: bool = False,
    finish_reason: str | None = None,
) -> RequestRecord:
    """A record whose times are given in milliseconds."""
    received = [(5, 1), (10, 1)] if arrivals is None else arrivals
    return RequestRecord(
        index=0,
        input_tokens=8,
        requested_tokens=2,
        intended_ns=intended * MS,
        sent_ns=None if sent is None else sent * MS,
        ended_ns=ended * MS,
        status=status,
        scheduled=scheduled,
        streamed=True,
        finish_reason=finish_reason,
        arrivals=[(time * MS, tokens) for time, tokens in received],
    )


def lost(status: Status, *, sent: int | None = 0) -> RequestRecord:
    """A record without an answer."""
    return record(status=status, sent=sent, arrivals=[])


@pytest.mark.parametrize(
    ("count", "p50", "p90", "p99"), [(1, 1, 1, 1), (10, 5, 9, 10), (100, 50, 90, 99), (7, 4, 7, 7)]
)
def test_percentiles_follow_upstream(count: int, p50: int, p90: int, p99: int) -> None:
    values = list(range(1, count + 1))
    assert [percentile(values, q) for q in (0.5, 0.9, 0.99)] == [p50, p90, p99]


def test_summary_equals_numpy() -> None:
    values = np.random.default_rng(0).exponential(3, 101)
    summary = summarize(values.tolist())
    assert summary.mean == pytest.approx(values.mean())
    # Upstream's rule is NumPy's inverted_cdf.
    expected = np.percentile(values, [50, 90, 99], method="inverted_cdf")
    assert [summary.p50, summary.p90, summary.p99] == pytest.approx(expected.tolist())
    assert (summary.minimum, summary.maximum) == (values.min(), values.max())


def test_interval_of_a_mean_does_not_go_below_zero() -> None:
    interval = summarize([0.001] * 39 + [1000.0]).intervals["mean"]
    assert interval is not None
    assert interval[0] == 0
    assert interval[1] > 25


def test_failed_requests_count_as_slowest() -> None:
    summary = summarize([1.0] * 8 + [math.inf] * 2)
    assert (summary.count, summary.censored, summary.mean, summary.p50) == (8, 2, 1.0, 1.0)
    assert summary.p90 == math.inf


def test_percentiles_of_no_values_are_none() -> None:
    assert summarize([math.inf] * 3).p99 is None


def test_closed_loop_figures() -> None:
    statistics = compute(
        [record(ended=10), record(intended=10, sent=10, ended=30, arrivals=[(12, 1), (16, 2), (30, 1)])]
    )
    assert statistics.total_latency_ms == 30
    assert statistics.requests_per_second == pytest.approx(2 / 0.030)
    assert statistics.output_tokens_per_second == pytest.approx(6 / 0.030)
    assert statistics.latency_ms.mean == 15
    assert statistics.time_to_first_token_ms.mean == (5 + 2) / 2
    assert statistics.time_per_output_token_ms.mean == pytest.approx((5 + 18 / 3) / 2)
    assert (statistics.input_tokens_per_request, statistics.output_tokens_per_request) == (8, 3)
    assert statistics.requests_in_flight == pytest.approx(1.0)
    assert statistics.short_answers == 1
    assert statistics.delivered_ratio is None


def test_first_response_does_not_count_for_time_per_token() -> None:
    """An answer in one response, as static batches send it, does not count either."""
    statistics = compute([record(arrivals=[(5, 2)]), record(arrivals=[(4, 3), (10, 2)])])
    assert (statistics.time_per_output_token_ms.count, statistics.time_per_output_token_ms.mean) == (1, 3)


def test_a_burst_of_tokens_does_not_make_a_user_fast() -> None:
    answers = [record(ended=1000, arrivals=[(first, 1), (1000, 9)]) for first in (10, 999)]
    speed = compute(answers).tokens_per_second_per_user
    assert (speed.count, speed.minimum, speed.maximum) == (2, 10, 10)


def test_empty_answers_have_no_time_to_first_token() -> None:
    statistics = compute([record(), record(arrivals=[], finish_reason="end_id")])
    assert (statistics.counts.completed, statistics.empty_answers) == (2, 1)
    assert (statistics.time_to_first_token_ms.count, statistics.time_to_first_token_ms.censored) == (1, 0)
    assert any("ended without a token" in note for note in notes_on(statistics))


def test_tokens_of_one_response_share_the_gap_before_it() -> None:
    gaps = token_gaps(record(arrivals=[(0, 1), (6, 3), (8, 1)]))
    assert [gap / MS for gap in gaps] == [2, 2, 2, 2]


def test_open_loop_latency_starts_at_the_scheduled_time() -> None:
    late = [
        record(intended=0, sent=0, ended=10, scheduled=True),
        record(intended=10, sent=40, ended=50, scheduled=True),
    ]
    statistics = compute(late)
    assert statistics.latency_ms.maximum == 40
    assert statistics.latency_from_send_ms.maximum == 10
    assert statistics.dispatch_delay_ms.maximum == 30
    assert statistics.delivered_ratio == pytest.approx(0.25)
    assert any("Invalid as an open loop" in note for note in notes_on(statistics))


def test_counts_add_up() -> None:
    records = [record(), lost("failed"), lost("cancelled"), lost("cancelled", sent=None)]
    counts = compute(records).counts
    assert (counts.planned, counts.sent, counts.completed, counts.failed, counts.cancelled) == (4, 3, 1, 1, 1)
    assert counts.sent == counts.completed + counts.failed + counts.cancelled
    assert counts.unsent == 1


def test_finish_reasons_of_completed_answers_are_counted() -> None:
    records = [record(finish_reason=reason) for reason in ("end_id", "length", "length")]
    records.append(record(status="failed", finish_reason="timed_out"))
    report = _report(records)
    assert list(report.statistics.finish_reasons.items()) == [("length", 2), ("end_id", 1)]
    assert report.rows()[-2:] == [("Ended by length", "2"), ("Ended by end_id", "1")]
    assert report.to_json()["statistics"]["finish_reasons"] == {"length": 2, "end_id": 1}
    assert not any(name.startswith("Ended by") for name, _ in _report([record()]).rows())


@pytest.mark.parametrize(("reason", "read"), [("length", "length"), ("not_finished", None), ("", None), (None, None)])
def test_finish_reason_is_read_from_a_response(reason: str | None, read: str | None) -> None:
    from tritonclient.grpc import service_pb2

    response = service_pb2.ModelInferResponse()
    tensors = [Tensor(name="output_ids", datatype="INT32", shape=(1, 1, 1), values=[3])]
    if reason is not None:
        tensors.append(Tensor(name="finish_reason", datatype="BYTES", shape=(1, 1), values=[reason]))
    for tensor in tensors:
        response.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        response.raw_output_contents.append(tensor.raw())
    assert read_response(described("tensorrt_llm"), response, 0).finish_reason == read


@pytest.mark.parametrize(("release", "asks"), [(None, True), ("1.2", False)])
def test_finish_reason_is_requested_if_the_model_declares_it(release: str | None, asks: bool) -> None:
    request = TrafficRequest(token_ids=np.array([1, 2], np.int32), output_len=3)
    model = described("tensorrt_llm", release=release)
    sent = {tensor.name: tensor.flat() for tensor in core_tensors(model, request, stream=True)}
    assert sent.get("return_finish_reason") == ([True] if asks else None)
    assert (sent["input_ids"], sent["input_lengths"], sent["request_output_len"]) == ([1, 2], [2], [3])


def _report(records: list[RequestRecord], *, streaming: bool = True, **spec: float) -> BenchReport:
    return BenchReport(
        spec={"input_mean": 128, **spec},
        endpoint="127.0.0.1:8001",
        model="demo",
        protocol="grpc",
        precision={"compute_precision": "f32"},
        streaming=streaming,
        tokens_counted_by="output_ids",
        limits={"vocab_size": 10},
        prompts_sha256="0" * 64,
        started="2026-01-01T00:00:00+00:00",
        records=tuple(records),
    )


UPSTREAM_ROWS = [
    "Requests/Sec",
    "OP tokens/sec",
    "Avg. latency (ms)",
    "P99 latency (ms)",
    "P90 latency (ms)",
    "Avg. IP tokens per request",
    "Avg. OP tokens per request",
    "Avg. InFlight requests",
    "Total latency (ms)",
    "Total requests",
]


def test_report_starts_with_upstreams_rows() -> None:
    rows = _report([record()]).rows()
    assert [name for name, _ in rows[:10]] == UPSTREAM_ROWS
    values = dict(rows)
    assert values["Requests/Sec"] == "100.00"
    assert values["Avg. TTFT (ms)"] == "5.00"
    assert values["Avg. inter-token latency (ms)"] == "5.00"
    assert "Delivered / offered rate" not in values
    assert "Delivered / offered rate" in dict(_report([record(scheduled=True)], request_rate=2.0).rows())


def test_the_short_table_has_the_percentiles_of_the_page_and_each_count_once() -> None:
    few = _report([record(), record(status="failed")])
    page = {row[0]: row for row in few.interval_rows()}
    assert few.short_rows()[0][3:] == (page["Time to first token (ms)"][6], page["Time to first token (ms)"][8])
    assert few.short_rows()[1][3].endswith("*")
    assert few.facts()[0].startswith("requests  1 of 2 answered, 1 failed, ")
    many = _report([record() for _ in range(2000)])
    assert {row[0]: row[4] for row in many.short_rows()}["Request latency"] == "10"
    assert [row[0] for row in _report([record()], streaming=False).short_rows()] == ["Request latency"]


def test_token_times_are_not_available_without_streaming() -> None:
    values = dict(_report([record(arrivals=[(10, 2)])], streaming=False).rows())
    assert values["Avg. TTFT (ms)"].startswith("n/a (not streaming")


def test_report_of_a_run_without_answers() -> None:
    values = dict(_report([lost("failed")]).rows())
    assert (values["Requests/Sec"], values["P99 latency (ms)"], values["Failed requests"]) == ("0.00", "n/a", "1")


def test_report_files(tmp_path: Path) -> None:
    write_result(_report([record(), lost("failed")]), tmp_path / "out")
    report = json.loads((tmp_path / "out" / "report.json").read_text(), parse_constant=pytest.fail)
    lines = [json.loads(line) for line in (tmp_path / "out" / "requests.jsonl").read_text().splitlines()]
    assert report["statistics"]["latency_ms"]["p99"] is None
    assert report["statistics"]["latency_ms"]["censored"] == 1
    assert report["spec"]["input_mean"] == 128
    assert [line["status"] for line in lines] == ["completed", "failed"]
    assert lines[0]["output_tokens"] == 2


def test_interrupted_report_says_which_number_was_planned() -> None:
    report = _report([record(), *[lost("cancelled", sent=None)] * 3])
    values = dict(report.rows())
    assert (values["Total requests (planned)"], values["Sent requests"]) == ("4", "1")
    assert any("3 of 4 planned requests were never sent" in note for note in report.notes)
