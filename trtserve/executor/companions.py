"""Tokens of nobody beside a token that would be alone in its step: how they are laid out, and whether they pay.

A step of one token does little but read every weight once. Kernels for one row of activations read weights slower
than kernels for a few rows on some CPUs (docs/performance.md), so a lone token is faster in company there. Which
company is the best differs with CPU and weights: it is measured when a model is loaded.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

# Tokens in a step, with the lone one: the best of 1 to 8 for packed weights and for weights of 16 bits.
SIZES = (2, 6)
_ROUNDS = 3
_WORTH = 0.95  # of the time of a lone token; what is faster by less may be chance, and results differ in the last bit


class StepInputs(NamedTuple):
    """What a step of a paged-attention graph takes, with the shapes of `PagedModel.forward`."""

    token_ids: npt.NDArray[Any]
    positions: npt.NDArray[Any]
    past_lens: npt.NDArray[Any]
    subsequence_begins: npt.NDArray[Any]
    block_indices: npt.NDArray[Any]
    block_indices_begins: npt.NDArray[Any]
    max_context_len: int
    rows: npt.NDArray[Any]


def lone_token(block: int) -> StepInputs:
    """The first token of a sequence whose keys and values go to `block`."""
    zero, one = np.zeros(1, np.int32), np.array([0, 1], np.int32)
    return StepInputs(zero, zero, zero, one, np.array([block], np.int32), one, 1, zero)


def in_company(step: StepInputs, size: int, block: int) -> StepInputs:
    """The step of one token as one of `size` tokens, of which the others are sequences of their own in `block`.

    They have different places in it, one token each. Rows are repeated: the output matrix has company too.
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


def fastest(run: Callable[[int], object]) -> int:
    """The size of a step in which a lone token is fastest; 1 when company does not pay. `run` computes a step."""
    seconds: dict[int, float] = {}
    for turn in range(_ROUNDS + 1):
        for size in (1, *SIZES):
            begin = time.perf_counter()
            run(size)
            if turn:  # the first step of a size makes its kernels
                seconds[size] = min(seconds.get(size, float("inf")), time.perf_counter() - begin)
    best = min(seconds, key=seconds.__getitem__)
    return best if seconds[best] <= _WORTH * seconds[1] else 1
