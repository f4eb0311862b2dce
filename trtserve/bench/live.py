"""Counters that a worker updates while it sends, and that its parent process reads without a lock or a queue."""

from __future__ import annotations

import math
from collections.abc import MutableSequence, Sequence
from multiprocessing.sharedctypes import RawArray

_COUNTERS = ("sent", "ended", "failed")
_PER_DECADE = 20  # buckets of the histogram are 12 % wide
_DECADES = 7  # 10 µs to 100 s
_SMALLEST_MS = 0.01
SIZE = len(_COUNTERS) + _PER_DECADE * _DECADES


class Live:
    """Counts of one worker and a histogram of times to the first response; only the worker writes."""

    def __init__(self, cells: MutableSequence[int] | None = None) -> None:
        self.cells: MutableSequence[int] = [0] * SIZE if cells is None else cells

    def sent(self) -> None:
        """Count a request that was sent."""
        self.cells[0] += 1

    def ended(self, *, failed: bool, first_ms: float | None) -> None:
        """Count a request that ended, whose first response came after `first_ms`."""
        self.cells[1] += 1
        self.cells[2] += failed
        if first_ms is not None:
            place = int(math.log10(max(first_ms, _SMALLEST_MS) / _SMALLEST_MS) * _PER_DECADE)
            self.cells[len(_COUNTERS) + min(place, SIZE - len(_COUNTERS) - 1)] += 1

    def reset(self) -> None:
        """Forget the warm-up."""
        for place in range(SIZE):
            self.cells[place] = 0


def shared_cells() -> MutableSequence[int]:
    """Return cells in memory that a child process shares."""
    cells: MutableSequence[int] = RawArray("q", SIZE)
    return cells


class Totals:
    """The sum over all workers at one moment."""

    def __init__(self, workers: Sequence[Live]) -> None:
        cells = [sum(column) for column in zip(*(worker.cells for worker in workers), strict=True)]
        self.sent, self.ended, self.failed = cells[: len(_COUNTERS)]
        self._histogram = cells[len(_COUNTERS) :]

    @property
    def in_flight(self) -> int:
        """Requests that were sent and have not ended."""
        return int(self.sent - self.ended)

    def first_ms(self, quantile: float) -> float | None:
        """Return a percentile of the time to the first response, within 12 %, or None before the first."""
        wanted, seen = quantile * sum(self._histogram), 0
        for place, count in enumerate(self._histogram):
            seen += count
            if count and seen >= wanted:
                return float(_SMALLEST_MS * 10 ** ((place + 0.5) / _PER_DECADE))
        return None
