"""Convert a planned step to the flat arrays of `StepInputs`, in buffers that are allocated once."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from trtserve.executor.engine.kv_cache import KvCache
from trtserve.executor.engine.limits import EngineLimits
from trtserve.executor.engine.lora import AdapterBatch, AdapterCache
from trtserve.executor.engine.model import Logits, StepInputs
from trtserve.executor.engine.scheduler import StepPlan
from trtserve.executor.engine.sequence import Sequence


@dataclass(slots=True)
class Span:
    """Rows `first` … `first + count` of a step's logits belong to `sequence`."""

    sequence: Sequence
    first: int
    count: int
    past: int  # the sequence's tokens before the step


@dataclass(slots=True)
class BatchedStep:
    """The inputs of a step, and the sequences that the rows of its logits belong to."""

    inputs: StepInputs
    sampled: list[Sequence]  # row i of the logits gives the next token of `sampled[i]`
    begins: int  # how many of `sampled`, from the first, have just finished their context
    spans: list[Span]  # the rows of beams and drafts, after those of `sampled`
    contexts: list[Span]  # rows whose logits the request asked for, from token `past` of the prompt on


@dataclass(slots=True)
class _Cursor:
    """What has been written so far."""

    sequences: int = 0
    tokens: int = 0
    longest: int = 0  # the longest context
    rows: list[int] = field(default_factory=list)  # tokens whose logits are needed
    sampled: list[Sequence] = field(default_factory=list)
    groups: list[tuple[Sequence, int, int]] = field(default_factory=list)
    """(sequence, first token, tokens) of beams and drafts."""
    contexts: list[tuple[Sequence, int, int]] = field(default_factory=list)
    """(sequence, first token, tokens) of requested context logits."""
    tables: list[Logits] = field(default_factory=list)
    table_rows: int = 0


class Batch:
    """Buffers for a step of at most `max_batch_size` sequences of `max_beam_width` beams and `max_num_tokens` tokens.

    `adapters` is the cache of LoRA adapters, or None for an engine without them; `states`: the model has states.
    """

    def __init__(
        self, limits: EngineLimits, cache: KvCache, adapters: AdapterCache | None = None, *, states: bool = False
    ) -> None:
        sequences = limits.max_batch_size * limits.max_beam_width
        tokens = max(limits.max_num_tokens, sequences)
        self._cache = cache
        self._adapters = adapters
        self._has_states = states
        self._vocab_size = limits.vocab_size
        self._long_rope_beyond = limits.long_rope_beyond
        self._token_ids = np.zeros(tokens, dtype=np.int64)
        self._positions = np.zeros(tokens, dtype=np.int64)
        self._ramp = np.arange(max(tokens, limits.max_seq_len) + 1, dtype=np.int64)
        self._past = np.zeros(sequences, dtype=np.int32)
        self._begins = np.zeros(sequences + 1, dtype=np.int32)
        self._block_begins = np.zeros(sequences + 1, dtype=np.int32)
        self._slots: npt.NDArray[np.intp] = np.zeros(sequences, dtype=np.intp)

    def fill(self, plan: StepPlan) -> BatchedStep:
        """Return the model's inputs and the owners of its rows of logits; prompts come before generations.

        Takes new blocks where the new tokens need them.
        """
        cursor = _Cursor()
        for sequence, size in plan.chunks:
            self._write_chunk(cursor, sequence, size)
        plain = len(plan.generations) - len(plan.drafts)
        generations, begins = plan.generations[:plain], len(cursor.sampled)
        if generations and generations[0].search is None:
            cursor.rows.extend(range(cursor.tokens, cursor.tokens + len(generations)))
            cursor.sampled.extend(generations)
            self._write_generations(cursor, generations)
        else:
            for sequence in generations:
                self._write_beams(cursor, sequence)
        for sequence in plan.generations[plain:]:
            draft = plan.drafts[sequence]
            cursor.groups.append((sequence, cursor.tokens, 1 + len(draft)))
            self._write_tokens(cursor, sequence, [sequence.generated[-1], *draft])
        spans, contexts = _spans(cursor, cursor.groups), _spans(cursor, cursor.contexts)
        inputs = self._inputs(cursor, self._adapters_of(plan), self._long_sequences(plan))
        return BatchedStep(inputs, cursor.sampled, begins, spans, contexts)

    def _write_chunk(self, cursor: _Cursor, sequence: Sequence, size: int) -> None:
        """Write context tokens; after the last of them the draft tokens, if there are any."""
        past, first = sequence.computed, cursor.tokens
        last = size == sequence.context_left
        tokens = sequence.context[past : past + size]
        if last and sequence.draft:
            tokens = np.concatenate([tokens, np.array(sequence.draft, dtype=np.int64)])
        self._write_tokens(cursor, sequence, tokens)
        if sequence.prompt_table is not None or sequence.positions is not None:
            self._write_request_inputs(cursor, sequence, first, past)
        # After a pause or a new rotation the context is computed again, but its logits are already known.
        wants_context = sequence.logits is not None and sequence.logits.context is not None
        if wants_context and past < sequence.prompt_length and not sequence.generated:
            cursor.contexts.append((sequence, first, min(size, sequence.prompt_length - past)))
        if last:  # the tokens after which a token is chosen: the last of the context and those of the draft
            if sequence.search is not None or sequence.single_step:
                cursor.groups.append((sequence, first + size - 1, len(tokens) - size + 1))
            else:
                cursor.rows.append(first + size - 1)
                cursor.sampled.append(sequence)

    def _write_tokens(self, cursor: _Cursor, sequence: Sequence, tokens: npt.NDArray[np.int64] | list[int]) -> None:
        """Write the next tokens of a sequence of width 1, and their positions."""
        past, first, number = sequence.computed, cursor.tokens, cursor.sequences
        end, stop = past + len(tokens), first + len(tokens)
        sequence.capacity = self._cache.extend(sequence.slots[0], end)
        self._token_ids[first:stop] = tokens
        self._positions[first:stop] = self._ramp[past:end]
        self._past[number] = past
        self._begins[number + 1] = stop
        self._slots[number] = sequence.slots[0]
        cursor.sequences, cursor.tokens, cursor.longest = number + 1, stop, max(cursor.longest, end)

    def _write_request_inputs(self, cursor: _Cursor, sequence: Sequence, first: int, past: int) -> None:
        """Write the request's position ids, and its prompt table after the tables of earlier sequences."""
        if sequence.positions is not None:
            own = sequence.positions[past : past + cursor.tokens - first]
            self._positions[first : first + len(own)] = own
        table, tokens = sequence.prompt_table, self._token_ids[first : cursor.tokens]
        if table is not None and (tokens >= self._vocab_size).any():
            tokens[tokens >= self._vocab_size] += cursor.table_rows
            cursor.tables.append(table)
            cursor.table_rows += len(table)

    def _write_generations(self, cursor: _Cursor, sequences: list[Sequence]) -> None:
        count, first, number = len(sequences), cursor.tokens, cursor.sequences
        for sequence in sequences:
            if sequence.computed >= sequence.capacity:
                sequence.capacity = self._cache.extend(sequence.slots[0], sequence.computed + 1)
        past = [sequence.computed for sequence in sequences]
        self._token_ids[first : first + count] = [
            -1 - sequence.place if sequence.ahead else sequence.generated[-1] for sequence in sequences
        ]
        self._positions[first : first + count] = past
        self._past[number : number + count] = past
        self._begins[number + 1 : number + count + 1] = self._ramp[first + 1 : first + count + 1]
        self._slots[number : number + count] = [sequence.slots[0] for sequence in sequences]
        cursor.sequences, cursor.tokens = number + count, first + count
        cursor.longest = max(cursor.longest, max(past) + 1)

    def _write_beams(self, cursor: _Cursor, sequence: Sequence) -> None:
        """Write one token of each growing beam; beam i has slot i."""
        assert sequence.search is not None
        beams, past = sequence.search.beams, sequence.computed
        count, first, number = len(beams), cursor.tokens, cursor.sequences
        if past >= sequence.capacity:
            sequence.capacity = min(self._cache.extend(slot, past + 1) for slot in sequence.slots)
        self._token_ids[first : first + count] = [beam.tokens[-1] for beam in beams]
        self._positions[first : first + count] = past
        self._past[number : number + count] = past
        self._begins[number + 1 : number + count + 1] = self._ramp[first + 1 : first + count + 1]
        self._slots[number : number + count] = sequence.slots[:count]
        cursor.sequences, cursor.tokens = number + count, first + count
        cursor.longest = max(cursor.longest, past + 1)
        cursor.groups.append((sequence, first, count))

    def _adapters_of(self, plan: StepPlan) -> AdapterBatch | None:
        """Return the LoRA adapters of the step's tokens if any sequence has one."""
        if self._adapters is None or all(
            sequence.adapter is None for sequence in [*(sequence for sequence, _ in plan.chunks), *plan.generations]
        ):
            return None
        spans = [
            (sequence.adapter, size + (len(sequence.draft) if size == sequence.context_left else 0))
            for sequence, size in plan.chunks
        ]
        spans += [
            (sequence.adapter, len(plan.drafts.get(sequence, ())) + (1 if search is None else len(search.beams)))
            for sequence, search in ((sequence, sequence.search) for sequence in plan.generations)
        ]
        return self._adapters.batch(spans)

    def _long_sequences(self, plan: StepPlan) -> npt.NDArray[np.bool_] | None:
        """Return which of the step's sequences LongRoPE rotates with its long factors."""
        beyond = self._long_rope_beyond
        if beyond is None:
            return None
        flags = [sequence.is_long(beyond) for sequence, _ in plan.chunks]
        for sequence in plan.generations:
            flags += [sequence.is_long(beyond)] * (1 if sequence.search is None else len(sequence.search.beams))
        return np.array(flags, dtype=np.bool_)

    def _inputs(
        self, cursor: _Cursor, adapters: AdapterBatch | None, long_sequences: npt.NDArray[np.bool_] | None
    ) -> StepInputs:
        count, tokens = cursor.sequences, cursor.tokens
        slots, begins = self._slots[:count], self._begins[: count + 1]
        # A sequence whose draft was wrong may have a block too many.
        blocks = -(-(self._past[:count] + begins[1:] - begins[:-1]) // self._cache.tokens_per_block)
        blocks.cumsum(out=self._block_begins[1 : count + 1])
        return StepInputs(
            token_ids=self._token_ids[:tokens],
            positions=self._positions[:tokens],
            past_lens=self._past[:count],
            subsequence_begins=begins,
            block_indices=self._cache.indices(slots, blocks),
            block_indices_begins=self._block_begins[: count + 1],
            max_context_len=cursor.longest,
            rows=np.array(cursor.rows, dtype=np.int32),
            prompt_table=np.concatenate(cursor.tables) if cursor.tables else None,
            adapters=adapters,
            long_sequences=long_sequences,
            states=slots.astype(np.int32) if self._has_states else None,
        )


def _spans(cursor: _Cursor, groups: list[tuple[Sequence, int, int]]) -> list[Span]:
    """Append the rows of `groups` (sequence, first token, tokens) to the needed rows."""
    spans = []
    for sequence, first, count in groups:
        spans.append(Span(sequence, len(cursor.rows), count, sequence.computed))
        cursor.rows.extend(range(first, first + count))
    return spans
