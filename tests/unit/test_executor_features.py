"""Features of requests with a fake model: several sequences, log-probs, logits, metrics, post-processors."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from tests.support.executors import Start, answer_of, collect, free_blocks, is_last, pauses
from tests.support.fake_model import fake_logits, greedy_continuation
from trtserve.executor.api import (
    BatchingType,
    CapacitySchedulerPolicy,
    FinishReason,
    KvCacheConfig,
    LogitsPostProcessorConfig,
    OutputConfig,
    Request,
    Response,
    SamplingConfig,
    SchedulerConfig,
)

BUILT = {"gather_context_logits": True, "gather_generation_logits": True}
ONLY_NEW = OutputConfig(exclude_input_from_output=True)
MAX_UTILIZATION = SchedulerConfig(CapacitySchedulerPolicy.MAX_UTILIZATION)


def _log_prob(tokens: list[int], token: int) -> float:
    logits = fake_logits(np.array(tokens)).astype(np.float64)
    return float(logits[token] - logits.max() - math.log(float(np.exp(logits - logits.max()).sum())))


# Several sequences


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("batch", [2, 8])
def test_several_sequences_of_one_request(start: Start, streaming: bool, batch: int) -> None:
    executor, model = start(batch=batch)
    sampling = {"top_k": 40, "temperature": 3.0}
    request = Request(
        [5, 6],
        6,
        streaming=streaming,
        sampling_config=SamplingConfig(num_return_sequences=4, seed=100, **sampling),
        output_config=ONLY_NEW,
        client_id=9,
    )
    (responses,) = collect(executor, [executor.enqueue_request(request)]).values()
    tokens: dict[int, list[int]] = {index: [] for index in range(4)}
    ends: list[int] = []
    for response in responses:
        result = response.result
        tokens[result.sequence_index] += result.output_token_ids[0]
        if result.is_sequence_final:
            ends.append(result.sequence_index)
    assert sorted(ends) == [0, 1, 2, 3]
    assert [response.result.is_final for response in responses] == [False] * (len(responses) - 1) + [True]
    assert {response.client_id for response in responses} == {9}
    for index in range(4):
        alone = Request([5, 6], 6, sampling_config=SamplingConfig(seed=100 + index, **sampling), output_config=ONLY_NEW)
        assert answer_of(executor, alone).result.output_token_ids == [tokens[index]]
    assert len(set(map(tuple, tokens.values()))) == 4
    assert free_blocks(executor) == model.blocks


def test_the_seed_after_the_largest_is_0(start: Start) -> None:
    executor, _ = start()

    def ask(seed: int, sequences: int) -> list[list[int]]:
        sampling = SamplingConfig(num_return_sequences=sequences, seed=seed, top_k=40, temperature=3.0)
        request = Request([5, 6], 6, sampling_config=sampling, output_config=ONLY_NEW)
        (responses,) = collect(executor, [executor.enqueue_request(request)]).values()
        ordered = sorted(responses, key=lambda response: response.result.sequence_index)
        return [response.result.output_token_ids[0] for response in ordered]

    assert ask(2**64 - 1, 2) == [*ask(2**64 - 1, 1), *ask(0, 1)]


def test_num_return_sequences_of_the_request_in_some_releases(start: Start) -> None:
    executor, _ = start(max_beam_width=2)
    request = Request([5], max_tokens=2, num_return_sequences=3)
    (responses,) = collect(executor, [executor.enqueue_request(request)]).values()
    assert [response.result.sequence_index for response in responses] == [0, 1, 2]
    beams = Request([5], 2, num_return_sequences=2, sampling_config=SamplingConfig(2))
    assert "cannot be used with beam width 2" in answer_of(executor, beams).error_msg
    late = Request([5], 2, sampling_config=SamplingConfig(2, num_return_sequences=1))
    assert len(answer_of(executor, late).result.output_token_ids) == 1


def test_sequences_count_for_the_queue_size(start: Start) -> None:
    executor, _ = start(max_queue_size=3)
    with pytest.raises(RuntimeError, match="Maximum queue size of 3 has been reached"):
        executor.enqueue_request(Request([5], 2, sampling_config=SamplingConfig(num_return_sequences=4)))
    (responses,) = collect(
        executor, [executor.enqueue_request(Request([5], 2, sampling_config=SamplingConfig(num_return_sequences=3)))]
    ).values()
    assert len(responses) == 3


def test_cancel_ends_every_sequence_of_a_request(start: Start) -> None:
    executor, model = start(batch=2, seq_len=5000)
    request = Request([5], 4000, streaming=True, sampling_config=SamplingConfig(num_return_sequences=3))
    number = executor.enqueue_request(request)
    executor.await_responses(number)
    executor.cancel_request(number)
    responses = collect(executor, [number])[number]
    ended = [each.result for each in responses if each.result.is_sequence_final]
    assert {result.sequence_index for result in ended} == {0, 1, 2}
    assert all(result.finish_reasons == [FinishReason.CANCELLED] for result in ended)
    assert [result.is_final for result in ended] == [False, False, True]
    assert free_blocks(executor) == model.blocks


def test_failing_sequence_ends_its_request_with_one_error(start: Start) -> None:
    executor, model = start(batch=2)
    request = Request(
        [5],
        8,
        sampling_config=SamplingConfig(num_return_sequences=3, min_tokens=1, seed=3, top_k=3),
        bad_words=[[token] for token in range(97)],
    )
    bad, good = executor.enqueue_requests([request, Request([5], 3)])
    responses = collect(executor, [bad, good])
    (error,) = responses[bad]
    assert "no token is allowed as token 1 of the answer: bad words" in error.error_msg
    assert not responses[good][0].has_error()
    assert free_blocks(executor) == model.blocks


# Log-probabilities and logits


def test_log_probs_repeat_all_tokens_without_the_end_token(start: Start) -> None:
    executor, _ = start()
    expected = greedy_continuation([9], 6)
    output = OutputConfig(return_log_probs=True)
    request = Request([9], 50, end_id=expected[4], streaming=True, output_config=output)
    (responses,) = collect(executor, [executor.enqueue_request(request)]).values()
    values = [_log_prob([9, *expected[:at]], expected[at]) for at in range(4)]
    assert len(responses) == 5
    for count, response in enumerate(responses, start=1):
        result = response.result
        assert result.log_probs is not None
        assert result.log_probs[0] == pytest.approx(values[:count], abs=1e-5)
        assert result.cum_log_probs == pytest.approx([sum(values[:count])], abs=1e-5)


@pytest.mark.parametrize("chunked", [False, True])
def test_context_logits_of_all_prompt_tokens(start: Start, chunked: bool) -> None:
    executor, _ = start(
        tokens=16 if chunked else 40,
        enable_chunked_context=chunked,
        built=BUILT,
        kv_cache_config=KvCacheConfig(enable_block_reuse=True),
    )
    prompt = list(range(37))
    request = Request(prompt, 3, output_config=OutputConfig(return_context_logits=True))
    for _ in range(2):  # with reuse, too, all logits must be returned
        result = answer_of(executor, request).result
        assert result.context_logits is not None
        assert result.context_logits.shape == (37, 97)
        for at in range(37):
            assert (result.context_logits[at] == fake_logits(np.arange(at + 1))).all()
        assert result.output_token_ids == [[*prompt, *greedy_continuation(prompt, 3)]]


@pytest.mark.parametrize("return_all", [False, True])
def test_generation_logits_while_streaming(start: Start, return_all: bool) -> None:
    executor, _ = start(built=BUILT)
    expected = greedy_continuation([9], 4)
    request = Request(
        [9],
        50,
        end_id=expected[3],
        streaming=True,
        return_all_generated_tokens=return_all,
        output_config=OutputConfig(return_generation_logits=True),
    )
    (responses,) = collect(executor, [executor.enqueue_request(request)]).values()
    rows = [fake_logits(np.array([9, *expected[:at]])) for at in range(4)]
    counts = [1, 2, 3, 3] if return_all else [1, 1, 1, 1]
    for at, response in enumerate(responses):
        logits = response.result.generation_logits
        assert logits is not None
        assert logits.shape == (counts[at], 1, 97)
        last = min(at, 2) if return_all else at
        assert (logits[-1, 0] == rows[last]).all()


def test_generation_logits_at_the_end(start: Start) -> None:
    executor, _ = start(built=BUILT)
    expected = greedy_continuation([9], 3)
    output = OutputConfig(return_generation_logits=True)
    result = answer_of(executor, Request([9], 5, end_id=expected[2], output_config=output)).result
    assert result.generation_logits is not None
    assert result.generation_logits.shape == (1, 5, 97)
    assert (result.generation_logits[0, 1] == fake_logits(np.array([9, expected[0]]))).all()
    assert not result.generation_logits[0, 2:].any()


@pytest.mark.parametrize("name", ["return_context_logits", "return_generation_logits"])
def test_logits_need_an_engine_built_to_gather_them(start: Start, name: str) -> None:
    executor, _ = start()
    request = Request([1], 1, output_config=OutputConfig(**{name: True}))
    assert f"{name} needs an engine that was built with gather_" in answer_of(executor, request).error_msg


def test_executor_config_may_allow_generation_logits(start: Start) -> None:
    executor, _ = start(gather_generation_logits=True)
    output = OutputConfig(return_generation_logits=True)
    assert answer_of(executor, Request([1], 1, output_config=output)).result.generation_logits is not None


# Metrics


def test_metrics_of_a_request(start: Start) -> None:
    executor, _ = start(kv_cache_config=KvCacheConfig(enable_block_reuse=True))
    output = OutputConfig(return_perf_metrics=True)
    prompt = list(range(9))
    answer_of(executor, Request(prompt, 4, output_config=output))
    metrics = answer_of(executor, Request(prompt, 4, output_config=output)).result.request_perf_metrics
    assert metrics is not None
    timing = metrics.timing_metrics
    times = [timing.arrival_time, timing.first_scheduled_time, timing.first_token_time, timing.last_token_time]
    assert timedelta() < times[0] <= times[1] <= times[2] <= times[3]
    assert metrics.first_iter is not None
    assert metrics.first_iter in [record.iter for record in executor.get_latest_iteration_stats()]
    assert metrics.last_iter == metrics.iter == metrics.first_iter + 3
    cache = metrics.kv_cache_metrics
    assert cache.num_reused_blocks == 2
    assert cache.kv_cache_hit_rate == cache.num_reused_blocks / (cache.num_reused_blocks + cache.num_missed_blocks)
    assert cache.num_total_allocated_blocks >= cache.num_new_allocated_blocks > 0
    assert answer_of(executor, Request(prompt, 4)).result.request_perf_metrics is None


# Pauses


@pytest.mark.parametrize("chunked", [False, True])
def test_pauses_do_not_change_results(start: Start, chunked: bool) -> None:
    executor, model = start(
        tokens=70,
        enable_chunked_context=chunked,
        scheduler_config=MAX_UTILIZATION,
        kv_cache_config=KvCacheConfig(max_tokens=100),
        built=BUILT,
    )
    sampling = SamplingConfig(top_k=30, temperature=2.0, repetition_penalty=1.2, presence_penalty=0.3)
    output = OutputConfig(exclude_input_from_output=True, return_log_probs=True, return_generation_logits=True)
    requests = [
        Request([n] * (3 + n), 40, streaming=n % 2 == 0, sampling_config=sampling, output_config=output)
        for n in range(1, 7)
    ]
    alone = {}
    for number, request in enumerate(requests):
        (alone[number],) = collect(executor, [executor.enqueue_request(request)]).values()
    pauses(executor)
    together = collect(executor, executor.enqueue_requests(requests))
    assert pauses(executor) > 0
    for expected, answers in zip(alone.values(), together.values(), strict=True):
        assert _tokens(answers) == _tokens(expected)
        assert len(answers) == len(expected)
        assert answers[-1].result.log_probs == expected[-1].result.log_probs
        assert (answers[-1].result.generation_logits == expected[-1].result.generation_logits).all()  # type: ignore[union-attr]
    assert free_blocks(executor) == model.blocks


def _tokens(responses: list[Response]) -> list[int]:
    return [token for response in responses for token in response.result.output_token_ids[0]]


def test_streaming_that_could_not_resume_is_refused(start: Start) -> None:
    executor, _ = start(tokens=20, scheduler_config=MAX_UTILIZATION)
    assert "exceeds maximum input length (20)" in answer_of(executor, Request([1] * 10, 12, streaming=True)).error_msg
    assert not answer_of(executor, Request([1] * 10, 12)).has_error()
    (responses,) = collect(executor, [executor.enqueue_request(Request([1] * 10, 11, streaming=True))]).values()
    assert not responses[-1].has_error()


# Static batches


def test_static_batches_do_not_stream(start: Start) -> None:
    executor, _ = start(batch=2, batching_type=BatchingType.STATIC)
    ids = executor.enqueue_requests([Request([n], 3, streaming=n > 2) for n in range(1, 6)])
    for number, responses in zip(range(1, 6), collect(executor, ids).values(), strict=True):
        (response,) = responses
        prompt = [] if number > 2 else [number]
        assert response.result.output_token_ids == [[*prompt, *greedy_continuation([number], 3)]]


# Time and priority


def test_request_ends_after_its_allotted_time(start: Start) -> None:
    executor, model = start(seq_len=50_000)
    sampling = SamplingConfig(num_return_sequences=2)
    request = Request([1], 49_000, allotted_time_ms=timedelta(milliseconds=30), sampling_config=sampling)
    number, other = executor.enqueue_requests([request, Request([2], 5)])
    responses = collect(executor, [number, other])
    assert [each.result.finish_reasons for each in responses[number]] == [[FinishReason.TIMED_OUT]] * 2
    assert [each.result.output_token_ids for each in responses[number]] == [[[1]]] * 2  # only the prompt
    assert responses[other][0].result.finish_reasons == [FinishReason.LENGTH]
    assert free_blocks(executor) == model.blocks


def test_higher_priorities_run_first(start: Start) -> None:
    executor, model = start(batch=1)
    model.gate.clear()
    priorities = [0.5, 0.5, 0.9, 0.1, 0.9]
    ids = executor.enqueue_requests([Request([1], 2, priority=priority) for priority in priorities])
    model.gate.set()
    order: list[int] = []
    while len(order) < len(ids):
        for response in executor.await_responses(timeout=20.0):
            assert isinstance(response, Response)
            order += [response.request_id] if is_last(response) else []
    ranks = [ids.index(number) for number in order]
    assert ranks.index(2) < ranks.index(4) < ranks.index(1) < ranks.index(3)


# Logits post-processors


def _only(token: int) -> Any:
    def process(number: int, logits: Any, tokens: list[list[int]], stream: Any, client: int | None) -> None:
        assert number > 0
        assert stream is None
        assert client == 5
        assert tokens[0][:2] == [8, 9]
        assert logits.shape == (1, len(tokens), 97)
        logits[:, :, [other for other in range(97) if other != token]] = -np.inf

    return process


def test_named_and_request_post_processors(start: Start) -> None:
    named = LogitsPostProcessorConfig({"seven": _only(7)})
    executor, _ = start(logits_post_processor_config=named, max_beam_width=2, built=BUILT)
    by_name = Request([8, 9], 3, logits_post_processor_name="seven", client_id=5, output_config=ONLY_NEW)
    assert answer_of(executor, by_name).result.output_token_ids == [[7, 7, 7]]
    output = OutputConfig(exclude_input_from_output=True, return_generation_logits=True)
    own = Request([8, 9], 2, logits_post_processor=_only(4), client_id=5, output_config=output)
    result = answer_of(executor, own).result
    assert result.output_token_ids == [[4, 4]]
    assert result.generation_logits is not None
    assert np.isfinite(result.generation_logits).all()  # the model's logits, not the processed ones
    with pytest.raises(RuntimeError, match="'eight' is unknown"):
        executor.enqueue_request(Request([1], 1, logits_post_processor_name="eight"))


def test_batched_post_processor_gets_all_requests_of_a_step(start: Start) -> None:
    calls: list[int] = []

    def process(ids: Any, logits: Any, tokens: Any, stream: Any, clients: Any) -> None:
        calls.append(len(ids))
        assert len(logits) == len(tokens) == len(clients) == len(ids)
        for each in logits:
            each[:, :, 3] = 1e6

    config = LogitsPostProcessorConfig(processor_batched=process)
    executor, model = start(logits_post_processor_config=config)
    model.gate.clear()
    name = Request.BATCHED_POST_PROCESSOR_NAME
    requests = [Request([n], 3, logits_post_processor_name=name, output_config=ONLY_NEW) for n in range(3)]
    ids = executor.enqueue_requests([Request([50], 4), *requests])
    model.gate.set()
    responses = collect(executor, ids)
    assert [responses[number][0].result.output_token_ids for number in ids[1:]] == [[[3, 3, 3]]] * 3
    assert responses[ids[0]][0].result.output_token_ids == [[50, *greedy_continuation([50], 4)]]
    assert 3 in calls


def test_post_processors_of_old_releases_get_no_client_id(start: Start) -> None:
    def process(number: int, logits: Any, tokens: list[list[int]], stream: Any) -> None:
        logits[:, :, 3] = 1e6

    executor, _ = start(logits_post_processor_map={"three": process})
    request = Request([1], 2, logits_post_processor_name="three")
    assert answer_of(executor, request).result.output_token_ids == [[1, 3, 3]]


@pytest.mark.parametrize("batched", [False, True])
def test_failing_post_processor_ends_only_its_requests(start: Start, batched: bool) -> None:
    def process(*_: Any) -> None:
        raise KeyError("nothing here")

    config = LogitsPostProcessorConfig({"bad": process}, None if not batched else process)
    executor, _ = start(logits_post_processor_config=config)
    name = Request.BATCHED_POST_PROCESSOR_NAME if batched else "bad"
    bad, good = executor.enqueue_requests([Request([1], 3, logits_post_processor_name=name), Request([1], 3)])
    responses = collect(executor, [bad, good])
    assert "the logits post-processor failed: KeyError: 'nothing here'" in responses[bad][0].error_msg
    assert responses[good][0].result.output_token_ids == [[1, *greedy_continuation([1], 3)]]
