"""Which sequences run in the next step and how many tokens of each: capacity first, then the step's budgets.

Reference: executor-api sections 3.1 to 3.3.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from trtserve.executor.enums import CapacitySchedulerPolicy, ContextChunkingPolicy
from trtserve.executor.kv_cache import KvCache
from trtserve.executor.limits import Limits
from trtserve.executor.sequence import Sequence


@dataclass(slots=True)
class Plan:
    """One step: prompt chunks (sequence, tokens) and sequences that generate one token each."""

    chunks: list[tuple[Sequence, int]] = field(default_factory=list)
    generations: list[Sequence] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.chunks or self.generations)

    @property
    def context_tokens(self) -> int:
        """Prompt tokens of this step."""
        return sum(size for _, size in self.chunks)


class Scheduler:
    """The active sequences in their order: `running` ones have blocks to their end, `pending` ones wait for blocks.

    Policy guaranteed_no_evict: nobody is paused and nobody overtakes. static_batch takes new sequences only when
    nothing runs.
    """

    def __init__(
        self,
        limits: Limits,
        cache: KvCache,
        *,
        policy: CapacitySchedulerPolicy = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT,
        chunking: ContextChunkingPolicy = ContextChunkingPolicy.FIRST_COME_FIRST_SERVED,
    ) -> None:
        self.limits = limits
        self.cache = cache
        self.running: list[Sequence] = []
        self.pending: deque[Sequence] = deque()
        self._static = policy is CapacitySchedulerPolicy.STATIC_BATCH
        self._equal_progress = chunking is ContextChunkingPolicy.EQUAL_PROGRESS
        # A unit above the budget could never be scheduled.
        self._unit = min(cache.tokens_per_block, limits.max_num_tokens)

    @property
    def active(self) -> list[Sequence]:
        """All active sequences in order."""
        return [*self.running, *self.pending]

    @property
    def room(self) -> int:
        """How many more sequences may become active."""
        return self.limits.max_batch_size - len(self.running) - len(self.pending)

    def add(self, sequence: Sequence) -> None:
        """Make `sequence` active, behind the others."""
        self.pending.append(sequence)

    def remove(self, sequences: list[Sequence]) -> None:
        """Let active sequences go and take their blocks back."""
        leaving = {sequence.id for sequence in sequences}
        for sequence in sequences:
            if sequence.slot is not None:
                self.cache.finish(sequence.slot)
                sequence.slot = None
        self.running = [sequence for sequence in self.running if sequence.id not in leaving]
        if any(sequence.id in leaving for sequence in self.pending):
            self.pending = deque(sequence for sequence in self.pending if sequence.id not in leaving)

    def plan(self) -> Plan:
        """The next step."""
        self._set_blocks_aside()
        return self._plan_chunked() if self.limits.chunked else self._plan_whole()

    def _set_blocks_aside(self) -> None:
        """Start pending sequences while their blocks to the end fit; the first that lacks blocks ends it."""
        if self._static and self.running:
            return
        while self.pending:
            first = self.pending[0]
            first.slot = self.cache.start(first.prompt_length + first.max_tokens)
            if first.slot is None:
                return
            self.running.append(self.pending.popleft())

    def _plan_whole(self) -> Plan:
        """Prompts run whole; the first sequence over a budget ends the pass."""
        plan, left = Plan(), self.limits.max_num_tokens
        for sequence in self.running:
            left -= 1 if sequence.generating else sequence.prompt_left
            if left < 0:
                break
            if sequence.generating:
                plan.generations.append(sequence)
            else:
                plan.chunks.append((sequence, sequence.prompt_left))
        return plan

    def _plan_chunked(self) -> Plan:
        """Generations first; prompts share what is left of the budget."""
        generations = [sequence for sequence in self.running if sequence.generating][: self.limits.max_num_tokens]
        prompts = [sequence for sequence in self.running if not sequence.generating]
        left = self.limits.max_num_tokens - len(generations)
        sizes = self._sizes([sequence.prompt_left for sequence in prompts], left) if prompts else []
        chunks = [(sequence, size) for sequence, size in zip(prompts, sizes, strict=True) if size]
        return Plan(chunks, generations)

    def _sizes(self, wanted: list[int], left: int) -> list[int]:
        if sum(wanted) <= left:
            return wanted
        return self._equal_sizes(wanted, left) if self._equal_progress else self._first_sizes(wanted, left)

    def _first_sizes(self, wanted: list[int], left: int) -> list[int]:
        """The first prompts get all that is left; a size that does not end its prompt is a multiple of the unit."""
        sizes = []
        for tokens in wanted:
            size = tokens if tokens <= left else left - left % self._unit
            sizes.append(size)
            left -= size
        return sizes

    def _equal_sizes(self, wanted: list[int], left: int) -> list[int]:
        """Round robin, one unit per prompt, until the budget is used."""
        sizes = [0] * len(wanted)
        growing = True
        while growing:
            growing = False
            for index, tokens in enumerate(wanted):
                more = min(self._unit, tokens - sizes[index])
                if 0 < more <= left:
                    sizes[index] += more
                    left -= more
                    growing = True
        return sizes
