"""How fast the stages were on this machine: runs are remembered in the store, and new ones are foreseen from them."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal

from trtserve.errors import TrtserveError
from trtserve.store import Store, write_json

TimedStage = Literal["pull", "convert", "build", "trtllm-build", "start"]

_FILE = "rates.json"
_KEPT = 8

Runs = Mapping[str, Sequence[Mapping[str, Any]]]


@contextmanager
def timed(store: Store, stage: TimedStage, size: int) -> Iterator[None]:
    """Remember how long the block took for `size` bytes, unless it raises; an unwritable store is no reason to fail."""
    began = time.monotonic()
    yield
    seconds = time.monotonic() - began
    runs = {key: list(value) for key, value in read_rates(store).items()}
    runs[stage] = [*runs.get(stage, []), {"bytes": size, "seconds": round(seconds, 3)}][-_KEPT:]
    with suppress(TrtserveError, OSError):
        write_json(store.root / _FILE, runs)


def read_rates(store: Store) -> Runs:
    """The runs of each stage, oldest first; none where nothing was measured yet."""
    with suppress(OSError, ValueError):
        content = json.loads((store.root / _FILE).read_text(encoding="utf-8"))
        if isinstance(content, dict):
            return content
    return {}


def expected_seconds(runs: Runs, stage: TimedStage, size: int) -> float | None:
    """Seconds of a stage over `size` bytes, in proportion to the measured run of the nearest size; None without one.

    Of several of the same size the newest counts.
    """
    measured = [run for run in runs.get(stage, []) if run["bytes"] > 0 and run["seconds"] > 0]
    if not measured or size <= 0:
        return None
    nearest = min(reversed(measured), key=lambda run: abs(math.log(run["bytes"] / size)))
    return float(nearest["seconds"]) * size / int(nearest["bytes"])
