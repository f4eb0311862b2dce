"""Plots of a result with Vega-Lite: a page that begins with the answer and opens without a network, or SVG and PNG.

vl-convert holds Vega and Vega-Lite; it is an optional package (`trtserve[report]`).
"""

from __future__ import annotations

import html
import importlib.util
import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from trtserve.bench.records import RequestRecord, first_token_ms, latency_ms, per_token_ms
from trtserve.bench.report import FEW_NOTE, ITL, LATENCY, TPOT, TTFT, BenchReport, brief, milliseconds, stage_rows
from trtserve.bench.statistics import QUANTILES, highest_known
from trtserve.bench.verdict import Judgement
from trtserve.errors import MissingDependencyError, UsageError
from trtserve.files import replacing, write_whole
from trtserve.host.machine import format_bytes, install_command

_ENDINGS = (".html", ".svg", ".png")
_DRAWING = "vl_convert"  # the module that draws
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
    with replacing(path) as staged:
        if path.suffix == ".svg":
            staged.write_text(convert.vegalite_to_svg(chart(reports)), encoding="utf-8")
        elif path.suffix == ".png":
            staged.write_bytes(convert.vegalite_to_png(chart(reports), scale=2))
        else:
            staged.write_text(_page(reports, _drawn(convert, _plots(reports))), encoding="utf-8")


def check_plots(path: Path, *, out: Path | None = None) -> Any:
    """Return the module that draws; the folder `out` will be made.

    Raises UsageError for another ending and a folder that does not exist, MissingDependencyError without vl-convert.
    """
    if path.suffix not in _ENDINGS:
        raise UsageError(f"--html is {path}; its name must end in {', '.join(_ENDINGS)}.")
    folder = path.absolute().parent
    if not folder.is_dir() and (out is None or folder != out.absolute()):
        raise UsageError(f"--html is {path}; the folder {folder} does not exist.", hint="Make it, or name another one.")
    try:
        return importlib.import_module(_DRAWING)
    except ImportError:
        raise MissingDependencyError(
            "Plots need the package vl-convert-python, which is not installed.",
            hint=f"{install_command('report')}, or leave --html out: `trtserve bench report DIR --html FILE` plots a "
            "result later.",
        ) from None


def can_plot() -> bool:
    """Return whether the module that draws is installed."""
    return importlib.util.find_spec(_DRAWING) is not None


_COLOURS = ("#4c9a2a", "#4a86c5", "#dd7d33", "#b0568c", "#7a7a7a")  # read on white and on the dark page
_SHARED: Spec = {
    "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
    "config": {"view": {"stroke": None}, "axis": {"grid": True}, "range": {"category": list(_COLOURS)}},
}
_INK = "currentColor"
_ON_PAGE: Spec = {
    **_SHARED,
    "background": "transparent",
    "autosize": {"type": "fit", "contains": "padding"},
    "config": {
        **_SHARED["config"],
        "font": "sans-serif",
        "axis": {
            "labelColor": _INK,
            "titleColor": _INK,
            "titleFontWeight": "normal",
            "labelFontSize": 11,
            "titleFontSize": 12,
            "domain": False,
            "ticks": False,
            "labelPadding": 6,
            "gridColor": _INK,
            "gridOpacity": 0.12,
            "labelOverlap": "parity",
            "labelSeparation": 4,
            "tickCount": 6,
        },
        "legend": {
            "orient": "top",
            "labelColor": _INK,
            "titleColor": _INK,
            "labelFontSize": 12,
            "symbolStrokeWidth": 3,
        },
        "line": {"strokeWidth": 2},
        "text": {"color": _INK},
    },
}
"""Plots in the page have its font, the colour of its text, which a dark page changes, and all the same size."""


def _drawn(convert: Any, plots: Sequence[Spec]) -> list[str]:
    """Return plots as the figures of a page; the last of an odd number has the whole width, if the window has room."""
    figures = []
    for number, plot in enumerate(plots, 1):
        wide = number == len(plots) and number % 2 == 1
        svg = _svg(convert, plot, _WIDTH + 60)
        if wide:  # narrow windows show the first; what it names must not be what the second names
            svg = svg.replace("gradient_", "narrow_gradient_") + _svg(convert, plot, 2 * _WIDTH + 160)
        meaning = f"<p>{html.escape(plot['description'])}</p>" if "description" in plot else ""
        caption = f"<figcaption>{html.escape(plot['title'])}{meaning}</figcaption>"
        figures.append(f"<figure{' class=wide' if wide else ''}>{caption}{svg}</figure>")
    return figures


def _svg(convert: Any, plot: Spec, width: int) -> str:
    size = {"width": width, "height": _HEIGHT + 40}
    if "row" in plot.get("encoding", {}):  # a size is that of one row, without axes
        size = {"width": width - 40, "height": plot["height"]}
    svg: str = convert.vegalite_to_svg({**_ON_PAGE, **plot, **size, "title": None})
    return svg


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


def _field(name: str, kind: str, title: str | None, **rest: Any) -> Spec:
    return {"field": name, "type": kind, "title": title, **rest}


def _throughput_curve(reports: Sequence[BenchReport]) -> Spec:
    streaming = reports[-1].streaming
    goal, measure = ("ttft", TTFT) if streaming else ("latency", LATENCY)
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
        "y": _field("ms", "quantitative", f"{measure}, {quantile} (ms)"),
    }
    judgements = sorted({point["judgement"] for point in points}, key=lambda each: each != "valid")
    colors = {"domain": judgements, "range": [_COLOURS[0 if each == "valid" else 2] for each in judgements]}
    layers: list[Spec] = [
        {"mark": {"type": "line", "color": "#888"}, "encoding": {**encoding, "order": {"field": "offered"}}},
        {
            "mark": {"type": "point", "filled": True, "size": 80},
            "encoding": {
                **encoding,
                "color": _field("judgement", "nominal", "verdict", scale=colors),
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
    within = "" if limit is None else "; green: within --slo"
    return _plot(f"Throughput and latency of the stages{within}", points, layer=layers)


def _latency_curves(records: Sequence[RequestRecord]) -> Spec | None:
    measures = {TTFT: first_token_ms, TPOT: per_token_ms, LATENCY: latency_ms}
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
        "Distribution of times",
        points,
        description="Each curve is one measure: where it crosses 90 %, nine of ten requests took that time or less. "
        "The steeper it is, the more alike they were.",
        mark={"type": "line", "interpolate": "step-after"},
        encoding={
            "x": _field("ms", "quantitative", "time (ms, logarithmic)", **_logarithmic(points)),
            "y": _field("share", "quantitative", "share of requests", axis={"format": "%"}, scale={"domain": [0, 1]}),
            "color": _field("measure", "nominal", ""),
        },
    )


def _logarithmic(points: Sequence[Mapping[str, Any]]) -> Spec:
    """Return scale and axis from the mark below the shortest time to the one above the longest: 1, 2 and 5 · 10ⁿ."""
    least, most = (pick(each["ms"] for each in points) for pick in (min, max))
    powers = range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)
    marks = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
    low, high = max(mark for mark in marks if mark <= least), min(mark for mark in marks if mark >= most)
    inside = [mark for mark in marks if low <= mark <= high]
    return {
        "scale": {"type": "log", "domain": [low, high], "nice": False},
        "axis": {"values": inside, "format": ",~r"},
    }


def _timeline(report: BenchReport) -> Spec | None:
    sent = [each for each in report.records if each.sent_ns is not None]
    if not sent:
        return None
    start = min(each.intended_ns for each in sent)
    step = max(1, len(sent) // _MOST_POINTS)
    points = [
        {"s": (each.intended_ns - start) / 1e9, "ms": latency_ms(each), "status": each.status} for each in sent[::step]
    ]
    legend = {} if len({each.status for each in sent}) > 1 else {"legend": None}
    return _plot(
        f"{LATENCY} over time, from the intended send",
        points,
        description="Each circle is an answer, placed at the moment when its request was due. Its time counts from "
        "that moment, so a request that the client sent late does not look fast.",
        mark={"type": "point", "size": 12, "opacity": 0.6},
        encoding={
            "x": _field("s", "quantitative", "time of the run (s)"),
            "y": _field("ms", "quantitative", f"{LATENCY} (ms)"),
            "color": _field("status", "nominal", "", **legend),
        },
    )


def _samples(report: BenchReport) -> list[Spec]:
    """Return two plots over time: percentages below each other, as steal and KV cache are small beside CPU; counts."""
    shares = {"kv_use": "KV cache use", "cpu": "CPU", "gpu": "GPU", "steal": "CPU steal"}
    counts = {"in_flight": "in flight", "batch_size": "batch size"}
    rows = report.samples.rows
    if not rows:
        return []
    found = [
        _over_time(
            "Server and machine over time",
            rows,
            shares,
            "%",
            apart=True,
            description="How busy the processors of this machine were, by whatever program, and how full the server's "
            "KV cache was. Steal is the time that the host of a virtual machine gave to others.",
        ),
        _over_time(
            "Requests in flight and batch size",
            rows,
            counts,
            "requests",
            description="What the client waited for, and what the server computed in one step. A batch below the "
            "requests in flight means that some waited in its queue.",
        ),
    ]
    return [plot for plot in found if plot is not None]


def _over_time(
    title: str,
    rows: Sequence[Mapping[str, float]],
    names: Mapping[str, str],
    unit: str,
    *,
    description: str,
    apart: bool = False,
) -> Spec | None:
    """Return lines over time of what is not always 0, `apart` with a scale for each; None without enough samples."""
    start = rows[0]["time_ns"]
    names = {name: label for name, label in names.items() if any(row.get(name) for row in rows)}
    points = [
        {"s": (row["time_ns"] - start) / 1e9, "what": label, "value": row[name] * (100 if name == "kv_use" else 1)}
        for row in rows
        for name, label in names.items()
        if name in row
    ]
    if len(rows) < _FEWEST_SAMPLES or not points:
        return None
    encoding = {
        "x": _field("s", "quantitative", "time of the run (s)"),
        "y": _field("value", "quantitative", unit),
        "color": _field("what", "nominal", ""),
    }
    if not apart:
        # Of equal lines the dashes of the later ones, which lie above, show the first between them.
        dashes = {"domain": list(names.values()), "range": [[1, 0], [5, 5], [2, 6]][: len(names)]}
        encoding["color"]["scale"] = {"domain": dashes["domain"]}
        encoding["strokeDash"] = _field("what", "nominal", "", scale=dashes)
        return _plot(title, points, description=description, mark="line", encoding=encoding)
    number = len({point["what"] for point in points})
    encoding["color"]["legend"] = None
    encoding["y"] |= {"scale": {"domain": {"unionWith": [0, 10]}}, "axis": {"tickCount": 3}}
    header = {"labelAngle": 0, "labelOrient": "top", "labelAnchor": "start", "labelFontSize": 12, "labelColor": _INK}
    header["labelPadding"] = 2
    encoding["row"] = _field("what", "nominal", None, header=header)
    return _plot(
        title,
        points,
        description=description,
        mark="line",
        encoding=encoding,
        height=max(36, (_HEIGHT + 46) / number - 58),  # all are as high as other plots; 58 are a row's labels
        spacing=4,
        resolve={"scale": {"y": "independent"}},
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
    longest = int(max(each["token"] for each in points))
    marks = [1, *range(10, longest + 1, 10 if longest <= 60 else 50)]
    return _plot(
        "Time before each response of an answer",
        points,
        description="Each column is an answer that grows upwards; each cell is the wait before one response. "
        "A bright cell is a pause, and a bright diagonal is a pause of the server that all answers shared.",
        mark={"type": "rect", "aria": False},  # a name for each of thousands of cells helps no reader
        encoding={
            "x": _field("answer", "ordinal", "answers in order", axis={"labels": False, "ticks": False, "grid": False}),
            "y": _field(
                "token", "ordinal", "number of the response", axis={"values": marks, "grid": False}, sort="descending"
            ),
            "color": _field(
                "ms",
                "quantitative",
                "wait (ms)",
                scale={"type": "sqrt", "scheme": "viridis"},
                legend={"tickCount": 3, "gradientLength": _HEIGHT},
            ),
        },
    )


def _page(reports: Sequence[BenchReport], figures: Sequence[str]) -> str:
    """Return the page: the answer, the figures that matter most, the plots, all figures, and where they come from."""
    last = reports[-1]
    where = f"trtserve bench · {last.model} at {last.endpoint} · {last.started[:16].replace('T', ' ')} UTC"
    parts = [f'<p class="eyebrow">{html.escape(where)}<br>{html.escape(_subject(last))}</p>']
    if len(reports) == 1:
        parts += [f"<h1>{html.escape(last.headline)}</h1>", _verdict(last), _tiles(last)]
    else:
        best = max(reports, key=lambda each: each.statistics.output_tokens_per_second)
        parts.append(f"<h1>Most at {html.escape(best.load)}: {html.escape(best.headline)}</h1>")
        columns, *rows = stage_rows(reports)
        parts.append(_table(columns, rows))
        parts += [_verdict(report, f"{report.load}: ") for report in reports if report.verdict.reasons]
    parts.append(f'<div class="plots">{"".join(figures)}</div>')
    for report in reports:
        parts.append(f"<h2>{html.escape(', '.join(filter(None, ('Figures', report.load))))}</h2>")
        parts.append(_table(("Statistic", "avg", "min", "max", *QUANTILES), report.interval_rows(), look="figures"))
        parts.append(f'<p class="soft">{_TIMES}</p>' if report.streaming else "")
        parts += [f'<p class="soft">{html.escape(FEW_NOTE)}</p>'] if report.few else []
        whole = _table(("Stat", "Value"), report.rows())
        parts.append(f"<details><summary>All figures, with the names of NVIDIA's benchmark</summary>{whole}</details>")
    for title, lines in (
        ("Notes", dict.fromkeys(note for each in reports for note in (*each.verdict.reasons[1:], *each.notes))),
        ("What next", _next_steps(reports)),
    ):
        found = "".join(f"<li>{_with_code(line)}</li>" for line in lines)
        parts += [f'<h2>{title}</h2><ul class="card">{found}</ul>'] if found else []
    parts.append(f'<h2>How it was measured</h2><dl class="card">{"".join(_sources(last))}</dl>')
    return _document(f"{last.model}: trtserve bench", parts)


def _subject(report: BenchReport) -> str:
    """Return what ran, how exact it computes, and how long prompts and answers were."""
    figures, names = report.statistics, {"weights_precision": "weights", "compute_precision": "arithmetic"}
    names["kv_precision"] = "KV cache"
    precision = ", ".join(f"{name} {report.precision[key]}" for key, name in names.items() if key in report.precision)
    lengths = f"{figures.input_tokens_per_request:,.0f} tokens in a prompt"
    lengths += f" and {figures.output_tokens_per_request:,.0f} in an answer, on average"
    return " · ".join(filter(None, (report.runtime and f"runtime {report.runtime}", precision, lengths)))


_TIMES = (
    f"{TPOT} is an average over an answer, {ITL.lower()} a single wait between two tokens. Below a "
    "figure: the interval that holds its true value with 95 % confidence."
)
_MEANINGS: Mapping[Judgement, str] = {
    "valid": "The client kept up, the figures did not drift, and they agree with each other and with the machine.",
    "implausible": "The figures contradict each other or the machine; do not use them.",
    "client-limited": "The server may be faster than these figures.",
    "disturbed": "The server may be faster than these figures.",
    "overloaded": "The server could not keep up, so the times tell how long its queue grew.",
    "not-steady": "A longer run may give other figures.",
}
"""What a verdict says about the figures, for those who meet it first on the page."""


def _verdict(report: BenchReport, load: str = "") -> str:
    """Return the judgement of a run and its first reason; others are among the notes."""
    judgement, reasons = report.verdict.judgement, report.verdict.reasons
    badge = f'<span class="badge {judgement}">{judgement}</span>'
    reason = f" {reasons[0][:1].upper()}{reasons[0][1:]}" if reasons else ""
    return f'<p class="verdict">{badge} {_with_code(load + _MEANINGS[judgement] + reason)}</p>'


def _tiles(report: BenchReport) -> str:
    """Return the few figures that a person looks for first."""
    figures = report.statistics
    tiles = [
        (brief(figures.requests_per_second), "requests/s"),
        (brief(figures.output_tokens_per_second), "output tokens/s"),
        (_milliseconds(figures.time_to_first_token_ms.p50), f"{TTFT}, p50") if report.streaming else None,
        (_milliseconds(figures.time_per_output_token_ms.p50), f"{TPOT}, p50") if report.streaming else None,
        (_milliseconds(figures.latency_ms.p50), f"{LATENCY}, p50"),
        (f"{figures.counts.completed:,} of {figures.counts.planned:,}", "requests answered"),
    ]
    shown = "".join(f"<div><strong>{value}</strong><span>{name}</span></div>" for value, name in filter(None, tiles))
    return f'<div class="tiles">{shown}</div>'


def _milliseconds(value: float | None) -> str:
    return "–" if value is None or math.isinf(value) else milliseconds(value)


def _next_steps(reports: Sequence[BenchReport]) -> Iterator[str]:
    """Yield what a reader may do with the result; commands are between backquotes."""
    last = reports[-1]
    bench = shlex.join(["trtserve", "bench", *_target(last.command)])
    if any(report.few for report in reports):
        yield f"Measure longer, so that high percentiles have an interval: `{bench} --num-requests 500`"
    if len(reports) == 1:
        yield f"See how latency grows with the load: `{bench} --sweep-concurrency 1,2,4,8,16 --html sweep.html`"
    if not last.goals:
        yield f"Count only answers that are fast enough for you: `{bench} --slo ttft=500ms,itl=50ms`"
    yield "After a change, tell it from chance: `trtserve bench compare BEFORE AFTER` (folders of `--out`)"
    yield "What the figures and verdicts mean: `trtserve help how-to/bench-results`"
    yield 'Let the machine look for better settings: `trtserve tune SETUP.yaml --goal "ttft p99 < 500 ms"`'


def _target(command: str) -> Iterator[str]:
    """Yield the words of a command that say which server it measured, and how it is reached."""
    try:
        words = shlex.split(command)
    except ValueError:  # a result is a file that anyone may have changed
        return
    for word, after in pairwise([*words, ""]):
        flag, equals, _ = word.partition("=")
        if flag.replace("_", "-") in _TARGET:
            yield from [word] if equals or flag in _SWITCHES else [word, after]


_SWITCHES = ("--ssl", "-s", "--chat")
_TARGET = (
    *("--server", "--host", "--http-port", "--grpc-port", "--url", "--openai", "--api-key", "--model", "-m"),
    *("--protocol", "-i", "--root-certificates", "--private-key", "--certificate-chain", *_SWITCHES),
)


def _with_code(text: str) -> str:
    """Return text as HTML, with what is between backquotes as code."""
    return re.sub("`([^`]*)`", r"<code>\1</code>", html.escape(text))


def _document(title: str, parts: Sequence[str]) -> str:
    style = Path(__file__).with_suffix(".css").read_text(encoding="utf-8")
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>\n{style}</style>"
    )
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'


@dataclass(frozen=True, kw_only=True)
class FrontPoint:
    """A configuration in the plane of throughput and latency."""

    throughput: float
    ms: float
    name: str
    kind: str  # its colour: whether it was measured and meets the goal
    on_front: bool  # whether no other measured point has more throughput and less latency


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
    colour = _field("kind", "nominal", "")
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
    plot = _plot(
        "Throughput and latency; the line joins what nothing else beats in both",
        [asdict(point) for point in points],
        layer=layers,
    )
    first, *rest = lines
    parts = [f"<h1>{html.escape(first)}</h1>", *(f"<p>{html.escape(line)}</p>" for line in rest)]
    parts.append(f'<div class="plots">{"".join(_drawn(convert, [plot]))}</div>')
    for heading, columns, rows in tables:
        parts += [] if not rows else [f"<h2>{html.escape(heading)}</h2>{_table(columns, rows)}"]
    write_whole(path, _document(title, parts))


def _sources(report: BenchReport) -> Iterator[str]:
    """Yield what a reader needs to measure the same again, as terms and their descriptions."""
    facts: dict[str, object] = {
        "Command": report.command,
        "Began": f"{report.started[:19].replace('T', ' ')} UTC",
        "Machine": report.machine,
        "Versions": report.versions,
        "Prompts (SHA-256)": report.prompts_sha256,
        "Engine or repository": report.fingerprint,
    }
    for name, value in facts.items():
        text = value
        if isinstance(value, Mapping):
            text = ", ".join(_fact(*each, value) for each in value.items() if each[1] not in (None, False))
        if text:
            yield f"<dt>{name}</dt><dd>{html.escape(str(text))}</dd>"


_FACTS = {
    "server_here": "client and server on this machine",
    "other_programs": "other programs used {other_programs:.1f} of {cpus} processors on average",
    "server_waited": "the server's threads waited for one {server_waited:.0%} of the time they had work",
}


def _fact(name: str, value: object, facts: Mapping[str, object]) -> str:
    if name in _FACTS:
        return _FACTS[name].format(**facts)
    if name.endswith("_bytes") and isinstance(value, int):
        name, value = name.removesuffix("_bytes"), format_bytes(value)
    if value is True:
        return name.replace("_", " ")
    return f"{name.replace('_', ' ')} {f'{value:.3g}' if isinstance(value, float) else value}"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], look: str = "") -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    body = "".join(f"<tr>{''.join(f'<td>{_cell(cell)}</td>' for cell in row)}</tr>" for row in rows)
    named = f' class="{look}"' if look else ""
    return f'<div class="table"><table{named}><tr>{head}</tr>{body}</table></div>'


def _cell(text: str) -> str:
    """Return a cell of a table as HTML; an interval in brackets stands under its figure."""
    figure, bracket, interval = text.partition(" (")
    under = f"<small>{html.escape(interval.removesuffix(')'))}</small>" if bracket and " – " in interval else ""
    return html.escape(figure) + under if under else html.escape(text)
