"""Plots of a result with Vega-Lite, as a page that opens without a network, or as SVG and PNG.

vl-convert holds Vega and Vega-Lite; it is an optional package (`trtserve[report]`).
"""

from __future__ import annotations

import html
import importlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trtserve.bench.records import RequestRecord, first_token_ms, latency_ms, per_token_ms
from trtserve.bench.report import BenchReport
from trtserve.bench.statistics import highest_known
from trtserve.errors import MissingDependencyError, UsageError
from trtserve.files import writing
from trtserve.host.machine import install_command

_ENDINGS = (".html", ".svg", ".png")
_WIDTH, _HEIGHT = 430, 240
_MOST_POINTS = 4000
_LESS = "\ue000"  # in place of "<", until it can be written as \u003c; no font and no name has this character
_HEAT_REQUESTS = 150
_HEAT_TOKENS = 200
Spec = dict[str, Any]


def write_plots(reports: Sequence[BenchReport], path: Path) -> None:
    """Write the plots of one result, or of the stages of a sweep; the ending .html, .svg or .png sets the form.

    Raises the errors of `check_plots`.
    """
    convert = check_plots(path)
    spec = chart(reports)
    with writing(path):
        if path.suffix == ".svg":
            path.write_text(convert.vegalite_to_svg(spec), encoding="utf-8")
        elif path.suffix == ".png":
            path.write_bytes(convert.vegalite_to_png(spec, scale=2))
        else:
            # The page has the specification as JSON in a script, which `</script>` in a model's name would end.
            spec = json.loads(json.dumps(spec).replace("<", _LESS))
            page = convert.vegalite_to_html(spec, bundle=True).replace(_LESS, "\\u003c")
            path.write_text(_with_figures(page, reports), encoding="utf-8")


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


def chart(reports: Sequence[BenchReport]) -> Spec:
    """Return the Vega-Lite specification of all plots; its data are inside.

    Of the stages of a sweep there is one curve, and the other plots show the last stage.
    """
    last = reports[-1]
    found = [_latency_curves(last.records), _timeline(last), *_samples(last), _heat_map(last.records)]
    plots, subtitle = [plot for plot in found if plot is not None], str(last.verdict)
    if len(reports) > 1:
        for plot in plots:
            plot["title"] += f", {last.load}"
        plots.insert(0, _throughput_curve(reports))
        subtitle = ", ".join(f"{each.load}: {each.verdict.judgement}" for each in reports)
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        "title": {"text": f"{last.model} at {last.endpoint}", "subtitle": subtitle, "anchor": "start"},
        "config": {"view": {"stroke": None}, "axis": {"grid": True}},
        "resolve": {"scale": {"color": "independent"}},
        "columns": 2,
        "concat": plots,
    }


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
    return [
        _over_time("Server and machine over time", rows, shares, "%"),
        _over_time("Requests in flight and batch size", rows, counts, "requests"),
    ]


def _over_time(title: str, rows: Sequence[Mapping[str, float]], names: Mapping[str, str], unit: str) -> Spec:
    start = rows[0]["time_ns"]
    points = [
        {"s": (row["time_ns"] - start) / 1e9, "what": label, "value": row[name] * (100 if name == "kv_use" else 1)}
        for row in rows
        for name, label in names.items()
        if name in row
    ]
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


def _with_figures(page: str, reports: Sequence[BenchReport]) -> str:
    """Add the tables, the notes and where the result comes from to the page."""
    parts = []
    for report in reports:
        title = ", ".join(filter(None, (report.model, report.load)))
        parts.append(f"<h2>{html.escape(title)}</h2>")
        parts.append(f"<p><b>{html.escape(str(report.verdict))}</b></p>")
        parts.append(
            _table(("Statistic", "avg", "min", "max", *("p50", "p75", "p90", "p95", "p99")), report.interval_rows())
        )
        parts.append(_table(("Stat", "Value"), report.rows(always=False)))
        parts += [f"<p>{html.escape(note)}</p>" for note in report.notes]
    source = {
        name: getattr(reports[-1], name)
        for name in ("command", "started", "versions", "machine", "prompts_sha256", "fingerprint")
    }
    parts.append(f"<pre>{html.escape(json.dumps(source, indent=2, default=str))}</pre>")
    style = (
        "<style>body{font:14px sans-serif;margin:2em;max-width:1250px}table{border-collapse:collapse;margin:1em 0}"
        "td,th{padding:.2em .8em;border-bottom:1px solid #ddd;text-align:right}td:first-child,th:first-child"
        "{text-align:left}pre{background:#f5f5f5;padding:1em;overflow:auto}</style>"
    )
    page = page.replace("<head>", f"<head>{style}", 1).replace("<title>Chart<", "<title>trtserve bench<", 1)
    # The last one: Vega's own code has more of them in its texts.
    before, _, after = page.rpartition("</body>")
    return f"{before}{''.join(parts)}</body>{after}"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"
