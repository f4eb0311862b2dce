"""Record statistics of the executor's iterations in bounded buffers until they are fetched."""

from __future__ import annotations

import time
from collections import deque

from trtserve.executor.engine.scheduler import Scheduler, StepPlan
from trtserve.executor.engine.sequence import Sequence
from trtserve.executor.interface.configs import ExecutorConfig
from trtserve.executor.interface.enums import BatchingType, RequestStage
from trtserve.executor.interface.statistics import (
    InflightBatchingStats,
    IterationStats,
    KvCacheStats,
    RequestStats,
    RequestStatsPerIteration,
    SpecDecodingStats,
    StaticBatchingStats,
    format_timestamp,
    hit_rate,
)

_MEMORY_PERIOD = 1.0


class Recorder:
    """Writes one record per iteration with active requests, and a closing one when the last request has ended.

    Unlike upstream it also writes one at the start, so that a server's metrics show the KV cache before any request.
    `iteration` is the number of the next record.
    """

    def __init__(self, scheduler: Scheduler, config: ExecutorConfig, *, drafts: bool) -> None:
        """`drafts`: records have statistics of draft tokens."""
        self._scheduler = scheduler
        self._iterations: deque[IterationStats] = deque(maxlen=config.iter_stats_max_iterations)
        self._requests: deque[RequestStatsPerIteration] = deque(maxlen=config.request_stats_max_iterations)
        self.iteration = 0
        self._started: list[float] = []
        self._completed: list[Sequence] = []
        self._with_drafts = drafts
        self._drafts = SpecDecodingStats()
        self._static = config.batching_type is BatchingType.STATIC
        self._batch = 0
        self._memory = 0
        self._memory_read = float("-inf")
        if self._iterations.maxlen:
            self._iterations.append(self._iteration_record(StepPlan(), 0.0, 0))
            self._drafts = SpecDecodingStats()  # the record keeps the other

    def became_active(self, sequence: Sequence) -> None:
        """Note that a request has left the queue."""
        self._started.append(time.monotonic() - sequence.arrival)

    def completed(self, sequences: list[Sequence]) -> None:
        """Note that requests have ended; the next record counts them."""
        self._completed.extend(sequences)

    def verified(self, drafted: int, accepted: int) -> None:
        """Note that `accepted` of the `drafted` tokens of a request were correct; the next record counts them.

        The acceptance length is the mean number of tokens that such a request got: the accepted ones plus one.
        """
        drafts = self._drafts
        drafts.num_draft_tokens += drafted
        drafts.num_accepted_tokens += accepted
        drafts.num_requests_with_draft_tokens += 1
        drafts.acceptance_length = 1 + drafts.num_accepted_tokens / drafts.num_requests_with_draft_tokens

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
            self._drafts = SpecDecodingStats()

    def drain_iterations(self) -> list[IterationStats]:
        """Return all iteration records since the last call."""
        return _drain(self._iterations)

    def drain_requests(self) -> list[RequestStatsPerIteration]:
        """Return all request records since the last call."""
        return _drain(self._requests)

    def _iteration_record(self, plan: StepPlan, seconds: float, queued: int) -> IterationStats:
        limits = self._scheduler.limits
        return IterationStats(
            timestamp=format_timestamp(time.time()),
            iter=self.iteration,
            iter_latency_ms=seconds * 1000.0,
            new_active_requests_queue_latency_ms=sum(self._started) * 1000.0,
            num_new_active_requests=len(self._started),
            num_active_requests=len(self._scheduler.active),
            num_queued_requests=queued,
            num_completed_requests=len(self._completed),
            max_num_active_requests=limits.max_batch_size,
            cpu_mem_usage=self._resident_memory(),
            kv_cache_stats=self._kv_cache_stats(),
            static_batching_stats=self._static_stats(plan) if self._static else None,
            inflight_batching_stats=None if self._static else self._inflight_stats(plan),
            specdec_stats=self._drafts if self._with_drafts else None,
            max_batch_size_static=limits.max_batch_size,
            max_batch_size_runtime=limits.max_batch_size,
            max_num_tokens_static=limits.max_num_tokens,
            max_num_tokens_runtime=limits.max_num_tokens,
        )

    def _static_stats(self, plan: StepPlan) -> StaticBatchingStats:
        """Empty slots are those of sequences of the batch that have ended while others still generate."""
        contexts, generations = len(plan.chunks), len(plan.generations)
        if not generations:
            self._batch = sum(bool(sequence.slots) for sequence in self._scheduler.active)
        return StaticBatchingStats(
            num_scheduled_requests=contexts + generations,
            num_context_requests=contexts,
            num_ctx_tokens=plan.context_tokens,
            num_gen_tokens=sum(sequence.width for sequence in plan.generations),
            empty_gen_slots=self._batch - generations if generations and not contexts else 0,
        )

    def _inflight_stats(self, plan: StepPlan) -> InflightBatchingStats:
        contexts, generations = len(plan.chunks), len(plan.generations)
        accepted = self._drafts.num_accepted_tokens if plan.drafts else 0
        return InflightBatchingStats(
            num_scheduled_requests=contexts + generations,
            num_context_requests=contexts,
            num_gen_requests=generations,
            num_paused_requests=len(plan.paused),
            num_ctx_tokens=plan.context_tokens,
            avg_num_decoded_tokens_per_iter=1 + accepted / generations if generations else 0.0,
        )

    def _kv_cache_stats(self) -> KvCacheStats:
        cache = self._scheduler.cache
        return KvCacheStats(
            max_num_blocks=cache.pool.count,
            free_num_blocks=cache.pool.free,
            used_num_blocks=cache.pool.count - cache.pool.free,
            tokens_per_block=cache.tokens_per_block,
            alloc_total_blocks=cache.allocated_total,
            alloc_new_blocks=cache.new_total,
            reused_blocks=cache.reused_total,
            missed_blocks=cache.missed_total,
            cache_hit_rate=hit_rate(cache.reused_total, cache.missed_total),
        )

    def _resident_memory(self) -> int:
        """Return the memory of this process in bytes, read once per second."""
        now = time.monotonic()
        if now - self._memory_read > _MEMORY_PERIOD:
            import psutil

            self._memory, self._memory_read = int(psutil.Process().memory_info().rss), now
        return self._memory

    def _request_records(self, plan: StepPlan, waiting: list[Sequence]) -> RequestStatsPerIteration:
        scheduled = {sequence for sequence, _ in plan.chunks} | set(plan.generations)
        stages = [
            (
                sequence,
                RequestStage.GENERATION_IN_PROGRESS if sequence.generating else RequestStage.CONTEXT_IN_PROGRESS,
            )
            for sequence in self._scheduler.active
        ]
        stages += [(sequence, RequestStage.QUEUED) for sequence in waiting]
        stages += [(sequence, RequestStage.GENERATION_COMPLETE) for sequence in self._completed]
        records = [
            _request_record(sequence, stage, scheduled=sequence in scheduled, paused=sequence in plan.paused)
            for sequence, stage in stages
        ]
        return RequestStatsPerIteration(self.iteration, records)


def _request_record(sequence: Sequence, stage: RequestStage, *, scheduled: bool, paused: bool) -> RequestStats:
    """Blocks count since the request started; a beam has as many tokens as there were iterations."""
    use, iterations = sequence.use, sequence.iterations
    generated = len(sequence.generated) if sequence.width == 1 else iterations
    return RequestStats(
        id=sequence.id,
        stage=stage,
        context_prefill_position=min(sequence.computed, sequence.prompt_length),
        num_generated_tokens=generated,
        avg_num_decoded_tokens_per_iter=generated / iterations if iterations else 0.0,
        scheduled=scheduled,
        paused=paused,
        alloc_total_blocks_per_request=use.total,
        alloc_new_blocks_per_request=use.new,
        reused_blocks_per_request=use.reused,
        missed_blocks_per_request=use.missed,
        kv_cache_hit_rate_per_request=hit_rate(use.reused, use.missed),
    )


def _drain(records: deque[IterationStats] | deque[RequestStatsPerIteration]) -> list:  # type: ignore[type-arg]
    """Remove and return all records; the worker may append meanwhile."""
    return [records.popleft() for _ in range(len(records))]
