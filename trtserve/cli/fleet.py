"""`trtserve plan --fleet`: how many replicas of which shape meet a goal, checked by a simulated day."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from trtserve.cli.output import print_data, print_json, print_table
from trtserve.errors import MissedLimitError, counted

if TYPE_CHECKING:
    from trtserve.pipeline.fleet.simulation import Simulated
    from trtserve.pipeline.fleet.sizing import SimulatedDay, Sized
    from trtserve.progress import Progress

_FIGURES = ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99")


def plan_fleet(file: Path | None, *, hours: int, write: Path | None, json: bool, progress: Progress) -> None:
    """Print the plan. Raises MissedLimitError if the nodes do not suffice, or the simulated day misses the goal."""
    from trtserve.pipeline.fleet.content import read_fleet
    from trtserve.pipeline.fleet.handover import hand_over
    from trtserve.pipeline.fleet.sizing import simulate, size

    fleet = read_fleet(Path(str(file)))
    shapes = size(fleet)
    chosen, day, figures = shapes[0], None, dict[str, float]()
    if hours and chosen.fits:
        progress.step(f"Simulating {counted(hours, 'hour')} of {counted(chosen.replicas + chosen.spare, 'replica')}")
        day = simulate(fleet, chosen, hours=hours)
        figures = figures_of(day.found)
    written = hand_over(fleet, chosen, write) if write is not None else []
    if json:
        print_json("plan", _described(shapes, day, figures, written))
    else:
        _print(shapes, day, figures, hours)
        for path in written:
            print_data(str(path))
    if not chosen.fits:
        available = f"there {'is' if chosen.available == 1 else 'are'} {chosen.available}"
        raise MissedLimitError(
            f"{fleet.goal} needs {counted(chosen.nodes, 'node')} for {chosen.shape}; {available}.",
            hint="Add nodes, a faster shape, or relax the goal.",
        )
    missed = [name for name, limit in fleet.limits_ms.items() if figures and figures[name] > limit]
    if missed:
        raise MissedLimitError(
            f"The simulated day misses {fleet.goal}: {', '.join(f'{name} {figures[name]:.4g} ms' for name in missed)}.",
            hint="The table shows the hours. Lower update.at_once, add a faster shape, or relax the goal.",
        )


def figures_of(day: Simulated) -> dict[str, float]:
    """Return the figures of a goal, in milliseconds."""
    found = {}
    for name in _FIGURES:
        measure, _, quantile = name.partition("_p")
        value = (day.first if measure == "ttft" else day.gap).quantile(int(quantile) / 100)
        found[name] = math.inf if value is None else 1000 * value
    return found


def _described(
    shapes: Sequence[Sized], day: SimulatedDay | None, figures: dict[str, float], written: Sequence[Path]
) -> dict[str, object]:
    content: dict[str, object] = {
        "shapes": [{**asdict(each), "fits": each.fits} for each in shapes],
        "written": [str(path) for path in written],
    }
    if day is not None:
        found = day.found
        content["simulated"] = {
            "replicas": day.replicas,
            "minutes_of_each_hour": day.minutes,
            "requests": found.requests,
            "completed": found.completed,
            "failed": found.failed,
            "events": found.events,
            "output_tokens": found.tokens,
            "cached_tokens": found.cached_tokens,
            "longest_queue": found.longest_queue,
            "figures_ms": figures,
            "ttft_p99_ms_by_hour": {hour: 1000 * (each.quantile(0.99) or 0) for hour, each in found.hours.items()},
        }
    return content


def _print(shapes: Sequence[Sized], day: SimulatedDay | None, figures: dict[str, float], hours: int) -> None:
    rows = [
        (
            each.shape,
            f"{each.fewest} to {each.replicas}",
            str(each.spare),
            f"{each.nodes} of {each.available}",
            f"{each.price:,.2f}" if each.price else "",
            *(f"{each.pooled.figures[name]:.4g} to {each.expected.figures[name]:.4g}" for name in _FIGURES),
        )
        for each in shapes
    ]
    titles = [f"{name.replace('_', ' ')} (ms)" for name in _FIGURES]
    print_table(("shape", "replicas", "spare", "nodes", "price/h", *titles), rows)
    if day is None:
        return
    print_data("")
    found = day.found
    many = counted(hours, "hour")
    scale = many if day.minutes == 60 else f"{day.minutes:.3g} minutes of each of {many}"
    scale += "" if day.part == 1 else f", {day.part:.1%} of the fleet"
    answered = f"{found.completed:,} answered, {found.failed:,} cut off"
    cached = f"{found.cached_tokens / 1e6:,.1f} M tokens from caches"
    print_data(f"Simulated ({scale}): {found.requests:,} requests, {answered}, {cached}")
    print_data(", ".join(f"{name.replace('_', ' ')} {figures[name]:.4g} ms" for name in _FIGURES))
    print_table(
        ("hour", "ttft p50 (ms)", "ttft p99 (ms)"),
        [
            (str(hour), *(f"{1000 * (each.quantile(quantile) or 0):.4g}" for quantile in (0.5, 0.99)))
            for hour, each in sorted(found.hours.items())
        ],
    )
