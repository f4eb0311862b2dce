"""What benchmarks share: options, measuring in alternating pairs, rows with targets, their table and their JSON."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MISSED = 3
"""Exit code of a benchmark that ran to its end and missed a target."""
_NOTHING_COMPILED = "PYTHONDONTWRITEBYTECODE"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A figure and its target: the lowest that will do, or with `at_most` the highest; None: nothing is asked.

    Of pairs it is the median of ratios or differences, pair by pair; `measured` and `base` are the sides' medians.
    """

    case: str
    value: float
    target: float | None = None
    at_most: bool = False
    measured: float | None = None
    base: float | None = None
    lowest: float | None = None
    highest: float | None = None
    pairs: int | None = None

    @property
    def missed(self) -> bool:
        """Whether the value is on the wrong side of its target."""
        if self.target is None:
            return False
        return self.value > self.target if self.at_most else self.value < self.target

    @property
    def wanted(self) -> str:
        """The target as the table shows it."""
        return "–" if self.target is None else f"{'≤' if self.at_most else '≥'} {_number(self.target)}"


def spread(case: str, values: Sequence[float], **rest: Any) -> Row:
    """Return the median of several measurements with the lowest and the highest."""
    return Row(case=case, value=statistics.median(values), lowest=min(values), highest=max(values), **rest)


def compare(
    case: str,
    measured: Callable[[int], float],
    base: Callable[[int], float],
    *,
    pairs: int,
    difference: bool = False,
    target: float | None = None,
    at_most: bool = False,
) -> Row:
    """Call both with the number of the pair; whoever begins changes from pair to pair, and pair 0 warms both.

    The figure is `measured` ÷ `base`, or with `difference` what `measured` adds.
    """
    found: dict[bool, list[float]] = {True: [], False: []}
    for number in range(pairs + 1):
        for ours in (True, False) if number % 2 else (False, True):
            value = (measured if ours else base)(number)
            if number:
                found[ours].append(value)
    both = zip(found[True], found[False], strict=True)
    values = [mine - other if difference else mine / other for mine, other in both]
    # A benchmark of many rows may be ended before it prints its table.
    print(f"{case}: {' '.join(map(_number, values))}", file=sys.stderr, flush=True)
    medians = (statistics.median(found[ours]) for ours in (True, False))
    return spread(
        case,
        values,
        pairs=pairs,
        target=target,
        at_most=at_most,
        **dict(zip(("measured", "base"), medians, strict=True)),
    )


def table(rows: Sequence[Row], *, measured: str = "With", base: str = "Without", value: str = "Ratio") -> str:
    """Return the rows as Markdown, without columns that are empty; the names head the columns of figures."""
    columns = {
        "Case": [row.case for row in rows],
        measured: [_number(row.measured) for row in rows],
        base: [_number(row.base) for row in rows],
        value: [_number(row.value) for row in rows],
        "Lowest … highest": [
            "–" if row.lowest is None else f"{_number(row.lowest)} … {_number(row.highest)}" for row in rows
        ],
        "Target": [row.wanted for row in rows],
        "Pairs": ["–" if row.pairs is None else str(row.pairs) for row in rows],
    }
    filled = {head: cells for head, cells in columns.items() if {*cells} != {"–"}}
    lines = [list(filled), ["---", *["--:"] * (len(filled) - 1)], *zip(*filled.values(), strict=True)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def benchmark_parser(description: str | None) -> argparse.ArgumentParser:
    """Return the options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--work", type=_folder, default=_folder(".bench"), help="folder that keeps models between runs")
    parser.add_argument("--out", type=_folder, help="folder for the figures as JSON; default: the work folder")
    parser.add_argument("--pairs", type=int, default=7, help="alternating pairs, where things are compared in pairs")
    return parser


def _folder(name: str) -> Path:
    folder = Path(name).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def finish(arguments: argparse.Namespace, name: str, rows: Sequence[Row], **more: Any) -> None:
    """Write the rows and what else was found to NAME.json; exit with MISSED if a target was missed."""
    report: Mapping[str, Any] = {"cpus": len(os.sched_getaffinity(0)), "rows": rows, **more}
    file = (arguments.out or arguments.work) / f"{name}.json"
    file.write_text(json.dumps(report, indent=2, default=asdict) + "\n", encoding="utf-8")
    missed = [row for row in rows if row.missed]
    for row in missed:
        print(f"Missed: {row.case} {row.value:.3f}, target {row.wanted}")
    if missed:
        sys.exit(MISSED)


def environment(**variables: str) -> dict[str, str]:
    """That of this process and `variables`; modules are compiled once, as for users, and not at each start."""
    return {name: value for name, value in os.environ.items() if name != _NOTHING_COMPILED} | variables
