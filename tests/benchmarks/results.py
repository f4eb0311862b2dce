"""The end of a benchmark: its figures as JSON, and a line and an exit code for missed targets."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Exit code of a benchmark that ran to its end and missed a target.
MISSED = 3


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A measured value and its target: the lowest that will do, or with `at_most` the highest."""

    case: str
    value: float
    target: float
    at_most: bool = False

    @property
    def missed(self) -> bool:
        """Return whether the value is on the wrong side of its target."""
        return self.value > self.target if self.at_most else self.value < self.target


def benchmark_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """The options that every benchmark has; NAME.json goes to --out."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--work", type=Path, required=True, help="folder that keeps models between runs")
    parser.add_argument("--out", type=Path, help=f"folder for {name}.json; default: the work folder")
    parser.add_argument("--pairs", type=int, default=7, help="alternating pairs, where things are compared in pairs")
    return parser


def finish(folder: Path, name: str, report: Mapping[str, Any], figures: Iterable[Figure]) -> None:
    """Write `report`, dataclasses included, to FOLDER/NAME.json; exit with MISSED if a target was missed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(report, indent=2, default=asdict) + "\n", encoding="utf-8")
    missed = [figure for figure in figures if figure.missed]
    for figure in missed:
        print(f"Missed: {figure.case} {figure.value:.3f}, target {'≤' if figure.at_most else '≥'} {figure.target:.2f}")
    if missed:
        sys.exit(MISSED)
