"""Record statistics of the executor's iterations in bounded buffers until they are fetched."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TypeVar

from trtserve.executor.engine.limits import EngineOptions
from trtserve.executor.engine.requests import BlockUse, RequestStage
from trtserve.executor.engine.scheduler import Scheduler, StepPlan
from trtserve.executor.engine.sequence import Sequence

_T = TypeVar("_T")
_MEMORY_PERIOD = 1.0


@dataclass(slots=True)
class DraftCounts:
    """Draft tokens of an iteration."""

    drafted: int = 0
    accepted: int = 0
    requests: int = 0  # requests that had draft tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationRecord:
    """One iteration of the engine."""

    number: int
    time: float  # seconds since the epoch, at its end
    seconds: float = 0.0
    started: int = 0  # requests that have left the queue since the last iteration
    queued_seconds: float = 0.0  # how long these were in the queue, together
    active: int = 0
    queued: int = 0
    completed: int = 0
    contexts: int = 0  # requests whose prompts were computed
    context_tokens: int = 0
    generations: int = 0  # requests that got further tokens
    generated_tokens: int = 0  # one for each beam
    right_guesses: int = 0  # guessed tokens that were right, of requests that got further tokens
    paused: int = 0
    empty_slots: int | None = None
    """Of a static batch: places of requests that have ended while others still generate; None without."""
    blocks: int  # blocks of the KV cache
    free_blocks: int
    tokens_per_block: int
    use: BlockUse  # blocks used since the start, by all requests
    memory: int = 0  # bytes of memory of this process
    drafts: DraftCounts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRecord:
    """One sequence at one iteration."""

    request_id: int
    stage: RequestStage
    computed: int  # tokens of the prompt that are computed
    generated: int
    iterations: int
    scheduled: bool
    paused: bool
    use: BlockUse  # blocks since the request started


@dataclass(frozen=True, slots=True)
class RequestsRecord:
    """All requests at one iteration."""

    number: int
    sequences: list[SequenceRecord] = field(default_factory=list)


class Recorder:
    """Writes one record per iteration with active requests, and a closing one when the last request has ended.

    Unlike upstream it also writes one at the start, so that a server's metrics show the KV cache before any request.
    `iteration` is the number of the next record.
    """

    def __init__(self, scheduler: Scheduler, options: EngineOptions, *, drafts: bool) -> None:
        """`drafts`: records have counts of draft tokens."""
        self._scheduler = scheduler
        self._iterations: deque[IterationRecord] = deque(maxlen=options.iteration_records)
        self._requests: deque[RequestsRecord] = deque(maxlen=options.request_records)
        self.iteration = 0
        self._started: list[float] = []
        self._completed: list[Sequence] = []
        self._with_drafts = drafts
        self._drafts = DraftCounts()
        self._static = options.static_batching
        self._batch = 0
        self._memory = 0
        self._memory_read = float("-inf")
        if self._iterations.maxlen:
            self._iterations.append(self._iteration_record(StepPlan(), 0.0, 0))

    def became_active(self, sequence: Sequence) -> None:
        """Note that a request has left the queue."""
        self._started.append(time.monotonic() - sequence.arrival)

    def completed(self, sequences: list[Sequence]) -> None:
        """Note that requests have ended; the next record counts them."""
        self._completed.extend(sequences)

    def verified(self, drafted: int, accepted: int) -> None:
        """Note that `accepted` of the `drafted` tokens of a request were correct; the next record counts them."""
        self._drafts.drafted += drafted
        self._drafts.accepted += accepted
        self._drafts.requests += 1

    def record(self, plan: StepPlan, *, seconds: float, queue: deque[Sequence]) -> None:
        """Write the record of one iteration that took `seconds`; `queue` holds the waiting requests."""
        if self._requests.maxlen:
            self._requests.append(self._request_records(plan, list(queue)))
        if self._iterations.maxlen:
            self._iterations.append(self._iteration_record(plan, seconds, len(queue)))
        self.iteration += 1
        self._started.clear()
        self._completed.clear()
        if self._with_drafts:
            self._drafts = DraftCounts()

    def drain_iterations(self) -> list[IterationRecord]:
        """Return all iteration records since the last call."""
        return _drain(self._iterations)

    def drain_requests(self) -> list[RequestsRecord]:
        """Return all request records since the last call."""
        return _drain(self._requests)

    def _iteration_record(self, plan: StepPlan, seconds: float, queued: int) -> IterationRecord:
        cache = self._scheduler.cache
        contexts, generations = len(plan.chunks), len(plan.generations)
        if self._static and not generations:
            self._batch = sum(bool(sequence.slots) for sequence in self._scheduler.active)
        empty = self._batch - generations if generations and not contexts else 0
        return IterationRecord(
            number=self.iteration,
            time=time.time(),
            seconds=seconds,
            started=len(self._started),
            queued_seconds=sum(self._started),
            active=len(self._scheduler.active),
            queued=queued,
            completed=len(self._completed),
            contexts=contexts,
            context_tokens=plan.context_tokens,
            generations=generations,
            generated_tokens=sum([sequence.width for sequence in plan.generations]),
            right_guesses=self._drafts.accepted if plan.drafts else 0,
            paused=len(plan.paused),
            empty_slots=empty if self._static else None,
            blocks=cache.pool.count,
            free_blocks=cache.pool.free,
            tokens_per_block=cache.tokens_per_block,
            use=BlockUse(cache.allocated_total, cache.new_total, cache.reused_total, cache.missed_total),
            memory=self._resident_memory(),
            drafts=replace(self._drafts) if self._with_drafts else None,
        )

    def _resident_memory(self) -> int:
        """Return the memory of this process in bytes, read once per second."""
        now = time.monotonic()
        if now - self._memory_read > _MEMORY_PERIOD:
            import psutil

            self._memory, self._memory_read = int(psutil.Process().memory_info().rss), now
        return self._memory

    def _request_records(self, plan: StepPlan, waiting: list[Sequence]) -> RequestsRecord:
        scheduled = {sequence for sequence, _ in plan.chunks} | set(plan.generations)
        stages = [
            (sequence, RequestStage.GENERATION_IN_PROGRESS if sequence.generating else RequestStage.CONTEXT_IN_PROGRESS)
            for sequence in self._scheduler.active
        ]
        stages += [(sequence, RequestStage.QUEUED) for sequence in waiting]
        stages += [(sequence, RequestStage.GENERATION_COMPLETE) for sequence in self._completed]
        records = [
            _sequence_record(sequence, stage, scheduled=sequence in scheduled, paused=sequence in plan.paused)
            for sequence, stage in stages
        ]
        return RequestsRecord(self.iteration, records)


def _sequence_record(sequence: Sequence, stage: RequestStage, *, scheduled: bool, paused: bool) -> SequenceRecord:
    return SequenceRecord(
        request_id=sequence.id,
        stage=stage,
        computed=min(sequence.computed, sequence.prompt_length),
        # A beam has as many tokens as there were iterations.
        generated=len(sequence.generated) if sequence.width == 1 else sequence.iterations,
        iterations=sequence.iterations,
        scheduled=scheduled,
        paused=paused,
        use=replace(sequence.use),
    )


def _drain(records: deque[_T]) -> list[_T]:
    """Remove and return all records; the worker may append meanwhile."""
    return [records.popleft() for _ in range(len(records))]
