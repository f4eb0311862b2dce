"""The sampler against plain scalar code that follows the reference's sentences."""

from __future__ import annotations

import math

import numpy as np
import pytest

from trtserve.executor.api import SamplingConfig
from trtserve.executor.sampling import UNDEFINED, SamplingParameters, choose_tokens, uniform

VOCAB = 3000
MASK = 2**64 - 1


def _logits(rows: int, seed: int = 0, vocab: int = VOCAB) -> np.ndarray:  # type: ignore[type-arg]
    return (np.random.default_rng(seed).standard_normal((rows, vocab)) * 2).astype(np.float32)


def _scalar_uniform(seed: int, position: int) -> float:
    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return z ^ (z >> 31)

    return (mix((mix(seed) + (position + 1) * 0x9E3779B97F4A7C15) & MASK) >> 11) / 2**53


def _scalar_choice(logits: list[float], config: SamplingConfig, position: int) -> int:
    temperature = 1.0 if config.temperature is None else config.temperature
    top_k = min(config.top_k or 0, 1024)
    if temperature == 0 or top_k == 1 or (top_k == 0 and config.top_p is None):
        return max(range(len(logits)), key=lambda token: logits[token])
    scaled = [logit if temperature == 1 else logit / (temperature + 1e-6) for logit in logits]
    highest = max(scaled)
    weights = [math.exp(logit - highest) for logit in scaled]
    order = sorted(range(len(weights)), key=lambda token: -weights[token])[: top_k or None]
    top_p = 1.0 if config.top_p is None else config.top_p
    target = _scalar_uniform(config.seed or 0, position) * top_p * sum(weights[token] for token in order)
    total = 0.0
    for token in order:
        total += weights[token]
        if total >= target:
            return token
    return order[-1]


CONFIGS = {
    "greedy by default": SamplingConfig(),
    "temperature alone is greedy": SamplingConfig(temperature=2.0),
    "top_k 1": SamplingConfig(top_k=1, top_p=0.9, temperature=3.0),
    "temperature 0": SamplingConfig(top_k=50, top_p=0.9, temperature=0.0),
    "top_k": SamplingConfig(top_k=5, seed=1),
    "top_k with temperature": SamplingConfig(top_k=40, temperature=1.7, seed=2),
    "nucleus": SamplingConfig(top_p=0.8, seed=3),
    "small nucleus": SamplingConfig(top_p=0.01, seed=4),
    "nucleus of nearly all, hot": SamplingConfig(top_p=1.0, temperature=50.0, seed=5),
    "top_k and top_p": SamplingConfig(top_k=20, top_p=0.5, seed=6),
    "top_k over 1024": SamplingConfig(top_k=2000, temperature=50.0, seed=7),
    "largest seed": SamplingConfig(top_k=50, temperature=3.0, seed=MASK),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_equals_the_scalar_reference(config: SamplingConfig) -> None:
    logits = _logits(12)
    parameters = [SamplingParameters.of(config)] * 12
    positions = list(range(12))
    expected = [_scalar_choice(row.tolist(), config, position) for position, row in enumerate(logits)]
    assert choose_tokens(logits, parameters, positions, [-1] * 12) == expected


def test_a_mixed_batch_equals_each_row_alone() -> None:
    configs = list(CONFIGS.values())
    logits = _logits(len(configs), seed=1)
    parameters = [SamplingParameters.of(config) for config in configs]
    together = choose_tokens(logits, parameters, [7] * len(configs), [-1] * len(configs))
    alone = [choose_tokens(logits[i : i + 1], [parameters[i]], [7], [-1])[0] for i in range(len(configs))]
    assert together == alone
    assert len(set(together)) > 3


def test_the_random_stream_depends_on_seed_and_position() -> None:
    seeds, positions = np.array([0, 0, 1, MASK], dtype=np.uint64), np.array([0, 1, 0, 5], dtype=np.uint64)
    numbers = uniform(seeds, positions).tolist()
    assert numbers == [_scalar_uniform(s, p) for s, p in zip(seeds.tolist(), positions.tolist(), strict=True)]
    assert len(set(numbers)) == 4


def test_random_numbers_are_uniform() -> None:
    numbers = uniform(np.repeat(np.arange(50, dtype=np.uint64), 200), np.tile(np.arange(200, dtype=np.uint64), 50))
    counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
    assert 0 <= numbers.min() < numbers.max() < 1
    assert np.abs(counts - 500).max() < 5 * math.sqrt(500)


def test_sampled_frequencies_follow_the_distribution() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], dtype=np.float32))
    count = 4000
    parameters = [SamplingParameters.of(SamplingConfig(top_p=1.0, seed=9))] * count
    tokens = choose_tokens(np.tile(logits, (count, 1)), parameters, list(range(count)), [-1] * count)
    shares = np.bincount(tokens, minlength=4) / count
    assert np.abs(shares - [0.5, 0.3, 0.15, 0.05]).max() < 0.03


def test_min_tokens_keeps_the_end_token_away() -> None:
    logits = np.array([[0.0, 5.0, 3.0]] * 3, dtype=np.float32)
    logits.flags.writeable = False  # the model's own memory
    parameters = [SamplingParameters.of(SamplingConfig(min_tokens=2))] * 3
    assert choose_tokens(logits, parameters, [0, 1, 2], [1, 1, 1]) == [2, 2, 1]
    assert choose_tokens(logits, parameters, [0, 0, 0], [-1, 0, 1]) == [1, 1, 2]


def test_equal_logits_give_the_first_token() -> None:
    assert choose_tokens(np.zeros((1, 5), np.float32), [SamplingParameters()], [0], [-1]) == [0]


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_rows_without_numbers_yield_no_token(wrong: float) -> None:
    logits = _logits(6)
    logits[[1, 4], 5] = wrong
    logits[5] = -np.inf
    logits[0, 5] = -np.inf
    for configs in ([SamplingConfig()] * 6, [SamplingConfig(top_k=3)] * 3 + [SamplingConfig(top_p=0.5)] * 3):
        parameters = [SamplingParameters.of(config) for config in configs]
        tokens = choose_tokens(logits, parameters, [0] * 6, [-1] * 6)
        assert [token == UNDEFINED for token in tokens] == [False, True, False, False, True, True]
        assert tokens[0] == choose_tokens(logits[:1], parameters[:1], [0], [-1])[0]
