"""Which sequences run in the next step and how many tokens of each: capacity first, then the step's budgets.

Reference: executor-api sections 2.9 and 3.1 to 3.3.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from trtserve.executor.chunks import Chunks
from trtserve.executor.enums import CapacitySchedulerPolicy, ContextChunkingPolicy
from trtserve.executor.kv_cache import KvCache
from trtserve.executor.limits import Limits
from trtserve.executor.sequence import Sequence

Fits = Callable[[set[Any]], bool]


@dataclass(slots=True)
class Plan:
    """One step: context chunks (sequence, tokens), sequences that generate a token per beam, and those put on hold.

    The draft of a sequence rides with its last chunk and is not in the chunk's size.
    """

    chunks: list[tuple[Sequence, int]] = field(default_factory=list)
    generations: list[Sequence] = field(default_factory=list)
    paused: list[Sequence] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.chunks or self.generations)

    @property
    def context_tokens(self) -> int:
        """Context tokens of this step."""
        return sum(size for _, size in self.chunks)


class Scheduler:
    """The active sequences, those of higher priority first: some hold blocks (`slots`), the others wait for them.

    guaranteed_no_evict: a sequence starts when its blocks to the end can be set aside; nobody is paused and nobody
    overtakes. static_batch takes new sequences only when nothing runs. max_utilization sets aside one step's blocks
    and pauses the last started sequence when they are short. `fits` says whether a set of adapters can be in use at
    the same time.
    """

    def __init__(
        self,
        limits: Limits,
        cache: KvCache,
        *,
        policy: CapacitySchedulerPolicy = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT,
        chunking: ContextChunkingPolicy = ContextChunkingPolicy.FIRST_COME_FIRST_SERVED,
        fits: Fits | None = None,
    ) -> None:
        self.limits = limits
        self.cache = cache
        self.active: list[Sequence] = []
        self._waiting = 0  # active sequences that hold no blocks
        self._adapters = 0  # active sequences with an adapter
        self._static = policy is CapacitySchedulerPolicy.STATIC_BATCH
        self._pauses = policy is CapacitySchedulerPolicy.MAX_UTILIZATION
        self._fits = fits
        one_window = len(set(limits.windows)) <= 1
        self._waits = cache.reuse and one_window and not self._static
        self._chunks = Chunks(limits, cache.tokens_per_block, chunking)

    @property
    def room(self) -> int:
        """How many more sequences may become active."""
        return self.limits.max_batch_size - len(self.active)

    def take(self, queue: deque[Sequence]) -> Sequence | None:
        """Remove and return the first of `queue`, which is ordered as by `insert`, that may become active.

        That has the beam width of those that are active, and when there is no room, a priority above the lowest.
        """
        active = self.active
        for index, sequence in enumerate(queue):
            if self.room <= 0 and sequence.priority <= active[-1].priority:
                return None
            if not active or sequence.width == active[0].width:
                del queue[index]
                return sequence
        return None

    def add(self, sequence: Sequence) -> None:
        """Make `sequence` active, behind those of its priority."""
        insert(self.active, sequence)
        self._waiting += 1
        self._adapters += sequence.adapter is not None

    def remove(self, sequences: list[Sequence], *, trusted: bool = True) -> None:
        """Let active sequences go and take their blocks back; the contents are used again unless not `trusted`."""
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
        self.cache.finish(sequence.slots, sequence.cached_tokens()[: sequence.computed] if stored else [])
        sequence.slots = ()

    def plan(self) -> Plan:
        """The next step."""
        plan = Plan()
        beyond = self.limits.long_beyond
        if beyond is not None:
            for sequence in self.active:
                if sequence.outgrows(beyond):
                    sequence.compute_again()
        if self._pauses:
            chosen = self._choose_for_a_step(plan.paused)
        else:
            if self._waiting:
                self._start_to_the_end()
            chosen = [sequence for sequence in self.active if sequence.slots] if self._waiting else self.active
        contexts, left = self._plan_generations(plan, chosen)
        if contexts:
            plan.chunks = self._chunks.divide(contexts, left)
        if self._adapters:
            plan.generations.sort(key=lambda sequence: sequence.key.adapter or 0)
        return plan

    def _start_to_the_end(self) -> None:
        """Start sequences while their blocks to the end fit; the first that lacks blocks ends it."""
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

    def _choose_for_a_step(self, paused: list[Sequence]) -> list[Sequence]:
        """The sequences whose blocks of the next step fit, in order; the last started gives its own up for others."""
        chosen: list[Sequence] = []
        computing = self._being_computed() if self._waiting else set()
        candidates = deque(self.active)
        while candidates and len(chosen) < self.limits.max_batch_size:
            sequence = candidates[0]
            if not sequence.slots and self._must_wait(sequence, computing):
                candidates.popleft()
            elif self._has_room(sequence, computing):
                chosen.append(candidates.popleft())
            elif not self._pause_last(candidates, paused):
                break
        return chosen

    def _has_room(self, sequence: Sequence, computing: set[bytes]) -> bool:
        """Set aside the blocks of the next step of `sequence`; of a context, all its blocks at its first chunk."""
        if sequence.slots:
            return not sequence.generating or self.cache.reserve(sequence.slots, sequence.computed + 1)
        return self._start(sequence, sequence.context_left + len(sequence.draft), computing)

    def _pause_last(self, candidates: deque[Sequence], paused: list[Sequence]) -> bool:
        """Pause the last candidate that has started, after which the list of candidates ends; False without one."""
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
        """True for one step when another sequence computes what it needs, or while its adapter finds no room."""
        if computing and self.cache.next_missing(sequence.key) in computing:
            return True
        if sequence.adapter is None or self._fits is None:
            return False
        running = {other.adapter for other in self.active if other.slots and other.adapter is not None}
        return not self._fits(running | {sequence.adapter})

    def _being_computed(self) -> set[bytes]:
        """The blocks, as `KvCache.next_missing` names them, that running contexts compute for others to use.

        Not with several windows and not in static batches: reference section 3.2.
        """
        if not self._waits:
            return set()
        running = (each for each in self.active if each.slots and not each.generating and each.key.stored)
        return {block for each in running if (block := self.cache.next_missing(each.key)) is not None}

    def _start(self, sequence: Sequence, tokens: int, computing: set[bytes]) -> bool:
        """Give `sequence` its rows with room for `tokens` tokens; False when that does not fit."""
        allocation = self.cache.start(sequence.key, reserve=tokens, width=sequence.width, use=sequence.use)
        if allocation is None:
            return False
        sequence.slots, sequence.computed = allocation.slots, allocation.reused_tokens
        self._waiting -= 1
        if self._waits and sequence.key.stored and (missing := self.cache.next_missing(sequence.key)) is not None:
            computing.add(missing)
        return True

    def _plan_generations(self, plan: Plan, chosen: list[Sequence]) -> tuple[list[Sequence], int]:
        """Take generations of one beam width into the step; the contexts that may join them, and their tokens.

        The first sequence over the budget ends the pass.
        """
        left = self.limits.max_num_tokens
        contexts, held, width = [], 0, 0
        for sequence in chosen:
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


def insert(sequences: list[Sequence] | deque[Sequence], sequence: Sequence) -> None:
    """Put `sequence` behind those of its priority or a higher one."""
    if not sequences or sequences[-1].priority >= sequence.priority:
        sequences.append(sequence)
    else:
        sequences.insert(bisect_right(sequences, -sequence.priority, key=lambda each: -each.priority), sequence)
