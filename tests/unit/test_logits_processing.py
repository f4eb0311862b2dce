"""The incremental logits processor, compared with formulas over the whole sequence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtserve.executor.engine.logits_processing import LogitsProcessor
from trtserve.executor.engine.sampling import UNDEFINED, SamplingRow, choose_tokens
from trtserve.executor.interface.convert import sampling_parameters
from trtserve.executor.interface.requests import SamplingConfig

VOCAB = 12
END = 2
LAST_RESORT = np.finfo(np.float32).min
"""Logit of an end token before min_tokens: unlike a ban, it can be chosen when nothing else is left."""
Words = Sequence[Sequence[int]]

tokens = st.integers(0, VOCAB - 1)
configs = st.builds(
    SamplingConfig,
    temperature=st.sampled_from([None, 0.0, 0.5, 1.0, 3.0]),
    repetition_penalty=st.sampled_from([None, 0.5, 1.0, 1.7]),
    presence_penalty=st.sampled_from([None, 0.8, -0.4]),
    frequency_penalty=st.sampled_from([None, 0.3, -0.2]),
    prompt_ignore_length=st.sampled_from([None, 0, 2, 100]),
    no_repeat_ngram_size=st.sampled_from([None, 0, 1, 2, 3]),
    min_tokens=st.sampled_from([None, 0, 1, 4]),
    min_p=st.sampled_from([None, 0.0, 0.2]),
    top_k=st.sampled_from([None, 1, 4]),
    top_p=st.sampled_from([None, 0.6]),
)
words = st.lists(st.lists(tokens, min_size=1, max_size=3), max_size=4)


def processor_of(config: SamplingConfig, prompt: list[int], **settings: Any) -> LogitsProcessor:
    settings = {"vocab_size": VOCAB, "end_id": END} | settings
    return LogitsProcessor(sampling_parameters(config), np.array(prompt, dtype=np.int64), **settings)


def reference(
    row: npt.NDArray[np.float32],
    config: SamplingConfig,
    prompt: list[int],
    generated: list[int],
    bad_words: Words = (),
    bias: npt.NDArray[np.float32] | None = None,
) -> npt.NDArray[np.float64]:
    """Bias, temperature, penalties and bans computed from the whole sequence for every token."""
    sequence = prompt + generated
    temperature = config.temperature or 1.0
    ever = Counter(sequence)
    counts = Counter(sequence[min(config.prompt_ignore_length or 0, len(prompt)) :])
    result = np.array(row, dtype=np.float64)
    for token in range(len(row)):
        value = float(row[token]) + (0.0 if bias is None else float(bias[token]))
        value = value if temperature == 1 else value / (temperature + 1e-6)
        if ever[token]:
            penalty = config.repetition_penalty or 1.0
            value = value * penalty if value < 0 else value / penalty
        if counts[token]:
            value -= config.presence_penalty or 0.0
            value -= (config.frequency_penalty or 0.0) * counts[token]
        result[token] = value
    if len(generated) < (config.min_tokens or 0):
        result[END] = LAST_RESORT
    for token in banned(config, sequence, bad_words):
        result[token] = -np.inf
    if config.min_p:
        probabilities = np.exp(result - result.max())
        result[probabilities < config.min_p * probabilities.max()] = -np.inf
    return result


def banned(config: SamplingConfig, sequence: list[int], bad_words: Words) -> set[int]:
    """Return the tokens that are banned next."""
    found: set[int] = set()
    size = config.no_repeat_ngram_size or 0
    if size:
        tail = sequence[len(sequence) - size + 1 :] if len(sequence) >= size - 1 else None
        starts = range(len(sequence) - size + 1)
        found |= {sequence[i + size - 1] for i in starts if sequence[i : i + size - 1] == tail}
    return found | {word[-1] for word in bad_words if ends_with(sequence, list(word[:-1]))}


def ends_with(sequence: list[int], tail: list[int]) -> bool:
    return len(tail) <= len(sequence) and sequence[len(sequence) - len(tail) :] == tail


@given(configs, st.lists(tokens, max_size=10), st.lists(tokens, max_size=14), words, st.integers(0, 99))
def test_processor_equals_the_formulas(
    config: SamplingConfig, prompt: list[int], answer: list[int], bad_words: Words, seed: int
) -> None:
    random = np.random.default_rng(seed)
    bias = random.standard_normal(VOCAB).astype(np.float32) if seed % 2 else None
    processor = processor_of(config, prompt, bad_words=bad_words, bias=bias)
    generated: list[int] = []
    for token in [*answer, 0]:
        row = random.standard_normal(VOCAB).astype(np.float32)
        expected = reference(row, config, prompt, generated, bad_words, bias)
        if np.isfinite(expected).any():
            np.testing.assert_allclose(processor.process(row, generated), expected, rtol=2e-5, atol=2e-6)
        generated.append(token)
        processor.accept(token)


@given(configs, st.lists(tokens, min_size=1, max_size=10), words, st.integers(0, 99))
def test_banned_tokens_are_never_chosen(config: SamplingConfig, prompt: list[int], bad_words: Words, seed: int) -> None:
    random = np.random.default_rng(seed)
    processor = processor_of(config, prompt, bad_words=bad_words)
    generated: list[int] = []
    row = SamplingRow(sampling_parameters(config), processor, generated)
    for _ in range(12):
        (choice,) = choose_tokens(random.standard_normal((1, VOCAB)).astype(np.float32), [row])
        forbidden = banned(config, prompt + generated, bad_words)
        assert (choice.token < 0) == (len(forbidden) == VOCAB)
        if choice.token < 0:
            break
        if len(generated) < (config.min_tokens or 0) and len(forbidden | {END}) < VOCAB:
            forbidden.add(END)
        assert choice.token not in forbidden
        generated.append(choice.token)
        processor.accept(choice.token)


@given(configs, st.lists(tokens, max_size=8), st.lists(tokens, max_size=5), st.lists(tokens, max_size=5), words)
def test_fork_is_independent(
    config: SamplingConfig, prompt: list[int], common: list[int], own: list[int], bad_words: Words
) -> None:
    row = np.linspace(-2, 2, VOCAB).astype(np.float32)
    trunk = processor_of(config, prompt, bad_words=bad_words)
    for token in common:
        trunk.accept(token)
    before = trunk.process(row, common)
    branch = trunk.fork()
    for token in own:
        branch.accept(token)
    np.testing.assert_array_equal(trunk.process(row, common), before)
    alone = processor_of(config, prompt, bad_words=bad_words)
    for token in common + own:
        alone.accept(token)
    np.testing.assert_array_equal(branch.process(row, common + own), alone.process(row, common + own))


def test_penalties_of_one_step() -> None:
    config = SamplingConfig(temperature=0.5, repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.125)
    processor = processor_of(config, [3, 3, 4], bias=np.full(VOCAB, 0.5, dtype=np.float32))
    processor.accept(5)
    row = np.zeros(VOCAB, dtype=np.float32)
    row[4] = -1.5
    result = processor.process(row, [5]).tolist()
    warm = 0.5 / 0.500001
    assert result[:3] == pytest.approx([warm] * 3)
    assert result[3:7] == pytest.approx(
        [warm / 2 - 0.25 - 0.25, -2 * 2 * warm - 0.25 - 0.125, warm / 2 - 0.25 - 0.125, warm], abs=1e-6
    )
    assert row[4] == -1.5  # the model's memory must not change


def test_prompt_table_ids_are_not_penalised() -> None:
    config = SamplingConfig(frequency_penalty=1.0, no_repeat_ngram_size=2)
    prompt = [VOCAB, 5, VOCAB + 7, VOCAB, 5, VOCAB]
    processor = processor_of(config, prompt, bad_words=[[VOCAB], [VOCAB, 6], [5, VOCAB]])
    result = processor.process(np.zeros(VOCAB, dtype=np.float32), [])
    assert result[5] == -np.inf  # it followed the row of the prompt table
    assert result[6] == -np.inf
    assert np.flatnonzero(result).tolist() == [5, 6]


def test_counts_grow_beyond_the_initial_size() -> None:
    count = 500
    processor = processor_of(SamplingConfig(frequency_penalty=1.0), [0, 0], vocab_size=count)
    for token in [*range(count), *range(count - 10, count)]:
        processor.accept(token)
    result = processor.process(np.zeros(count, dtype=np.float32), [1])
    assert result.tolist() == [-3.0, *[-1.0] * (count - 11), *[-2.0] * 10]


NEUTRAL: list[tuple[dict[str, Any], dict[str, Any], bool, bool]] = [
    ({}, {}, True, True),
    ({"top_p": 0.5, "top_p_decay": 0.5}, {"bad_words": [[]]}, True, True),
    ({"repetition_penalty": 1.0, "presence_penalty": 0.0, "min_tokens": 0}, {}, True, True),
    ({"min_tokens": 3}, {"end_id": -1}, True, True),
    ({"temperature": 0.7}, {}, False, True),
    ({"min_p": 0.7}, {}, False, True),
    ({"min_tokens": 3}, {}, False, False),
    ({"presence_penalty": 0.1}, {}, False, False),
    ({"no_repeat_ngram_size": 4}, {}, False, False),
    ({}, {"bad_words": [[3]]}, False, False),
    ({}, {"bias": np.zeros(VOCAB, dtype=np.float32)}, False, False),
]


@pytest.mark.parametrize(("config", "settings", "neutral", "keeps_order"), NEUTRAL)
def test_neutral_parameters_are_recognised(
    config: dict[str, Any], settings: dict[str, Any], neutral: bool, keeps_order: bool
) -> None:
    processor = processor_of(SamplingConfig(**config), [1, 2], **settings)
    assert (processor.neutral, processor.keeps_order) == (neutral, keeps_order)


@pytest.mark.parametrize("config", [{"presence_penalty": float("nan")}, {"repetition_penalty": 1e-9}])
def test_overflowing_penalties_affect_only_their_row(config: dict[str, float]) -> None:
    sampling = [SamplingConfig(**config), SamplingConfig()]
    rows = [SamplingRow(sampling_parameters(each), processor_of(each, [3]), []) for each in sampling]
    logits = np.full((2, VOCAB), 1e30, dtype=np.float32)
    assert [choice.token for choice in choose_tokens(logits, rows)] == [UNDEFINED, 0]


def test_top_p_decays_and_is_reset() -> None:
    config = SamplingConfig(top_p=0.8, top_p_decay=0.5, top_p_min=0.3, top_p_reset_ids=7)
    processor = processor_of(config, [1])
    masses = []
    for token in (1, 2, 3, 7, 7, 1):
        masses.append(processor.top_p)
        processor.accept(token)
    assert masses == pytest.approx([0.8, 0.4, 0.3, 0.3, 0.8, 0.8])
    assert processor.top_p == pytest.approx(0.4)
    assert processor.fork().top_p == processor.top_p


def test_sampling_uses_the_decayed_top_p() -> None:
    """Two equal tokens: a nucleus of at most half the mass contains only the first."""
    config = SamplingConfig(top_p=1.0, top_p_decay=0.5)
    logits = np.full((1, VOCAB), -50, dtype=np.float32)
    logits[0, [3, 8]] = 0
    parameters = sampling_parameters(config)
    chosen: dict[int, set[int]] = {0: set(), 1: set()}
    for position in range(40):
        for steps in (0, 1):
            processor = processor_of(config, [1])
            for _ in range(steps):
                processor.accept(3)
            (choice,) = choose_tokens(logits, [SamplingRow(parameters, processor, range(position))])
            chosen[steps].add(choice.token)
    assert chosen == {0: {3, 8}, 1: {3}}
