"""Statistics of reuse, pauses, static batches, drafts and requests."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from tests.support.schedulers import add, make_scheduler, make_sequence, run_step
from trtserve.executor.api import (
    BatchingType,
    CapacitySchedulerPolicy,
    ExecutorConfig,
    IterationStats,
    RequestStage,
    RequestStats,
    RequestStatsPerIteration,
)
from trtserve.executor.engine.recorder import Recorder
from trtserve.executor.engine.scheduler import Scheduler, StepPlan
from trtserve.executor.engine.sequence import Sequence
from trtserve.executor.interface.convert import engine_options
from trtserve.executor.interface.results import iteration_stats, request_stats


def _recorder(scheduler: Scheduler, **config: Any) -> Recorder:
    settings = ExecutorConfig(request_stats_max_iterations=100, **config)
    recorder = Recorder(scheduler, engine_options(settings), drafts=bool(scheduler.limits.max_draft_len))
    recorder.drain_iterations()
    return recorder


def _step(
    scheduler: Scheduler, recorder: Recorder, queue: deque[Sequence] | None = None
) -> tuple[StepPlan, IterationStats]:
    plan = run_step(scheduler)
    recorder.record(plan, seconds=0.25, queue=queue or deque())
    (record,) = recorder.drain_iterations()
    return plan, iteration_stats(record, scheduler.limits)


def _drained(recorder: Recorder) -> list[RequestStatsPerIteration]:
    return [request_stats(record) for record in recorder.drain_requests()]


def _requests(recorder: Recorder) -> dict[int, RequestStats]:
    """Return the latest record of each request."""
    return {stats.id: stats for record in _drained(recorder) for stats in record.request_stats}


def test_reused_blocks_and_hit_rate() -> None:
    scheduler = make_scheduler(reuse=True)
    recorder = _recorder(scheduler)
    first = add(scheduler, 1, 8)
    _, record = _step(scheduler, recorder)
    cache = record.kv_cache_stats
    assert cache is not None
    assert (cache.alloc_total_blocks, cache.alloc_new_blocks) == (2, 2)
    assert (cache.reused_blocks, cache.missed_blocks, cache.cache_hit_rate) == (0, 2, 0.0)
    scheduler.remove([first])
    add(scheduler, 2, 16)
    _, record = _step(scheduler, recorder)
    cache = record.kv_cache_stats
    assert cache is not None
    assert (cache.alloc_total_blocks, cache.alloc_new_blocks) == (4, 4)
    assert (cache.reused_blocks, cache.missed_blocks) == (2, 4)
    assert cache.cache_hit_rate == pytest.approx(1 / 3)
    assert (cache.used_num_blocks, cache.free_num_blocks) == (4, 96)
    stats = _requests(recorder)[2]
    assert (stats.alloc_total_blocks_per_request, stats.alloc_new_blocks_per_request) == (2, 2)
    assert (stats.reused_blocks_per_request, stats.missed_blocks_per_request) == (2, 2)
    assert stats.kv_cache_hit_rate_per_request == 0.5


def test_reusable_blocks_count_as_free_and_not_as_new() -> None:
    scheduler = make_scheduler(blocks=3, reuse=True)
    recorder = _recorder(scheduler)
    first = add(scheduler, 1, 8, 1)
    _step(scheduler, recorder)
    scheduler.remove([first])
    add(scheduler, 2, [50, 51, 52, 53, 54, 55, 56, 57, 58], 3)
    cache = _step(scheduler, recorder)[1].kv_cache_stats
    assert cache is not None
    assert (cache.alloc_total_blocks, cache.alloc_new_blocks, cache.used_num_blocks) == (5, 3, 3)


def test_pauses_are_in_iteration_and_request_statistics() -> None:
    scheduler = make_scheduler(blocks=3, policy=CapacitySchedulerPolicy.MAX_UTILIZATION)
    recorder = _recorder(scheduler)
    add(scheduler, 1, 4, 8)
    add(scheduler, 2, 3, 5)
    records = [_step(scheduler, recorder)[1] for _ in range(3)]
    inflight = [record.inflight_batching_stats for record in records]
    assert [stats.num_paused_requests for stats in inflight if stats] == [0, 0, 1]
    stats = _requests(recorder)
    assert (stats[1].paused, stats[1].scheduled) == (False, True)
    assert (stats[2].paused, stats[2].scheduled) == (True, False)
    assert stats[2].stage is RequestStage.CONTEXT_IN_PROGRESS
    assert stats[2].num_generated_tokens == 2


def test_static_batching_statistics() -> None:
    scheduler = make_scheduler(policy=CapacitySchedulerPolicy.STATIC_BATCH)
    recorder = _recorder(scheduler, batching_type=BatchingType.STATIC)
    batch = [add(scheduler, number, 4) for number in (1, 2, 3)]
    records = [_step(scheduler, recorder)[1]]
    add(scheduler, 4, 4)
    records.append(_step(scheduler, recorder)[1])
    scheduler.remove(batch[:2])
    records.append(_step(scheduler, recorder)[1])
    scheduler.remove(batch[2:])
    records += [_step(scheduler, recorder)[1] for _ in range(2)]
    static = [record.static_batching_stats for record in records]
    assert [(each.num_context_requests, each.num_ctx_tokens) for each in static if each] == [
        (3, 12),
        (0, 0),
        (0, 0),
        (1, 4),
        (0, 0),
    ]
    assert [(each.num_gen_tokens, each.empty_gen_slots) for each in static if each] == [
        (0, 0),
        (3, 0),
        (1, 2),
        (0, 0),
        (1, 0),
    ]
    assert [each.num_scheduled_requests for each in static if each] == [3, 3, 1, 1, 1]
    assert all(record.inflight_batching_stats is None for record in records)


@pytest.mark.parametrize("built", [0, 8])
def test_draft_statistics_if_the_engine_accepts_drafts(built: int) -> None:
    scheduler = make_scheduler(max_draft_len=built)
    recorder = _recorder(scheduler)
    add(scheduler, 1, 4)
    recorder.verified(4, 3)
    recorder.verified(2, 0)
    stats = _step(scheduler, recorder)[1].specdec_stats
    again = _step(scheduler, recorder)[1].specdec_stats
    if not built:
        assert stats is again is None
        return
    assert stats is not None
    assert again is not None
    assert (stats.num_draft_tokens, stats.num_accepted_tokens, stats.num_requests_with_draft_tokens) == (6, 3, 2)
    assert stats.acceptance_length == 2.5
    assert (again.num_draft_tokens, again.acceptance_length) == (0, 0.0)


def test_sequences_of_one_request_have_their_own_records() -> None:
    scheduler = make_scheduler(batch=1)
    recorder = _recorder(scheduler)
    add(scheduler, 7, 4)
    _step(scheduler, recorder, deque([make_sequence(7, 4)]))
    (record,) = _drained(recorder)
    assert [(stats.id, stats.scheduled, stats.stage) for stats in record.request_stats] == [
        (7, True, RequestStage.GENERATION_IN_PROGRESS),
        (7, False, RequestStage.QUEUED),
    ]


def test_completed_requests_appear_once_more() -> None:
    scheduler = make_scheduler()
    recorder = _recorder(scheduler)
    sequence = add(scheduler, 1, 4)
    sequence.iterations = 1
    _step(scheduler, recorder)
    scheduler.remove([sequence])
    recorder.completed([sequence])
    recorder.record(StepPlan(), seconds=0.0, queue=deque())
    recorder.record(StepPlan(), seconds=0.0, queue=deque())
    stages = [[stats.stage for stats in record.request_stats] for record in _drained(recorder)]
    assert stages == [[RequestStage.GENERATION_IN_PROGRESS], [RequestStage.GENERATION_COMPLETE], []]
    assert [record.completed for record in recorder.drain_iterations()] == [1, 0]
