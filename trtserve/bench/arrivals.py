"""When requests are sent: an absolute schedule of offsets, fixed before the run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Arrivals = Literal["exponential", "constant", "gamma"]


def arrival_times(
    kind: Arrivals, *, rate: float, count: int, seed: int, burstiness: float = 1.0, ramp_to: float | None = None
) -> list[float]:
    """Return the offsets in seconds of `count` arrivals at `rate` per second on average; the first is 0.

    Offsets are absolute, so a request that is sent late never delays those after it. `burstiness` is the shape of
    gamma gaps: 1 equals exponential, less is burstier, more is smoother. With `ramp_to` the rate changes linearly from
    `rate` to that rate.
    """
    import numpy as np

    if kind == "constant":
        unit: npt.NDArray[np.float64] = np.arange(count, dtype=np.float64)
    else:
        shape = burstiness if kind == "gamma" else 1.0
        gaps = np.random.default_rng([seed, 1]).gamma(shape, 1 / shape, count - 1)
        unit = np.concatenate([[0.0], np.cumsum(gaps)])
    offsets: list[float] = _stretched(unit, rate, rate if ramp_to is None else ramp_to, count).tolist()
    return offsets


def _stretched(unit: npt.NDArray[np.float64], first: float, last: float, count: int) -> npt.NDArray[np.float64]:
    """Turn arrivals at rate 1 into arrivals whose rate goes linearly from `first` to `last` over `count` requests.

    The expected number of arrivals until t is first·t + slope·t²/2; this solves it for t.
    """
    import numpy as np

    if first == last:
        return unit / first
    slope = (last**2 - first**2) / (2 * count)  # the ramp takes 2·count / (first + last) seconds
    # After the ramp the rate stays at `last`.
    ramp = np.minimum(unit, count)
    ramped = (np.sqrt(np.maximum(0.0, first**2 + 2 * slope * ramp)) - first) / slope
    return np.asarray(ramped + (unit - ramp) / last)
