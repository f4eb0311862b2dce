"""Statistics of the executor's iterations, kept in bounded buffers until somebody asks (reference section 1.12)."""

from __future__ import annotations

import time
from collections import deque

from trtserve.executor.configs import ExecutorConfig
from trtserve.executor.enums import RequestStage
from trtserve.executor.scheduler import Plan, Scheduler
from trtserve.executor.sequence import Sequence
from trtserve.executor.statistics import (
    InflightBatchingStats,
    IterationStats,
    KvCacheStats,
    RequestStats,
    RequestStatsPerIteration,
    format_timestamp,
)

_MEMORY_PERIOD = 1.0


class Recorder:
    """Writes one record per iteration with active requests, and a closing one when the last request has ended.

    Unlike upstream's it also writes one at the start, so that a server's gauges show the KV cache before any request.
    """

    def __init__(self, scheduler: Scheduler, config: ExecutorConfig) -> None:
        self._scheduler = scheduler
        self._iterations: deque[IterationStats] = deque(maxlen=config.iter_stats_max_iterations)
        self._requests: deque[RequestStatsPerIteration] = deque(maxlen=config.request_stats_max_iterations)
        self._iteration = 0
        self._started: list[float] = []
        self._completed: list[Sequence] = []
        self._allocated = 0
        self._memory = 0
        self._memory_read = float("-inf")
        if self._iterations.maxlen:
            self._iterations.append(self._iteration_record(Plan(), 0.0, 0))

    def became_active(self, sequence: Sequence) -> None:
        """Note a request that left the queue."""
        self._started.append(time.monotonic() - sequence.arrival)

    def completed(self, sequences: list[Sequence]) -> None:
        """Note requests that ended; the next record counts them."""
        self._completed.extend(sequences)

    def record(self, plan: Plan, *, seconds: float, queue: deque[Sequence]) -> None:
        """Write the record of one iteration that took `seconds`; `queue` holds the requests that still wait."""
        if self._requests.maxlen:
            self._requests.append(self._request_records(plan, list(queue)))
        if self._iterations.maxlen:
            self._iterations.append(self._iteration_record(plan, seconds, len(queue)))
        self._iteration += 1
        self._started.clear()
        self._completed.clear()

    def drain_iterations(self) -> list[IterationStats]:
        """All iteration records since the last call."""
        return _drain(self._iterations)

    def drain_requests(self) -> list[RequestStatsPerIteration]:
        """All request records since the last call."""
        return _drain(self._requests)

    def _iteration_record(self, plan: Plan, seconds: float, queued: int) -> IterationStats:
        contexts, generations = len(plan.chunks), len(plan.generations)
        limits = self._scheduler.limits
        return IterationStats(
            timestamp=format_timestamp(time.time()),
            iter=self._iteration,
            iter_latency_ms=seconds * 1000.0,
            new_active_requests_queue_latency_ms=sum(self._started) * 1000.0,
            num_new_active_requests=len(self._started),
            num_active_requests=len(self._scheduler.running) + len(self._scheduler.pending),
            num_queued_requests=queued,
            num_completed_requests=len(self._completed),
            max_num_active_requests=limits.max_batch_size,
            cpu_mem_usage=self._resident_memory(),
            kv_cache_stats=self._kv_cache_stats(),
            inflight_batching_stats=InflightBatchingStats(
                num_scheduled_requests=contexts + generations,
                num_context_requests=contexts,
                num_gen_requests=generations,
                num_ctx_tokens=plan.context_tokens,
                avg_num_decoded_tokens_per_iter=1.0 if generations else 0.0,
            ),
            max_batch_size_static=limits.max_batch_size,
            max_batch_size_runtime=limits.max_batch_size,
            max_num_tokens_static=limits.max_num_tokens,
            max_num_tokens_runtime=limits.max_num_tokens,
        )

    def _kv_cache_stats(self) -> KvCacheStats:
        cache = self._scheduler.cache
        new, self._allocated = cache.allocated_total - self._allocated, cache.allocated_total
        return KvCacheStats(
            max_num_blocks=cache.pool.count,
            free_num_blocks=cache.pool.free,
            used_num_blocks=cache.pool.count - cache.pool.free,
            tokens_per_block=cache.tokens_per_block,
            alloc_total_blocks=cache.allocated_total,
            alloc_new_blocks=new,
            missed_blocks=cache.allocated_total,
        )

    def _resident_memory(self) -> int:
        """Bytes of memory of this process, read once per second."""
        now = time.monotonic()
        if now - self._memory_read > _MEMORY_PERIOD:
            import psutil

            self._memory, self._memory_read = int(psutil.Process().memory_info().rss), now
        return self._memory

    def _request_records(self, plan: Plan, waiting: list[Sequence]) -> RequestStatsPerIteration:
        scheduled = {sequence.id for sequence, _ in plan.chunks} | {sequence.id for sequence in plan.generations}
        records = [self._request_record(sequence, _stage(sequence), scheduled) for sequence in self._scheduler.active]
        records += [self._request_record(sequence, RequestStage.QUEUED, scheduled) for sequence in waiting]
        records += [
            self._request_record(sequence, RequestStage.GENERATION_COMPLETE, scheduled) for sequence in self._completed
        ]
        return RequestStatsPerIteration(self._iteration, records)

    def _request_record(self, sequence: Sequence, stage: RequestStage, scheduled: set[int]) -> RequestStats:
        """Blocks are those of the whole life so far; nothing is reused, so that each was new and missed."""
        blocks = sequence.capacity // self._scheduler.cache.tokens_per_block
        iterations, generated = sequence.iterations, len(sequence.generated)
        return RequestStats(
            id=sequence.id,
            stage=stage,
            context_prefill_position=min(sequence.computed, sequence.prompt_length),
            num_generated_tokens=generated,
            avg_num_decoded_tokens_per_iter=generated / iterations if iterations else 0.0,
            scheduled=sequence.id in scheduled,
            alloc_total_blocks_per_request=blocks,
            alloc_new_blocks_per_request=blocks,
            missed_blocks_per_request=blocks,
        )


def _stage(sequence: Sequence) -> RequestStage:
    return RequestStage.GENERATION_IN_PROGRESS if sequence.generating else RequestStage.CONTEXT_IN_PROGRESS


def _drain(records: deque[IterationStats] | deque[RequestStatsPerIteration]) -> list:  # type: ignore[type-arg]
    """Take what is there; the worker may append meanwhile."""
    return [records.popleft() for _ in range(len(records))]
