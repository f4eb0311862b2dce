"""Choose tokens from the words of `draw_words` with NumPy, on the CPU; `sampling_kernels` does the same on GPUs."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from trtserve.executor.engine.sampling import EXHAUSTED, UNDEFINED, uniform
from trtserve.executor.torch.draw_words import (
    BANNED,
    DIVISOR,
    FLAGS,
    FREQUENCY,
    GUARDED_END,
    MIN_P,
    MOST_COUNTED,
    NORMALIZES,
    NUMBER,
    PRESENCE,
    PROCESSES,
    REPETITION,
    SAMPLES,
    SEED,
    TABLE_ROW,
    TOP_K,
    TOP_P,
    WANTS_LOG_PROBS,
    Words,
)

Floats = npt.NDArray[np.float32]
Table = npt.NDArray[np.int16]


def choose_tokens(logits: Floats, words: Words, table: Table) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Return the token i32[r] and (log-prob, full log-prob) f32[r, 2] of each row; count the tokens in `table`."""
    tokens = np.zeros(len(logits), np.int32)
    log_probs = np.full((len(logits), 2), np.nan, np.float32)
    for number, (row, mine) in enumerate(zip(logits, words, strict=True)):
        tokens[number], log_probs[number] = _choose(row, mine, table)
        entry = mine[TABLE_ROW]
        if mine[FLAGS] & PROCESSES and entry >= 0 and tokens[number] >= 0:
            place = entry, tokens[number]
            table[place] = min(max(int(table[place]), 1) + 1, MOST_COUNTED)
    return tokens, log_probs


def _choose(logits: Floats, mine: Words, table: Table) -> tuple[int, tuple[float, float]]:
    nothing = float("nan"), float("nan")
    flags, numbers = int(mine[FLAGS]), mine.view(np.float32)
    if not np.isfinite(logits.max()):
        return UNDEFINED, nothing
    values = _process(logits, mine, table) if flags & PROCESSES else logits
    highest = values.max()
    if not np.isfinite(highest):
        return EXHAUSTED if highest == -np.inf else UNDEFINED, nothing
    weights = np.exp(values - highest)
    weights[weights < numbers[MIN_P]] = 0
    total = chosen_from = float(weights.sum(dtype=np.float64))
    token = int(values.argmax())
    if flags & SAMPLES:
        order = np.argsort(-values, kind="stable")
        if mine[TOP_K]:
            order = order[: mine[TOP_K]]
        sums = weights[order].cumsum(dtype=np.float64)
        chosen_from = float(sums[-1])
        seed, number = mine[SEED : SEED + 2].copy().view(np.uint64), mine[NUMBER : NUMBER + 1].astype(np.uint64)
        target = float(uniform(seed, number)[0]) * float(numbers[TOP_P]) * chosen_from
        token = int(order[np.searchsorted(sums, min(target, chosen_from))])
    if not flags & WANTS_LOG_PROBS:
        return token, nothing
    offset = float(values[token]) - float(highest)
    full = offset - float(np.log(total))
    return token, (offset - float(np.log(chosen_from)) if flags & NORMALIZES else full, full)


def _process(logits: Floats, mine: Words, table: Table) -> Floats:
    """Return a processed copy, as `LogitsProcessor.process` does."""
    numbers: Any = mine.view(np.float32)
    values: Floats = logits / numbers[DIVISOR]
    if mine[TABLE_ROW] >= 0:
        occurred = table[mine[TABLE_ROW]]
        seen, counted = occurred > 0, occurred > 1
        if numbers[REPETITION] != 1:
            punished = np.where(values < 0, values * numbers[REPETITION], values / numbers[REPETITION])
            values = np.where(seen, punished, values)
        values[counted] -= numbers[PRESENCE]
        values[counted] -= numbers[FREQUENCY] * (occurred[counted] - 1)
        values[occurred == BANNED] = -np.inf
    if mine[GUARDED_END] >= 0:
        values[mine[GUARDED_END]] = np.finfo(np.float32).min
    return values
