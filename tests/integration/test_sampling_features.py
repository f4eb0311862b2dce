"""Every way to choose tokens, on a float32 engine of a random model: alone, mixed in one batch, and as transformers."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.tiny_models import write_tiny_model
from trtserve.artifacts import Model
from trtserve.build import build_engine
from trtserve.convert import convert_model
from trtserve.executor import api
from trtserve.specs import BuildSpec, ConvertSpec

VOCAB = 320
END = 2
PROMPT_LENGTHS = (5, 1, 33, 12, 47, 8, 20, 31)
COUNT = 16
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
    return write_tiny_model(tmp_path_factory.mktemp("sampling") / "model", "llama", seed=5)


@pytest.fixture(scope="module")
def executor(folder: Path) -> Iterator[api.Executor]:
    checkpoint = convert_model(Model(path=folder), ConvertSpec(dtype="float32"), out=folder.parent / "checkpoint")
    limits = BuildSpec(max_batch_size=8, max_seq_len=128, max_num_tokens=256, runtime="openvino")
    engine = build_engine(checkpoint, limits, out=folder.parent / "engine")
    guided = api.GuidedDecodingConfig(
        api.GuidedDecodingConfig.GuidedDecodingBackend.LLGUIDANCE,
        tokenizer_str=(folder / "tokenizer.json").read_text(encoding="utf-8"),
    )
    config = api.ExecutorConfig(
        guided_decoding_config=guided, kv_cache_config=api.KvCacheConfig(enable_block_reuse=False)
    )
    with api.Executor(engine.path, api.ModelType.DECODER_ONLY, config) as running:
        yield running


def prompt_of(number: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(number).integers(3, 259, size=PROMPT_LENGTHS[number]).tolist()
    return tokens


def request_of(number: int = 0, *, count: int = COUNT, log_probs: bool = False, **parts: Any) -> api.Request:
    """A request for prompt `number`; `parts` are parameters of Request or of SamplingConfig."""
    fields = ("end_id", "bad_words", "embedding_bias", "guided_decoding_params", "num_return_sequences", "stop_words")
    settings = {name: parts.pop(name) for name in fields if name in parts}
    return api.Request(
        prompt_of(number),
        count,
        sampling_config=api.SamplingConfig(**parts),
        output_config=api.OutputConfig(exclude_input_from_output=True, return_log_probs=log_probs),
        **settings,
    )


def answers(executor: api.Executor, requests: list[api.Request]) -> list[list[api.Response]]:
    """The responses of each request, all enqueued at once; those of several sequences in their order."""
    collected = []
    for number in executor.enqueue_requests(requests):
        responses: list[api.Response] = []
        while not responses or not (responses[-1].has_error() or responses[-1].result.is_final):
            new = executor.await_responses(number, timedelta(seconds=60))
            assert new, "no answer within a minute"
            responses += [each for each in new if isinstance(each, api.Response)]
        collected.append(sorted(responses, key=lambda each: 0 if each.has_error() else each.result.sequence_index))
    return collected


def results(executor: api.Executor, *requests: api.Request) -> list[api.Result]:
    """The only result of each request."""
    found = []
    for (response,) in answers(executor, list(requests)):
        assert not response.has_error(), response.error_msg
        found.append(response.result)
    return found


def tokens(executor: api.Executor, *requests: api.Request) -> list[list[int]]:
    return [result.output_token_ids[0] for result in results(executor, *requests)]


def log_probs_of(result: api.Result) -> list[float]:
    assert result.log_probs is not None
    return result.log_probs[0]


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


def test_every_feature_gives_the_same_alone_and_in_a_batch_of_eight(executor: api.Executor) -> None:
    parts = list(FEATURES.values())
    requests = [request_of(number % 8, log_probs=number % 2 == 0, **each) for number, each in enumerate(parts)]
    alone = [results(executor, request)[0] for request in requests]
    assert len({tuple(result.output_token_ids[0]) for result in alone}) == len(requests)
    for first in range(0, len(requests), 5):  # eight at a time, with other neighbours each time
        chosen = [(first + offset) % len(requests) for offset in range(8)]
        for number, result in zip(chosen, results(executor, *(requests[i] for i in chosen)), strict=True):
            assert result.output_token_ids == alone[number].output_token_ids, list(FEATURES)[number]
            assert result.finish_reasons == alone[number].finish_reasons
            if requests[number].output_config.return_log_probs:
                np.testing.assert_allclose(log_probs_of(result), log_probs_of(alone[number]), atol=1e-4)


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


def test_a_nucleus_that_has_decayed_is_greedy(executor: api.Executor) -> None:
    (sampled,) = tokens(executor, request_of(2, top_p=1.0, top_p_decay=1e-6, temperature=3.0, seed=4))
    (greedy,) = tokens(executor, request_of(2))
    assert sampled[0] != greedy[0]
    prompt = [*prompt_of(2), sampled[0]]
    (response,) = answers(
        executor,
        [api.Request(prompt, COUNT - 1, output_config=api.OutputConfig(exclude_input_from_output=True))],
    )[0]
    assert response.result.output_token_ids[0] == sampled[1:]


def test_what_leaves_one_token_is_greedy(executor: api.Executor) -> None:
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

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
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
def test_what_cannot_be_done_fails_alone(executor: api.Executor, parts: dict[str, Any], message: str) -> None:
    alone = tokens(executor, request_of(1))
    (failed,), (fine,) = answers(executor, [request_of(0, **parts), request_of(1)])
    assert failed.has_error()
    assert message in failed.error_msg
    assert fine.result.output_token_ids == alone


class Counted:
    """Presence and frequency penalty as the reference's formula has them, in transformers' shape."""

    def __init__(self, presence: float, frequency: float) -> None:
        self._presence, self._frequency = presence, frequency

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        scores = scores.clone()
        for token, count in Counter(input_ids[0].tolist()).items():
            scores[0, token] -= self._presence + self._frequency * count
        return scores


# Ours and transformers' names for the same.
ORACLES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": ({}, {}),
    "repetition": ({"repetition_penalty": 1.7}, {"repetition_penalty": 1.7}),
    "n-grams": ({"no_repeat_ngram_size": 1}, {"no_repeat_ngram_size": 1}),
    "bad words": (
        {"bad_words": [[token] for token in range(0, 300, 7)] + [[token, token + 1] for token in range(300)]},
        {"bad_words_ids": [[token] for token in range(0, 300, 7)] + [[token, token + 1] for token in range(300)]},
    ),
    "bias": (
        {"embedding_bias": BIAS},
        {"sequence_bias": [[[token], float(value)] for token, value in enumerate(BIAS)]},
    ),
    "presence and frequency": (
        {"presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"logits_processor": [Counted(1.5, 0.5)]},
    ),
    "together": (
        {
            "repetition_penalty": 1.4,
            "no_repeat_ngram_size": 3,
            "embedding_bias": BIAS,
            "bad_words": [[token] for token in range(0, 300, 7)],
        },
        {
            "repetition_penalty": 1.4,
            "no_repeat_ngram_size": 3,
            "sequence_bias": [[[token], float(value)] for token, value in enumerate(BIAS)],
            "bad_words_ids": [[token] for token in range(0, 300, 7)],
        },
    ),
}


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def transformers_tokens(model: Any, number: int, **settings: Any) -> list[int]:
    """What transformers generates greedily for a prompt."""
    import torch

    prompt = torch.tensor([prompt_of(number)])
    length = {"max_new_tokens": COUNT, "pad_token_id": 0}
    with torch.inference_mode():
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            **(length | {"eos_token_id": None} | settings),
        )
    generated: list[int] = output[0, prompt.shape[1] :].tolist()
    return generated


@pytest.mark.oracle
@pytest.mark.parametrize(("ours", "theirs"), ORACLES.values(), ids=ORACLES.keys())
def test_greedy_decoding_equals_transformers(
    executor: api.Executor, model: Any, ours: dict[str, Any], theirs: dict[str, Any]
) -> None:
    numbers = range(0, 8, 2)
    found = tokens(executor, *(request_of(number, **ours) for number in numbers))
    assert found == [transformers_tokens(model, number, **theirs) for number in numbers]
    if ours:
        assert found != tokens(executor, *(request_of(number) for number in numbers))


@pytest.mark.oracle
def test_min_tokens_equals_transformers(executor: api.Executor, model: Any) -> None:
    (greedy,) = tokens(executor, request_of(1))
    end = greedy[1]
    (ours,) = tokens(executor, request_of(1, end_id=end, min_tokens=6))
    theirs = transformers_tokens(model, 1, eos_token_id=end, min_new_tokens=6)
    assert ours == (theirs[:-1] if theirs[-1] == end else theirs)
    assert len(ours) >= 6


@pytest.mark.oracle
def test_log_probs_equal_transformers(executor: api.Executor, model: Any) -> None:
    import torch

    (result,) = results(executor, request_of(2, log_probs=True, repetition_penalty=1.7))
    answer = result.output_token_ids[0]
    sequence = prompt_of(2) + answer
    with torch.inference_mode():
        logits = model(torch.tensor([sequence])).logits[0, len(prompt_of(2)) - 1 : -1].numpy()
    expected = []
    for position, token in enumerate(answer):
        row = logits[position].astype(np.float64)
        seen = sorted(set(sequence[: len(prompt_of(2)) + position]))
        row[seen] = np.where(row[seen] < 0, row[seen] * 1.7, row[seen] / 1.7)
        expected.append(row[token] - np.log(np.exp(row).sum()))
    np.testing.assert_allclose(log_probs_of(result), expected, atol=2e-4)
