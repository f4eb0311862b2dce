"""The executor with a fake model: queue, waiting, cancelling, statistics."""

from __future__ import annotations

import json
import threading
from datetime import timedelta

import pytest

from tests.support.executors import SOON, Start, answer_of, collect, free_blocks, loop_of
from tests.support.waiting import wait_until
from trtserve.executor.api import (
    FinishReason,
    KvCacheConfig,
    OutputConfig,
    Request,
    RequestStage,
    RequestStats,
    Response,
)

# Queue


def test_full_queue_refuses_the_whole_call(start: Start) -> None:
    executor, model = start(batch=1, max_queue_size=2)
    model.gate.clear()
    first = executor.enqueue_request(Request([1], 2))
    assert executor._loop is not None
    queue = loop_of(executor).waiting
    wait_until(lambda: not queue)
    second = executor.enqueue_request(Request([2], 2))
    with pytest.raises(RuntimeError, match="Maximum queue size of 2 has been reached, please try again later"):
        executor.enqueue_requests([Request([3], 2), Request([4], 2)])
    third = executor.enqueue_request(Request([5], 2))
    model.gate.set()
    assert set(collect(executor, [first, second, third])) == {first, second, third}


def test_ids_are_in_order_of_the_requests(start: Start) -> None:
    executor, _ = start()
    ids = executor.enqueue_requests([Request([1], 1) for _ in range(3)])
    assert ids == sorted(ids)
    assert executor.enqueue_requests([]) == []
    with pytest.raises(TypeError):
        executor.enqueue_requests(["text"])  # type: ignore[list-item]


# Waiting


def test_await_without_responses_times_out(start: Start) -> None:
    executor, _ = start()
    assert executor.await_responses(timeout=0) == []
    assert executor.await_responses(timedelta(milliseconds=1)) == []
    assert executor.await_responses(12345, timedelta(milliseconds=1)) == []


def test_await_by_id_and_by_ids(start: Start) -> None:
    executor, _ = start()
    first, second = executor.enqueue_requests([Request([1], 2), Request([2], 2)])
    wait_until(lambda: executor.get_num_responses_ready() == 2)
    assert (executor.get_num_responses_ready(first), executor.get_num_responses_ready(999)) == (1, 0)
    by_ids = executor.await_responses([second, first], timedelta(seconds=SOON))
    assert [[response.request_id for response in each] for each in by_ids] == [[second], [first]]  # type: ignore[union-attr]
    (again,) = executor.await_responses(first)
    assert isinstance(again, Response)
    assert "has already been processed and terminated" in again.error_msg
    assert executor.get_num_responses_ready() == 0


def test_await_returns_when_a_response_arrives(start: Start) -> None:
    executor, model = start()
    model.gate.clear()
    number = executor.enqueue_request(Request([1], 2))
    threading.Timer(0.05, model.gate.set).start()
    (response,) = executor.await_responses(number)
    assert isinstance(response, Response)
    assert response.result.is_final


# Cancelling


def test_cancel_ends_a_request_within_one_step(start: Start) -> None:
    executor, model = start(seq_len=20_000)
    number = executor.enqueue_request(Request([1], 19_000, streaming=True))
    executor.await_responses(number)
    executor.cancel_request(number)
    steps = len(model.steps)
    executor.cancel_request(number)
    last = collect(executor, [number])[number][-1]
    assert len(model.steps) <= steps + 1
    assert not last.has_error()
    assert last.result.output_token_ids == [[]]
    assert last.result.finish_reasons == [FinishReason.CANCELLED]
    assert free_blocks(executor) == model.blocks
    executor.cancel_request(number)
    executor.cancel_request(10**6)
    assert not answer_of(executor, Request([1], 2)).has_error()


@pytest.mark.parametrize("excluded", [False, True])
def test_a_cancelled_request_that_does_not_stream_answers_with_its_prompt(start: Start, excluded: bool) -> None:
    executor, _ = start(seq_len=20_000)
    request = Request([7, 8], 19_000, output_config=OutputConfig(exclude_input_from_output=excluded))
    number = executor.enqueue_request(request)
    executor.cancel_request(number)
    (response,) = collect(executor, [number])[number]
    assert response.result.output_token_ids == [[] if excluded else [7, 8]]
    assert response.result.finish_reasons == [FinishReason.CANCELLED]


def test_queued_request_is_cancelled_when_it_becomes_active(start: Start) -> None:
    executor, model = start(batch=1)
    model.gate.clear()
    first, second = executor.enqueue_requests([Request([1], 5), Request([2], 50)])
    executor.cancel_request(second)
    model.gate.set()
    responses = collect(executor, [first, second])
    assert responses[first][0].result.finish_reasons == [FinishReason.LENGTH]
    assert responses[second][0].result.finish_reasons == [FinishReason.CANCELLED]
    assert len(model.steps) == 5


# Statistics


def test_statistics_of_the_iterations(start: Start) -> None:
    executor, model = start(batch=4, kv_cache_config=KvCacheConfig(max_tokens=160))
    (first,) = executor.get_latest_iteration_stats()
    assert first.kv_cache_stats is not None
    assert (first.num_active_requests, first.kv_cache_stats.max_num_blocks) == (0, 40)
    answer_of(executor, Request([1, 2, 3, 4, 5], 3))
    wait_until(lambda: len(loop_of(executor).recorder._iterations) == 4)
    records = executor.get_latest_iteration_stats()
    assert [record.iter for record in records] == [0, 1, 2, 3]
    assert [record.num_active_requests for record in records] == [1, 1, 1, 0]
    assert [record.num_completed_requests for record in records] == [0, 0, 0, 1]
    assert [record.num_new_active_requests for record in records] == [1, 0, 0, 0]
    inflight = [record.inflight_batching_stats for record in records]
    assert [(s.num_ctx_tokens, s.num_context_requests, s.num_gen_requests) for s in inflight if s] == [
        (5, 1, 0),
        (0, 0, 1),
        (0, 0, 1),
        (0, 0, 0),
    ]
    cache = [record.kv_cache_stats for record in records]
    assert [(s.used_num_blocks, s.free_num_blocks, s.max_num_blocks) for s in cache if s] == [
        (2, 38, 40),
        (2, 38, 40),
        (2, 38, 40),
        (0, 40, 40),
    ]
    assert records[0].max_num_active_requests == 4
    assert records[0].cpu_mem_usage > 1 << 20
    assert records[0].static_batching_stats is None
    document = json.loads(records[0].to_json_str())
    assert (document["kvCacheStats"]["maxNumBlocks"], document["maxBatchSizeRuntime"]) == (40, 4)
    assert {"iterLatencyMS", "newActiveRequestsQueueLatencyMS", "specDecStats"} <= set(document)
    assert document["staticBatchingStats"] is None
    assert executor.get_latest_iteration_stats() == []
    assert executor.get_latest_request_stats() == []
    assert model.blocks * model.tokens_per_block == executor.kv_cache_tokens == 160


def test_request_statistics_if_enabled(start: Start) -> None:
    executor, _ = start(batch=1, request_stats_max_iterations=100, iter_stats_max_iterations=2)
    ids = executor.enqueue_requests([Request([1, 2], 3), Request([3], 6)])
    collect(executor, ids)
    records = executor.get_latest_request_stats()
    first = {stats.id: stats for stats in records[0].request_stats}
    assert first[ids[0]].scheduled
    assert first[ids[0]].context_prefill_position == 2
    assert first[ids[1]].stage is RequestStage.QUEUED
    # Blocks of 4 tokens: the prompt of 2 needs one, which also holds the next 2; the last token is not computed.
    assert _blocks_of(first[ids[0]]) == (1, 1, 0, 1)
    assert _blocks_of(first[ids[1]]) == (0, 0, 0, 0)
    last = {stats.id: stats for record in records for stats in record.request_stats}
    assert _blocks_of(last[ids[0]]) == (1, 1, 0, 1)
    assert _blocks_of(last[ids[1]]) == (2, 2, 0, 1)
    stages = {stats.stage for record in records for stats in record.request_stats if stats.id == ids[0]}
    assert stages == {RequestStage.GENERATION_IN_PROGRESS, RequestStage.GENERATION_COMPLETE}
    assert '"requestStats"' in records[0].to_json_str()
    assert len(executor.get_latest_iteration_stats()) <= 2


def test_iteration_statistics_can_be_disabled(start: Start) -> None:
    executor, _ = start(iter_stats_max_iterations=0)
    collect(executor, [executor.enqueue_request(Request([1, 2], 3))])
    assert executor.get_latest_iteration_stats() == []


def _blocks_of(stats: RequestStats) -> tuple[int, int, int, int]:
    return (
        stats.alloc_total_blocks_per_request,
        stats.alloc_new_blocks_per_request,
        stats.reused_blocks_per_request,
        stats.missed_blocks_per_request,
    )
