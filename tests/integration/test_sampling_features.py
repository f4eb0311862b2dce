"""Every way to choose tokens, on a float32 engine of a random model: alone, in one batch, paused, with drafts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.sampling_requests import (
    COUNT,
    VOCAB,
    answers,
    build_tiny_engine,
    log_probs_of,
    prompt_of,
    request_of,
    results,
    tokens,
)
from trtserve.executor import api

END = 2
BIAS = np.where(np.arange(VOCAB) % 3 == 0, -2.0, 1.0).astype(np.float32)
JSON_SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"a": {"enum": ["x", "yz"]}, "b": {"type": "boolean"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
)
Guide = api.GuidedDecodingParams.GuideType


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the model and its engine."""
    folder = tmp_path_factory.mktemp("sampling")
    build_tiny_engine(folder)
    return folder


def config_of(folder: Path, **settings: Any) -> api.ExecutorConfig:
    guided = api.GuidedDecodingConfig(
        api.GuidedDecodingConfig.GuidedDecodingBackend.LLGUIDANCE,
        tokenizer_str=(folder / "model" / "tokenizer.json").read_text(encoding="utf-8"),
    )
    return api.ExecutorConfig(guided_decoding_config=guided, **settings)


@pytest.fixture(scope="module")
def executor(folder: Path) -> Iterator[api.Executor]:
    with api.Executor(folder / "engine", api.ModelType.DECODER_ONLY, config_of(folder)) as running:
        yield running


FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "top_k": {"top_k": 20, "temperature": 1.5, "seed": 1},
    "top_k over 1024": {"top_k": 2000, "temperature": 2.0, "seed": 1},
    "top_p": {"top_p": 0.9, "temperature": 1.3, "seed": 2},
    "top_k and top_p": {"top_k": 50, "top_p": 0.7, "temperature": 2.0, "seed": 3},
    "min_p": {"top_p": 1.0, "min_p": 0.3, "temperature": 3.0, "seed": 4},
    "decay": {"top_p": 0.99, "top_p_decay": 0.8, "top_p_min": 0.1, "top_p_reset_ids": 17, "temperature": 2.0},
    "temperature 0": {"top_k": 40, "top_p": 0.9, "temperature": 0.0},
    "repetition": {"repetition_penalty": 1.5},
    "presence": {"presence_penalty": 2.0, "top_p": 0.9},
    "frequency": {"frequency_penalty": 1.5, "prompt_ignore_length": 3},
    "n-grams": {"no_repeat_ngram_size": 2, "temperature": 0.3},
    "bad words": {"bad_words": [[5], [7, 8], [100, 101, 102]], "top_k": 3, "seed": 5},
    "bias": {"embedding_bias": BIAS},
    "min_tokens": {"min_tokens": 5, "end_id": 66, "top_p": 1.0},
    "guide": {"guided_decoding_params": api.GuidedDecodingParams(Guide.JSON_SCHEMA, JSON_SCHEMA), "end_id": END},
    "sampled guide": {
        "guided_decoding_params": api.GuidedDecodingParams(Guide.REGEX, "[a-z]{3,9}( [0-9]+)*"),
        "end_id": END,
        "top_p": 1.0,
        "temperature": 3.0,
    },
    "all together": {
        "top_k": 30,
        "top_p": 0.95,
        "temperature": 1.4,
        "seed": 9,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "no_repeat_ngram_size": 3,
        "min_p": 0.01,
        "min_tokens": 4,
        "bad_words": [[9], [10, 11]],
        "embedding_bias": BIAS,
        "end_id": 70,
    },
}


@pytest.fixture(scope="module")
def requests() -> list[api.Request]:
    """One for each feature."""
    return [request_of(number % 8, log_probs=number % 2 == 0, **each) for number, each in enumerate(FEATURES.values())]


@pytest.fixture(scope="module")
def alone(executor: api.Executor, requests: list[api.Request]) -> list[api.Result]:
    """The answer of each request alone."""
    found = [results(executor, request)[0] for request in requests]
    assert len({tuple(result.output_token_ids[0]) for result in found}) == len(requests)
    return found


def assert_equal_results(found: list[api.Result], expected: list[api.Result]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.output_token_ids == theirs.output_token_ids
        assert ours.finish_reasons == theirs.finish_reasons
        if theirs.log_probs is not None:
            np.testing.assert_allclose(log_probs_of(ours), log_probs_of(theirs), atol=1e-4)


def test_every_feature_gives_the_same_in_a_batch_of_eight(
    executor: api.Executor, requests: list[api.Request], alone: list[api.Result]
) -> None:
    for first in range(0, len(requests), 5):  # eight at a time, with other neighbours each time
        chosen = [(first + offset) % len(requests) for offset in range(8)]
        assert_equal_results(results(executor, *(requests[i] for i in chosen)), [alone[i] for i in chosen])


def test_pauses_change_nothing(folder: Path, requests: list[api.Request], alone: list[api.Result]) -> None:
    """With room for a few sequences only, the others are put aside and their tokens computed again."""
    policy = api.CapacitySchedulerPolicy.MAX_UTILIZATION
    config = config_of(
        folder,
        scheduler_config=api.SchedulerConfig(policy),
        kv_cache_config=api.KvCacheConfig(max_tokens=160, enable_block_reuse=False),
        enable_chunked_context=True,
    )
    with api.Executor(folder / "engine", api.ModelType.DECODER_ONLY, config) as crowded:
        assert_equal_results(results(crowded, *requests), alone)
        paused = sum(
            record.inflight_batching_stats.num_paused_requests
            for record in crowded.get_latest_iteration_stats()
            if record.inflight_batching_stats
        )
    assert paused > 0


DRAFTED = (
    "greedy",
    "top_k",
    "top_p",
    "min_p",
    "decay",
    "repetition",
    "presence",
    "n-grams",
    "bad words",
    "all together",
)


def test_drafts_change_nothing(executor: api.Executor, alone: list[api.Result]) -> None:
    """With tokens drafted, right ones and wrong ones, the same tokens follow as without."""
    names = list(FEATURES)
    for name in DRAFTED:
        number = names.index(name)
        expected = alone[number].output_token_ids[0]
        for right, wrong in ((3, 2), (5, 0), (0, 4)):
            drafted = [*expected[:right], *((token + 1) % VOCAB for token in expected[right : right + wrong])]
            draft = api.ExternalDraftTokensConfig(drafted)
            request = request_of(number % 8, count=1, external_draft_tokens_config=draft, **FEATURES[name])
            assert tokens(executor, request) == [expected[: right + 1]], (name, right)


def test_seeds_are_reproducible(executor: api.Executor) -> None:
    sampled = [request_of(3, top_p=1.0, temperature=2.0, seed=seed) for seed in (7, 7, 8, 0)]
    first, again, other, zero = tokens(executor, *sampled)
    assert first == again
    assert len({tuple(each) for each in (first, other, zero)}) == 3
    assert tokens(executor, request_of(3, top_p=1.0, temperature=2.0)) == [zero]


def test_sequences_of_one_request_use_the_seeds_that_follow(executor: api.Executor) -> None:
    several = request_of(3, top_k=50, temperature=2.0, seed=7, num_return_sequences=3)
    (responses,) = answers(executor, [several])
    alone = tokens(executor, *(request_of(3, top_k=50, temperature=2.0, seed=seed) for seed in (7, 8, 9)))
    assert [response.result.output_token_ids[0] for response in responses] == alone
    assert [response.result.sequence_index for response in responses] == [0, 1, 2]


def test_a_decayed_nucleus_is_greedy(executor: api.Executor) -> None:
    (sampled,) = tokens(executor, request_of(2, top_p=1.0, top_p_decay=1e-6, temperature=3.0, seed=4))
    (greedy,) = tokens(executor, request_of(2))
    assert sampled[0] != greedy[0]
    prompt = [*prompt_of(2), sampled[0]]
    (response,) = answers(
        executor,
        [api.Request(prompt, COUNT - 1, output_config=api.OutputConfig(exclude_input_from_output=True))],
    )[0]
    assert response.result.output_token_ids[0] == sampled[1:]


def test_settings_that_leave_one_token_are_greedy(executor: api.Executor) -> None:
    same: list[dict[str, Any]] = [
        {},
        {"top_k": 40, "min_p": 1.0},
        {"top_p": 1e-6},
        {"top_k": 9, "temperature": 0.0},
        {"temperature": 5.0},
    ]
    assert len({tuple(each) for each in tokens(executor, *(request_of(4, **parts) for parts in same))}) == 1


def test_a_high_presence_penalty_keeps_tokens_from_coming_twice(executor: api.Executor) -> None:
    (answer,) = tokens(executor, request_of(5, count=60, presence_penalty=1000.0))
    assert len(set(answer)) == 60
    assert not set(answer) & set(prompt_of(5))


def test_ends_and_bad_words_do_not_come(executor: api.Executor) -> None:
    (greedy,) = tokens(executor, request_of(1))
    end, bad = greedy[2], greedy[4:6]
    ended, late, clean = results(
        executor,
        request_of(1, end_id=end),
        request_of(1, end_id=end, min_tokens=6),
        request_of(1, bad_words=[bad]),
    )
    assert len(ended.output_token_ids[0]) == greedy.index(end)
    assert ended.finish_reasons == [api.FinishReason.END_ID]
    assert len(late.output_token_ids[0]) >= 6
    assert clean.output_token_ids[0][:5] == greedy[:5]
    assert clean.output_token_ids[0][5] != bad[1]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.5}, {"top_p": 0.9, "temperature": 1.5}])
def test_log_probs_add_up(executor: api.Executor, sampling: dict[str, Any]) -> None:
    (result,) = results(executor, request_of(6, log_probs=True, **sampling))
    log_probs = log_probs_of(result)
    assert result.cum_log_probs is not None
    assert len(log_probs) == COUNT
    assert all(-50 < value < 0 for value in log_probs)
    assert result.cum_log_probs[0] == pytest.approx(math.fsum(log_probs), abs=1e-4)


def test_top_k_log_probs_are_of_the_k_tokens(executor: api.Executor) -> None:
    """Rescaled in log_probs, as normalize_log_probs is on by default, and never in cum_log_probs."""
    (result,) = results(executor, request_of(6, log_probs=True, top_k=2, seed=3))
    log_probs = log_probs_of(result)
    assert result.cum_log_probs is not None
    assert all(value < 0 for value in log_probs)
    assert result.cum_log_probs[0] < math.fsum(log_probs)


def test_guided_text_is_valid(executor: api.Executor, folder: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "model" / "tokenizer.json"))
    grammar = 'root ::= word ("-" word)*\nword ::= "ab" | "cd" [0-9]'
    guides = [
        api.GuidedDecodingParams(Guide.JSON_SCHEMA, JSON_SCHEMA),
        api.GuidedDecodingParams(Guide.REGEX, "[A-F]{4}"),
        api.GuidedDecodingParams(Guide.EBNF_GRAMMAR, grammar),
        api.GuidedDecodingParams(Guide.JSON),
    ]
    # Spaces between the parts of JSON would go on for ever: random weights know no better.
    bias = np.zeros(VOCAB, dtype=np.float32)
    bias[[tokenizer.token_to_id(space) for space in "ĠĊĉč"]] = -100
    bias[END] = 10
    found = results(
        executor,
        *(
            request_of(number, count=90, end_id=END, guided_decoding_params=guide, embedding_bias=bias)
            for number, guide in enumerate(guides)
        ),
    )
    schema, expression, words, anything = (tokenizer.decode(result.output_token_ids[0]) for result in found)
    assert set(json.loads(schema)) == {"a", "b"}
    assert len(expression) == 4
    assert set(expression) <= set("ABCDEF")
    assert all(word == "ab" or (len(word) == 3 and word.startswith("cd")) for word in words.split("-"))
    assert anything.startswith("{")
    assert [result.finish_reasons for result in found[:3]] == [[api.FinishReason.END_ID]] * 3


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "guide": ({"guided_decoding_params": api.GuidedDecodingParams(Guide.REGEX, "([")}, "The guide of type REGEX is"),
    "everything banned": ({"bad_words": [[token] for token in range(VOCAB)]}, "no token is allowed"),
}


@pytest.mark.parametrize(("parts", "message"), WRONG.values(), ids=WRONG.keys())
def test_an_impossible_request_fails_alone(executor: api.Executor, parts: dict[str, Any], message: str) -> None:
    alone = tokens(executor, request_of(1))
    (failed,), (fine,) = answers(executor, [request_of(0, **parts), request_of(1)])
    assert failed.has_error()
    assert message in failed.error_msg
    assert fine.result.output_token_ids == alone
