"""ALiBi, attention with linear biases: the slope of each head (Press, Smith, Lewis: arXiv:2108.12409)."""

from __future__ import annotations

import math


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """Return one slope per head: 2^(-8i / n) for i = 1 … n, where n is the largest power of two ≤ `heads`.

    The remaining heads take every second slope of 2n heads, starting with the first (as BLOOM and TensorRT-LLM do).
    """
    power = 1 << (heads.bit_length() - 1)
    slopes = [math.pow(2.0, -8.0 * index / power) for index in range(1, power + 1)]
    return (*slopes, *(math.pow(2.0, -4.0 * index / power) for index in range(1, 2 * (heads - power), 2)))
