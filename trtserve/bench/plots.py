"""Plots of a result with Vega-Lite: a page that begins with the answer and opens without a network, or SVG and PNG.

vl-convert holds Vega and Vega-Lite; it is an optional package (`trtserve[report]`).
"""

from __future__ import annotations

import html
import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trtserve.bench.records import RequestRecord, first_token_ms, latency_ms, per_token_ms
from trtserve.bench.report import BenchReport
from trtserve.bench.statistics import highest_known
from trtserve.errors import MissingDependencyError, UsageError
from trtserve.files import writing
from trtserve.host.machine import format_bytes, install_command

_ENDINGS = (".html", ".svg", ".png")
_WIDTH, _HEIGHT = 430, 240
_MOST_POINTS = 4000
_FEWEST_SAMPLES = 2  # of a line over time
_HEAT_REQUESTS = 150
_HEAT_TOKENS = 200
Spec = dict[str, Any]


def write_plots(reports: Sequence[BenchReport], path: Path) -> None:
    """Write the plots of one result, or of the stages of a sweep; the ending .html, .svg or .png sets the form.

    Raises the errors of `check_plots`.
    """
    convert = check_plots(path)
    with writing(path):
        if path.suffix == ".svg":
            path.write_text(convert.vegalite_to_svg(chart(reports)), encoding="utf-8")
        elif path.suffix == ".png":
            path.write_bytes(convert.vegalite_to_png(chart(reports), scale=2))
        else:
            drawn = [convert.vegalite_to_svg({**_SHARED, **plot}) for plot in _plots(reports)]
            path.write_text(_page(reports, drawn), encoding="utf-8")


def check_plots(path: Path) -> Any:
    """Return the module that draws. Raises UsageError for another ending, MissingDependencyError without vl-convert."""
    if path.suffix not in _ENDINGS:
        raise UsageError(f"--html is {path}; its name must end in {', '.join(_ENDINGS)}.")
    try:
        return importlib.import_module("vl_convert")
    except ImportError:
        raise MissingDependencyError(
            "Plots need the package vl-convert-python, which is not installed.",
            hint=f"{install_command('report')}, or leave --html out: `trtserve bench report DIR --html FILE` plots a "
            "result later.",
        ) from None


_SHARED: Spec = {
    "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
    "config": {"view": {"stroke": None}, "axis": {"grid": True}},
}


def chart(reports: Sequence[BenchReport]) -> Spec:
    """Return the Vega-Lite specification of all plots; its data are inside."""
    last = reports[-1]
    answers = [each.answer if len(reports) == 1 else f"{each.load}: {each.answer}" for each in reports]
    return {
        **_SHARED,
        "title": {"text": f"{last.model} at {last.endpoint}", "subtitle": answers, "anchor": "start"},
        "resolve": {"scale": {"color": "independent"}},
        "columns": 2,
        "concat": _plots(reports),
    }


def _plots(reports: Sequence[BenchReport]) -> list[Spec]:
    """Return the plots that have data. Of a sweep there is one curve, and the other plots show the last stage."""
    last = reports[-1]
    found = [_latency_curves(last.records), _timeline(last), *_samples(last), _heat_map(last.records)]
    plots = [plot for plot in found if plot is not None]
    if len(reports) > 1:
        for plot in plots:
            plot["title"] += f", {last.load}"
        plots.insert(0, _throughput_curve(reports))
    return plots


def _plot(title: str, data: Iterable[Any], **rest: Any) -> Spec:
    return {"title": title, "width": _WIDTH, "height": _HEIGHT, "data": {"values": list(data)}, **rest}


def _field(name: str, kind: str, title: str, **rest: Any) -> Spec:
    return {"field": name, "type": kind, "title": title, **rest}


def _throughput_curve(reports: Sequence[BenchReport]) -> Spec:
    streaming = reports[-1].streaming
    goal, measure = ("ttft", "time to first token") if streaming else ("latency", "latency")
    times = [each.statistics.time_to_first_token_ms if streaming else each.statistics.latency_ms for each in reports]
    quantile = highest_known(times) or "p50"
    points = [
        {
            "throughput": each.statistics.output_tokens_per_second,
            "ms": getattr(time, quantile),
            "stage": each.load,
            "offered": each.spec.get("request_rate") or each.spec.get("concurrency") or 0,
            "judgement": each.verdict.judgement,
        }
        for each, time in zip(reports, times, strict=True)
        if getattr(time, quantile) not in (None, float("inf"))
    ]
    encoding = {
        "x": _field("throughput", "quantitative", "output tokens/s"),
        "y": _field("ms", "quantitative", f"{quantile} {measure} (ms)"),
    }
    layers: list[Spec] = [
        {"mark": {"type": "line", "color": "#888"}, "encoding": {**encoding, "order": {"field": "offered"}}},
        {
            "mark": {"type": "point", "filled": True, "size": 80},
            "encoding": {
                **encoding,
                "color": _field("judgement", "nominal", "verdict"),
                "tooltip": [{"field": "stage"}],
            },
        },
        {"mark": {"type": "text", "dy": -12}, "encoding": {**encoding, "text": {"field": "stage"}}},
    ]
    limit = reports[-1].goals.limits_ms.get(goal)
    if limit is not None:
        layers.insert(
            0,
            {
                "mark": {"type": "rect", "color": "#2a9d5c", "opacity": 0.12},
                "encoding": {"y": {"datum": 0}, "y2": {"datum": limit}},
            },
        )
    return _plot("Throughput and latency of the stages; green: within --slo", points, layer=layers)


def _latency_curves(records: Sequence[RequestRecord]) -> Spec | None:
    measures = {"time to first token": first_token_ms, "time per output token": per_token_ms, "latency": latency_ms}
    failed = sum(each.status == "failed" for each in records)
    points = []
    for name, measure in measures.items():
        values = sorted(
            value
            for each in records
            if each.status == "completed" and (value := measure(each)) is not None and value > 0
        )
        # Failed requests count as infinitely slow: the curve does not reach 100 %.
        most = len(values) + (0 if measure is per_token_ms else failed)
        step = max(1, len(values) // 500)
        points += [
            {"measure": name, "ms": value, "share": (place + 1) / most}
            for place, value in enumerate(values)
            if place % step == 0 or place == len(values) - 1
        ]
    if not points:
        return None
    return _plot(
        "Distributions",
        points,
        mark={"type": "line", "interpolate": "step-after"},
        encoding={
            "x": _field("ms", "quantitative", "milliseconds", scale={"type": "log"}),
            "y": _field("share", "quantitative", "share of requests", axis={"format": "%"}, scale={"domain": [0, 1]}),
            "color": _field("measure", "nominal", ""),
        },
    )


def _timeline(report: BenchReport) -> Spec | None:
    sent = [each for each in report.records if each.sent_ns is not None]
    if not sent:
        return None
    start = min(each.intended_ns for each in sent)
    step = max(1, len(sent) // _MOST_POINTS)
    points = [
        {"s": (each.intended_ns - start) / 1e9, "ms": latency_ms(each), "status": each.status} for each in sent[::step]
    ]
    return _plot(
        "Latency over time, from the intended send",
        points,
        mark={"type": "point", "size": 12, "opacity": 0.6},
        encoding={
            "x": _field("s", "quantitative", "seconds"),
            "y": _field("ms", "quantitative", "latency (ms)"),
            "color": _field("status", "nominal", ""),
        },
    )


def _samples(report: BenchReport) -> list[Spec]:
    """Return two plots over time, since counts and percentages have different scales."""
    shares = {"kv_use": "KV cache use", "cpu": "CPU", "gpu": "GPU", "steal": "CPU steal"}
    counts = {"in_flight": "in flight", "batch_size": "batch size"}
    rows = report.samples.rows
    if not rows:
        return []
    found = [
        _over_time("Server and machine over time", rows, shares, "%"),
        _over_time("Requests in flight and batch size", rows, counts, "requests"),
    ]
    return [plot for plot in found if plot is not None]


def _over_time(title: str, rows: Sequence[Mapping[str, float]], names: Mapping[str, str], unit: str) -> Spec | None:
    start = rows[0]["time_ns"]
    points = [
        {"s": (row["time_ns"] - start) / 1e9, "what": label, "value": row[name] * (100 if name == "kv_use" else 1)}
        for row in rows
        for name, label in names.items()
        if name in row
    ]
    if len(rows) < _FEWEST_SAMPLES or not points:
        return None
    return _plot(
        title,
        points,
        mark="line",
        encoding={
            "x": _field("s", "quantitative", "seconds"),
            "y": _field("value", "quantitative", unit),
            "color": _field("what", "nominal", ""),
        },
    )


def _heat_map(records: Sequence[RequestRecord]) -> Spec | None:
    """Return the gap before each response of each answer; slow steps of the server are columns of one colour."""
    answers = [each for each in records if each.status == "completed" and len(each.arrivals) > 1]
    step = max(1, len(answers) // _HEAT_REQUESTS)
    points = [
        {"answer": place, "token": number, "ms": (after - before) / 1e6}
        for place, each in enumerate(answers[::step])
        for number, ((before, _), (after, _)) in enumerate(
            zip(each.arrivals[:_HEAT_TOKENS], each.arrivals[1:_HEAT_TOKENS], strict=False), 1
        )
    ]
    if not points:
        return None
    return _plot(
        "Time before each response of an answer",
        points,
        mark="rect",
        encoding={
            "x": _field("answer", "ordinal", "answers in order", axis={"labels": False, "ticks": False, "grid": False}),
            "y": _field("token", "ordinal", "response", axis={"labelOverlap": True, "grid": False}, sort="descending"),
            "color": _field("ms", "quantitative", "ms", scale={"type": "sqrt", "scheme": "viridis"}),
        },
    )


_STYLE = """
:root { color-scheme: light dark; --text: #1c2420; --soft: #56615b; --line: #d8ddd9; --card: #f6f7f5; }
@media (prefers-color-scheme: dark) { :root { --text: #e6ebe8; --soft: #a3aea8; --line: #343d38; --card: #1d2320; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); margin: 0 auto; padding: 1.5rem; max-width: 75rem; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p { margin: .4rem 0; max-width: 60rem; } .soft, dt { color: var(--soft); }
.plots { display: grid; gap: 1rem; margin: 1.5rem 0;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 28rem), 1fr)); }
.plots svg { width: 100%; height: auto; background: #fff; border: 1px solid var(--line); border-radius: .4rem; }
.table { overflow-x: auto; } table { border-collapse: collapse; margin: .5rem 0 1rem; }
td, th { padding: .25rem .75rem; border-bottom: 1px solid var(--line); text-align: right; }
td:first-child, th:first-child { text-align: left; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; }
dd { margin: 0; overflow-wrap: anywhere; }
@media (max-width: 30rem) { body { padding: .75rem; } dl { grid-template-columns: 1fr; } dt { margin-top: .4rem; } }
"""


def _page(reports: Sequence[BenchReport], plots: Sequence[str]) -> str:
    """Return the page: the answer, the plots, the figures, and where they come from."""
    last, escape = reports[-1], html.escape
    parts = []
    for report in reports:
        at = f"{report.load}: " if len(reports) > 1 else ""
        parts.append(f"<h1>{escape(at + report.answer)}</h1>")
        parts += [f"<p>{escape(reason[:1].upper() + reason[1:])}</p>" for reason in report.verdict.reasons]
    rate = f"{last.statistics.output_tokens_per_second:,.1f} output tokens/s"
    parts.append(f'<p class="soft">{escape(f"{last.model} at {last.endpoint}, {rate}, {last.started[:16]} UTC")}</p>')
    parts.append(f'<div class="plots">{"".join(plots)}</div>')
    for report in reports:
        parts.append(f"<h2>{escape(', '.join(filter(None, ('Figures', report.load))))}</h2>")
        columns = ("Statistic", "avg", "min", "max", *("p50", "p75", "p90", "p95", "p99"))
        parts.append(_table(columns, report.interval_rows()))
        parts.append(_table(("Stat", "Value"), report.rows(always=False)))
        parts += [f"<p>{escape(note)}</p>" for note in report.notes]
    parts.append(f"<h2>How it was measured</h2><dl>{''.join(_sources(last))}</dl>")
    return _document(f"{last.model}: trtserve bench", parts)


def _document(title: str, parts: Sequence[str]) -> str:
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style>"
    )
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'


@dataclass(frozen=True, kw_only=True)
class FrontPoint:
    """A configuration in the plane of throughput and latency."""

    throughput: float
    ms: float
    name: str
    kind: str
    """Its colour: whether it was measured and meets the goal."""
    on_front: bool
    """Whether no other measured point has more throughput and less latency."""


def write_front(
    points: Sequence[FrontPoint],
    path: Path,
    *,
    title: str,
    axes: tuple[str, str],
    lines: Sequence[str],
    tables: Sequence[tuple[str, Sequence[str], Sequence[Sequence[str]]]],
) -> None:
    """Write a page with the plot of a front, `lines` above it, and tables (heading, columns, rows) below.

    Raises the errors of `check_plots`. The page is complete before it has its name.
    """
    convert = check_plots(path)
    encoding = {"x": _field("throughput", "quantitative", axes[0]), "y": _field("ms", "quantitative", axes[1])}
    front = {"filter": "datum.on_front"}
    colour = _field("kind", "nominal", "", scale={"scheme": "tableau10"})
    layers: list[Spec] = [
        {"transform": [front], "mark": {"type": "line", "color": "#888"}, "encoding": encoding},
        {
            "mark": {"type": "point", "filled": True, "size": 70},
            "encoding": {**encoding, "color": colour, "tooltip": [{"field": "name"}]},
        },
        {
            "transform": [front],
            "mark": {"type": "text", "dy": -10, "fontSize": 9},
            "encoding": {**encoding, "text": {"field": "name"}},
        },
    ]
    plot = {
        **_plot(
            "Throughput and latency; the line joins what nothing else beats in both",
            [asdict(point) for point in points],
            layer=layers,
        ),
        "width": 2 * _WIDTH,
        "height": int(1.4 * _HEIGHT),
    }
    drawn = convert.vegalite_to_svg({**_SHARED, **plot})
    first, *rest = lines
    parts = [f"<h1>{html.escape(first)}</h1>", *(f"<p>{html.escape(line)}</p>" for line in rest)]
    parts.append(f'<div class="plots">{drawn}</div>')
    for heading, columns, rows in tables:
        parts += [] if not rows else [f"<h2>{html.escape(heading)}</h2>{_table(columns, rows)}"]
    staged = path.with_name(f".{path.name}.partial")
    with writing(path):
        staged.write_text(_document(title, parts), encoding="utf-8")
        staged.replace(path)


def _sources(report: BenchReport) -> Iterator[str]:
    """Yield what a reader needs to measure the same again, as terms and their descriptions."""
    facts: dict[str, object] = {
        "Command": report.command,
        "Began": report.started,
        "Machine": report.machine,
        "Versions": report.versions,
        "Prompts (SHA-256)": report.prompts_sha256,
        "Engine or repository": report.fingerprint,
    }
    for name, value in facts.items():
        text = ", ".join(_fact(*each) for each in value.items()) if isinstance(value, Mapping) else value
        if text:
            yield f"<dt>{name}</dt><dd>{html.escape(str(text))}</dd>"


def _fact(name: str, value: object) -> str:
    if name.endswith("_bytes") and isinstance(value, int):
        name, value = name.removesuffix("_bytes"), format_bytes(value)
    return f"{name.replace('_', ' ')} {f'{value:.3g}' if isinstance(value, float) else value}"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="table"><table><tr>{head}</tr>{body}</table></div>'
