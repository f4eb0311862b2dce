"""`trtserve bench report` and `compare`: read results again, and print them."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from trtserve.cli import output
from trtserve.cli.completion import paths
from trtserve.cli.options import JsonOption
from trtserve.errors import DoubtfulResultError, RegressionError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trtserve.bench import Report
    from trtserve.bench.compare import Difference

Table = Literal["upstream", "genai-perf"]
ResultArgument = Annotated[
    Path, typer.Argument(metavar="RESULT", help="Folder of --out, or its requests.jsonl.", autocompletion=paths)
]


def report(
    *,
    result: ResultArgument,
    table: Annotated[
        str, typer.Option("--table", metavar="upstream|genai-perf", help="Table to print.")
    ] = "genai-perf",
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write plots and tables as one page (.svg, .png: only the plots)."),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Fail if the verdict is not `valid`.")] = False,
    json: JsonOption = False,
) -> None:
    """Compute the figures of a result again from its records.

    Examples:
        trtserve bench report results
        trtserve bench report results/requests.jsonl --html results.html
    """
    from trtserve.bench.report import read_report

    if table not in ("upstream", "genai-perf"):
        raise UsageError(f"--table is {table!r}; expected upstream or genai-perf.")
    found = read_report(result)
    if json:
        output.print_json("bench report", found.to_json())
    else:
        print_report(found, table="upstream" if table == "upstream" else "genai-perf")
    say_course(found, output.say)
    for note in found.notes:
        output.say(f"note: {note}")
    output.say(f"Verdict: {found.verdict}")
    if html is not None:
        from trtserve.bench.plots import write_plots

        write_plots([found], html)
        output.say(f"Written: {html}")
    if strict and not found.verdict.valid:
        raise DoubtfulResultError(f"The verdict is {found.verdict}")


RunsArgument = typer.Argument(
    help="Folder of --out, or a folder with one such folder for each run.", autocompletion=paths
)


def compare(
    *,
    before: Annotated[Path, RunsArgument],
    after: Annotated[Path, RunsArgument],
    max_regression: Annotated[
        str, typer.Option("--max-regression", metavar="5%", help="How much worse a mean time may be.")
    ] = "0%",
    drift: Annotated[
        str,
        typer.Option(
            "--drift",
            metavar="5%",
            help="How far two runs of one server differ by themselves; several runs on each side tell it instead.",
        ),
    ] = "5%",
    json: JsonOption = False,
) -> None:
    """Compare results of two servers; ends with code 52 if AFTER is worse than allowed, beyond the uncertainty.

    One run on each side cannot tell a change from drift: its interval is wider by --drift. With several runs, best
    measured in turn, the interval comes from the differences between runs. Results of the same requests (same traffic
    and --seed) are compared request by request.

    Examples:
        trtserve bench compare monday tuesday
        trtserve bench compare old-runs new-runs --max-regression 5%
    """
    from trtserve.bench.compare import compare as compare_reports
    from trtserve.bench.compare import take_turns
    from trtserve.bench.report import read_runs

    allowed, between = _percentage("--max-regression", max_regression), _percentage("--drift", drift)
    sides = read_runs(before), read_runs(after)
    differences = compare_reports(*sides, drift=between)
    if json:
        rows = [{**asdict(each), "regression": each.worse_than(allowed)} for each in differences]
        output.print_json("bench compare", {"max_regression": allowed, "drift": between, "differences": rows})
    else:
        output.print_table(
            ("Mean", "Before", "After", "Change", "95 % interval", "Judgement"),
            [_row(each, allowed) for each in differences],
        )
    single = len(sides[0]) == 1
    if single:
        output.say(
            f"note: one run on each side cannot tell a change from drift; the intervals allow {between:.0%} for it."
        )
    elif not take_turns(*sides):
        output.say("note: the runs of both sides did not take turns, so that slow drift looks like a change.")
    worse = [each for each in differences if each.worse_than(allowed)]
    if worse:
        found = "; ".join(f"{each.name} by {each.relative:+.1%}" for each in worse)
        raise RegressionError(
            f"{after} is worse than {before} by more than {allowed:.1%}: {found}.",
            hint="Measure each several times, in turn, before you believe it." if single else None,
        )


def _percentage(flag: str, text: str) -> float:
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise UsageError(f"{flag} is {text!r}; expected a percentage such as 5%.")
    return value / 100


def _row(each: Difference, allowed: float) -> tuple[str, ...]:
    judgement = "worse" if each.worse_than(allowed) else "better" if each.better else "no difference seen"
    if each.interval is None:
        interval, judgement = "not enough data", "unknown"
    else:
        interval = f"{each.interval[0]:+.1%} – {each.interval[1]:+.1%}"
    if each.runs == (1, 1):
        compared = f"{each.pairs} {'pairs of requests' if each.paired else 'answers'}"
    else:
        compared = f"{each.pairs} pairs of runs" if each.paired else "{} and {} runs".format(*each.runs)
    return (
        f"{each.name}, {compared}",
        f"{each.before:.2f}",
        f"{each.after:.2f}",
        f"{each.relative:+.1%}",
        interval,
        judgement,
    )


def print_report(found: Report, *, table: Table) -> None:
    """Print the table of one result."""
    from trtserve.bench.report import COLUMNS
    from trtserve.bench.statistics import QUANTILES

    if table == "upstream":
        output.print_table(COLUMNS, [*found.rows(), ("Verdict", found.verdict.judgement)])
    else:
        columns = ("Statistic", "avg", "min", "max", *QUANTILES)
        output.print_table(columns, found.interval_rows(), title="LLM Metrics (95 % intervals)")
        statistics = found.statistics
        output.print_data(f"Output token throughput (per sec): {statistics.output_tokens_per_second:,.2f}")
        output.print_data(f"Request throughput (per sec): {statistics.requests_per_second:,.2f}")
        output.print_data(f"Verdict: {found.verdict.judgement}")


def say_course(found: Report, say: Callable[[str], None]) -> None:
    """Show how the run went over time, one line of bars for each measure."""
    for name, line in found.sparklines():
        say(f"{name:<12} {line}")


def print_stages(reports: Sequence[Report]) -> None:
    """Print one row for each stage of a sweep."""
    columns = ("Load", "Requests/s", "Tokens/s", "TTFT p50", "TTFT p99", "ITL p50", "Latency p90", "Good/s", "Verdict")
    rows = []
    for each in reports:
        figures = each.statistics
        cells = (
            figures.time_to_first_token_ms.p50,
            figures.time_to_first_token_ms.p99,
            figures.inter_token_ms.p50,
            figures.latency_ms.p90,
            figures.goodput_per_second,
        )
        rows.append(
            (
                each.load,
                f"{figures.requests_per_second:.2f}",
                f"{figures.output_tokens_per_second:.1f}",
                *("n/a" if cell is None else f"{cell:.2f}" for cell in cells),
                each.verdict.judgement,
            )
        )
    output.print_table(columns, rows)
