"""How a planned step becomes the flat arrays that the model takes, written into buffers that are made once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

import numpy as np
import numpy.typing as npt

from trtserve.executor.kv_cache import KvCache
from trtserve.executor.limits import Limits
from trtserve.executor.model import Int32s, Int64s
from trtserve.executor.scheduler import Plan
from trtserve.executor.sequence import Sequence


class ModelInputs(TypedDict):
    """Keyword arguments of `Model.forward`."""

    token_ids: Int64s
    positions: Int64s
    past_lens: Int32s
    subsequence_begins: Int32s
    block_indices: Int32s
    block_indices_begins: Int32s
    max_context_len: int
    rows: Int32s


@dataclass(slots=True)
class _Cursor:
    """How many sequences and tokens are written, and the longest context among them."""

    sequences: int = 0
    tokens: int = 0
    longest: int = 0


class Batch:
    """Buffers for one step of at most `max_batch_size` sequences and `max_num_tokens` tokens."""

    def __init__(self, limits: Limits, cache: KvCache) -> None:
        tokens, sequences = max(limits.max_num_tokens, limits.max_batch_size), limits.max_batch_size
        self._cache = cache
        self._token_ids = np.zeros(tokens, dtype=np.int64)
        self._positions = np.zeros(tokens, dtype=np.int64)
        self._ramp = np.arange(max(tokens, limits.max_seq_len) + 1, dtype=np.int64)
        self._past = np.zeros(sequences, dtype=np.int32)
        self._begins = np.zeros(sequences + 1, dtype=np.int32)
        self._block_begins = np.zeros(sequences + 1, dtype=np.int32)
        self._slots: npt.NDArray[np.intp] = np.zeros(sequences, dtype=np.intp)

    def fill(self, plan: Plan) -> tuple[ModelInputs, list[Sequence]]:
        """The model's inputs, and the sequences whose next token the rows of its logits give, in order.

        Prompts stand before generations. Blocks are taken as the new tokens need them.
        """
        cursor, rows, sampled = _Cursor(), [], []
        for sequence, size in plan.chunks:
            self._write_chunk(cursor, sequence, size)
            if size == sequence.prompt_left:
                rows.append(cursor.tokens - 1)
                sampled.append(sequence)
        if plan.generations:
            rows.extend(range(cursor.tokens, cursor.tokens + len(plan.generations)))
            sampled.extend(plan.generations)
            self._write_generations(cursor, plan.generations)
        return self._inputs(cursor, rows), sampled

    def _write_chunk(self, cursor: _Cursor, sequence: Sequence, size: int) -> None:
        past, first, number = sequence.computed, cursor.tokens, cursor.sequences
        end = past + size
        self._extend(sequence, end)
        self._token_ids[first : first + size] = sequence.prompt[past:end]
        self._positions[first : first + size] = self._ramp[past:end]
        self._past[number] = past
        self._begins[number + 1] = first + size
        self._slots[number] = sequence.slot
        cursor.sequences, cursor.tokens, cursor.longest = number + 1, first + size, max(cursor.longest, end)

    def _write_generations(self, cursor: _Cursor, sequences: list[Sequence]) -> None:
        count, first, number = len(sequences), cursor.tokens, cursor.sequences
        for sequence in sequences:
            if sequence.computed >= sequence.capacity:
                self._extend(sequence, sequence.computed + 1)
        past = [sequence.computed for sequence in sequences]
        self._token_ids[first : first + count] = [sequence.generated[-1] for sequence in sequences]
        self._positions[first : first + count] = past
        self._past[number : number + count] = past
        self._begins[number + 1 : number + count + 1] = self._ramp[first + 1 : first + count + 1]
        self._slots[number : number + count] = [sequence.slot for sequence in sequences]
        cursor.sequences, cursor.tokens = number + count, first + count
        cursor.longest = max(cursor.longest, max(past) + 1)

    def _extend(self, sequence: Sequence, tokens: int) -> None:
        assert sequence.slot is not None  # the scheduler plans running sequences only
        sequence.capacity = self._cache.extend(sequence.slot, tokens)

    def _inputs(self, cursor: _Cursor, rows: list[int]) -> ModelInputs:
        count, tokens = cursor.sequences, cursor.tokens
        slots = self._slots[:count]
        np.cumsum(self._cache.counts[slots], out=self._block_begins[1 : count + 1])
        return ModelInputs(
            token_ids=self._token_ids[:tokens],
            positions=self._positions[:tokens],
            past_lens=self._past[:count],
            subsequence_begins=self._begins[: count + 1],
            block_indices=self._cache.indices(slots),
            block_indices_begins=self._block_begins[: count + 1],
            max_context_len=cursor.longest,
            rows=np.array(rows, dtype=np.int32),
        )
