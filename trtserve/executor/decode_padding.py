"""Pads a lone decode step with dummy tokens, where that is faster.

A step of one token mostly reads weights. On some CPUs the kernels for one row of activations read weights slower than
those for a few rows (docs/performance.md), so a lone token is faster with dummy tokens next to it. The best number
depends on the CPU and the weights; it is measured when a model is loaded.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

# Padded numbers of tokens per step: the best of 1 to 8 for packed weights and for 16-bit weights.
SIZES = (2, 6)
_ROUNDS = 3
# A padded step must be this much faster: smaller gains may be chance, and results differ in the last bit.
_REQUIRED_RATIO = 0.95


class StepInputs(NamedTuple):
    """Inputs of a step with the shapes of `Model.forward`."""

    token_ids: npt.NDArray[Any]
    positions: npt.NDArray[Any]
    past_lens: npt.NDArray[Any]
    subsequence_begins: npt.NDArray[Any]
    block_indices: npt.NDArray[Any]
    block_indices_begins: npt.NDArray[Any]
    max_context_len: int
    rows: npt.NDArray[Any]


def single_token_step(block: int) -> StepInputs:
    """Return a step with the first token of a sequence whose keys and values go to `block`."""
    zero, one = np.zeros(1, np.int32), np.array([0, 1], np.int32)
    return StepInputs(zero, zero, zero, one, np.array([block], np.int32), one, 1, zero)


def pad_decode_step(step: StepInputs, size: int, block: int) -> StepInputs:
    """Pad a step of one token to `size` tokens; the others are sequences of their own in `block`.

    Each has its own place in the block. The rows are repeated as well, because the output matrix gains too.
    """
    if size == 1:
        return step
    others = np.arange(size - 1)
    begins = step.block_indices_begins
    return step._replace(
        token_ids=np.append(step.token_ids, np.zeros_like(others)),
        positions=np.append(step.positions, others),
        past_lens=np.append(step.past_lens, others),
        subsequence_begins=np.arange(size + 1),
        block_indices=np.append(step.block_indices, np.full_like(others, block)),
        block_indices_begins=np.append(begins, begins[-1] + 1 + others),
        max_context_len=max(step.max_context_len, size - 1),
        rows=np.repeat(step.rows, size),
    )


def fastest_step_size(run: Callable[[int], object]) -> int:
    """Return the number of tokens with which a lone token is fastest, 1 for no padding. `run` computes such a step."""
    seconds: dict[int, float] = {}
    for turn in range(_ROUNDS + 1):
        for size in (1, *SIZES):
            begin = time.perf_counter()
            run(size)
            if turn:  # the first step of a size compiles its kernels
                seconds[size] = min(seconds.get(size, float("inf")), time.perf_counter() - begin)
    best = min(seconds, key=seconds.__getitem__)
    return best if seconds[best] <= _REQUIRED_RATIO * seconds[1] else 1
