"""Choosing tokens greedily, with penalties and bans: equal to transformers with its processors of the same meaning."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.sampling_requests import (
    COUNT,
    VOCAB,
    build_tiny_engine,
    log_probs_of,
    prompt_of,
    request_of,
    results,
    tokens,
)
from trtserve.executor import api

BIAS = np.where(np.arange(VOCAB) % 3 == 0, -2.0, 1.0).astype(np.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the model and its engine."""
    folder = tmp_path_factory.mktemp("sampling")
    build_tiny_engine(folder)
    return folder


@pytest.fixture(scope="module")
def executor(folder: Path) -> Iterator[api.Executor]:
    with api.Executor(folder / "engine", api.ModelType.DECODER_ONLY, api.ExecutorConfig()) as running:
        yield running


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
    import torch
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()


def transformers_tokens(model: Any, number: int, **settings: Any) -> list[int]:
    """Return the greedy answer of transformers to a prompt."""
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


@pytest.mark.needs("torch")
@pytest.mark.parametrize(("ours", "theirs"), ORACLES.values(), ids=ORACLES.keys())
def test_greedy_decoding_equals_transformers(
    executor: api.Executor, model: Any, ours: dict[str, Any], theirs: dict[str, Any]
) -> None:
    numbers = range(0, 8, 2)
    found = tokens(executor, *(request_of(number, **ours) for number in numbers))
    assert found == [transformers_tokens(model, number, **theirs) for number in numbers]
    if ours:
        assert found != tokens(executor, *(request_of(number) for number in numbers))


@pytest.mark.needs("torch")
def test_min_tokens_equals_transformers(executor: api.Executor, model: Any) -> None:
    (greedy,) = tokens(executor, request_of(1))
    end = greedy[1]
    (ours,) = tokens(executor, request_of(1, end_id=end, min_tokens=6))
    theirs = transformers_tokens(model, 1, eos_token_id=end, min_new_tokens=6)
    assert ours == (theirs[:-1] if theirs[-1] == end else theirs)
    assert len(ours) >= 6


@pytest.mark.needs("torch")
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
