"""The files of a result: our own, and genai-perf's and AIPerf's JSON and CSV from our figures, for what reads those.

Percentiles here are NumPy's (linear), as both tools compute them; `report.json` has upstream's.
"""

from __future__ import annotations

import csv
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

from trtserve.bench.records import FILE_NAME, RequestRecord, first_token_ms, latency_ms, per_token_ms
from trtserve.bench.report import REPORT, SAMPLES, BenchReport
from trtserve.files import json_text, make_folder, replacing

_PERCENTILES = (99, 95, 90, 75, 50, 25)
_AIPERF_PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99)
_AIPERF_SCHEMA = "1.4"
# Name in the JSON files → title in the CSV files.
_TITLES = {
    "time_to_first_token": "Time To First Token",
    "time_to_second_token": "Time To Second Token",
    "inter_token_latency": "Inter Token Latency",
    "request_latency": "Request Latency",
    "output_token_throughput_per_user": "Output Token Throughput Per User",
    "output_token_throughput_per_request": "Output Token Throughput Per Request",
    "output_sequence_length": "Output Sequence Length",
    "input_sequence_length": "Input Sequence Length",
    "output_token_throughput": "Output Token Throughput",
    "request_throughput": "Request Throughput",
    "request_count": "Request Count",
}
_TOKENS = ("output_sequence_length", "input_sequence_length")


def write_result(report: BenchReport, folder: Path) -> None:
    """Write the report, one line per planned request and the samples, and the files of NVIDIA's tools.

    An older result is replaced when all of them are written: on a full disk it stays.
    """
    make_folder(folder)
    with ExitStack() as files:
        for name, text in _texts(report):
            files.enter_context(replacing(folder / name)).write_text(text, encoding="utf-8", newline="")


def _texts(report: BenchReport) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each file; each tool's figures are JSON and CSV, its requests JSON."""
    completed = [record for record in report.records if record.status == "completed"]
    values = {name: found for name, found in _values(completed, streaming=report.streaming).items() if found[1]}
    statistics = report.statistics
    totals = {
        "output_token_throughput": ("tokens/sec", statistics.output_tokens_per_second),
        "request_throughput": ("requests/sec", statistics.requests_per_second),
        "request_count": ("requests", float(statistics.counts.completed)),
    }
    sent = (record for record in report.records if record.sent_ns is not None)
    yield FILE_NAME, _lines(record.to_json() for record in report.records)
    yield SAMPLES, _lines(report.samples.rows)
    yield REPORT, json_text(report.to_json())
    yield "profile_export_genai_perf.json", json_text(_genai_perf(values, totals, report))
    yield "profile_export.json", json_text(_raw_profile(report))
    yield "profile_export_aiperf.json", json_text(_aiperf(values, totals, report))
    yield "profile_export_genai_perf.csv", _csv(values, totals, genai=True)
    yield "profile_export_aiperf.csv", _csv(values, totals, genai=False)
    yield "profile_export.jsonl", _lines(map(_aiperf_record, sent))


def _lines(rows: Iterable[object]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


Values = Mapping[str, tuple[str, list[float]]]
Totals = Mapping[str, tuple[str, float]]


def _values(completed: Sequence[RequestRecord], *, streaming: bool) -> dict[str, tuple[str, list[float]]]:
    """Return unit and values of each measure, one value per completed request."""
    seconds = [(record, latency_ms(record) / 1000) for record in completed]
    found = {
        "request_latency": ("ms", [latency_ms(record) for record in completed]),
        "output_token_throughput_per_request": ("tokens/sec", [r.output_tokens / s for r, s in seconds if s > 0]),
        "output_sequence_length": ("tokens", [float(record.output_tokens) for record in completed]),
        "input_sequence_length": ("tokens", [float(record.input_tokens) for record in completed]),
    }
    if not streaming:
        return found
    per_token = [value for record in completed if (value := per_token_ms(record)) is not None]
    return {
        "time_to_first_token": ("ms", [first for record in completed if (first := first_token_ms(record)) is not None]),
        "time_to_second_token": (
            "ms",
            [(r.arrivals[1][0] - r.arrivals[0][0]) / 1e6 for r in completed if len(r.arrivals) > 1],
        ),
        "inter_token_latency": ("ms", per_token),
        **found,
        "output_token_throughput_per_user": ("tokens/sec/user", [1000 / value for value in per_token if value > 0]),
    }


def _figures(values: Sequence[float], percentiles: Sequence[int], *, sample: bool) -> dict[str, float]:
    import numpy as np

    array = np.asarray(values, np.float64)
    found = {"avg": float(array.mean()), "max": float(array.max()), "min": float(array.min())}
    found |= {
        f"p{each}": value for each, value in zip(percentiles, np.percentile(array, percentiles).tolist(), strict=True)
    }
    deviation = float(array.std(ddof=1)) if sample and len(array) > 1 else float(array.std())
    return {**found, "std": 0.0 if math.isnan(deviation) else deviation}


def _raw_profile(report: BenchReport) -> dict[str, Any]:
    """Return Perf Analyzer's profile, from which genai-perf computes its figures and plots.

    Times are nanoseconds, and a request's own time is that of its send, as there. `triton_c_api` is the kind of
    profile in which tokens are counted by their ids and not by a tokenizer. Records keep no ids: each is 0.
    """
    rate, sent = report.spec.get("request_rate"), [each for each in report.records if each.sent_ns is not None]
    requests = [
        {
            "timestamp": each.sent_ns,
            "request_inputs": {"input_ids": [0] * each.input_tokens},
            "response_timestamps": [time for time, _ in each.arrivals],
            "response_outputs": [{"output_ids": [0] * tokens} for _, tokens in each.arrivals],
        }
        for each in sent
        if each.status == "completed" and each.arrivals
    ]
    mode, value = ("concurrency", report.spec.get("concurrency")) if rate is None else ("request_rate", rate)
    window = [min(each.sent_ns or 0 for each in sent), max(each.ended_ns for each in sent)] if sent else []
    experiment = {"experiment": {"mode": mode, "value": value}, "requests": requests, "window_boundaries": window}
    version = f"trtserve {report.versions.get('trtserve', '')}".rstrip()
    return {"experiments": [experiment], "version": version, "service_kind": "triton_c_api", "endpoint": ""}


def _genai_perf(values: Values, totals: Totals, report: BenchReport) -> dict[str, Any]:
    spec = report.spec
    return {
        **{name: {"unit": unit, **_figures(each, _PERCENTILES, sample=False)} for name, (unit, each) in values.items()},
        **{name: {"unit": unit, "avg": value} for name, (unit, value) in totals.items()},
        "request_count": {"unit": "count", "avg": totals["request_count"][1]},
        "input_config": {
            "model": [report.model],
            "backend": "tensorrtllm",
            "concurrency": spec.get("concurrency"),
            "request_rate": spec.get("request_rate"),
            "random_seed": spec.get("seed"),
            "streaming": report.streaming,
            "url": report.endpoint,
        },
    }


def _aiperf(values: Values, totals: Totals, report: BenchReport) -> dict[str, Any]:
    counts = report.statistics.counts
    errors = Counter(str(each.error) for each in report.records if each.status == "failed")
    return {
        "schema_version": _AIPERF_SCHEMA,
        **{
            name: {"unit": unit, **_figures(each, _AIPERF_PERCENTILES, sample=True), "count": len(each)}
            for name, (unit, each) in values.items()
        },
        **{name: {"unit": unit, "avg": value} for name, (unit, value) in totals.items()},
        "error_request_count": {"unit": "requests", "avg": float(counts.failed)},
        "input_config": _aiperf_config(values, report),
        "was_cancelled": report.interrupted,
        "error_summary": [{"error_details": {"message": text}, "count": count} for text, count in errors.items()],
        "start_time": report.started,
    }


def _aiperf_config(values: Values, report: BenchReport) -> dict[str, Any]:
    """Return the run as AIPerf's own settings; prompts are always its kind `synthetic`, with their mean lengths."""
    spec = report.spec
    arrivals = {"constant": "constant", "exponential": "poisson", "gamma": "gamma"}
    load: dict[str, Any] = {"name": "profiling", "requests": report.statistics.counts.planned}
    if spec.get("concurrency"):
        load |= {"type": "concurrency", "concurrency": spec["concurrency"]}
    if spec.get("request_rate"):
        load |= {"type": arrivals[spec.get("arrivals", "constant")], "rate": spec["request_rate"]}
        if load["type"] == "gamma":
            load["smoothness"] = spec["burstiness"]
    load.setdefault("type", "fixed_schedule")
    lengths = {name: sum(each) / len(each) for name in _TOKENS if (each := values.get(name, ("", []))[1])}
    where = report.protocol if report.protocol == "in-process" else report.endpoint
    prompts = {"isl": lengths.get("input_sequence_length", 0.0), "osl": lengths.get("output_sequence_length", 0.0)}
    return {
        "models": {"items": [{"name": report.model}]},
        "endpoint": {"urls": [where], "streaming": report.streaming},
        "datasets": [{"name": "prompts", "type": "synthetic", "entries": load["requests"], "prompts": prompts}],
        "phases": [load],
    }


def _aiperf_record(record: RequestRecord) -> dict[str, Any]:
    metrics: dict[str, Any] = {
        name: {"unit": unit, "value": each[0]}
        for name, (unit, each) in _values([record], streaming=True).items()
        if each
    }
    times = [time for time, _ in record.arrivals]
    if len(times) > 1:
        gaps = [(after - before) / 1e6 for before, after in pairwise(times)]
        metrics["inter_chunk_latency"] = {"unit": "ms", "value": gaps}
    return {
        "metadata": {
            "session_num": record.index,
            "x_request_id": str(record.index),
            "worker_id": f"worker_{record.worker}",
            "record_processor_id": f"worker_{record.worker}",
            "request_start_ns": record.sent_ns,
            "request_end_ns": record.ended_ns,
            "credit_issued_ns": record.intended_ns,
            "benchmark_phase": "profiling",
            "was_cancelled": record.status == "cancelled",
        },
        "metrics": metrics if record.status == "completed" else {},
        "error": None if record.error is None else {"message": record.error},
    }


def _csv(values: Values, totals: Totals, *, genai: bool) -> str:
    percentiles = _PERCENTILES if genai else _AIPERF_PERCENTILES
    names = ["avg", "min", "max", *(f"p{each}" for each in percentiles), *([] if genai else ["std"])]
    text = StringIO()
    writer = csv.writer(text)
    writer.writerow(["Metric", *names])
    for name, (unit, each) in values.items():
        figures = _figures(each, percentiles, sample=not genai)
        title = _TITLES[name] if genai and name in _TOKENS else f"{_TITLES[name]} ({unit})"
        writer.writerow([title, *(f"{figures[key]:{',.2f' if genai else '.2f'}}" for key in names)])
    writer.writerow([])
    writer.writerow(["Metric", "Value"])
    for name, (unit, value) in totals.items():
        writer.writerow([f"{_TITLES[name]}{' (per sec)' if unit.endswith('/sec') else ''}", f"{value:.2f}"])
    return text.getvalue()
