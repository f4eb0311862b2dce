"""`tune` on made-up machines in virtual time: how good what it finds is, in how much of a sweep's time; also of equals.

Each machine is drawn anew from its seed, so take seeds that nothing was chosen on. `--count 120` takes about ten
minutes of one core.
"""

from __future__ import annotations

import statistics
from typing import Any

from tests.benchmarks.frame import Row, benchmark_parser, finish, table
from tests.support.tuning_landscapes import GOALS, SIZES, Landscape, Score, score


def tenth(values: list[float], *, worst: float) -> float:
    """Return the value that a tenth of them are as bad as, or worse; `worst` is 0 where low is bad, or 1."""
    return sorted(values, reverse=bool(worst))[max(0, len(values) // 10 - 1)]


def searches(first: int, count: int, *, equal: bool = False) -> list[tuple[str, Score]]:
    """Search one machine after the other, of both sizes and for all goals in turn."""
    found = []
    for number in range(count):
        size, goal = list(SIZES)[number % len(SIZES)], GOALS[number // len(SIZES) % len(GOALS)]
        case = f"{size} {first + number}, {goal}"
        each = score(
            Landscape.random(size, first + number), "none" if equal else goal, seed=first + number, equal=equal
        )
        found_part = "among equals" if equal else f"found {each.found:.3f}"
        print(f"{case}: {found_part} in {each.time:.3f} of the time, {each.trials} trials", flush=True)
        found.append((case, each))
    return found


def main() -> None:
    """Search, print the table and write landscapes.json."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--count", type=int, default=120, help="machines, and a third as many with equals")
    parser.add_argument("--first", type=int, default=2000, help="seed of the first one")
    arguments = parser.parse_args()
    found = searches(arguments.first, arguments.count)
    scores = [each for _, each in found]
    parts, times = [each.found for each in scores], [each.time for each in scores]
    owns = [each.own for each in scores if each.own is not None]
    rows = [
        Row(case="found ÷ best: median", value=statistics.median(parts), target=0.97),
        Row(case="found ÷ best: worst tenth", value=tenth(parts, worst=0), target=0.97),
        Row(case="found ÷ best: worst", value=min(parts)),
        Row(case="time ÷ the sweep's: median", value=statistics.median(times), target=0.2, at_most=True),
        Row(case="time ÷ the sweep's: worst", value=max(times), target=0.2, at_most=True),
        Row(case="found ÷ the file's own: median", value=statistics.median(owns)),
        Row(case="found ÷ the file's own: worst", value=min(owns), target=1.0),
    ]
    for name, first, later in (("tokens_per_second", 0.25, 0.1), ("ttft_mean", 0.25, 0.1)):
        for when, target in enumerate((first, later)):
            errors = [error for each in scores if (error := each.errors[name][when]) is not None]
            words = "before any trial" if not when else "after three"
            rows.append(
                Row(case=f"error of {name}, {words}", value=statistics.median(errors), target=target, at_most=True)
            )
    equals = searches(arguments.first, max(1, arguments.count // 3), equal=True)
    winners = [case for case, each in equals if each.search.outcome.best and each.search.outcome.best.candidate.values]
    share = len(winners) / len(equals)
    rows.append(Row(case=f"winners among equals, of {len(equals)}", value=share, target=0.05, at_most=True))
    print(table(rows))
    details: list[Any] = [
        {"case": case, "found": each.found, "time": each.time, "own": each.own} for case, each in found
    ]
    finish(arguments, "landscapes", rows, details=[*details, {"winners": winners}])


if __name__ == "__main__":
    main()
