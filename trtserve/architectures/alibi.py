"""Attention with linear biases: the slope of each head (Press, Smith, Lewis: arXiv:2108.12409)."""

from __future__ import annotations

import math


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """Slopes of `heads` heads: 2^(-8i / n) for i = 1 … n, n the largest power of two in `heads`.

    The heads that are left take every second slope of 2n heads, from the first one on (as BLOOM and TensorRT-LLM do).
    """
    whole = 1 << (heads.bit_length() - 1)
    slopes = [math.pow(2.0, -8.0 * index / whole) for index in range(1, whole + 1)]
    return (*slopes, *(math.pow(2.0, -4.0 * index / whole) for index in range(1, 2 * (heads - whole), 2)))
