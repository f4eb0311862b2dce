"""Two ways to do the same thing, measured in alternating pairs."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.benchmarks.results import Figure


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Medians over the pairs in `unit`; `ratio` is the median of the first over the second, pair by pair."""

    case: str
    unit: str
    pairs: int
    measured: float
    base: float
    ratio: float
    ratio_lowest: float
    ratio_highest: float
    target: float | None
    at_most: bool

    @property
    def words(self) -> str:
        """The target as the tables show it."""
        return "–" if self.target is None else f"{'≤' if self.at_most else '≥'} {self.target:.2f}"


def compare(
    case: str,
    measured: Callable[[int], float],
    base: Callable[[int], float],
    *,
    pairs: int,
    unit: str,
    target: float | None,
    at_most: bool = False,
) -> Comparison:
    """Call both with the number of the pair; whoever begins changes from pair to pair, and pair 0 warms both.

    `target` is the lowest ratio that will do, with `at_most` the highest; None where nothing is asked.
    """
    found: dict[bool, list[float]] = {True: [], False: []}
    for number in range(pairs + 1):
        for ours in (True, False) if number % 2 else (False, True):
            value = (measured if ours else base)(number)
            if number:
                found[ours].append(value)
    ratios = [mine / other for mine, other in zip(found[True], found[False], strict=True)]
    # A benchmark of many rows may be ended before it prints its table.
    print(f"{case}: {' '.join(f'{ratio:.2f}' for ratio in ratios)}", file=sys.stderr, flush=True)
    return Comparison(
        case=case,
        unit=unit,
        pairs=pairs,
        measured=statistics.median(found[True]),
        base=statistics.median(found[False]),
        ratio=statistics.median(ratios),
        ratio_lowest=min(ratios),
        ratio_highest=max(ratios),
        target=target,
        at_most=at_most,
    )


def figures(rows: Sequence[Comparison]) -> list[Figure]:
    """Return the rows that have a target."""
    return [
        Figure(case=row.case, value=row.ratio, target=row.target, at_most=row.at_most)
        for row in rows
        if row.target is not None
    ]


def table(rows: Sequence[Comparison], *, measured: str = "With", base: str = "Without") -> str:
    """The rows as a Markdown table; `measured` and `base` head the two columns of medians."""
    lines = [
        f"| Case | {measured} | {base} | Ratio | Lowest … highest | Target | Pairs |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {row.case} | {row.measured:.4g} {row.unit} | {row.base:.4g} {row.unit} | {row.ratio:.2f} "
        f"| {row.ratio_lowest:.2f} … {row.ratio_highest:.2f} | {row.words} | {row.pairs} |"
        for row in rows
    ]
    return "\n".join(lines)
