"""Measured speed of the stages on this machine, kept in the store, to predict the duration of new runs."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from trtserve.errors import ArtifactError, TrtserveError
from trtserve.files import read_json_object, write_json
from trtserve.store import Store

_FILE = "rates.json"
# Starting processes and loading libraries takes a second regardless of size, so a small run cannot predict a model
# several times larger.
_TELLING_BYTES = 128 * 2**20
_FEW_TIMES = 4
_MOST = 1 << 60  # bytes or seconds; a float does not hold every number of JSON

Runs = Mapping[str, Sequence[Mapping[str, Any]]]


@contextmanager
def timed(store: Store, stage: str, size: int) -> Iterator[None]:
    """Record how long the block took for `size` bytes of `stage` unless it raises; an unwritable store is ignored.

    The newest run per power of two of bytes is kept.
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
    """Return the runs of each stage, oldest first."""
    with suppress(FileNotFoundError, ArtifactError):
        content = read_json_object(store.root / _FILE)
        return {stage: [run for run in runs if _is_run(run)] for stage, runs in content.items() if type(runs) is list}
    return {}


def _is_run(content: object) -> bool:
    """Return whether a record is valid; other versions or users may have written anything."""
    return (
        isinstance(content, dict)
        and type(content.get("bytes")) is int
        and 0 < content["bytes"] < _MOST
        and isinstance(content.get("seconds"), (int, float))
        and 0 <= content["seconds"] < _MOST
    )


def expected_seconds(runs: Runs, stage: str, size: int) -> float | None:
    """Predict a stage's seconds for `size` bytes, in proportion to the measured run of the closest size.

    The newest run counts among equal sizes. Returns None without a comparable run: small ones mostly measure start-up.
    """
    measured = [run for run in runs.get(stage, []) if run["seconds"] > 0 and _speaks(int(run["bytes"]), size)]
    if not measured or size <= 0:
        return None
    nearest = min(reversed(measured), key=lambda run: abs(math.log(run["bytes"] / size)))
    return float(nearest["seconds"]) * size / int(nearest["bytes"])


def _speaks(measured: int, size: int) -> bool:
    """Return whether a run over `measured` bytes predicts one over `size`."""
    return measured >= _TELLING_BYTES or 0 < size <= _FEW_TIMES * measured
