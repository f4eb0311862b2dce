"""Describe how the token of each row is chosen: as words of 32 bits, and a table of what has occurred.

The table has a row per slot and a column per token: 0 for a token that has not occurred, 1 + its count for one that
has (`TokenCounts`), and BANNED for one that is not allowed. A row with a guide has a row of bits, which say what the
guide allows. `choose_tokens` chooses by them with NumPy, on the CPU; `step_kernels` does the same on GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from trtserve.executor.engine.model import Draws
from trtserve.executor.engine.sampling import EXHAUSTED, UNDEFINED, SamplingRow, uniform

Words = npt.NDArray[np.int32]

# The words of a row. Kernels have these numbers in their code.
FLAGS, TOP_K, SEED, _, NUMBER, TABLE_ROW, GUARDED_END = range(7)
DIVISOR, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY, GUIDE = range(7, 14)
WORDS = 14
SAMPLES, PROCESSES, WANTS_LOG_PROBS, NORMALIZES, GUIDED = 1, 2, 4, 8, 16
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
    guided: bool
    """Whether a row has a guide."""
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
        guided = chosen[:, FLAGS] & GUIDED != 0
        chosen[:, GUIDE] = np.cumsum(guided) - 1
        words[draws.numbers] = chosen
        log_probs = bool((chosen[:, FLAGS] & WANTS_LOG_PROBS).any())
        return DrawArrays(words, np.array(draws.numbers, np.int64), log_probs, bool(guided.any()), new_rows)

    def _begin(self, row: SamplingRow, slot: int, *, normalize: bool) -> None:
        """Write the words of a sequence that do not change."""
        parameters, processor = row.parameters, row.processor
        has_table = processor.counts is not None or processor.bad_words is not None
        guided = processor.guide is not None
        processes = has_table or guided or processor.divisor != 1 or processor.guarded_end is not None
        flags = SAMPLES * (not parameters.greedy) | PROCESSES * processes | GUIDED * guided
        flags |= WANTS_LOG_PROBS * row.log_prob
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


Floats = npt.NDArray[np.float32]
Table = npt.NDArray[np.int16]
Bits = npt.NDArray[np.uint32]


def choose_tokens(
    logits: Floats, words: Words, table: Table, allowed: Bits
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Return the token i32[r] and (log-prob, full log-prob) f32[r, 2] of each row; count the tokens in `table`."""
    tokens = np.zeros(len(logits), np.int32)
    log_probs = np.full((len(logits), 2), np.nan, np.float32)
    for number, (row, mine) in enumerate(zip(logits, words, strict=True)):
        tokens[number], log_probs[number] = _choose(row, mine, table, allowed)
        entry = mine[TABLE_ROW]
        if mine[FLAGS] & PROCESSES and entry >= 0 and tokens[number] >= 0:
            place = entry, tokens[number]
            table[place] = min(max(int(table[place]), 1) + 1, MOST_COUNTED)
    return tokens, log_probs


def _choose(logits: Floats, mine: Words, table: Table, allowed: Bits) -> tuple[int, tuple[float, float]]:
    nothing = float("nan"), float("nan")
    flags, numbers = int(mine[FLAGS]), mine.view(np.float32)
    if not np.isfinite(logits.max()):
        return UNDEFINED, nothing
    values = _process(logits, mine, table, allowed) if flags & PROCESSES else logits
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


def _process(logits: Floats, mine: Words, table: Table, allowed: Bits) -> Floats:
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
    if mine[FLAGS] & GUIDED:
        bits = np.unpackbits(allowed[mine[GUIDE]].view(np.uint8), count=len(values), bitorder="little")
        values[bits == 0] = -np.inf
    return values
