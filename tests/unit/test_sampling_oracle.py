"""Logits processing compared with transformers' processors, where both have the same definition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from trtserve.executor.engine.logits_processing import LogitsProcessor
from trtserve.executor.engine.sampling import SamplingRow, choose_tokens, log_softmax
from trtserve.executor.interface.convert import sampling_parameters
from trtserve.executor.interface.requests import SamplingConfig

pytestmark = pytest.mark.needs("torch")

VOCAB = 40
END = 2


def _temperature(transformers: Any, _prompt: int) -> Any:
    # TensorRT-LLM divides by the temperature + 1e-6.
    return transformers.TemperatureLogitsWarper(0.7 + 1e-6)


def _repetition(transformers: Any, _prompt: int) -> Any:
    return transformers.RepetitionPenaltyLogitsProcessor(1.8)


def _min_tokens(transformers: Any, prompt: int) -> Any:
    return transformers.MinNewTokensLengthLogitsProcessor(prompt, 4, END, device="cpu")


def _ngrams(transformers: Any, _prompt: int) -> Any:
    return transformers.NoRepeatNGramLogitsProcessor(2)


def _bad_words(transformers: Any, _prompt: int) -> Any:
    # transformers skips bad words that are only an end token; TensorRT-LLM bans them too.
    return transformers.NoBadWordsLogitsProcessor([[4], [5, 6], [7, 8, 9]], [END])


def _bias(transformers: Any, _prompt: int) -> Any:
    return transformers.SequenceBiasLogitsProcessor([[[token], float(value)] for token, value in enumerate(BIAS)])


def _min_p(transformers: Any, _prompt: int) -> Any:
    return transformers.MinPLogitsWarper(0.2)


BIAS = np.linspace(-3, 3, VOCAB).astype(np.float32)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], list[Any]]] = {
    "temperature": ({"temperature": 0.7, "top_p": 1.0}, {}, [_temperature]),
    "repetition_penalty": ({"repetition_penalty": 1.8}, {}, [_repetition]),
    "min_tokens": ({"min_tokens": 4}, {}, [_min_tokens]),
    "no_repeat_ngram_size": ({"no_repeat_ngram_size": 2}, {}, [_ngrams]),
    "bad_words": ({}, {"bad_words": [[4], [5, 6], [7, 8, 9]]}, [_bad_words]),
    "bias": ({}, {"bias": BIAS}, [_bias]),
    "min_p": ({"min_p": 0.2}, {}, [_min_p]),
    # TensorRT-LLM's order: bias, temperature, penalty, bans, min_p. transformers applies the penalty first.
    "together": (
        {"temperature": 0.7, "repetition_penalty": 1.8, "no_repeat_ngram_size": 2, "min_tokens": 4, "min_p": 0.2},
        {"bias": BIAS, "bad_words": [[4], [5, 6], [7, 8, 9]]},
        [_bias, _temperature, _repetition, _min_tokens, _ngrams, _bad_words, _min_p],
    ),
}


def _processor(config: SamplingConfig, prompt: list[int], **settings: Any) -> LogitsProcessor:
    parameters = sampling_parameters(config)
    return LogitsProcessor(parameters, np.array(prompt, dtype=np.int64), vocab_size=VOCAB, end_id=END, **settings)


@pytest.mark.parametrize(("config", "settings", "oracles"), CASES.values(), ids=CASES.keys())
def test_equals_transformers_processors(config: dict[str, Any], settings: dict[str, Any], oracles: list[Any]) -> None:
    import torch
    import transformers

    random = np.random.default_rng(3)
    prompt = [5, 7, 8, 11, 5]
    processor = _processor(SamplingConfig(**config), prompt, **settings)
    chain = [oracle(transformers, len(prompt)) for oracle in oracles]
    generated: list[int] = []
    for token in [6, 8, 7, 8, 5, 6, 6, 20]:
        row = (random.standard_normal(VOCAB) * 3).astype(np.float32)
        expected = torch.from_numpy(row.copy())[None]
        for each in chain:
            expected = each(torch.tensor([prompt + generated]), expected)
        result = processor.process(row, generated)
        result[result == np.finfo(np.float32).min] = -np.inf  # TensorRT-LLM's mask of the end token before min_tokens
        np.testing.assert_allclose(result, expected[0].numpy(), rtol=1e-5, atol=1e-6)
        generated.append(token)
        processor.accept(token)


def test_log_softmax_equals_torchs() -> None:
    import torch

    rows = (np.random.default_rng(4).standard_normal((3, 5000)) * 5).astype(np.float32)
    expected = torch.log_softmax(torch.from_numpy(rows), dim=1).numpy()
    np.testing.assert_allclose(log_softmax(rows), expected, rtol=1e-6, atol=1e-5)


NUCLEI: dict[str, tuple[dict[str, Any], list[Callable[[Any], Any]]]] = {
    "top_k": ({"top_k": 5}, [lambda library: library.TopKLogitsWarper(5)]),
    "top_p": ({"top_p": 0.6}, [lambda library: library.TopPLogitsWarper(0.6)]),
    "both": (
        {"top_k": 8, "top_p": 0.5},
        [lambda library: library.TopKLogitsWarper(8), lambda library: library.TopPLogitsWarper(0.5)],
    ),
    "min_p and top_k": (
        {"min_p": 0.3, "top_k": 9},
        [lambda library: library.MinPLogitsWarper(0.3), lambda library: library.TopKLogitsWarper(9)],
    ),
}


@pytest.mark.parametrize(("config", "oracles"), NUCLEI.values(), ids=NUCLEI.keys())
def test_samples_come_from_the_same_tokens_as_in_transformers(config: dict[str, Any], oracles: list[Any]) -> None:
    """Exactly the tokens that transformers' warpers keep are drawn, each at least once.

    How often differs by design: TensorRT-LLM draws a number below p times the mass, so that the last token of the
    nucleus counts with the part that lies inside it alone, and transformers with the whole.
    """
    import torch
    import transformers

    row = (np.random.default_rng(8).standard_normal((1, VOCAB)) * 1.5).astype(np.float32)
    kept = torch.from_numpy(row)
    for oracle in oracles:
        kept = oracle(transformers)(torch.tensor([[1]]), kept)
    parameters = sampling_parameters(SamplingConfig(seed=1, **config))
    processor = _processor(SamplingConfig(**config), [1])
    count = 3000
    rows = [SamplingRow(parameters, processor, range(position)) for position in range(count)]
    drawn = {choice.token for choice in choose_tokens(np.repeat(row, count, axis=0), rows)}
    assert drawn == set(torch.isfinite(kept[0]).nonzero().flatten().tolist())
