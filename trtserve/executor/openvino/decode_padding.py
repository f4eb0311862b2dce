"""Measures how long small steps take, and pads them with dummy tokens where that is faster.

A step of a few tokens mostly reads weights. On some CPUs the kernels for one row of activations read weights slower
than those for a few rows (docs/performance.md), so a lone token is faster with dummy tokens next to it, or with draft
tokens, which may be of use. What is best depends on the CPU and the weights; it is measured when a model is loaded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import numpy as np

from trtserve.executor.engine.model import StepInputs

SIZES = (1, 2, 4, 6, 8, 12)
"""The measured numbers of tokens."""
_ROUNDS = 3
# A padded step must be this much faster: smaller gains may be chance, and results differ in the last bit.
_REQUIRED_RATIO = 0.95


def pad_step(step: StepInputs, size: int, block: int) -> StepInputs:
    """Pad a step to `size` tokens; the others are sequences of their own in `block`.

    Each has its own place in the block. The last row is repeated as well, because the output matrix gains too.
    """
    others = np.arange(size - len(step.token_ids))
    if not len(others):
        return step
    begins, block_begins = step.subsequence_begins, step.block_indices_begins
    return replace(
        step,
        token_ids=np.append(step.token_ids, np.zeros_like(others)),
        positions=np.append(step.positions, others),
        past_lens=np.append(step.past_lens, others),
        subsequence_begins=np.append(begins, begins[-1] + 1 + others),
        block_indices=np.append(step.block_indices, np.full_like(others, block)),
        block_indices_begins=np.append(block_begins, block_begins[-1] + 1 + others),
        max_context_len=max(step.max_context_len, len(others)),
        rows=np.append(step.rows, np.repeat(step.rows[-1:], len(others))),
    )


def measure_steps(run: Callable[[int], object]) -> list[dict[int, float]]:
    """Return the seconds of steps of each of `SIZES`, of several rounds; `run` computes a step of this many tokens."""
    rounds = []
    for _ in range(_ROUNDS + 1):
        seconds = {}
        for size in SIZES:
            begin = time.perf_counter()
            run(size)
            seconds[size] = time.perf_counter() - begin
        rounds.append(seconds)
    return rounds[1:]  # the first step of a size compiles its kernels


def least(rounds: SequenceOf[Mapping[int, float]]) -> dict[int, float]:
    """Return the least seconds of each size: other programs may have disturbed some rounds."""
    return {size: min(seconds[size] for seconds in rounds) for size in rounds[0]}


def padded_sizes(rounds: SequenceOf[Mapping[int, float]]) -> list[int]:
    """Return to how many tokens steps of 1, 2, … tokens should be padded: faster in each round, so not by chance."""
    seconds = least(rounds)
    limits = [[_REQUIRED_RATIO * own for own in seconds_of_each(each)] for each in rounds]
    sizes = []
    for tokens in range(1, max(seconds) + 1):
        best = min((size for size in seconds if size >= tokens), key=seconds.__getitem__)
        faster = all(each[best] <= limit[tokens - 1] for each, limit in zip(rounds, limits, strict=True))
        sizes.append(best if faster else tokens)
    return sizes


def seconds_of_each(seconds: Mapping[int, float]) -> list[float]:
    """Return the seconds of steps of 1, 2, … tokens, between the measured sizes by interpolation."""
    known = sorted(seconds)
    each: list[float] = np.interp(range(1, known[-1] + 1), known, [seconds[size] for size in known]).tolist()
    return each
