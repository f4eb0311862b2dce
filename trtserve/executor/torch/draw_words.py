"""Describe to the device how the token of each row is chosen: as words of 32 bits, and a table of what has occurred.

The table has a row per slot and a column per token: 0 for a token that has not occurred, 1 + its count for one that
has (`TokenCounts`), and BANNED for one that is not allowed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from trtserve.executor.engine.draws import Draws
from trtserve.executor.engine.sampling import SamplingRow

Words = npt.NDArray[np.int32]

# The words of a row. Kernels have these numbers in their code.
FLAGS, TOP_K, SEED, _, NUMBER, TABLE_ROW, GUARDED_END = range(7)
DIVISOR, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY = range(7, 13)
WORDS = 13
SAMPLES, PROCESSES, WANTS_LOG_PROBS, NORMALIZES = 1, 2, 4, 8
BANNED = -1
MOST_COUNTED = 32_767
"""The largest number in the table."""


@dataclass(slots=True)
class DrawArrays:
    """`Draws` as arrays."""

    words: Words
    """i32[n, WORDS], for the rows up to the last that is chosen from; zeros for those whose logits go to the host."""
    numbers: npt.NDArray[np.int64]
    """i64[d], the rows whose tokens are chosen."""
    log_probs: bool
    """Whether a row wants log-probabilities."""
    new_rows: list[tuple[int, npt.NDArray[np.int64], npt.NDArray[np.int16]]] = field(default_factory=list)
    """(table row, tokens, numbers): new contents of rows of the table."""


class DrawWriter:
    """Turns `Draws` into arrays; remembers what does not change while a sequence has its slot."""

    def __init__(self, slots: int) -> None:
        self._words = np.zeros((slots, WORDS), dtype=np.int32)
        self._min_tokens = np.zeros(slots, dtype=np.int64)

    def write(self, draws: Draws) -> DrawArrays:
        """Return the arrays for a step."""
        new_rows = []
        for row, slot, begins in zip(draws.rows, draws.slots, draws.begins, strict=True):
            if begins:
                self._begin(row, slot, normalize=draws.normalize_log_probs)
                if self._words[slot, TABLE_ROW] >= 0:
                    new_rows.append((slot, *_occurrences(row)))
        words = np.zeros((draws.numbers[-1] + 1 if draws.numbers else 0, WORDS), dtype=np.int32)
        slots, counts = np.array(draws.slots, np.int64), np.array(draws.counts, np.int64)
        chosen = self._words[slots]
        chosen[:, NUMBER] = counts
        chosen[counts >= self._min_tokens[slots], GUARDED_END] = -1
        words[draws.numbers] = chosen
        log_probs = bool((chosen[:, FLAGS] & WANTS_LOG_PROBS).any())
        return DrawArrays(words, np.array(draws.numbers, np.int64), log_probs, new_rows)

    def _begin(self, row: SamplingRow, slot: int, *, normalize: bool) -> None:
        """Write the words of a sequence that do not change."""
        parameters, processor = row.parameters, row.processor
        has_table = processor.counts is not None or processor.bad_words is not None
        processes = has_table or processor.divisor != 1 or processor.guarded_end is not None
        flags = SAMPLES * (not parameters.greedy) | PROCESSES * processes | WANTS_LOG_PROBS * row.log_prob
        flags |= NORMALIZES * (normalize and parameters.top_k > 0 and not parameters.greedy)
        words = self._words[slot]
        words[[FLAGS, TOP_K, TABLE_ROW]] = flags, parameters.top_k, slot if has_table else -1
        words[SEED : SEED + 2] = np.array([parameters.seed], np.uint64).view(np.int32)
        words[GUARDED_END] = -1 if processor.guarded_end is None else processor.guarded_end
        words[DIVISOR : FREQUENCY + 1] = np.array(
            [
                processor.divisor,
                parameters.top_p,
                parameters.min_p,
                parameters.repetition_penalty,
                parameters.presence_penalty,
                parameters.frequency_penalty,
            ],
            np.float32,
        ).view(np.int32)
        self._min_tokens[slot] = parameters.min_tokens


def _occurrences(row: SamplingRow) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int16]]:
    """Return the tokens that have occurred or are banned, and their numbers in the table."""
    ids: npt.NDArray[Any] = np.zeros(0, np.int64)
    numbers: npt.NDArray[Any] = np.zeros(0, np.int64)
    if row.processor.counts is not None:
        ids, counts = row.processor.counts.occurred()
        numbers = np.minimum(1 + counts, MOST_COUNTED)
    if row.processor.bad_words is not None:
        banned = np.array(row.processor.bad_words.single, np.int64)
        keep = ~np.isin(ids, banned)
        ids, numbers = np.concatenate([ids[keep], banned]), np.append(numbers[keep], np.full(len(banned), BANNED))
    return ids.astype(np.int64), numbers.astype(np.int16)
