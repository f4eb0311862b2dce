"""Beam search in the executor with a fake model, compared with a search without a cache."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tests.support.executors import Start, answer_of, collect, free_blocks, pauses
from tests.support.fake_model import fake_logits, greedy_continuation
from trtserve.executor.api import (
    CapacitySchedulerPolicy,
    FinishReason,
    KvCacheConfig,
    OutputConfig,
    Request,
    Response,
    SamplingConfig,
    SchedulerConfig,
)

BUILT = {"gather_context_logits": True, "gather_generation_logits": True}


def _log_probs(tokens: list[int]) -> np.ndarray[Any, Any]:
    logits = fake_logits(np.array(tokens)).astype(np.float64)
    shifted = logits - logits.max()
    result: np.ndarray[Any, Any] = shifted - math.log(float(np.exp(shifted).sum()))
    return result


def _plain_search(prompt: list[int], count: int, width: int) -> list[tuple[float, list[int]]]:
    """A textbook beam search without ends: keep the `width` best of all continuations at each step."""
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    for _ in range(count):
        grown = [
            (total + float(log_prob), [*tokens, token])
            for total, tokens in beams
            for token, log_prob in enumerate(_log_probs([*prompt, *tokens]))
        ]
        beams = sorted(grown, key=lambda beam: -beam[0])[:width]
    return beams


def _request(prompt: list[int], count: int, width: int, **other: Any) -> Request:
    sampling = SamplingConfig(beam_width=width, **other.pop("sampling", {}))
    output = OutputConfig(**({"exclude_input_from_output": True, "return_log_probs": True} | other.pop("output", {})))
    return Request(prompt, count, sampling_config=sampling, output_config=output, **other)


@pytest.mark.parametrize("width", [2, 3, 5])
@pytest.mark.parametrize("prompt", [[1], [1, 2, 3, 4], [5, 6, 7, 8, 9]], ids=["1", "4", "5"])
def test_beams_equal_a_search_without_cache(start: Start, width: int, prompt: list[int]) -> None:
    executor, model = start(max_beam_width=5)
    result = answer_of(executor, _request(prompt, 11, width)).result
    expected = _plain_search(prompt, 11, width)
    assert result.output_token_ids == [tokens for _, tokens in expected]
    assert result.cum_log_probs == pytest.approx([total for total, _ in expected], abs=1e-4)
    assert result.log_probs is not None
    assert [sum(each) for each in result.log_probs] == pytest.approx(result.cum_log_probs)
    assert result.finish_reasons == [FinishReason.LENGTH] * width
    assert (result.is_final, result.is_sequence_final, result.sequence_index) == (True, True, 0)
    assert free_blocks(executor) == model.blocks


def test_beams_of_concurrent_requests_equal_single_requests(start: Start) -> None:
    executor, model = start(batch=4, max_beam_width=3, kv_cache_config=KvCacheConfig(max_tokens=160))
    requests = [_request([n, n + 1, n + 2], 3 + n, 3) for n in range(9)]
    responses = collect(executor, executor.enqueue_requests(requests))
    for response, request in zip(responses.values(), requests, strict=True):
        expected = _plain_search(request.input_token_ids, request.max_tokens, 3)
        assert response[0].result.output_token_ids == [tokens for _, tokens in expected]
    assert free_blocks(executor) == model.blocks == 40


def test_streamed_beams_repeat_all_tokens_so_far(start: Start) -> None:
    executor, _ = start(max_beam_width=2, built=BUILT)
    request = _request([3, 4], 5, 2, streaming=True, output={"return_generation_logits": True})
    (responses,) = collect(executor, [executor.enqueue_request(request)]).values()
    results = [response.result for response in responses]
    for count, result in enumerate(results, start=1):
        assert result.output_token_ids == [tokens for _, tokens in _plain_search([3, 4], count, 2)]
        assert result.generation_logits is None
    assert [result.is_final for result in results] == [False] * 4 + [True]
    assert results[0].finish_reasons == [FinishReason.NOT_FINISHED] * 2


def test_finished_beams_keep_their_rank_without_the_end_token(start: Start) -> None:
    executor, _ = start(max_beam_width=2)
    (_, best), _ = _plain_search([6, 6], 6, 2)
    end = best[2]
    result = answer_of(executor, _request([6, 6], 6, 2, end_id=end, sampling={"early_stopping": 0})).result
    assert result.log_probs is not None
    assert result.cum_log_probs is not None
    assert FinishReason.END_ID in result.finish_reasons
    for tokens, log_probs, total, reason in zip(
        result.output_token_ids, result.log_probs, result.cum_log_probs, result.finish_reasons, strict=True
    ):
        assert end not in tokens
        assert len(log_probs) == len(tokens)
        last = float(_log_probs([6, 6, *tokens])[end]) if reason is FinishReason.END_ID else 0.0
        assert total == pytest.approx(sum(log_probs) + last, abs=1e-4)


def test_stop_words_end_a_beam_and_stay_in_it(start: Start) -> None:
    executor, _ = start(max_beam_width=2)
    (_, best), _ = _plain_search([8], 6, 2)
    result = answer_of(executor, _request([8], 6, 2, stop_words=[best[1:3]], sampling={"early_stopping": 0})).result
    stopped = [
        tokens
        for tokens, reason in zip(result.output_token_ids, result.finish_reasons, strict=True)
        if reason is FinishReason.STOP_WORDS
    ]
    assert stopped
    assert all(tokens[-2:] == best[1:3] for tokens in stopped)


def test_min_tokens_holds_for_every_beam(start: Start) -> None:
    executor, _ = start(max_beam_width=3)
    (_, best), *_ = _plain_search([2], 4, 3)
    result = answer_of(executor, _request([2], 8, 3, end_id=best[0], sampling={"min_tokens": 4})).result
    assert min(map(len, result.output_token_ids)) >= 4
    assert all(best[0] not in tokens for tokens in result.output_token_ids)


def test_banned_words_hold_for_every_beam(start: Start) -> None:
    executor, _ = start(max_beam_width=3)
    free = {token for _, tokens in _plain_search([2], 6, 3) for token in tokens}
    banned = sorted(free)[: len(free) // 2]
    result = answer_of(executor, _request([2], 6, 3, bad_words=[[token] for token in banned])).result
    assert not {token for tokens in result.output_token_ids for token in tokens} & set(banned)


def test_diversity_favours_later_beams(start: Start) -> None:
    executor, _ = start(max_beam_width=4)
    plain = answer_of(executor, _request([2, 1], 6, 4)).result
    diverse = answer_of(executor, _request([2, 1], 6, 4, sampling={"beam_search_diversity_rate": 5.0})).result
    assert plain.cum_log_probs is not None
    assert diverse.cum_log_probs is not None
    assert plain.output_token_ids != diverse.output_token_ids
    for tokens, total in zip(diverse.output_token_ids, diverse.cum_log_probs, strict=True):
        steps = [float(_log_probs([2, 1, *tokens[:at]])[token]) for at, token in enumerate(tokens)]
        assert total == pytest.approx(sum(steps), abs=1e-4)


def test_generation_logits_of_every_beam(start: Start) -> None:
    executor, _ = start(max_beam_width=3, built=BUILT)
    request = _request([2, 1], 5, 3, output={"return_generation_logits": True, "return_context_logits": True})
    result = answer_of(executor, request).result
    assert result.generation_logits is not None
    assert result.context_logits is not None
    assert result.generation_logits.shape == (3, 5, 97)
    for beam, tokens in enumerate(result.output_token_ids):
        for step in range(5):
            assert (result.generation_logits[beam, step] == fake_logits(np.array([2, 1, *tokens[:step]]))).all()
    assert (result.context_logits == np.stack([fake_logits(np.array([2])), fake_logits(np.array([2, 1]))])).all()


def test_paused_beam_search_starts_again(start: Start) -> None:
    """Two searches that do not fit together take turns; streams neither repeat nor miss tokens."""
    executor, model = start(
        max_beam_width=2,
        scheduler_config=SchedulerConfig(CapacitySchedulerPolicy.MAX_UTILIZATION),
        kv_cache_config=KvCacheConfig(max_tokens=56),
    )
    requests = [_request([n, 3], 18, 2, streaming=True) for n in range(3)]
    responses = collect(executor, executor.enqueue_requests(requests))
    assert pauses(executor) > 0
    for answers, request in zip(responses.values(), requests, strict=True):
        counts = [max(map(len, each.result.output_token_ids)) for each in answers]
        assert counts == list(range(1, 19))
        expected = _plain_search(request.input_token_ids, 18, 2)
        assert answers[-1].result.output_token_ids == [tokens for _, tokens in expected]
    assert free_blocks(executor) == model.blocks


def test_cancelled_search_returns_an_empty_list_per_beam(start: Start) -> None:
    executor, model = start(max_beam_width=2, seq_len=5000)
    number = executor.enqueue_request(_request([1], 4000, 2, streaming=True))
    executor.await_responses(number)
    executor.cancel_request(number)
    last = collect(executor, [number])[number][-1].result
    assert (last.output_token_ids, last.finish_reasons) == ([[], []], [FinishReason.CANCELLED] * 2)
    assert free_blocks(executor) == model.blocks


def test_search_without_an_allowed_token_fails_alone(start: Start) -> None:
    executor, _ = start(max_beam_width=2)
    bad, good = executor.enqueue_requests(
        [_request([1], 4, 2, bad_words=[[token] for token in range(97)]), _request([1], 4, 2)]
    )
    responses = collect(executor, [bad, good])
    assert "no token is allowed as token 1 of the answer" in responses[bad][0].error_msg
    assert not responses[good][0].has_error()


def test_width_one_is_plain_decoding(start: Start) -> None:
    executor, _ = start(max_beam_width=3)
    response: Response = answer_of(executor, _request([4], 5, 1))
    assert response.result.output_token_ids == [greedy_continuation([4], 5)]
