"""`trtserve bench report` and `compare`: read results again, and print them."""

from __future__ import annotations

import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from trtserve.cli import output
from trtserve.cli.options import Fields, JsonOption, QuietOption, paths
from trtserve.errors import DoubtfulResultError, RegressionError, UsageError
from trtserve.specs import BenchRuns

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trtserve.bench.compare import Difference
    from trtserve.bench.report import BenchReport

Table = Literal["upstream", "genai-perf"]
MORE_CLIENT = "Use more --workers, or another machine than the server's."
ResultArgument = Annotated[
    Path,
    typer.Argument(
        metavar="RESULT", help="Folder of --out, of one run or of a sweep, or a requests.jsonl.", autocompletion=paths
    ),
]


def report(
    *,
    result: ResultArgument,
    shown: Annotated[BenchRuns, Fields("table", "html", "strict", defaults={"table": "genai-perf"})],
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Compute the figures of a result again from its records.

    Examples:
        trtserve bench report results
        trtserve bench report results/requests.jsonl --html results.html
    """
    from trtserve.bench.report import read_stages

    if shown.html is not None:
        from trtserve.bench.plots import check_plots

        check_plots(shown.html)
    found = read_stages(result)
    if shown.html is not None:  # before anything is printed: the reader of a pipe may leave early
        from trtserve.bench.plots import write_plots

        write_plots(found, shown.html)
    if json:
        whole = [each.to_json() for each in found]
        output.print_json("bench report", whole[0] if len(found) == 1 else {"stages": whole})
    elif len(found) > 1:
        print_stages(found)
    else:
        print_report(found[0], table=shown.table)
    if not quiet:
        say_notes(found, output.say)
        if shown.html is not None:
            output.say(f"Written: {shown.html}")
    if shown.strict:
        require_valid(found)


RunsArgument = typer.Argument(
    help="Folder of --out, or a folder with one such folder for each run.", autocompletion=paths
)


def compare(
    *,
    before: Annotated[Path, RunsArgument],
    after: Annotated[Path, RunsArgument],
    max_regression: Annotated[
        str, typer.Option("--max-regression", metavar="PERCENT", help="How much worse a mean time may be.")
    ] = "0%",
    drift: Annotated[
        str,
        typer.Option(
            "--drift",
            metavar="PERCENT",
            help="How far two runs of one server may differ by chance; several runs on each side measure it.",
        ),
    ] = "5%",
    json: JsonOption = False,
) -> None:
    """Compare results of two servers; ends with code 52 if AFTER is worse than allowed, beyond the uncertainty.

    AFTER is also worse if more of its requests failed. One run on each side cannot tell a change from drift: its
    interval is wider by --drift. With several runs, best measured in turn, the interval comes from the differences
    between runs. Results of the same requests (same traffic and --seed) are compared request by request.

    Examples:
        trtserve bench compare monday tuesday
        trtserve bench compare old-runs new-runs --max-regression 5%
    """
    from trtserve.bench.compare import compare as compare_reports
    from trtserve.bench.compare import failed_share, take_turns
    from trtserve.bench.report import differing, read_runs

    allowed, between = _percentage("--max-regression", max_regression), _percentage("--drift", drift)
    sides = read_runs(before), read_runs(after)
    differences = compare_reports(*sides, drift=between)
    failed = [failed_share(side) for side in sides]
    if json:
        rows = [{**asdict(each), "regression": each.worse_than(allowed)} for each in differences]
        whole = {"max_regression": allowed, "drift": between, "differences": rows, "failed_shares": failed}
        output.print_json("bench compare", whole)
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
    differ = differing(sides[0][0], sides[1][0])
    if differ:
        output.say(f"note: the sides differ in {', '.join(differ)}.")
    for path, side in zip((before, after), sides, strict=True):
        for verdict in dict.fromkeys(str(each.verdict) for each in side if not each.verdict.valid):
            output.say(f"note: {path} is {verdict}")
    worse = [f"{each.name} by {each.relative:+.1%}" for each in differences if each.worse_than(allowed)]
    if failed[1] > failed[0] + allowed:
        worse.append(f"failed requests, which the means leave out, {failed[0]:.1%} before and {failed[1]:.1%} after")
    if worse:
        raise RegressionError(
            f"{after} is worse than {before} by more than {allowed:.1%}: {'; '.join(worse)}.",
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
    from trtserve.bench.report import brief

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
        brief(each.before),
        brief(each.after),
        f"{each.relative:+.1%}",
        interval,
        judgement,
    )


def print_report(found: BenchReport, *, table: Table | None) -> None:
    """Print the table of one result; None: the short one on a terminal, upstream's elsewhere."""
    from trtserve.bench.report import COLUMNS, SHORT_COLUMNS
    from trtserve.bench.statistics import QUANTILES

    if _is_short(table):
        output.print_table(SHORT_COLUMNS, found.short_rows())
        output.print_block("\n".join(found.facts()))
    elif table != "genai-perf":
        output.print_table(COLUMNS, [*found.rows(), ("Verdict", found.verdict.judgement)])
    else:
        columns = ("Statistic", "avg", "min", "max", *QUANTILES)
        output.print_table(columns, found.interval_rows(), title="LLM Metrics (95 % intervals)")
        statistics = found.statistics
        output.print_data(f"Output token throughput (per sec): {statistics.output_tokens_per_second:,.2f}")
        output.print_data(f"Request throughput (per sec): {statistics.requests_per_second:,.2f}")
        output.print_data(f"Verdict: {found.verdict.judgement}")


def _is_short(table: Table | None) -> bool:
    return table is None and sys.stdout.isatty()


def say_notes(reports: Sequence[BenchReport], say: Callable[[str], None]) -> None:
    """Tell what a reader of the figures must know, what several runs have in common once, and at the end the result."""
    from trtserve.bench.report import FEW_NOTE

    if any(report.few for report in reports):
        say(FEW_NOTE)
    common = [note for note in reports[0].notes if all(note in report.notes for report in reports)]
    for note in common:
        say(f"note: {note}")
    for report in reports:
        load = f" at {report.load}" if len(reports) > 1 else ""
        if not load:  # how the run went over time
            for name, line in report.sparklines():
                say(f"{name:<19} {line}")
        for note in report.notes:
            if note not in common:
                say(f"note{load}: {note}")
        if not load:  # the last lines are what a small terminal still shows
            say(f"Result: {report.headline}")
        say(f"Verdict{load}: {report.verdict}")
    if any(report.verdict.judgement == "client-limited" for report in reports):
        say(f"hint: {MORE_CLIENT}")


def require_valid(reports: Sequence[BenchReport]) -> None:
    """Raise DoubtfulResultError for --strict; stages of a sweep may be beyond what the server can do."""
    for report in reports:
        doubtful = report.verdict.judgement in ("client-limited", "disturbed", "implausible")
        if doubtful or (len(reports) == 1 and not report.verdict.valid):
            where = f" at {report.load}" if len(reports) > 1 else ""
            raise DoubtfulResultError(
                f"The verdict{where} is {report.verdict}", hint="Change the load or the machine, or leave --strict out."
            )


def print_stages(reports: Sequence[BenchReport]) -> None:
    """Print one row for each stage of a sweep."""
    from trtserve.bench.report import stage_rows

    columns, *rows = stage_rows(reports)
    output.print_table(columns, rows)
