"""The executor with a fake model: responses, batches, failures, start and shutdown."""

from __future__ import annotations

import logging
import math
import threading
import time
from typing import Any

import numpy as np
import pytest

from tests.support.executors import SOON, Start, answer_of, collect, free_blocks, loop_of
from tests.support.fake_model import greedy_continuation
from tests.support.waiting import wait_until
from trtserve.executor.api import (
    CapacitySchedulerPolicy,
    Executor,
    ExecutorConfig,
    FinishReason,
    KvCacheConfig,
    ModelType,
    MropeConfig,
    OutputConfig,
    Request,
    Response,
    SamplingConfig,
    SchedulerConfig,
)
from trtserve.executor.engine.model import StepInputs

# What a response contains


def test_answer_contains_prompt_and_generated_tokens(start: Start) -> None:
    executor, _ = start()
    result = answer_of(executor, Request([3, 4, 5], 6)).result
    assert result.output_token_ids == [[3, 4, 5, *greedy_continuation([3, 4, 5], 6)]]
    assert (result.is_final, result.is_sequence_final, result.sequence_index) == (True, True, 0)
    assert result.finish_reasons == [FinishReason.LENGTH]
    assert (result.cum_log_probs, result.log_probs, result.context_logits) == (None, None, None)


def test_model_is_warmed_up_before_the_first_request(start: Start) -> None:
    _, model = start()
    assert model.is_warm


def test_prompt_can_be_excluded(start: Start) -> None:
    executor, _ = start()
    request = Request([3, 4, 5], 6, output_config=OutputConfig(exclude_input_from_output=True))
    assert answer_of(executor, request).result.output_token_ids == [greedy_continuation([3, 4, 5], 6)]


@pytest.mark.parametrize("return_all", [False, True])
def test_streaming_never_repeats_the_prompt(start: Start, return_all: bool) -> None:
    executor, _ = start()
    expected = greedy_continuation([7, 8], 4)
    request = Request([7, 8], 4, streaming=True, return_all_generated_tokens=return_all, client_id=77)
    (responses,) = collect(executor, [executor.enqueue_request(request)]).values()
    tokens = [response.result.output_token_ids[0] for response in responses]
    assert tokens == [expected[: i + 1] if return_all else expected[i : i + 1] for i in range(4)]
    assert [response.result.is_final for response in responses] == [False] * 3 + [True]
    assert [response.result.decoding_iter for response in responses] == [1, 2, 3, 4]
    assert responses[0].result.finish_reasons == [FinishReason.NOT_FINISHED]
    assert {response.client_id for response in responses} == {77}


def test_end_token_is_not_part_of_the_output(start: Start) -> None:
    executor, _ = start()
    expected = greedy_continuation([9], 5)
    assert expected[3] not in expected[:3]
    for streaming in (False, True):
        request = Request([9], 50, end_id=expected[3], streaming=streaming)
        (responses,) = collect(executor, [executor.enqueue_request(request)]).values()
        last = responses[-1].result
        assert last.finish_reasons == [FinishReason.END_ID]
        assert last.output_token_ids == ([[]] if streaming else [[9, *expected[:3]]])
        assert len(responses) == (4 if streaming else 1)


def test_stop_words_stay_in_the_output_and_may_begin_in_the_prompt(start: Start) -> None:
    executor, _ = start()
    expected = greedy_continuation([9, 11], 8)
    within = Request([9, 11], 8, stop_words=[[1, 2, 3], expected[2:5]])
    result = answer_of(executor, within).result
    assert result.output_token_ids == [[9, 11, *expected[:5]]]
    assert result.finish_reasons == [FinishReason.STOP_WORDS]
    across = Request([9, 11], 8, stop_words=[[9, 11, expected[0]], []])
    assert answer_of(executor, across).result.output_token_ids == [[9, 11, expected[0]]]
    too_long = Request([9, 11], 2, stop_words=[[1, 9, 11, expected[0]]])
    assert answer_of(executor, too_long).result.finish_reasons == [FinishReason.LENGTH]


# Batches


def test_an_unset_seed_is_0(start: Start) -> None:
    executor, _ = start()
    unset, zero = (
        answer_of(executor, Request([1], 10, sampling_config=SamplingConfig(top_p=0.9, seed=seed)))
        for seed in (None, 0)
    )
    assert unset.result.output_token_ids == zero.result.output_token_ids


def test_static_batch_policy_serves_all_requests(start: Start) -> None:
    policy = SchedulerConfig(CapacitySchedulerPolicy.STATIC_BATCH)
    executor, _ = start(batch=2, scheduler_config=policy)
    ids = executor.enqueue_requests([Request([n], 3) for n in range(1, 6)])
    assert [r[0].result.output_token_ids[0][0] for r in collect(executor, ids).values()] == [1, 2, 3, 4, 5]


# Errors of one request


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request([1] * 65, 1), r"Prompt length \(65\) exceeds maximum input length \(64\)"),
        (Request([97], 1), "Token id 97 .* outside the vocabulary of 97"),
        (Request([-1], 1), "Token id -1"),
        (Request([1], 1, end_id=97), r"EndId \(97\) is not within acceptable range"),
        (Request([1], 1, sampling_config=SamplingConfig(beam_width=2)), "Requested beam width 2 is larger"),
        (Request([1], 1, mrope_config=MropeConfig(np.zeros(1), 0)), r"mrope_config \(Triton: mrope_rotary_cos_sin\)"),
        (Request([1], 1, sampling_config=SamplingConfig(presence_penalty=math.nan)), "presence_penalty is nan"),
        (Request([1], 1, sampling_config=SamplingConfig(frequency_penalty=-math.inf)), "frequency_penalty is -inf"),
        (Request([1], 1, sampling_config=SamplingConfig(temperature=math.inf)), "temperature is inf"),
        (Request([1], 1, priority=math.nan), "priority is nan; expected a finite number"),
        (Request([1], 1, num_return_sequences=2**31 - 1), r"num_return_sequences \(2147483647\) exceeds 1024"),
    ],
)
def test_invalid_request_fails_alone(start: Start, request_: Request, message: str) -> None:
    executor, _ = start()
    good, bad = executor.enqueue_requests([Request([5], 3), request_])
    responses = collect(executor, [good, bad])
    assert responses[good][0].result.output_token_ids == [[5, *greedy_continuation([5], 3)]]
    (error,) = responses[bad]
    assert error.error_msg.startswith("Encountered an error when fetching new request: ")
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(error.error_msg)
    with pytest.raises(RuntimeError, match="holds an error"):
        _ = error.result


def test_neutral_values_are_accepted(start: Start) -> None:
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
    assert not answer_of(executor, request).has_error()


def test_max_tokens_is_reduced_with_a_warning(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    executor, _ = start(seq_len=20)
    with caplog.at_level(logging.WARNING):
        result = answer_of(executor, Request([5] * 12, 50)).result
    assert len(result.output_token_ids[0]) == 20
    assert result.finish_reasons == [FinishReason.LENGTH]
    assert "max_tokens (50) is reduced to 8" in caplog.text


def test_failed_step_ends_only_the_active_requests(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    executor, model = start()
    model.failures = 1
    model.gate.clear()
    ids = executor.enqueue_requests([Request([n], 3) for n in (1, 2)])
    model.gate.set()
    for responses in collect(executor, ids).values():
        assert responses[-1].error_msg == "Encountered an error in forwardAsync function: the step failed: broken step"
    assert "A step failed" in caplog.text
    assert free_blocks(executor) == model.blocks
    assert not answer_of(executor, Request([1], 3)).has_error()


@pytest.mark.parametrize("sampling", [SamplingConfig(), SamplingConfig(top_k=5, temperature=0.7)])
def test_nan_logits_end_only_their_request(
    start: Start, sampling: SamplingConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    executor, model = start()
    forward = model.forward

    def broken(step: StepInputs) -> Any:
        logits = forward(step)
        logits[step.token_ids[step.rows] == 90, 7] = float("nan")
        return logits

    monkeypatch.setattr(model, "forward", broken)
    assert 90 not in greedy_continuation([3], 8)
    ids = executor.enqueue_requests([Request([90], 8, sampling_config=sampling), Request([3], 8)])
    bad, good = (responses[-1] for _, responses in sorted(collect(executor, ids).items()))
    assert bad.error_msg.endswith("the logits for token 1 of the answer are not finite")
    assert good.result.output_token_ids == [[3, *greedy_continuation([3], 8)]]
    assert "are not finite" in caplog.text
    assert free_blocks(executor) == model.blocks


@pytest.mark.parametrize("place", ["_end", "_collect", "_fail"])
def test_broken_executor_answers_all_requests_with_the_cause(
    start: Start, place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    executor, model = start(batch=1)
    worker = loop_of(executor)
    assert worker is not None
    model.gate.clear()
    ids = executor.enqueue_requests([Request([n], 2, client_id=n, streaming=True) for n in (1, 2, 3)])
    wait_until(lambda: len(worker.waiting) == 2)
    model.failures = int(place == "_fail")
    monkeypatch.setattr(worker, place, _boom)
    model.gate.set()
    cause = "The executor has stopped working: ValueError: boom"
    for number, responses in collect(executor, ids).items():
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


def _boom(*_: object, **__: object) -> None:
    raise ValueError("boom")


# Start and shutdown


def test_shutdown_finishes_enqueued_requests(start: Start) -> None:
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


def test_shutdown_wakes_waiting_threads(start: Start) -> None:
    executor, _ = start()
    found: list[Any] = []
    waiter = threading.Thread(target=lambda: found.append(executor.await_responses()))
    waiter.start()
    executor.shutdown()
    waiter.join(SOON)
    assert found == [[]]


def test_context_manager_shuts_down(start: Start) -> None:
    executor, _ = start()
    with executor as entered:
        assert entered.can_enqueue_requests()
        assert entered.get_latest_debug_tensors() == []
    with pytest.raises(RuntimeError, match="Shutdown called"):
        executor.get_num_responses_ready()


def test_idle_executor_sleeps(start: Start) -> None:
    executor, _ = start()
    answer_of(executor, Request([1], 2))
    assert executor._thread.ident is not None
    clock = time.pthread_getcpuclockid(executor._thread.ident)
    before = time.clock_gettime(clock)
    time.sleep(0.1)
    assert time.clock_gettime(clock) - before < 0.05


def test_settings_beyond_the_engine_are_refused(start: Start) -> None:
    with pytest.raises(RuntimeError, match="sink_token_length"):
        start(kv_cache_config=KvCacheConfig(sink_token_length=4))


def test_only_decoder_engines_are_served() -> None:
    with pytest.raises(RuntimeError, match="decoder-only"):
        Executor("engine", ModelType.ENCODER_DECODER, ExecutorConfig())
    with pytest.raises(RuntimeError, match="engine_buffer"):
        Executor("engine", ModelType.DECODER_ONLY, ExecutorConfig(), engine_buffer=b"")
