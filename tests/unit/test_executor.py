"""The executor over a fake model: batches, responses, waiting, cancelling, failing, ending."""

from __future__ import annotations

import json
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

from tests.support.fake_model import FakeModel, greedy_continuation
from trtserve.executor.api import (
    BatchingType,
    CapacitySchedulerPolicy,
    ContextChunkingPolicy,
    Executor,
    ExecutorConfig,
    ExternalDraftTokensConfig,
    FinishReason,
    KvCacheConfig,
    ModelType,
    OutputConfig,
    Request,
    RequestStage,
    RequestStats,
    Response,
    SamplingConfig,
    SchedulerConfig,
    for_release,
)
from trtserve.executor.limits import Limits

Start = Callable[..., tuple[Executor, FakeModel]]
SOON = 20.0


@pytest.fixture
def start() -> Iterator[Start]:
    """Start executors over fake models; they are shut down at the end."""
    started: list[tuple[Executor, FakeModel]] = []

    def make(*, batch: int = 8, seq_len: int = 100, tokens: int = 64, **config: Any) -> tuple[Executor, FakeModel]:
        model = FakeModel()
        settings = ExecutorConfig(**config)
        limits = Limits(
            max_batch_size=batch,
            max_seq_len=seq_len,
            max_num_tokens=tokens,
            vocab_size=model.vocab_size,
            chunked=settings.enable_chunked_context,
        )
        started.append((Executor.over(model, limits, settings), model))
        return started[-1]

    yield make
    for executor, model in started:
        model.gate.set()
        executor.shutdown()


def _collect(executor: Executor, ids: list[int]) -> dict[int, list[Response]]:
    """All responses of `ids`, up to their last ones."""
    found: dict[int, list[Response]] = {number: [] for number in ids}
    deadline = time.monotonic() + SOON
    while not all(responses and _is_last(responses[-1]) for responses in found.values()):
        assert time.monotonic() < deadline, "not all requests were answered"
        for response in executor.await_responses(timeout=0.5):
            assert isinstance(response, Response)
            found[response.request_id].append(response)
    return found


def _is_last(response: Response) -> bool:
    return response.has_error() or response.result.is_final


def _one(executor: Executor, request: Request) -> Response:
    (response,) = _collect(executor, [executor.enqueue_request(request)]).popitem()[1]
    return response


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def _free_blocks(executor: Executor) -> int:
    assert executor._worker is not None
    return executor._worker.cache.available


# What a response contains


def test_the_answer_is_prompt_and_generated_tokens(start: Start) -> None:
    executor, _ = start()
    result = _one(executor, Request([3, 4, 5], 6)).result
    assert result.output_token_ids == [[3, 4, 5, *greedy_continuation([3, 4, 5], 6)]]
    assert (result.is_final, result.is_sequence_final, result.sequence_index) == (True, True, 0)
    assert result.finish_reasons == [FinishReason.LENGTH]
    assert (result.cum_log_probs, result.log_probs, result.context_logits) == (None, None, None)


def test_the_prompt_can_be_left_out(start: Start) -> None:
    executor, _ = start()
    request = Request([3, 4, 5], 6, output_config=OutputConfig(exclude_input_from_output=True))
    assert _one(executor, request).result.output_token_ids == [greedy_continuation([3, 4, 5], 6)]


@pytest.mark.parametrize("return_all", [False, True])
def test_streaming_never_repeats_the_prompt(start: Start, return_all: bool) -> None:
    executor, _ = start()
    expected = greedy_continuation([7, 8], 4)
    request = Request([7, 8], 4, streaming=True, return_all_generated_tokens=return_all, client_id=77)
    (responses,) = _collect(executor, [executor.enqueue_request(request)]).values()
    tokens = [response.result.output_token_ids[0] for response in responses]
    assert tokens == [expected[: i + 1] if return_all else expected[i : i + 1] for i in range(4)]
    assert [response.result.is_final for response in responses] == [False] * 3 + [True]
    assert [response.result.decoding_iter for response in responses] == [1, 2, 3, 4]
    assert responses[0].result.finish_reasons == [FinishReason.NOT_FINISHED]
    assert {response.client_id for response in responses} == {77}


def test_the_end_token_is_not_part_of_the_output(start: Start) -> None:
    executor, _ = start()
    expected = greedy_continuation([9], 5)
    assert expected[3] not in expected[:3]
    for streaming in (False, True):
        request = Request([9], 50, end_id=expected[3], streaming=streaming)
        (responses,) = _collect(executor, [executor.enqueue_request(request)]).values()
        last = responses[-1].result
        assert last.finish_reasons == [FinishReason.END_ID]
        assert last.output_token_ids == ([[]] if streaming else [[9, *expected[:3]]])
        assert len(responses) == (4 if streaming else 1)


def test_stop_words_stay_and_may_begin_in_the_prompt(start: Start) -> None:
    executor, _ = start()
    expected = greedy_continuation([9, 11], 8)
    within = Request([9, 11], 8, stop_words=[[1, 2, 3], expected[2:5]])
    result = _one(executor, within).result
    assert result.output_token_ids == [[9, 11, *expected[:5]]]
    assert result.finish_reasons == [FinishReason.STOP_WORDS]
    across = Request([9, 11], 8, stop_words=[[9, 11, expected[0]], []])
    assert _one(executor, across).result.output_token_ids == [[9, 11, expected[0]]]
    too_long = Request([9, 11], 2, stop_words=[[1, 9, 11, expected[0]]])
    assert _one(executor, too_long).result.finish_reasons == [FinishReason.LENGTH]


# Batches


@pytest.mark.parametrize("policy", [None, *ContextChunkingPolicy], ids=str)
def test_mixed_batches_equal_each_request_alone(start: Start, policy: ContextChunkingPolicy | None) -> None:
    executor, model = start(
        tokens=40,
        enable_chunked_context=policy is not None,
        scheduler_config=SchedulerConfig(context_chunking_policy=policy),
        kv_cache_config=KvCacheConfig(max_tokens=160),
    )
    source = random.Random(1)
    prompts = [[source.randrange(97) for _ in range(source.choice([1, 4, 17, 39]))] for _ in range(20)]
    lengths = [source.randint(1, 30) for _ in prompts]
    ids = executor.enqueue_requests([Request(p, n) for p, n in zip(prompts, lengths, strict=True)])
    responses = _collect(executor, ids)
    for number, prompt, length in zip(ids, prompts, lengths, strict=True):
        assert responses[number][0].result.output_token_ids == [[*prompt, *greedy_continuation(prompt, length)]]
    assert max(model.steps) <= 40
    assert _free_blocks(executor) == model.blocks == 40


def test_sampled_tokens_do_not_depend_on_the_batch(start: Start) -> None:
    executor, _ = start()
    requests = [
        Request([seed, 5], 10, sampling_config=SamplingConfig(top_k=30, temperature=2.0, seed=seed))
        for seed in range(6)
    ]
    together = _collect(executor, executor.enqueue_requests(requests))
    alone = [_one(executor, request).result.output_token_ids for request in requests]
    assert [responses[0].result.output_token_ids for responses in together.values()] == alone
    unset, zero = (
        _one(executor, Request([1], 10, sampling_config=SamplingConfig(top_p=0.9, seed=seed))) for seed in (None, 0)
    )
    assert unset.result.output_token_ids == zero.result.output_token_ids


def test_static_batch_policy_serves_everybody(start: Start) -> None:
    policy = SchedulerConfig(CapacitySchedulerPolicy.STATIC_BATCH)
    executor, _ = start(batch=2, scheduler_config=policy)
    ids = executor.enqueue_requests([Request([n], 3) for n in range(1, 6)])
    assert [r[0].result.output_token_ids[0][0] for r in _collect(executor, ids).values()] == [1, 2, 3, 4, 5]


# Errors of one request


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request([1] * 65, 1), r"Prompt length \(65\) exceeds maximum input length \(64\)"),
        (Request([97], 1), "Token id 97 .* outside the vocabulary of 97"),
        (Request([-1], 1), "Token id -1"),
        (Request([1], 1, end_id=97), r"EndId \(97\) is not within acceptable range"),
        (Request([1], 1, sampling_config=SamplingConfig(beam_width=2)), "Requested beam width 2 is larger"),
        (Request([1], 1, bad_words=[[5]]), r"bad_words \(Triton: bad_words_list\) is not supported"),
        (Request([1], 1, sampling_config=SamplingConfig(repetition_penalty=1.1)), "repetition_penalty"),
        (Request([1], 1, output_config=OutputConfig(return_log_probs=True)), "return_log_probs"),
        (Request([1], 1, external_draft_tokens_config=ExternalDraftTokensConfig([1])), "draft_input_ids"),
        (for_release("0.12").Request([1], 1, sampling_config=for_release("0.12").SamplingConfig(1, 0, 2.0)), "top_p"),
    ],
)
def test_a_bad_request_is_answered_alone(start: Start, request_: Request, message: str) -> None:
    executor, _ = start()
    good, bad = executor.enqueue_requests([Request([5], 3), request_])
    responses = _collect(executor, [good, bad])
    assert responses[good][0].result.output_token_ids == [[5, *greedy_continuation([5], 3)]]
    (error,) = responses[bad]
    assert error.error_msg.startswith("Encountered an error when fetching new request: ")
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(error.error_msg)
    with pytest.raises(RuntimeError, match="holds an error"):
        _ = error.result


def test_neutral_values_pass(start: Start) -> None:
    executor, _ = start()
    sampling = SamplingConfig(
        beam_width=1,
        top_k=1,
        temperature=1.0,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        length_penalty=1.0,
        early_stopping=False,
        beam_search_diversity_rate=0.0,
        top_p_decay=1.0,
        num_return_sequences=1,
        min_tokens=0,
        min_p=0.0,
    )
    request = Request([5], 3, sampling_config=sampling, bad_words=[], stop_words=[[]], pad_id=0, streaming=False)
    assert not _one(executor, request).has_error()


def test_max_tokens_is_reduced_with_a_warning(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    executor, _ = start(seq_len=20)
    with caplog.at_level(logging.WARNING):
        result = _one(executor, Request([5] * 12, 50)).result
    assert len(result.output_token_ids[0]) == 20
    assert result.finish_reasons == [FinishReason.LENGTH]
    assert "max_tokens (50) is reduced to 8" in caplog.text


def test_a_failed_step_ends_the_active_requests_and_nothing_else(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    executor, model = start()
    model.failures = 1
    model.gate.clear()
    ids = executor.enqueue_requests([Request([n], 3) for n in (1, 2)])
    model.gate.set()
    for responses in _collect(executor, ids).values():
        assert responses[-1].error_msg == "Encountered an error in forwardAsync function: broken step"
    assert "A step failed" in caplog.text
    assert _free_blocks(executor) == model.blocks
    assert not _one(executor, Request([1], 3)).has_error()


@pytest.mark.parametrize("sampling", [SamplingConfig(), SamplingConfig(top_k=5, temperature=0.7)])
def test_logits_that_are_no_numbers_end_their_request_alone(
    start: Start, sampling: SamplingConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    executor, model = start()
    forward = model.forward

    def broken(**inputs: Any) -> Any:
        logits = forward(**inputs)
        logits[inputs["token_ids"][inputs["rows"]] == 90, 7] = float("nan")
        return logits

    monkeypatch.setattr(model, "forward", broken)
    assert 90 not in greedy_continuation([3], 8)
    ids = executor.enqueue_requests([Request([90], 8, sampling_config=sampling), Request([3], 8)])
    bad, good = (responses[-1] for _, responses in sorted(_collect(executor, ids).items()))
    assert bad.error_msg.endswith("the logits for token 1 of the answer are not finite")
    assert good.result.output_token_ids == [[3, *greedy_continuation([3], 8)]]
    assert "are not finite" in caplog.text
    assert _free_blocks(executor) == model.blocks


@pytest.mark.parametrize("place", ["_end", "_collect", "_fail_all"])
def test_a_broken_executor_answers_everybody_and_says_why(
    start: Start, place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    executor, model = start(batch=1)
    worker = executor._worker
    assert worker is not None
    model.gate.clear()
    ids = executor.enqueue_requests([Request([n], 2, client_id=n, streaming=True) for n in (1, 2, 3)])
    _until(lambda: len(worker._queue) == 2)
    model.failures = int(place == "_fail_all")
    monkeypatch.setattr(worker, place, _boom)
    model.gate.set()
    cause = "The executor has stopped working: ValueError: boom"
    for number, responses in _collect(executor, ids).items():
        assert (responses[-1].error_msg, responses[-1].client_id) == (cause, number)
    for attempt in (
        lambda: executor.await_responses(timeout=5.0),
        lambda: executor.await_responses(ids[-1] + 1),
        lambda: executor.enqueue_request(Request([1], 2)),
    ):
        with pytest.raises(RuntimeError, match=cause):
            attempt()
    (ended,) = executor.await_responses(ids[0])
    assert isinstance(ended, Response)
    assert "already been processed" in ended.error_msg
    assert "The executor has stopped: ValueError('boom')" in caplog.text


def _boom(*_: object) -> None:
    raise ValueError("boom")


# Queue


def test_a_full_queue_refuses_the_whole_call(start: Start) -> None:
    executor, model = start(batch=1, max_queue_size=2)
    model.gate.clear()
    first = executor.enqueue_request(Request([1], 2))
    assert executor._worker is not None
    queue = executor._worker._queue
    _until(lambda: not queue)
    second = executor.enqueue_request(Request([2], 2))
    with pytest.raises(RuntimeError, match="Maximum queue size of 2 has been reached, please try again later"):
        executor.enqueue_requests([Request([3], 2), Request([4], 2)])
    third = executor.enqueue_request(Request([5], 2))
    model.gate.set()
    assert set(_collect(executor, [first, second, third])) == {first, second, third}


def test_ids_follow_the_order_and_an_empty_list_is_fine(start: Start) -> None:
    executor, _ = start()
    ids = executor.enqueue_requests([Request([1], 1) for _ in range(3)])
    assert ids == sorted(ids)
    assert executor.enqueue_requests([]) == []
    with pytest.raises(TypeError):
        executor.enqueue_requests(["text"])  # type: ignore[list-item]


# Waiting


def test_await_without_responses_ends_with_the_time(start: Start) -> None:
    executor, _ = start()
    assert executor.await_responses(timeout=0) == []
    assert executor.await_responses(timedelta(milliseconds=1)) == []
    assert executor.await_responses(12345, timedelta(milliseconds=1)) == []


def test_await_by_id_and_by_ids(start: Start) -> None:
    executor, _ = start()
    first, second = executor.enqueue_requests([Request([1], 2), Request([2], 2)])
    _until(lambda: executor.get_num_responses_ready() == 2)
    assert (executor.get_num_responses_ready(first), executor.get_num_responses_ready(999)) == (1, 0)
    by_ids = executor.await_responses([second, first], timedelta(seconds=SOON))
    assert [[response.request_id for response in each] for each in by_ids] == [[second], [first]]  # type: ignore[union-attr]
    (again,) = executor.await_responses(first)
    assert isinstance(again, Response)
    assert "has already been processed and terminated" in again.error_msg
    assert executor.get_num_responses_ready() == 0


def test_await_wakes_when_a_response_comes(start: Start) -> None:
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
    last = _collect(executor, [number])[number][-1]
    assert len(model.steps) <= steps + 1
    assert not last.has_error()
    assert last.result.output_token_ids == [[]]
    assert last.result.finish_reasons == [FinishReason.CANCELLED]
    assert _free_blocks(executor) == model.blocks
    executor.cancel_request(number)
    executor.cancel_request(10**6)
    assert not _one(executor, Request([1], 2)).has_error()


def test_a_queued_request_is_cancelled_when_it_becomes_active(start: Start) -> None:
    executor, model = start(batch=1)
    model.gate.clear()
    first, second = executor.enqueue_requests([Request([1], 5), Request([2], 50)])
    executor.cancel_request(second)
    model.gate.set()
    responses = _collect(executor, [first, second])
    assert responses[first][0].result.finish_reasons == [FinishReason.LENGTH]
    assert responses[second][0].result.finish_reasons == [FinishReason.CANCELLED]
    assert len(model.steps) == 5


@pytest.mark.parametrize("chunked", [False, True])
def test_random_cancels_leak_nothing(start: Start, chunked: bool) -> None:
    executor, model = start(tokens=30, enable_chunked_context=chunked, kv_cache_config=KvCacheConfig(max_tokens=120))
    source = random.Random(3)
    requests = [
        Request([source.randrange(97)] * source.randint(1, 29), source.randint(1, 40), streaming=source.random() < 0.5)
        for _ in range(60)
    ]
    ids = executor.enqueue_requests(requests)
    for number in source.sample(ids, 25):
        executor.cancel_request(number)
        time.sleep(0.001)
    for number, responses in _collect(executor, ids).items():
        assert [_is_last(response) for response in responses].count(True) == 1, number
    assert _free_blocks(executor) == model.blocks == 30


# Statistics


def test_statistics_of_the_iterations(start: Start) -> None:
    executor, model = start(batch=4, kv_cache_config=KvCacheConfig(max_tokens=160))
    (first,) = executor.get_latest_iteration_stats()
    assert first.kv_cache_stats is not None
    assert (first.num_active_requests, first.kv_cache_stats.max_num_blocks) == (0, 40)
    _one(executor, Request([1, 2, 3, 4, 5], 3))
    _until(lambda: len(executor._worker.recorder._iterations) == 4 if executor._worker else False)
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


def test_statistics_of_the_requests_when_asked_for(start: Start) -> None:
    executor, _ = start(batch=1, request_stats_max_iterations=100, iter_stats_max_iterations=2)
    ids = executor.enqueue_requests([Request([1, 2], 3), Request([3], 6)])
    _collect(executor, ids)
    records = executor.get_latest_request_stats()
    first = {stats.id: stats for stats in records[0].request_stats}
    assert first[ids[0]].scheduled
    assert first[ids[0]].context_prefill_position == 2
    assert first[ids[1]].stage is RequestStage.QUEUED
    # Blocks of 4 tokens: a prompt of 2 fills one, and so it stays for 3 tokens more, of which the last is not computed.
    assert _blocks_of(first[ids[0]]) == (1, 1, 0, 1)
    assert _blocks_of(first[ids[1]]) == (0, 0, 0, 0)
    last = {stats.id: stats for record in records for stats in record.request_stats}
    assert _blocks_of(last[ids[0]]) == (1, 1, 0, 1)
    assert _blocks_of(last[ids[1]]) == (2, 2, 0, 2)
    stages = {stats.stage for record in records for stats in record.request_stats if stats.id == ids[0]}
    assert stages == {RequestStage.GENERATION_IN_PROGRESS, RequestStage.GENERATION_COMPLETE}
    assert '"requestStats"' in records[0].to_json_str()
    assert len(executor.get_latest_iteration_stats()) <= 2


def _blocks_of(stats: RequestStats) -> tuple[int, int, int, int]:
    return (
        stats.alloc_total_blocks_per_request,
        stats.alloc_new_blocks_per_request,
        stats.reused_blocks_per_request,
        stats.missed_blocks_per_request,
    )


# Beginning and ending


def test_shutdown_runs_what_was_enqueued_to_its_end(start: Start) -> None:
    executor, model = start(batch=1)
    executor.enqueue_requests([Request([1], 4), Request([2], 4)])
    executor.shutdown()
    executor.shutdown()
    assert len(model.steps) == 8
    for call in (executor.await_responses, executor.can_enqueue_requests, executor.get_latest_iteration_stats):
        with pytest.raises(RuntimeError, match="Shutdown called"):
            call()
    with pytest.raises(RuntimeError, match="Shutdown called"):
        executor.enqueue_request(Request([1], 1))


def test_shutdown_wakes_a_waiter(start: Start) -> None:
    executor, _ = start()
    found: list[Any] = []
    waiter = threading.Thread(target=lambda: found.append(executor.await_responses()))
    waiter.start()
    executor.shutdown()
    waiter.join(SOON)
    assert found == [[]]


def test_the_context_manager_shuts_down(start: Start) -> None:
    executor, _ = start()
    with executor as entered:
        assert entered.can_enqueue_requests()
        assert entered.get_latest_debug_tensors() == []
    with pytest.raises(RuntimeError, match="Shutdown called"):
        executor.get_num_responses_ready()


def test_an_idle_executor_sleeps(start: Start) -> None:
    executor, _ = start()
    _one(executor, Request([1], 2))
    before = time.process_time()
    time.sleep(0.1)
    assert time.process_time() - before < 0.05


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"batching_type": BatchingType.STATIC}, "batching_type"),
        ({"scheduler_config": SchedulerConfig(CapacitySchedulerPolicy.MAX_UTILIZATION)}, "batch_scheduler_policy"),
        ({"kv_cache_config": KvCacheConfig(sink_token_length=4)}, "sink_token_length"),
        ({"max_beam_width": 2}, "max_beam_width"),
    ],
)
def test_settings_that_cannot_be_kept_are_refused(start: Start, config: dict[str, Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        start(**config)


def test_only_decoder_folders_are_served() -> None:
    with pytest.raises(RuntimeError, match="decoder-only"):
        Executor("engine", ModelType.ENCODER_DECODER, ExecutorConfig())
    with pytest.raises(RuntimeError, match="engine_buffer"):
        Executor("engine", ModelType.DECODER_ONLY, ExecutorConfig(), engine_buffer=b"")
