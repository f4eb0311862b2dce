"""Choose which sequences run in the next step, by capacity first and token budget second.

The policies are those of TensorRT-LLM's capacity scheduler and micro-batch scheduler; `ContextChunker` divides a step's
tokens among contexts.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any

from trtserve.executor.engine.drafts import best_draft_lengths
from trtserve.executor.engine.kv_cache import KvCache
from trtserve.executor.engine.limits import CapacitySchedulerPolicy, ContextChunkingPolicy, EngineLimits
from trtserve.executor.engine.sequence import Sequence

Fits = Callable[[set[Any]], bool]

_PATIENCE = 2.0  # seconds that a request of another beam width is overtaken; then the active ones end, and it is next


@dataclass(slots=True)
class StepPlan:
    """The work of one step."""

    chunks: list[tuple[Sequence, int]] = field(default_factory=list)
    """(sequence, context tokens); draft tokens follow the last chunk and are not counted."""
    generations: list[Sequence] = field(default_factory=list)  # sequences that generate one token per beam
    drafts: dict[Sequence, list[int]] = field(default_factory=dict)
    """Draft tokens by sequence. Sequences with drafts come last in `generations`."""
    paused: list[Sequence] = field(default_factory=list)  # sequences that were put on hold

    def __bool__(self) -> bool:
        return bool(self.chunks or self.generations)

    @property
    def context_tokens(self) -> int:
        """Number of context tokens in this step."""
        return sum(size for _, size in self.chunks)


class Scheduler:
    """The active sequences by descending priority: those that run hold blocks (`slots`), the others wait for blocks.

    guaranteed_no_evict: a sequence starts when all blocks it may ever need can be reserved; it is never paused, and no
    sequence overtakes another. static_batch: new sequences start only when nothing runs. max_utilization: reserves the
    blocks of one step and pauses the sequence started last when blocks run out. `fits` tells whether a set of adapters
    can be used at the same time. Sequences with a drafter get up to `max_draft_len` draft tokens in a step, as far as
    `step_costs` (`ModelRunner.step_costs`) promise more speed. Beside sequences that decode, contexts get what
    `ContextPace` says.
    """

    def __init__(
        self,
        limits: EngineLimits,
        cache: KvCache,
        *,
        policy: CapacitySchedulerPolicy = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT,
        chunking: ContextChunkingPolicy = ContextChunkingPolicy.FIRST_COME_FIRST_SERVED,
        fits: Fits | None = None,
        max_draft_len: int = 0,
        step_costs: SequenceOf[float] = (),
        plain_costs: SequenceOf[float] = (),
        brief_tokens: int = 0,
    ) -> None:
        self.limits = limits
        self.cache = cache
        self.active: list[Sequence] = []
        self._turn_began = 0.0
        self._waiting = 0  # active sequences that hold no blocks
        self._adapters = 0  # active sequences with an adapter
        self._static = policy is CapacitySchedulerPolicy.STATIC_BATCH
        self._may_pause = policy is CapacitySchedulerPolicy.MAX_UTILIZATION
        self._fits = fits
        self._max_draft_len = max_draft_len
        self._step_costs = step_costs
        self._plain_costs = plain_costs
        one_window = len(set(limits.windows)) <= 1
        self._waits_for_blocks = cache.reuse and one_window and not self._static
        self._chunks = ContextChunker(limits, cache.tokens_per_block, chunking, stops=cache.keeps_states)
        self._pace = ContextPace(brief_tokens, self._chunks.unit) if brief_tokens and limits.chunked else None

    def take(self, queue: deque[Sequence]) -> Sequence | None:
        """Remove and return the first sequence of `queue` (ordered by priority) that may become active.

        Its beam width must equal that of the active ones. If the batch is full, its priority must exceed the lowest
        active one. None overtakes a sequence of another width that has waited for _PATIENCE since the active width's
        turn began.
        """
        active = self.active
        for index, sequence in enumerate(queue):
            if len(active) >= self.limits.max_batch_size and sequence.priority <= active[-1].priority:
                return None
            if not active or sequence.width == active[0].width:
                del queue[index]
                return sequence
            if time.monotonic() - max(sequence.arrival, self._turn_began) > _PATIENCE:
                return None
        return None

    def add(self, sequence: Sequence) -> None:
        """Make `sequence` active, after those of the same priority."""
        if not self.active:
            self._turn_began = time.monotonic()
        insert_by_priority(self.active, sequence)
        self._waiting += 1
        self._adapters += sequence.adapter is not None
        if self._pace:
            self._pace.arrived += sequence.context_left

    def remove(self, sequences: list[Sequence], *, trusted: bool = True) -> None:
        """Remove active sequences and free their blocks; the contents are kept for reuse if `trusted`."""
        leaving = set(sequences)
        for sequence in sequences:
            self._adapters -= sequence.adapter is not None
            if sequence.slots:
                self._release(sequence, trusted=trusted)
            else:
                self._waiting -= 1
        self.active = [sequence for sequence in self.active if sequence not in leaving]

    def _release(self, sequence: Sequence, *, trusted: bool) -> None:
        stored = trusted and self.cache.reuse and sequence.key.stored
        self.cache.free(sequence.slots, sequence.cached_tokens()[: sequence.computed] if stored else [])
        sequence.slots = ()

    def can_plan_ahead(self) -> bool:
        """Return whether the next step can be planned before the tokens of the last one are known.

        Not when a sequence may have to be paused, or computed again, or has a promising draft: that needs all of its
        tokens.
        """
        beyond = self.limits.long_rope_beyond
        if beyond is not None and any(sequence.outgrows(beyond) for sequence in self.active):
            return False
        drafts = self._step_costs and all(sequence.generating for sequence in self.active)
        if drafts and any(self._draft_lengths(self.active)[1]):
            return False
        return not self._may_pause or (not self._waiting and self.cache.available >= len(self.active))

    def plan_step(self) -> StepPlan:
        """Plan the next step. Sequences that wait for a token of the last step do not take part."""
        plan = StepPlan()
        beyond = self.limits.long_rope_beyond
        if beyond is not None:
            for sequence in self.active:
                if sequence.outgrows(beyond):
                    sequence.recompute()
        if self._may_pause:
            chosen = self._choose_for_step(plan.paused)
        else:
            if self._waiting:
                self._start_sequences()
            chosen = [sequence for sequence in self.active if sequence.slots] if self._waiting else self.active
        contexts, left = self._plan_generations(plan, chosen)
        room = left
        if self._pace:
            backlog = sum(each.context_left for each in self.active if not each.generating) if contexts else 0
            room = min(left, self._pace.room(len(plan.generations), backlog))
        if contexts:
            plan.chunks = self._chunks.divide(contexts, left, room)
        elif self._step_costs:
            self._plan_drafts(plan, left)
        if self._adapters:
            plan.generations.sort(key=lambda sequence: (sequence in plan.drafts, sequence.key.adapter or 0))
        return plan

    def _plan_drafts(self, plan: StepPlan, left: int) -> None:
        """Give sequences draft tokens while the step has `left` tokens of room and their blocks fit."""
        if any(sequence.ahead for sequence in plan.generations):  # their last tokens are not known
            return
        drafting, lengths = self._draft_lengths(plan.generations, left)
        for sequence, length in zip(drafting, lengths, strict=True):
            assert sequence.drafter is not None
            draft = sequence.drafter.draft(length)
            if draft and self.cache.reserve(sequence.slots, sequence.computed + 1 + len(draft)):
                plan.drafts[sequence] = draft
        if plan.drafts:
            plan.generations.sort(key=lambda sequence: sequence in plan.drafts)

    def _draft_lengths(self, generations: list[Sequence], left: int | None = None) -> tuple[list[Sequence], list[int]]:
        """Return the sequences that may have drafts, and how long these should be, with `left` tokens of room."""
        tokens = len(generations)
        costs = self._step_costs if left is None else self._step_costs[: tokens + left]
        # Where steps with drafts are of another kind, that kind has no adapters.
        if tokens >= len(costs) or (self._plain_costs and self._adapters):
            return [], []
        drafting = [sequence for sequence in generations if sequence.drafter is not None]
        gains = [sequence.drafter.gains(self._draft_room(sequence)) for sequence in drafting if sequence.drafter]
        return drafting, best_draft_lengths(gains, tokens, costs, self._plain_costs)

    def _draft_room(self, sequence: Sequence) -> int:
        """Return how many draft tokens are useful: one token is chosen besides them, and all use the same rotation."""
        room = min(self._max_draft_len, sequence.max_tokens - len(sequence.generated) - 1)
        beyond = self.limits.long_rope_beyond
        if beyond is not None and not sequence.is_long(beyond):
            room = min(room, beyond - sequence.prompt_length - len(sequence.generated))
        return max(room, 0)

    def _start_sequences(self) -> None:
        """Start sequences while all blocks they may need can be reserved; stop at the first that lacks blocks."""
        started = len(self.active) - self._waiting
        if self._static and started:
            return
        computing = self._being_computed()
        for sequence in self.active:
            if started >= self.limits.max_batch_size:
                return
            if sequence.slots or self._must_wait(sequence, computing):
                continue
            if not self._start(sequence, sequence.total_tokens, computing):
                return
            started += 1

    def _choose_for_step(self, paused: list[Sequence]) -> list[Sequence]:
        """Return the sequences whose blocks for the next step fit; the one started last may be paused for others."""
        chosen: list[Sequence] = []
        computing = self._being_computed() if self._waiting else set()
        candidates = deque(self.active)
        while candidates and len(chosen) < self.limits.max_batch_size:
            sequence = candidates[0]
            if not sequence.slots and self._must_wait(sequence, computing):
                candidates.popleft()
            elif self._reserve_step(sequence, computing):
                chosen.append(candidates.popleft())
            elif not self._pause_last(candidates, paused):
                break
        return chosen

    def _reserve_step(self, sequence: Sequence, computing: set[bytes]) -> bool:
        """Reserve the blocks of the next step; a context reserves all its blocks with its first chunk."""
        if sequence.slots:
            return not sequence.generating or self.cache.reserve(sequence.slots, sequence.computed + 1)
        return self._start(sequence, sequence.context_left + len(sequence.draft), computing)

    def _pause_last(self, candidates: deque[Sequence], paused: list[Sequence]) -> bool:
        """Pause the last running candidate and drop all candidates after it. Returns False if none is running."""
        if not any(sequence.slots for sequence in candidates):
            return False
        while not candidates[-1].slots:
            candidates.pop()
        sequence = candidates.pop()
        self._release(sequence, trusted=True)
        sequence.pause()
        self._waiting += 1
        paused.append(sequence)
        return True

    def _must_wait(self, sequence: Sequence, computing: set[bytes]) -> bool:
        """True while another sequence computes blocks this one can reuse, or while its adapter does not fit."""
        if computing and self.cache.next_missing(sequence.key) in computing:
            return True
        if sequence.adapter is None or self._fits is None:
            return False
        running = {other.adapter for other in self.active if other.slots and other.adapter is not None}
        return not self._fits(running | {sequence.adapter})

    def _being_computed(self) -> set[bytes]:
        """Return the blocks, as named by `KvCache.next_missing`, that running contexts compute for reuse.

        Not with several attention windows and not in static batches, as in TensorRT-LLM.
        """
        if not self._waits_for_blocks:
            return set()
        running = (each for each in self.active if each.slots and not each.generating and each.key.stored)
        return {block for each in running if (block := self.cache.next_missing(each.key)) is not None}

    def _start(self, sequence: Sequence, tokens: int, computing: set[bytes]) -> bool:
        """Give `sequence` its slots, with blocks for `tokens` tokens. Return False if they do not fit."""
        allocation = self.cache.start(sequence.key, reserve=tokens, width=sequence.width, use=sequence.use)
        if allocation is None:
            return False
        sequence.slots, sequence.computed = allocation.slots, allocation.reused_tokens
        self._waiting -= 1
        if (
            self._waits_for_blocks
            and sequence.key.stored
            and (missing := self.cache.next_missing(sequence.key)) is not None
        ):
            computing.add(missing)
        return True

    def _plan_generations(self, plan: StepPlan, chosen: list[Sequence]) -> tuple[list[Sequence], int]:
        """Add generations of one beam width to the step; return the contexts that may join, and the tokens left.

        The first sequence that exceeds the budget ends the pass.
        """
        left = self.limits.max_num_tokens
        contexts, held, width = [], 0, 0
        for sequence in chosen:
            if sequence.ahead and sequence.awaits_token:
                continue
            if sequence.generating:
                beams = sequence.width
                if width and beams != width:
                    continue
                if beams > left - held:
                    break
                plan.generations.append(sequence)
                left -= beams
                width = beams
            else:
                cost = self._chunks.cost(sequence, left - held)
                if cost > left - held:
                    break
                contexts.append(sequence)
                held += cost
        return contexts, left


def insert_by_priority(sequences: list[Sequence] | deque[Sequence], sequence: Sequence) -> None:
    """Insert `sequence` after all of the same or a higher priority."""
    if not sequences or sequences[-1].priority >= sequence.priority:
        sequences.append(sequence)
    else:
        sequences.insert(bisect_right(sequences, -sequence.priority, key=lambda each: -each.priority), sequence)


_PACE_STEPS = 64
_PACE_MARGIN = 1.5
_BACKLOG_STEPS = 32


class ContextPace:
    """How many context tokens a step takes beside sequences that decode, which wait for it.

    As few as make the step brief. If more arrive, or many wait, as many as fit: fewer steps with contexts cost less.
    """

    def __init__(self, brief_tokens: int, unit: int) -> None:
        """`brief_tokens`: see `ChoosingModel.brief_tokens`; a chunk has at least `unit` tokens."""
        self.arrived = 0
        """Context tokens that arrived since the last step."""
        self._brief_tokens = brief_tokens
        self._unit = unit
        self._rate = 0.0  # tokens that arrive in a step, a mean over the last steps

    def room(self, generations: int, backlog: int) -> int:
        """Return the tokens for contexts of the next step, of all steps; `backlog` is what all contexts lack."""
        self._rate += (self.arrived - self._rate) / _PACE_STEPS
        self.arrived = 0
        brief = max(self._brief_tokens - generations, self._brief_tokens // 2, self._unit)
        crowded = brief < max(_PACE_MARGIN * self._rate, backlog / _BACKLOG_STEPS)
        return brief if generations and not crowded else backlog


_WINDOW_UNIT = 256  # smallest chunk unit in tokens if contexts may be longer than the attention window


class ContextChunker:
    """Divides the tokens of a step among contexts; all but the last chunk of a context end at multiples of the unit.

    With `stops`, a chunk also ends where the last whole block before a context's end does, so that its state is kept.
    """

    def __init__(
        self, limits: EngineLimits, tokens_per_block: int, policy: ContextChunkingPolicy, *, stops: bool = False
    ) -> None:
        self._block = tokens_per_block
        self._stops = stops
        self._limits = limits
        self._equal_progress = limits.chunked and policy is ContextChunkingPolicy.EQUAL_PROGRESS
        windowed = bool(limits.windows) and min(limits.windows) < limits.max_input_len
        unit = max(tokens_per_block, _WINDOW_UNIT) if windowed and limits.chunked else tokens_per_block
        # A unit above the budget could never be scheduled.
        self.unit = min(unit, limits.max_num_tokens)
        """All but the last chunk of a context end at multiples of it."""

    def cost(self, sequence: Sequence, left: int) -> int:
        """Return the tokens that the context of `sequence` takes from the `left` ones before other sequences.

        With chunking 0. Without it, a context that a pause made longer than a step takes the whole step, in chunks.
        """
        if self._limits.chunked:
            return 0
        wanted = sequence.context_left + len(sequence.draft)
        return wanted if wanted <= self._limits.max_num_tokens else max(left, self.unit)

    def divide(self, contexts: list[Sequence], left: int, room: int) -> list[tuple[Sequence, int]]:
        """Return the chunks of `contexts` in a step with `left` tokens for them and their drafts, which are cut to fit.

        The chunks take `room` of these tokens.
        """
        wanted = [sequence.context_left for sequence in contexts]
        if sum(wanted) <= room:
            sizes = wanted
        elif self._equal_progress:
            sizes = self._equal_sizes(contexts, room)
        else:
            sizes = self._first_sizes(contexts, room)
        if self._stops:
            sizes = [self._before_last_block(*pair) for pair in zip(contexts, sizes, strict=True)]
        left -= sum(sizes)
        for sequence, size in zip(contexts, sizes, strict=True):
            if sequence.draft and size == sequence.context_left:
                sequence.draft = sequence.draft[:left]
                left -= len(sequence.draft)
        chunks = [(sequence, size) for sequence, size in zip(contexts, sizes, strict=True) if size]
        if len(chunks) > 1:
            chunks.sort(key=lambda chunk: (chunk[1] == chunk[0].context_left, chunk[0].key.adapter or 0))
        return chunks

    def _before_last_block(self, sequence: Sequence, size: int) -> int:
        """Return a chunk of at most `size` tokens that does not go beyond the last whole block before the end."""
        last = (sequence.context_length - 1) // self._block * self._block
        stops = sequence.key.stored and sequence.computed < last < sequence.computed + size
        return last - sequence.computed if stops else size

    def _first_sizes(self, contexts: list[Sequence], left: int) -> list[int]:
        """First come, first served: the first contexts get everything."""
        sizes = []
        for sequence in contexts:
            size = sequence.context_left
            if size > left:
                size = max(0, left - (sequence.computed + left) % self.unit)
            sizes.append(size)
            left -= size
        return sizes

    def _equal_sizes(self, contexts: list[Sequence], left: int) -> list[int]:
        """Round robin, one unit per context, until the budget is used."""
        sizes = [0] * len(contexts)
        growing = True
        while growing:
            growing = False
            for index, sequence in enumerate(contexts):
                to_boundary = self.unit - (sequence.computed + sizes[index]) % self.unit
                more = min(to_boundary, sequence.context_left - sizes[index])
                if 0 < more <= left:
                    sizes[index] += more
                    left -= more
                    growing = True
        return sizes
