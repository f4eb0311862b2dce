"""Draft tokens: acceptance by tokens and by logits, and results of the executor."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import numpy as np
import pytest

from tests.support.executors import Start, answer_of, collect, free_blocks
from tests.support.fake_model import VOCAB, fake_logits, greedy_continuation
from tests.support.waiting import wait_until
from trtserve.executor.api import (
    ExternalDraftTokensConfig,
    FinishReason,
    KvCacheConfig,
    OutputConfig,
    Request,
    Response,
    SamplingConfig,
)
from trtserve.executor.engine.drafts import DraftLogits, distribution, verify_draft
from trtserve.executor.engine.logits_processing import LogitsProcessor
from trtserve.executor.engine.requests import FinishReason as Reason
from trtserve.executor.engine.sampling import Choice, SamplingParameters, SamplingRow

BUILT = {"max_draft_len": 8, "speculative_decoding_mode": 2, "gather_generation_logits": True}
PROMPT = [3, 4, 5]


def _request(draft: list[int], *, prompt: list[int] = PROMPT, count: int = 1, **other: Any) -> Request:
    config = ExternalDraftTokensConfig(draft, other.pop("logits", None), other.pop("threshold", None))
    output = OutputConfig(exclude_input_from_output=True, **other.pop("output", {}))
    return Request(prompt, count, external_draft_tokens_config=config, output_config=output, **other)


# By tokens


@pytest.mark.parametrize("right", range(5))
def test_drafts_are_accepted_up_to_the_first_wrong_token(start: Start, right: int) -> None:
    executor, model = start(built=BUILT)
    expected = greedy_continuation(PROMPT, 5)
    draft = [token if at < right else (token + 1) % VOCAB for at, token in enumerate(expected[:4])]
    result = answer_of(executor, _request(draft)).result
    assert result.output_token_ids == [expected[: right + 1]]
    assert result.finish_reasons == [FinishReason.LENGTH]
    assert result.decoding_iter == 1
    assert model.steps == [len(PROMPT) + 4]
    assert free_blocks(executor) == model.blocks


def test_drafts_in_mixed_batches_and_with_chunks(start: Start) -> None:
    executor, model = start(built=BUILT, tokens=16, enable_chunked_context=True)
    prompt = list(range(40))
    expected = greedy_continuation(prompt, 5)
    ids = executor.enqueue_requests([_request(expected[:4], prompt=prompt), Request([7], 9), _request([1], count=9)])
    first, plain, third = (responses[-1].result for responses in collect(executor, ids).values())
    assert first.output_token_ids == [expected]
    assert plain.output_token_ids == [[7, *greedy_continuation([7], 9)]]
    assert third.output_token_ids == [greedy_continuation(PROMPT, 1)]
    assert max(model.steps) <= 16


def test_sampled_tokens_equal_plain_decoding(start: Start) -> None:
    executor, _ = start(built=BUILT)
    sampling = SamplingConfig(top_k=30, temperature=2.0, seed=9, repetition_penalty=1.3)
    output = OutputConfig(exclude_input_from_output=True)
    plain = answer_of(executor, Request(PROMPT, 6, sampling_config=sampling, output_config=output))
    expected = plain.result.output_token_ids[0]
    drafted = answer_of(executor, _request(expected[:5], sampling_config=sampling)).result
    assert drafted.output_token_ids == [expected]


def test_end_tokens_and_stop_words_inside_the_draft(start: Start) -> None:
    executor, _ = start(built=BUILT)
    expected = greedy_continuation(PROMPT, 5)
    ended = answer_of(executor, _request(expected[:4], end_id=expected[2])).result
    assert (ended.output_token_ids, ended.finish_reasons) == ([expected[:2]], [FinishReason.END_ID])
    stopped = answer_of(executor, _request(expected[:4], stop_words=[expected[1:3]])).result
    assert (stopped.output_token_ids, stopped.finish_reasons) == ([expected[:3]], [FinishReason.STOP_WORDS])


def test_streaming_sends_accepted_tokens_at_once(start: Start) -> None:
    executor, _ = start(built=BUILT)
    expected = greedy_continuation(PROMPT, 3)
    request = _request(
        expected[:2], streaming=True, output={"return_log_probs": True, "return_generation_logits": True}
    )
    (response,) = collect(executor, [executor.enqueue_request(request)]).popitem()[1]
    result = response.result
    assert result.output_token_ids == [expected]
    assert result.log_probs is not None
    assert len(result.log_probs[0]) == 3
    assert result.generation_logits is not None
    contexts = [[*PROMPT, *expected[:count]] for count in range(3)]
    assert (result.generation_logits[:, 0] == [fake_logits(np.array(tokens)) for tokens in contexts]).all()


def test_rejected_tokens_are_not_in_the_cache(start: Start) -> None:
    executor, model = start(built=BUILT, kv_cache_config=KvCacheConfig(enable_block_reuse=True))
    tokens = list(PROMPT)
    expected = greedy_continuation(PROMPT, 24)
    random = np.random.default_rng(4)
    while len(tokens) < 20:
        done = len(tokens) - len(PROMPT)
        draft = expected[done : done + 4]
        draft[random.integers(4)] = int(random.integers(VOCAB))
        tokens += answer_of(executor, _request(draft, prompt=tokens)).result.output_token_ids[0]
    assert tokens == [*PROMPT, *expected[: len(tokens) - len(PROMPT)]]
    assert min(model.steps[1:]) < 10  # the blocks of the accepted tokens were reused


def test_acceptance_rate_is_in_metrics_and_statistics(start: Start) -> None:
    executor, _ = start(built=BUILT)
    expected = greedy_continuation(PROMPT, 4)
    draft = [*expected[:3], (expected[3] + 1) % VOCAB]
    result = answer_of(executor, _request(draft, output={"return_perf_metrics": True})).result
    assert result.request_perf_metrics is not None
    figures = result.request_perf_metrics.speculative_decoding
    assert (figures.acceptance_rate, figures.total_accepted_draft_tokens, figures.total_draft_tokens) == (0.75, 3, 4)
    records: list[Any] = []
    wait_until(
        lambda: any(each.specdec_stats and each.specdec_stats.num_draft_tokens for each in _more(executor, records))
    )
    (stats,) = [each.specdec_stats for each in records if each.specdec_stats and each.specdec_stats.num_draft_tokens]
    assert (stats.num_draft_tokens, stats.num_accepted_tokens, stats.acceptance_length) == (4, 3, 4.0)


def _more(executor: Any, records: list[Any]) -> list[Any]:
    records += executor.get_latest_iteration_stats()
    return records


# Limits


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (_request([1] * 9), r"Draft tokens length \(9\) exceeds maximum draft tokens length \(8\)\."),
        (_request([97]), "outside the vocabulary of 97"),
        (_request([1], logits=np.zeros((1, 5), np.float32)), "over 5 tokens; the vocabulary has 97"),
        (_request([1], logits=np.full((1, VOCAB), np.nan, np.float32)), "draft logits have NaN"),
        (_request([1, 1], logits=np.full((2, VOCAB), np.inf, np.float32)), "draft logits have NaN"),
        (_request([1], logits=np.full((1, VOCAB), -np.inf, np.float32)), "row without any finite value"),
        (_request([1], sampling_config=SamplingConfig(beam_width=2)), "beam width 1"),
    ],
)
def test_invalid_drafts_are_refused(start: Start, request_: Request, message: str) -> None:
    executor, _ = start(built=BUILT, max_beam_width=2)
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(answer_of(executor, request_).error_msg)


def test_engine_without_drafts_refuses_them(start: Start) -> None:
    executor, _ = start()
    assert "(1) exceeds maximum draft tokens length (0)" in answer_of(executor, _request([1])).error_msg


def test_draft_is_cut_to_the_maximum_input_length(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    executor, _ = start(built=BUILT, tokens=20)
    prompt = list(range(18))
    expected = greedy_continuation(prompt, 5)
    with caplog.at_level(logging.WARNING):
        assert answer_of(executor, _request(expected[:4], prompt=prompt)).result.output_token_ids == [expected[:3]]
    assert "using 2 draft tokens" in caplog.text
    full: Response = answer_of(executor, _request([1], prompt=list(range(20))))
    assert full.result.output_token_ids == [greedy_continuation(list(range(20)), 1)]


# By logits


def _row(**parameters: Any) -> SamplingRow:
    resolved = SamplingParameters(**parameters)
    return SamplingRow(resolved, LogitsProcessor(resolved, np.zeros(1, np.int64), vocab_size=4, end_id=-1), [])


def _verdict(row: SamplingRow, logits: Any, draft: list[int], given: DraftLogits) -> list[int]:
    chosen: list[int] = []

    def accept(choice: Choice) -> Reason:
        chosen.append(choice.token)
        return Reason.NOT_FINISHED

    verdict = verify_draft(np.array(logits, np.float32), row, draft, given, accept)
    assert verdict.token == chosen[-1]
    assert verdict.accepted in (len(chosen), len(chosen) - 1)
    return chosen


def test_threshold_compares_both_models() -> None:
    target, draft = np.log([[0.4, 0.3, 0.2, 0.1]] * 2), np.log(np.array([[0.1, 0.7, 0.1, 0.1]], np.float32))
    row = _row(greedy=False, temperature=1.0)
    # 0.3 > 0.4 · 0.7 is accepted, 0.3 > 0.5 · 0.7 is not: then a token is drawn from p - q = (0.3, 0, 0.1, 0).
    assert _verdict(row, target, [1], DraftLogits(draft, 0.4))[0] == 1
    (replaced,) = _verdict(row, target, [1], DraftLogits(draft, 0.5))
    assert replaced in (0, 2)


def test_greedy_accepts_the_best_token_only() -> None:
    target, draft = np.log([[0.4, 0.3, 0.2, 0.1]] * 2), np.log(np.array([[0.1, 0.7, 0.1, 0.1]], np.float32))
    row = _row(min_p=0.01)  # greedy, but not argmax_only
    assert _verdict(row, target, [1], DraftLogits(draft, 0.01)) == [0]
    assert _verdict(row, target, [0], DraftLogits(draft, 1.0)) == [0, 0]


def test_random_acceptance_follows_the_target_distribution() -> None:
    """Draft tokens drawn from the draft's distribution and verified follow the target's distribution."""
    p, q = np.array([0.5, 0.25, 0.15, 0.1]), np.array([0.1, 0.2, 0.3, 0.4])
    random, counts = np.random.default_rng(0), Counter[int]()
    draft = DraftLogits(np.log(q)[None].astype(np.float32))
    rounds = 4000
    for seed in range(rounds):
        row = _row(greedy=False, seed=seed)
        counts[_verdict(row, np.log([p, p]), [int(random.choice(4, p=q))], draft)[0]] += 1
    # Four standard deviations of a binomial count.
    for token, share in enumerate(p):
        assert abs(counts[token] - rounds * share) < 4 * (rounds * share * (1 - share)) ** 0.5


def test_distribution_equals_the_samplers() -> None:
    processed = np.log(np.array([0.5, 0.25, 0.15, 0.1], np.float32))
    assert distribution(processed, _row()).tolist() == [1, 0, 0, 0]
    assert distribution(processed, _row(greedy=False, top_k=2)) == pytest.approx([2 / 3, 1 / 3, 0, 0], abs=1e-6)
    # The nucleus ends inside the second token; the sampler uses the part inside the nucleus.
    assert distribution(processed, _row(greedy=False, top_p=0.6)) == pytest.approx([5 / 6, 1 / 6, 0, 0], abs=1e-6)


def test_draft_logits_through_the_executor(start: Start) -> None:
    executor, _ = start(built=BUILT)
    expected = greedy_continuation(PROMPT, 4)
    logits = np.stack([fake_logits(np.array([*PROMPT, *expected[:at]])) for at in range(3)])
    output = {"return_log_probs": True}
    greedy = answer_of(executor, _request(expected[:3], logits=logits, output=output)).result
    assert greedy.output_token_ids == [expected]
    sampled = answer_of(
        executor,
        _request(expected[:3], logits=logits, sampling_config=SamplingConfig(top_p=0.9, seed=1), output=output),
    ).result
    # Both models agree, so every draft token is accepted.
    assert sampled.output_token_ids[0][:3] == expected[:3]
    assert sampled.log_probs is not None
    assert all(value < 0 for value in sampled.log_probs[0])
