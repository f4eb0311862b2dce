"""The sampler, compared with plain scalar code."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtserve.executor.engine.logits_processing import LogitsProcessor
from trtserve.executor.engine.sampling import (
    EXHAUSTED,
    UNDEFINED,
    Choice,
    SamplingRow,
    _best,
    choose_tokens,
    log_softmax,
    uniform,
)
from trtserve.executor.interface.convert import sampling_parameters
from trtserve.executor.interface.requests import SamplingConfig

VOCAB = 3000
MASK = 2**64 - 1
NO_PROMPT = np.zeros(0, dtype=np.int64)


def _logits(rows: int, seed: int = 0, vocab: int = VOCAB) -> np.ndarray:  # type: ignore[type-arg]
    return (np.random.default_rng(seed).standard_normal((rows, vocab)) * 2).astype(np.float32)


def _row(
    config: SamplingConfig, position: int = 0, *, vocab: int = VOCAB, log_prob: bool = False, **processing: Any
) -> SamplingRow:
    """A row after `position` arbitrary tokens."""
    parameters = sampling_parameters(config)
    processor = LogitsProcessor(parameters, NO_PROMPT, vocab_size=vocab, **({"end_id": -1} | processing))
    return SamplingRow(parameters, processor, range(position), log_prob)


def _tokens(logits: np.ndarray, rows: list[SamplingRow]) -> list[int]:  # type: ignore[type-arg]
    return [choice.token for choice in choose_tokens(logits, rows)]


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
def test_sampler_equals_the_scalar_reference(config: SamplingConfig) -> None:
    logits = _logits(12)
    expected = [_scalar_choice(row.tolist(), config, position) for position, row in enumerate(logits)]
    assert _tokens(logits, [_row(config, position) for position in range(12)]) == expected


def test_mixed_batch_equals_single_rows() -> None:
    configs = list(CONFIGS.values())
    logits = _logits(len(configs), seed=1)
    together = _tokens(logits, [_row(config, 7) for config in configs])
    assert together == [_tokens(logits[i : i + 1], [_row(config, 7)])[0] for i, config in enumerate(configs)]
    assert len(set(together)) > 3


@given(st.permutations(range(len(CONFIGS))), st.integers(1, len(CONFIGS)), st.integers(0, 50))
def test_results_do_not_depend_on_other_rows(order: list[int], count: int, position: int) -> None:
    configs, logits = list(CONFIGS.values()), _logits(len(CONFIGS), seed=2, vocab=100)
    chosen = order[:count]
    together = choose_tokens(
        logits[chosen], [_row(configs[i], position, vocab=100, log_prob=i % 2 == 0) for i in chosen]
    )
    for i, choice in zip(chosen, together, strict=True):
        (alone,) = choose_tokens(logits[i : i + 1], [_row(configs[i], position, vocab=100, log_prob=True)])
        assert choice.token == alone.token
        assert i % 2 or choice == alone


def test_random_numbers_depend_on_seed_and_position() -> None:
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
    rows = [_row(SamplingConfig(top_p=1.0, seed=9), position, vocab=4) for position in range(count)]
    shares = np.bincount(_tokens(np.tile(logits, (count, 1)), rows), minlength=4) / count
    assert np.abs(shares - [0.5, 0.3, 0.15, 0.05]).max() < 0.03


@pytest.mark.parametrize("spread", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("count", [1, 5, 700, 1024])
def test_best_tokens_equal_a_full_sort(spread: float, count: int) -> None:
    logits = np.round(_logits(1, seed=5)[0] * np.float32(spread), 2)  # with ties
    whole = sorted(range(VOCAB), key=lambda token: -logits[token])
    assert _best(logits, count).tolist() == whole[:count]
    assert len(_best(logits, VOCAB + 1)) == VOCAB


def test_min_tokens_excludes_the_end_token() -> None:
    logits = np.array([[0.0, 5.0, 3.0]] * 3, dtype=np.float32)
    logits.flags.writeable = False  # the model's memory must not change
    config = SamplingConfig(min_tokens=2)
    assert _tokens(logits, [_row(config, position, vocab=3, end_id=1) for position in (0, 1, 2)]) == [2, 2, 1]
    assert _tokens(logits, [_row(config, 0, vocab=3, end_id=end) for end in (-1, 0, 1)]) == [1, 1, 2]


def test_first_of_equal_logits_is_chosen() -> None:
    assert _tokens(np.zeros((1, 5), np.float32), [_row(SamplingConfig(), vocab=5)]) == [0]


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_rows_without_finite_logits_yield_no_token(wrong: float) -> None:
    logits = _logits(6)
    logits[[1, 4], 5] = wrong
    logits[5] = -np.inf
    logits[0, 5] = -np.inf
    for configs in ([SamplingConfig()] * 6, [SamplingConfig(top_k=3)] * 3 + [SamplingConfig(top_p=0.5)] * 3):
        tokens = _tokens(logits, [_row(config) for config in configs])
        assert [token == UNDEFINED for token in tokens] == [False, True, False, False, True, True]
        assert tokens[0] == _tokens(logits[:1], [_row(configs[0])])[0]


@pytest.mark.parametrize("config", [SamplingConfig(), SamplingConfig(top_p=0.5), SamplingConfig(top_k=2)])
def test_row_with_all_tokens_banned_is_exhausted(config: SamplingConfig) -> None:
    logits = _logits(2, vocab=3)
    rows = [_row(config, vocab=3, bad_words=[[0], [1], [2]], log_prob=True), _row(config, vocab=3)]
    exhausted, free = choose_tokens(logits, rows)
    assert exhausted.token == EXHAUSTED
    assert math.isnan(exhausted.log_prob)
    assert free.token >= 0


def test_nan_bias_yields_no_token() -> None:
    bias = np.array([0, np.nan, 0], dtype=np.float32)
    assert _tokens(np.ones((1, 3), np.float32), [_row(SamplingConfig(), vocab=3, bias=bias)]) == [UNDEFINED]


def _log_softmax(logits: list[float]) -> list[float]:
    total = math.fsum(math.exp(logit) for logit in logits)
    return [logit - math.log(total) for logit in logits]


LOG_PROBS = {
    "greedy": (SamplingConfig(), 1.0, False),
    "greedy after a temperature": (SamplingConfig(temperature=0.5), 1 / (0.5 + 1e-6), False),
    "temperature 0 becomes 1": (SamplingConfig(temperature=0.0, top_k=5), 1.0, False),
    "top_k 1": (SamplingConfig(top_k=1), 1.0, False),
    "top_k": (SamplingConfig(top_k=3, seed=4), 1.0, True),
    "top_k with a nucleus": (SamplingConfig(top_k=3, top_p=0.8, temperature=2.0), 1 / (2 + 1e-6), True),
    "nucleus": (SamplingConfig(top_p=0.9, seed=3), 1.0, False),
}


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("config", "factor", "kept"), LOG_PROBS.values(), ids=LOG_PROBS.keys())
def test_log_probs_are_of_the_tokens_chosen_from(
    config: SamplingConfig, factor: float, kept: bool, normalize: bool
) -> None:
    logits = _logits(1, seed=6, vocab=20)
    expected = _log_softmax([float(logit) * factor for logit in logits[0]])
    rows = [_row(config, vocab=20, log_prob=True)]
    (choice,) = choose_tokens(logits, rows, normalize_log_probs=normalize)
    assert choice.full_log_prob == pytest.approx(expected[choice.token], abs=1e-5)
    if kept and normalize:
        mass = math.fsum(sorted(map(math.exp, expected))[-3:])
        assert choice.log_prob == pytest.approx(expected[choice.token] - math.log(mass), abs=1e-5)
    else:
        assert choice.log_prob == choice.full_log_prob


def test_log_probs_only_if_requested() -> None:
    (choice,) = choose_tokens(_logits(1), [_row(SamplingConfig(top_k=4))])
    assert math.isnan(choice.log_prob)
    assert math.isnan(Choice(3).full_log_prob)


def test_log_softmax_of_rows() -> None:
    logits = np.array([[1.0, 2.0, 3.0], [-np.inf, 0.0, 1000.0]], dtype=np.float32)
    result = log_softmax(logits)
    assert result.dtype == np.float32
    assert result[0].tolist() == pytest.approx(_log_softmax([1.0, 2.0, 3.0]), abs=1e-6)
    assert result[1].tolist() == [-math.inf, -1000.0, 0.0]
    odd = log_softmax(np.array([[-np.inf] * 2, [np.nan, 0], [np.inf, 0]], dtype=np.float32))
    assert odd[0].tolist() == [-math.inf] * 2
    assert np.isnan(odd[1]).all()
    assert np.isnan(odd[2, 0])


def test_banned_token_is_never_sampled() -> None:
    """Not even with the largest random number and rounded sums."""
    logits = np.zeros((1, 3000), dtype=np.float32)
    row = _row(SamplingConfig(top_p=1.0), bad_words=[[token] for token in range(1500, 3000)])
    with patch("trtserve.executor.engine.sampling.uniform", return_value=np.array([1 - 2**-53])):
        assert _tokens(logits, [row]) == [1499]
