"""How a benchmark ends: its figures as JSON, and a line and an exit code for every reach that was missed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# What a benchmark ends with that came to its end and missed a reach.
MISSED = 3


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A measured value and its reach: the lowest that will do, or with `at_most` the highest."""

    case: str
    value: float
    reach: float
    at_most: bool = False

    @property
    def missed(self) -> bool:
        """Whether the value is on the wrong side of its reach."""
        return self.value > self.reach if self.at_most else self.value < self.reach


def finish(folder: Path, name: str, report: Mapping[str, Any], figures: Iterable[Figure]) -> None:
    """Write `report`, dataclasses included, to FOLDER/NAME.json; ends with code MISSED where a reach was missed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(report, indent=2, default=asdict) + "\n", encoding="utf-8")
    missed = [figure for figure in figures if figure.missed]
    for figure in missed:
        print(f"Missed: {figure.case} {figure.value:.3f}, reach {'≤' if figure.at_most else '≥'} {figure.reach:.2f}")
    if missed:
        sys.exit(MISSED)
