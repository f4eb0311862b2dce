"""When requests are meant to be sent: offsets in seconds from the start of the measured window."""

from __future__ import annotations

from typing import Literal

Arrivals = Literal["exponential", "constant"]


def schedule(kind: Arrivals, *, rate: float, count: int, seed: int) -> list[float]:
    """Offsets of `count` arrivals at `rate` per second on average; the first is 0.

    The schedule is absolute: gaps are summed here, so a late request never moves those behind it.
    """
    import numpy as np

    if kind == "constant":
        return [index / rate for index in range(count)]
    gaps = np.random.default_rng([seed, 1]).exponential(1 / rate, count - 1)
    offsets: list[float] = np.concatenate([[0.0], np.cumsum(gaps)]).tolist()
    return offsets
