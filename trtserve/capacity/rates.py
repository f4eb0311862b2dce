"""How fast the stages were on this machine: runs are remembered in the store, and new ones are foreseen from them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal

from trtserve.errors import ArtifactError, TrtserveError
from trtserve.files import read_json_object, write_json
from trtserve.store import Store

TimedStage = Literal["pull", "convert", "build", "trtllm-build", "start"]

_FILE = "rates.json"
# The start of processes and the loading of libraries take a second whatever the size: what a smaller run took says
# nothing of a model that is more than a few times larger.
_TELLING_BYTES = 128 * 2**20
_FEW_TIMES = 4

Runs = Mapping[str, Sequence[Mapping[str, Any]]]


@contextmanager
def timed(store: Store, stage: TimedStage, size: int) -> Iterator[None]:
    """Remember how long the block took for `size` bytes, unless it raises; an unwritable store is no reason to fail.

    One run is kept for each power of two of bytes, the newest.
    """
    began = time.monotonic()
    yield
    seconds = time.monotonic() - began
    runs = {key: list(value) for key, value in read_rates(store).items()}
    others = [run for run in runs.get(stage, []) if run["bytes"].bit_length() != size.bit_length()]
    runs[stage] = [*others, {"bytes": size, "seconds": round(seconds, 3)}]
    with suppress(TrtserveError, OSError):
        write_json(store.root / _FILE, runs)


def read_rates(store: Store) -> Runs:
    """The runs of each stage, oldest first; none where nothing was measured yet."""
    with suppress(FileNotFoundError, ArtifactError):
        content = read_json_object(store.root / _FILE)
        return {stage: [run for run in runs if _is_run(run)] for stage, runs in content.items() if type(runs) is list}
    return {}


def _is_run(content: object) -> bool:
    """Whether another version, or a user, left no statistic that stops what it counts."""
    return (
        isinstance(content, dict)
        and type(content.get("bytes")) is int
        and isinstance(content.get("seconds"), (int, float))
    )


def expected_seconds(runs: Runs, stage: TimedStage, size: int) -> float | None:
    """Seconds of a stage over `size` bytes, in proportion to the measured run of the nearest size.

    Of several of the same size the newest counts. None without a run that can speak for so many bytes: a small one
    is mostly the start of its process.
    """
    measured = [run for run in runs.get(stage, []) if run["seconds"] > 0 and _speaks(int(run["bytes"]), size)]
    if not measured or size <= 0:
        return None
    nearest = min(reversed(measured), key=lambda run: abs(math.log(run["bytes"] / size)))
    return float(nearest["seconds"]) * size / int(nearest["bytes"])


def _speaks(measured: int, size: int) -> bool:
    """Whether a run over `measured` bytes says something of one over `size`."""
    return measured >= _TELLING_BYTES or 0 < size <= _FEW_TIMES * measured
