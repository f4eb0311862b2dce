"""Drafts from n-grams: what is guessed, how much of it, and what the executor reports."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.executors import Start, answer_of, collect, executors, free_blocks
from tests.support.fake_model import VOCAB, FakeRepeatingChooser, FakeRepeatingModel
from trtserve.executor.api import ExecutorConfig, KvCacheConfig, OutputConfig, Request, SamplingConfig
from trtserve.executor.engine.drafts import NgramDrafter, best_draft_lengths
from trtserve.executor.engine.model import StepInputs

PROMPT = [3, 4, 5, 6, 7, 8, 9]


class Drafting(ExecutorConfig):
    """With drafts of up to six tokens."""

    ngram_max_draft_len = 6


@pytest.fixture(params=[FakeRepeatingModel, FakeRepeatingChooser])
def repeating(request: pytest.FixtureRequest) -> Iterator[Start]:
    with executors(request.param) as start:
        yield start


def _drafter(*tokens: int) -> NgramDrafter:
    return NgramDrafter(tokens, vocab_size=VOCAB)


# What is guessed


@pytest.mark.parametrize(
    ("tokens", "draft"),
    [
        ([], []),
        ([5], []),
        ([5, 5], []),
        ([1, 2, 3, 4], []),
        ([1, 2, 3, 4, 9, 1, 2], [3, 4, 9, 1]),
        # The longest match counts, among equals the last one.
        ([1, 2, 3, 4, 9, 2, 3, 5, 9, 1, 2, 3], [4, 9, 2, 3]),
        ([2, 3, 4, 8, 2, 3, 5, 7, 2, 3], [5, 7, 2, 3]),
        # A source that ends goes on with what it has guessed.
        ([7, 8, 7, 8, 7, 8], [7, 8, 7, 8]),
        ([6, 6, 6], [6, 6, 6, 6]),
        # Rows of a prompt table are no tokens.
        ([1, 2, 3, VOCAB, 4, 1, 2], [3]),
    ],
)
def test_what_followed_the_last_tokens_before_is_guessed(tokens: list[int], draft: list[int]) -> None:
    assert _drafter(*tokens).draft(4) == draft


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(0, 8))
def test_a_draft_is_what_stood_behind_an_earlier_occurrence(tokens: list[int], length: int) -> None:
    drafter = NgramDrafter(tokens, vocab_size=4)
    draft, last = drafter.draft(length), tuple(tokens[-2:])
    places = [end for end in range(2, len(tokens)) if tuple(tokens[end - 2 : end]) == last]
    assert len(draft) == len(drafter.gains(length)) == (length if places else 0)
    continued = [(tokens[place:] * (length + 1))[:length] for place in places]
    assert not draft or draft in continued


def test_after_right_guesses_the_source_moves_along_and_the_drafter_is_surer() -> None:
    text = list(range(10, 40))
    drafter = _drafter(*text, 1, 10, 11)
    (first,) = drafter.gains(1)
    for token in text[2:20]:
        assert drafter.draft(1) == [token]
        drafter.accept(token)
    assert drafter.gains(1)[0] > 0.9 > first
    assert drafter.draft(20) == [*text[20:], 1, 10, 11, *text[2:9]]


def test_wrong_guesses_are_learnt_without_being_verified() -> None:
    drafter = _drafter(1, 2, 3)
    for token in range(40):
        drafter.accept(1)
        drafter.accept(2)
        drafter.accept(10 + token)
    drafter.accept(1)
    drafter.accept(2)
    assert drafter.gains(1)[0] < 0.01


# How much of it


@pytest.mark.parametrize(
    ("gains", "tokens", "costs", "lengths"),
    [
        ([[0.5, 0.25]], 1, [1.0, 1.0, 1.0], [2]),
        ([[0.5, 0.25]], 1, [1.0, 1.0, 1.3], [1]),
        ([[0.5, 0.25]], 1, [1.0, 1.6, 1.75], [0]),
        # Two tokens are slower than three.
        ([[0.5, 0.25]], 1, [1.0, 2.0, 1.1], [2]),
        # The likelier guesses of two sequences; a third has none.
        ([[0.9, 0.8], [], [0.5, 0.1]], 3, [1.0] * 6, [2, 0, 1]),
        # No room, or nothing to guess.
        ([[0.9]], 3, [1.0, 1.0, 1.0], [0]),
        ([[0.9]], 4, [1.0, 1.0, 1.0], [0]),
        ([[]], 1, [1.0, 1.0], [0]),
        # A gain within the error of the costs.
        ([[0.01]], 1, [1.0, 1.0], [0]),
    ],
)
def test_drafts_are_as_long_as_makes_the_step_worth_most(
    gains: list[list[float]], tokens: int, costs: list[float], lengths: list[int]
) -> None:
    assert best_draft_lengths(gains, tokens, costs) == lengths


# The executor


def _plain(repeating: Start, request: Request, **config: Any) -> list[int]:
    return list(answer_of(repeating(**config)[0], request).result.output_token_ids[0])


def test_a_repeating_answer_takes_fewer_steps(repeating: Start) -> None:
    request = Request(PROMPT, 60)
    executor, model = repeating(config_class=Drafting)
    result = answer_of(executor, request).result
    assert result.output_token_ids == [_plain(repeating, request)]
    assert result.decoding_iter < 45
    assert len(model.steps) == result.decoding_iter
    assert free_blocks(executor) == model.blocks


@pytest.mark.parametrize("config", [{"config_class": Drafting}, {}])
def test_statistics_count_guesses_and_right_ones(repeating: Start, config: dict[str, Any]) -> None:
    executor, _ = repeating(**config)
    output = OutputConfig(return_perf_metrics=True)
    result = answer_of(executor, Request(PROMPT, 60, output_config=output)).result
    records = executor.get_latest_iteration_stats()
    assert result.request_perf_metrics is not None
    figures = result.request_perf_metrics.speculative_decoding
    if not config:
        assert all(record.specdec_stats is None for record in records)
        assert figures.total_draft_tokens == 0
        return
    drafts = [record.specdec_stats for record in records if record.specdec_stats is not None]
    assert len(drafts) == len(records)
    assert figures.total_draft_tokens == sum(each.num_draft_tokens for each in drafts) > 0
    assert figures.total_accepted_draft_tokens == sum(each.num_accepted_tokens for each in drafts)
    assert figures.acceptance_rate == pytest.approx(figures.total_accepted_draft_tokens / figures.total_draft_tokens)
    per_step = [record.inflight_batching_stats for record in records]
    tokens = sum(each.avg_num_decoded_tokens_per_iter * each.num_gen_requests for each in per_step if each)
    assert tokens == 59  # the first token belongs to the prompt's step


def test_no_drafts_without_costs_and_none_that_are_not_worth_it(
    repeating: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = _plain(repeating, Request(PROMPT, 40))
    for costs in ([], [float(tokens) for tokens in range(1, 17)]):
        monkeypatch.setattr(FakeRepeatingModel, "STEP_COSTS", costs)
        executor, model = repeating(config_class=Drafting)
        result = answer_of(executor, Request(PROMPT, 40)).result
        assert result.output_token_ids == [expected]
        assert model.steps == [len(PROMPT), *[1] * 39]


def test_other_requests_share_the_room(repeating: Start) -> None:
    """Drafts fill a step up to the most tokens whose cost is known, and no more."""
    executor, model = repeating(config_class=Drafting, batch=8)
    mix = [Request([*PROMPT, number], 40) for number in range(6)]
    answers = collect(executor, executor.enqueue_requests(mix))
    decode_steps = [tokens for tokens in model.steps if tokens <= 16]
    assert max(decode_steps) > 6
    assert len(model.steps) - len(decode_steps) <= len(mix)
    plain, _ = repeating(batch=8)
    expected = collect(plain, plain.enqueue_requests(mix))
    for ours, theirs in zip(answers.values(), expected.values(), strict=True):
        assert ours[-1].result.output_token_ids == theirs[-1].result.output_token_ids


def test_guessed_tokens_fill_blocks_that_are_reused(repeating: Start) -> None:
    caching = KvCacheConfig(enable_block_reuse=True)
    executor, _ = repeating(config_class=Drafting, kv_cache_config=caching)
    first = answer_of(executor, Request(PROMPT, 40)).result.output_token_ids[0]
    again = answer_of(executor, Request(first, 20, output_config=OutputConfig(return_perf_metrics=True))).result
    assert again.output_token_ids == [_plain(repeating, Request(first, 20))]
    assert again.request_perf_metrics is not None
    assert again.request_perf_metrics.kv_cache_metrics.num_reused_blocks >= len(first) // 4 - 1


def test_a_post_processor_sees_one_row_after_another(repeating: Start) -> None:
    seen: dict[bool, list[tuple[int, tuple[int, ...]]]] = {True: [], False: []}
    answers = []
    for drafting in (True, False):

        def force(_: int, logits: Any, tokens: list[list[int]], *__: Any, key: bool = drafting) -> None:
            seen[key].append((len(tokens[0]), np.shape(logits)))
            logits[:] = -1.0
            logits[..., 10 + len(tokens[0]) % 5] = 1.0

        executor, model = repeating(**({"config_class": Drafting} if drafting else {}))
        request = Request(PROMPT, 50, logits_post_processor=force, sampling_config=SamplingConfig(top_k=3, seed=8))
        answers.append(answer_of(executor, request).result.output_token_ids)
        assert (len(model.steps) < 45) == drafting
    assert answers[0] == answers[1]
    assert seen[True] == seen[False]


def test_a_draft_never_crosses_the_length_at_which_rotations_change(
    repeating: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LongRoPE: tokens up to the limit have short factors; beyond it all are computed again with long ones."""
    expected = _plain(repeating, Request(PROMPT, 70))
    seen: list[tuple[int, bool]] = []
    forward = FakeRepeatingModel.forward

    def record(self: FakeRepeatingModel, step: StepInputs) -> Any:
        assert step.long_sequences is not None
        seen.append((step.max_context_len, bool(step.long_sequences[0])))
        return forward(self, step)

    monkeypatch.setattr(FakeRepeatingModel, "forward", record)
    executor, _ = repeating(config_class=Drafting, built={"long_rope_beyond": 45})
    result = answer_of(executor, Request(PROMPT, 70)).result
    assert seen
    assert all(long == (length > 45) for length, long in seen)
    assert result.decoding_iter < 60
    assert result.output_token_ids == [expected]
