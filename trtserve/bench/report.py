"""What a benchmark tells: the rows of upstream's table, more of them below, and the same as JSON files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trtserve.bench.load import Record
from trtserve.bench.statistics import Distribution, Statistics
from trtserve.files import write_json
from trtserve.specs import BenchSpec

COLUMNS = ("Stat", "Value")
SCHEMA = 1
VALID_DELIVERY = 0.99

_TIMES = (
    "total_latency",
    "latency",
    "latency_from_send",
    "dispatch_delay",
    "time_to_first_token",
    "inter_token",
    "time_per_output_token",
)
UNITS: Mapping[str, str] = {
    **dict.fromkeys(_TIMES, "ms"),
    "requests_per_second": "requests/s",
    "output_tokens_per_second": "tokens/s",
    "input_tokens": "tokens/request",
    "output_tokens": "tokens/request",
}
"""What the figures of `Statistics` count."""

Row = tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class Report:
    """Result of one benchmark. `limits` are the engine's that traffic was held to; `prompts` is a hash of all prompts.

    `spec` has the concurrency that was used. `model` is the name under which the server offers text generation, None
    where only its address is known; `precision` is the engine's, as far as it is known. `tokens_counted_by` is
    `output_ids` (the length of what a core model sends), or for a text model `server` or `tokenizer`.

    `notes` say what a reader of the figures must know: clipping, warm-up, censored values, an invalid open loop.
    """

    spec: BenchSpec
    endpoint: str
    model: str | None
    precision: Mapping[str, str]
    streaming: bool
    tokens_counted_by: str
    statistics: Statistics
    limits: Mapping[str, int | None]
    prompts: str
    started: str
    versions: Mapping[str, str]
    interrupted: bool = False
    timed_out: bool = False
    notes: tuple[str, ...] = ()
    records: tuple[Record, ...] = field(default=(), repr=False)

    def to_json(self) -> dict[str, Any]:
        """All but the records; values that are infinite (see Distribution) are null."""
        content = {name: value for name, value in vars(self).items() if name not in ("records", "spec", "statistics")}
        content |= {"spec": asdict(self.spec), "statistics": asdict(self.statistics), "units": UNITS}
        files = {"dataset": self.spec.dataset, "tokenizer": self.spec.tokenizer}
        content["spec"] |= {name: None if path is None else str(path) for name, path in files.items()}
        finite: dict[str, Any] = _finite({"schema": SCHEMA, **content})
        return finite

    def write(self, folder: Path) -> None:
        """Write `report.json` and `requests.jsonl` (one line per offered request) into `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps({**asdict(record), "output_tokens": record.output_tokens}) for record in self.records]
        (folder / "requests.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        write_json(folder / "report.json", self.to_json())

    def rows(self) -> list[Row]:
        """Upstream's rows in upstream's order and names, then what it does not print."""
        rows = upstream_rows(self.statistics) + self._token_rows() + _count_rows(self.statistics)
        return rows + (_open_loop_rows(self.statistics) if self.spec.request_rate is not None else [])

    def _token_rows(self) -> list[Row]:
        if not self.streaming:
            absent = "n/a (not streaming: one response per request)"
            return [("Avg. TTFT (ms)", absent), ("Avg. inter-token latency (ms)", absent)]
        statistics = self.statistics
        return [
            *_distribution_rows("TTFT", statistics.time_to_first_token),
            *_distribution_rows("inter-token latency", statistics.inter_token),
            ("Avg. time per output token (ms)", _number(statistics.time_per_output_token.mean)),
        ]


def upstream_rows(statistics: Statistics) -> list[Row]:
    """The table of benchmark_core_model.py; `Avg. InFlight requests`, always 0.00 there, is measured here."""
    latency = statistics.latency
    return [
        ("Requests/Sec", _number(statistics.requests_per_second)),
        ("OP tokens/sec", _number(statistics.output_tokens_per_second)),
        ("Avg. latency (ms)", _number(latency.mean)),
        ("P99 latency (ms)", _number(latency.p99)),
        ("P90 latency (ms)", _number(latency.p90)),
        ("Avg. IP tokens per request", _number(statistics.input_tokens)),
        ("Avg. OP tokens per request", _number(statistics.output_tokens)),
        ("Avg. InFlight requests", _number(statistics.in_flight)),
        ("Total latency (ms)", _number(statistics.total_latency)),
        ("Total requests", _number(statistics.counts.offered)),
    ]


def _distribution_rows(name: str, values: Distribution) -> list[Row]:
    return [
        (f"Avg. {name} (ms)", _number(values.mean)),
        (f"P99 {name} (ms)", _number(values.p99)),
        (f"P90 {name} (ms)", _number(values.p90)),
    ]


def _count_rows(statistics: Statistics) -> list[Row]:
    counts = statistics.counts
    names = ("sent", "completed", "failed", "cancelled")
    rows = [(f"{name.capitalize()} requests", str(getattr(counts, name))) for name in names]
    return rows + [(f"Ended by {reason}", str(number)) for reason, number in statistics.finish_reasons.items()]


def _open_loop_rows(statistics: Statistics) -> list[Row]:
    """What only a schedule has; the latencies above count from the intended send."""
    ratio = statistics.delivered_ratio
    return [
        *_distribution_rows("latency from send", statistics.latency_from_send),
        ("P99 dispatch delay (ms)", _number(statistics.dispatch_delay.p99)),
        ("Delivered / offered rate", "n/a" if ratio is None else f"{ratio:.3f}"),
    ]


def notes_on(statistics: Statistics) -> list[str]:
    """What the figures themselves give cause to say."""
    counts, notes = statistics.counts, []
    if counts.failed:
        notes.append(f"{counts.failed} failed requests count as infinitely slow in the percentiles.")
    if counts.unsent:
        notes.append(f"{counts.unsent} of {counts.offered} requests were never sent.")
    if statistics.short_answers:
        notes.append(f"{statistics.short_answers} answers did not have the requested length.")
    if statistics.empty_answers:
        notes.append(f"{statistics.empty_answers} answers ended without a token: they have no TTFT.")
    if statistics.delivered_ratio is not None and statistics.delivered_ratio < VALID_DELIVERY:
        ratio = f"{statistics.delivered_ratio:.3f}"
        notes.append(f"Invalid as an open loop: the delivered rate is {ratio} of the offered one.")
    return notes


def _number(value: float | None) -> str:
    if value is None:
        return "n/a"
    return "∞ (requests failed)" if math.isinf(value) else f"{value:.2f}"


def _finite(content: Any) -> Any:
    if isinstance(content, Mapping):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content
