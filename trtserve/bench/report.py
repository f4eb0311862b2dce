"""The report of a benchmark: upstream's table with further rows below, and files from which it can be made again."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from trtserve.bench.monitoring import Samples, WorkerHealth
from trtserve.bench.records import FILE_NAME, Positive, Real, RequestRecord, Whole, read_records
from trtserve.bench.statistics import (
    QUANTILES,
    VALID_DELIVERY,
    Distribution,
    Goals,
    Statistics,
    compute,
    highest_known,
    read_goals,
)
from trtserve.bench.verdict import Calibration, Machine, Surroundings, Verdict, implausible, judge
from trtserve.errors import UsageError
from trtserve.files import LARGEST_DATA, decode_as, parse_json, read_json_object, read_text

COLUMNS = ("Stat", "Value")
TTFT, TPOT, ITL = "Time to first token", "Time per output token", "Inter-token latency"
LATENCY = "Request latency"
SHORT_COLUMNS = ("ms", "avg", "p50", "p90", "p99")
SCHEMA = 2
REPORT = "report.json"
SAMPLES = "samples.jsonl"
FEW = "*"  # behind a percentile that too few answers support, on the terminal and in the page alike
FEW_NOTE = "*: too few answers to know how exact this percentile is (95 % interval); ask for more with --num-requests."
_SCALES = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 40
_MATERIAL = 0.1  # change of the throughput that is reported
Row = tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What was measured and how, as report.json has it."""

    spec: Mapping[str, Any]  # what was asked for, with the concurrency that was used
    endpoint: str
    model: str  # name of the model that got the requests
    protocol: str
    streaming: bool
    tokens_counted_by: str  # `output_ids` (a core model's output), or for a text model `server` or `tokenizer`
    prompts_sha256: str
    started: str  # UTC, ISO 8601
    runtime: str | None = None  # what runs the model, such as `openvino`, if known
    precision: Mapping[str, str] = field(default_factory=dict)
    """Precision of the engine's weights, arithmetic and KV cache, as far as known."""
    limits: Mapping[str, Whole | None] = field(default_factory=dict)
    """The engine's limits that the traffic was kept within."""
    fingerprint: str | None = None  # of the repository or the engine
    command: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)
    bounds: Machine = field(default_factory=Machine)  # what the engine's speed cannot exceed
    calibration: Calibration | None = None
    queue_wait_ms: Real | None = None  # mean wait in the server's own queue, from its metrics
    interrupted: bool = False
    timed_out: bool = False


@dataclass(frozen=True, kw_only=True)
class BenchReport(RunFacts):
    """Result of one benchmark. All figures follow from the records."""

    records: tuple[RequestRecord, ...] = field(repr=False)
    health: tuple[WorkerHealth, ...] = ()
    samples: Samples = field(default_factory=Samples, repr=False)
    planned_notes: tuple[str, ...] = ()
    statistics: Statistics = field(init=False)
    verdict: Verdict = field(init=False)
    notes: tuple[str, ...] = field(init=False)
    """What a reader of the figures must know: clipping, warm-up, failed requests, an invalid open loop."""

    def __post_init__(self) -> None:
        statistics = compute(self.records, self.goals)
        verdict = judge(
            statistics,
            self.records,
            () if self.protocol == "in-process" else self.health,  # there the engine is in the same process
            concurrency=self.spec.get("concurrency"),
            capacity=self.capacity,
            surroundings=Surroundings(
                processors=self.machine.get("cpus"),
                load=self.machine.get("load_average") or 0.0,
                others=self.machine.get("other_programs"),
                server=bool(self.machine.get("server_here")),
                server_waited=self.machine.get("server_waited"),
            ),
            implausible=implausible(
                self.records,
                machine=self.bounds,
                rows=self.samples.rows,
                server_tokens=self.samples.tokens.get("generated"),
            ),
        )
        object.__setattr__(self, "statistics", statistics)
        object.__setattr__(self, "verdict", verdict)
        object.__setattr__(self, "notes", (*self.planned_notes, *notes_on(statistics)))

    @property
    def goals(self) -> Goals:
        """The limits of --slo."""
        return read_goals(self.spec.get("slo") or {})

    @property
    def capacity(self) -> float | None:
        """The highest rate at which the client received such answers from the echo server; None: not calibrated."""
        if self.calibration is None:
            return None
        completed = [record for record in self.records if record.status == "completed"]
        responses = sum(len(record.arrivals) for record in completed) / max(1, len(completed))
        return self.calibration.capacity(responses)

    @property
    def load(self) -> str:
        """The offered load, for people: `4/s`, `4 to 8/s` or `8 in flight`; empty for a trace."""
        rate, number, ramp_to = (self.spec.get(name) for name in ("request_rate", "concurrency", "ramp_to"))
        if rate is not None:
            return f"{round(rate, 3):g}{'' if ramp_to is None else f' to {ramp_to:g}'}/s"
        return "" if number is None else f"{number} in flight"

    @property
    def open_loop(self) -> bool:
        """Whether requests had a schedule; their latencies count from the intended send then."""
        return any(record.scheduled for record in self.records)

    @property
    def partial(self) -> bool:
        """Whether the run ended before all requests were answered."""
        return self.interrupted or self.timed_out

    @property
    def answer(self) -> str:
        """The result in one line: `4.1 requests/s, 99 % of answers within 500 ms, limited by the server, valid`."""
        return f"{self.headline}, {self.verdict.judgement}"

    @property
    def headline(self) -> str:
        """The result without its verdict."""
        statistics, judgement = self.statistics, self.verdict.judgement
        if self.goals:
            parts = [f"{brief(statistics.goodput_per_second)} requests/s with {self.goals}"]
        else:
            parts = [f"{brief(statistics.requests_per_second)} requests/s"]
            quantile = highest_known([statistics.latency_ms]) or "p50"
            value = getattr(statistics.latency_ms, quantile)
            if value is not None and not math.isinf(value):
                share = "half of the" if quantile == "p50" else f"{quantile[1:]} % of"
                parts.append(f"{share} answers within {milliseconds(value)}")
        if judgement in ("disturbed", "implausible"):
            pass  # the figures do not tell what the limit was
        elif judgement == "client-limited":
            parts.append("limited by the client")
        elif judgement == "overloaded" or not self.open_loop:
            parts.append("limited by the server")
        else:
            parts.append(f"as fast as the requests came ({self.load})" if self.load else "as fast as the requests came")
        return ", ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """Return all but the records and the samples over time; infinite values (see Distribution) become null."""
        content = {each.name: getattr(self, each.name) for each in fields(RunFacts)} | {
            "notes": self.notes,
            "partial": self.partial,
            "verdict": {"judgement": self.verdict.judgement, "reasons": self.verdict.reasons},
            "statistics": self.statistics,
            "capacity_per_second": self.capacity,
            "workers": self.health,
            "server": {"counters": self.samples.server, "tokens": self.samples.tokens},
        }
        finite: dict[str, Any] = _finite({"schema": SCHEMA, **content})
        return finite

    @property
    def few(self) -> bool:
        """Whether a percentile of the tables has the mark FEW."""
        return any(cell.endswith(FEW) for row in (*self.rows(), *self.interval_rows()) for cell in row)

    def rows(self) -> list[Row]:
        """Return upstream's rows in upstream's order and with its names, then further ones."""
        statistics = self.statistics
        if self.streaming:
            tokens = [
                *_distribution_rows("TTFT", statistics.time_to_first_token_ms),
                *_distribution_rows("inter-token latency", statistics.inter_token_ms),
                ("Avg. time per output token (ms)", _number(statistics.time_per_output_token_ms.mean)),
            ]
        else:
            absent = "n/a (not streaming: one response per request)"
            tokens = [("Avg. TTFT (ms)", absent), ("Avg. inter-token latency (ms)", absent)]
        counts = [
            (f"{name.capitalize()} requests", str(getattr(statistics.counts, name)))
            for name in ("sent", "completed", "failed", "cancelled")
        ]
        counts += [(f"Ended by {reason}", str(number)) for reason, number in statistics.finish_reasons.items()]
        rows = upstream_rows(statistics) + tokens + counts
        if self.open_loop:  # the latencies above count from the intended send
            ratio = statistics.delivered_ratio
            rows += [
                *_distribution_rows("latency from send", statistics.latency_from_send_ms),
                ("P99 dispatch delay (ms)", percentile_cell(statistics.dispatch_delay_ms, "p99")),
                ("Delivered / offered rate", "n/a" if ratio is None else f"{ratio:.3f}"),
            ]
        if self.goals:
            rows.append((f"Good requests/sec ({self.goals})", _number(statistics.goodput_per_second)))
        if self.capacity is not None:
            # A ramp ends at another rate, and conversations have several requests.
            asked = (self.spec.get(name) or 0.0 for name in ("request_rate", "ramp_to"))
            rate = max(statistics.requests_per_second, *asked)
            rows.append(("Rate / the client's highest", f"{rate / self.capacity:.3f}"))
        if self.queue_wait_ms is not None:
            rows.append(("Avg. wait in the server's queue (ms)", _number(self.queue_wait_ms)))
        return rows

    def short_rows(self) -> list[tuple[str, ...]]:
        """Return the times that a person reads first."""
        statistics = self.statistics
        measures = {LATENCY: statistics.latency_ms}
        if self.streaming:
            measures = {
                TTFT: statistics.time_to_first_token_ms,
                TPOT: statistics.time_per_output_token_ms,
                **measures,
            }
        return [
            (
                name,
                _rounded(each.mean),
                *(percentile_cell(each, quantile, _rounded) for quantile in SHORT_COLUMNS[2:]),
            )
            for name, each in measures.items()
        ]

    def facts(self) -> list[str]:
        """Return what stands below the short table: rates and counts, each once."""
        statistics, counts = self.statistics, self.statistics.counts
        waits = "" if self.queue_wait_ms is None else f", {self.queue_wait_ms:.2g} ms in the server's queue"
        others = "".join(
            f", {number} {name}"
            for name, number in (("failed", counts.failed), ("cancelled", counts.cancelled))
            if number
        )
        flight, made = brief(statistics.requests_in_flight), brief(statistics.output_tokens_per_second)
        prompt, answer = f"{statistics.input_tokens_per_request:.0f}", f"{statistics.output_tokens_per_request:.0f}"
        facts = [
            f"requests  {counts.completed} of {counts.planned} answered{others}, {flight} in flight{waits}",
            f"tokens    {made}/s generated, {prompt} in a prompt, {answer} in an answer",
        ]
        if self.open_loop and statistics.delivered_ratio is not None:
            facts.append(f"rate      {statistics.delivered_ratio:.1%} of the offered one was sent")
        return facts

    def interval_rows(self) -> list[tuple[str, ...]]:
        """Return genai-perf's table: a row for each measure, with the 95 % interval of its mean and percentiles."""
        statistics = self.statistics
        measures = {f"{LATENCY} (ms)": statistics.latency_ms}
        if self.streaming:
            measures = {
                f"{TTFT} (ms)": statistics.time_to_first_token_ms,
                f"{TPOT} (ms)": statistics.time_per_output_token_ms,
                f"{ITL} (ms)": statistics.inter_token_ms,
                **measures,
            }
        measures["Tokens/s per user"] = statistics.tokens_per_second_per_user
        return [
            (
                name,
                _with_interval(each, "mean"),
                _rounded(each.minimum),
                _rounded(each.maximum),
                *(_with_interval(each, quantile) for quantile in QUANTILES),
            )
            for name, each in measures.items()
        ]

    def sparklines(self) -> list[Row]:
        """Return the course of throughput, first-token time and requests in flight as one line each."""
        ended = [(record.ended_ns, 1.0) for record in self.records if record.status == "completed"]
        latencies = [
            (record.sent_ns, (record.arrivals[0][0] - record.intended_ns) / 1e6)
            for record in self.records
            if record.sent_ns is not None and record.arrivals
        ]
        in_flight = [(int(row["time_ns"]), row["in_flight"]) for row in self.samples.rows]
        lines = {"answers": sparkline(ended, total=True), TTFT: sparkline(latencies)}
        lines["in flight"] = sparkline(in_flight)
        peaks = {TTFT: (latencies, " ms"), "in flight": (in_flight, "")}
        tops = {
            name: f"  up to {brief(max(value for _, value in points))}{unit}"
            for name, (points, unit) in peaks.items()
            if points
        }
        return [(name, line + tops.get(name, "")) for name, line in lines.items() if line]


def brief(value: float) -> str:
    """Return three digits, or all of a larger number: `0.574`, `57.4`, `1,159`."""
    return f"{value:,.0f}" if value >= 99.95 else f"{round(value, 3):.3g}"


def milliseconds(value: float) -> str:
    """Return a time with its unit, as `brief` rounds it."""
    return f"{brief(value)} ms"


def sparkline(points: Sequence[tuple[int, float]], *, total: bool = False) -> str:
    """Return values over time as a line of bars; `total` adds up what falls into a bar instead of averaging it."""
    if len(points) < 2:
        return ""
    first, last = min(time for time, _ in points), max(time for time, _ in points)
    bars: list[list[float]] = [[] for _ in range(_SPARK_WIDTH)]
    for time, value in points:
        bars[min(_SPARK_WIDTH - 1, (time - first) * _SPARK_WIDTH // max(1, last - first))].append(value)
    heights: list[float] = []
    for bar in bars:  # one without a value repeats the one before it
        heights.append(sum(bar) if total else sum(bar) / len(bar) if bar else heights[-1])
    most = max(heights) or 1.0
    return "".join(_SCALES[round(height / most * (len(_SCALES) - 1))] for height in heights)


def read_report(path: Path) -> BenchReport:
    """Make a report again from the folder that --out wrote, or from its requests.jsonl.

    Every figure is computed from the records. Raises UsageError when a file is missing or not of such a folder.
    """
    folder = path if path.is_dir() else path.parent
    records = read_records(folder / FILE_NAME if path.is_dir() else path)
    try:
        content = read_json_object(folder / REPORT, UsageError)
        lines = read_text(folder / SAMPLES, UsageError, limit=LARGEST_DATA).splitlines()
        places = (f"Line {number} of {folder / SAMPLES}" for number in range(1, len(lines) + 1))
        rows = [_sample(parse_json(line), place) for line, place in zip(lines, places, strict=True)]
    except FileNotFoundError as error:
        raise UsageError(
            f"{error.filename} cannot be read: {error.strerror}.",
            hint="Give the folder that `trtserve bench … --out DIR` wrote.",
        ) from None
    except ValueError as error:
        raise UsageError(f"{folder} is damaged: {error}.") from None
    if content.get("schema") != SCHEMA:
        raise UsageError(
            f"{folder / REPORT} has the schema {content.get('schema', 'none')!r:.100}; this version reads {SCHEMA}.",
            hint="Measure again, or read it with the version of trtserve that wrote it.",
        )
    stored = decode_as(content, _ReportFile, "a report", folder / REPORT, UsageError, tolerant=True)
    asked = {name: value for name, value in stored.spec.items() if name in _ASKED}
    decode_as(asked, _Asked, "what a benchmark was asked for", folder / REPORT, UsageError)
    computed = notes_on(compute(records, read_goals(stored.spec.get("slo") or {})))
    # Of several ranks, in results of older versions, only the first one sampled its requests in flight.
    samples = Samples(
        rows=rows if stored.ranks == 1 else [], server=stored.server.counters, tokens=stored.server.tokens
    )
    return BenchReport(
        **{each.name: getattr(stored, each.name) for each in fields(RunFacts)},
        records=tuple(records),
        health=stored.workers,
        samples=samples,
        planned_notes=tuple(note for note in stored.notes if note not in computed),
    )


def _sample(content: object, place: str) -> dict[str, float]:
    row = decode_as(content, dict[str, Real], "a sample", place, UsageError)
    if "time_ns" not in row or "in_flight" not in row:
        raise UsageError(f"{place} cannot be read as a sample: missing key `time_ns` or `in_flight`.")
    return row


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """What figures and plots use of the spec."""

    concurrency: Annotated[int, Meta(ge=1, le=1 << 62)] | None = None
    request_rate: Positive | None = None
    ramp_to: Positive | None = None
    slo: dict[str, str] | None = None


_ASKED = frozenset(each.name for each in fields(_Asked))


@dataclass(frozen=True, kw_only=True)
class _Server:
    counters: dict[str, dict[str, Real]]
    tokens: dict[str, Real]


@dataclass(frozen=True, kw_only=True)
class _ReportFile(RunFacts):
    """What is read of report.json; the figures are computed again."""

    workers: tuple[WorkerHealth, ...]
    server: _Server
    notes: tuple[str, ...]
    ranks: Whole = 1


def read_runs(path: Path) -> list[BenchReport]:
    """Read one result, or all results in the folders of a folder: the runs of one benchmark, made several times.

    Raises UsageError when one cannot be read, or when they differ in what was asked for (but the seed).
    """
    return _read_alike(path)


def read_stages(path: Path) -> list[BenchReport]:
    """Read one result, or those of a sweep in the order of their load; raises UsageError as `read_runs` does."""
    reports = _read_alike(path, "request_rate", "concurrency")
    return sorted(reports, key=lambda each: each.spec.get("request_rate") or each.spec.get("concurrency") or 0)


def _read_alike(path: Path, *varied: str) -> list[BenchReport]:
    inner = sorted(each.parent for each in path.glob(f"*/{FILE_NAME}"))
    if not inner or (path / FILE_NAME).exists():
        return [read_report(path)]
    reports = [read_report(each) for each in inner]
    for folder, report in zip(inner, reports, strict=True):
        found = sorted({*differing(reports[0], report)} - {*varied})
        if found:
            raise UsageError(
                f"{inner[0]} and {folder} are not runs of one benchmark: they differ in {', '.join(found)}.",
                hint="Give a folder whose results were made by the same command, or one result.",
            )
    return reports


def differing(first: BenchReport, second: BenchReport) -> list[str]:
    """Return the names of what was asked for differently, but for the seed."""
    one, other = _asked(first), _asked(second)
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def _asked(report: BenchReport) -> dict[str, Any]:
    asked = {name: value for name, value in report.spec.items() if name not in ("seed", "calibrate")}
    return {"model": report.model, **asked}


def stage_rows(reports: Sequence[BenchReport]) -> list[tuple[str, ...]]:
    """Return column names and a row for each stage of a sweep, with the highest percentiles that all have data for."""
    first = highest_known([each.statistics.time_to_first_token_ms for each in reports]) or "p90"
    whole = highest_known([each.statistics.latency_ms for each in reports]) or "p50"
    times = ("TTFT p50 (ms)", f"TTFT {first} (ms)", "ITL p50 (ms)", f"Latency {whole} (ms)")
    rows: list[tuple[str, ...]] = [("Load", "Requests/s", "Tokens/s", *times, "Good/s", "Verdict")]
    for each in reports:
        figures = each.statistics
        rows.append(
            (
                each.load,
                brief(figures.requests_per_second),
                brief(figures.output_tokens_per_second),
                percentile_cell(figures.time_to_first_token_ms, "p50", _rounded),
                percentile_cell(figures.time_to_first_token_ms, first, _rounded),
                percentile_cell(figures.inter_token_ms, "p50", _rounded),
                percentile_cell(figures.latency_ms, whole, _rounded),
                brief(figures.goodput_per_second),
                each.verdict.judgement,
            )
        )
    return rows


def upstream_rows(statistics: Statistics) -> list[Row]:
    """Return the table of benchmark_core_model.py, except that `Avg. InFlight requests` is measured (there 0.00)."""
    latency, counts = statistics.latency_ms, statistics.counts
    return [
        ("Requests/Sec", _number(statistics.requests_per_second)),
        ("OP tokens/sec", _number(statistics.output_tokens_per_second)),
        *_distribution_rows("latency", latency),
        ("Avg. IP tokens per request", _number(statistics.input_tokens_per_request)),
        ("Avg. OP tokens per request", _number(statistics.output_tokens_per_request)),
        ("Avg. InFlight requests", _number(statistics.requests_in_flight)),
        ("Total latency (ms)", _number(statistics.total_latency_ms)),
        # Upstream never ends early; here the two can differ.
        ("Total requests (planned)" if counts.unsent else "Total requests", str(counts.planned)),
    ]


def _distribution_rows(name: str, values: Distribution) -> list[Row]:
    """Return upstream's rows of a measure."""
    return [
        (f"Avg. {name} (ms)", _number(values.mean)),
        *((f"{each.upper()} {name} (ms)", percentile_cell(values, each)) for each in ("p99", "p90")),
    ]


def percentile_cell(values: Distribution, name: str, written: Callable[[float | None], str] | None = None) -> str:
    """Return a percentile for a table, with the mark FEW where too few answers support it."""
    return f"{(written or _number)(getattr(values, name))}{'' if _is_known(values, name) else FEW}"


def _is_known(values: Distribution, name: str) -> bool:
    return not values.count or values.intervals.get(name) is not None


def notes_on(statistics: Statistics) -> list[str]:
    """Return warnings about the figures themselves."""
    counts, steady, notes = statistics.counts, statistics.steady, []
    if counts.failed:
        notes.append(f"{counts.failed} failed requests count as infinitely slow in the percentiles.")
    if counts.unsent:
        notes.append(f"{counts.unsent} of {counts.planned} planned requests were never sent.")
    if statistics.short_answers:
        notes.append(f"{statistics.short_answers} answers did not have the requested length.")
    if statistics.empty_answers:
        notes.append(f"{statistics.empty_answers} answers ended without a token: they have no TTFT.")
    if statistics.delivered_ratio is not None and statistics.delivered_ratio < VALID_DELIVERY:
        ratio = f"{statistics.delivered_ratio:.3f}"
        notes.append(f"Invalid as an open loop: the delivered rate is only {ratio} of the offered one.")
    overall = statistics.requests_per_second
    if (
        0 < steady.warmup_requests < counts.completed
        and abs(steady.requests_per_second - overall) > _MATERIAL * overall
    ):
        notes.append(
            f"The first {steady.warmup_requests} answers differ from the rest (MSER). Without them and the drain: "
            f"{steady.requests_per_second:.2f} requests/s, {steady.output_tokens_per_second:.2f} tokens/s."
        )
    return notes


def _with_interval(values: Distribution, name: str) -> str:
    figure, interval = getattr(values, name), values.intervals.get(name)
    if figure is None or interval is None or math.isinf(figure):
        return _rounded(figure) if name == "mean" else percentile_cell(values, name, _rounded)
    low, high = ("∞" if math.isinf(bound) else brief(bound) for bound in interval)
    return f"{brief(figure)} ({low} – {high})"


def _rounded(value: float | None) -> str:
    return _number(value) if value is None or math.isinf(value) else brief(value)


def _number(value: float | None) -> str:
    """Return a figure of NVIDIA's table, which has two decimals."""
    if value is None:
        return "n/a"
    return "∞ (requests failed)" if math.isinf(value) else f"{value:.2f}"


def _finite(content: Any) -> Any:
    if is_dataclass(content) and not isinstance(content, type):
        content = asdict(content)
    if isinstance(content, Mapping):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content
