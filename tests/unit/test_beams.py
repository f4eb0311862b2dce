"""When a beam search ends and which beams it keeps, with chosen probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from trtserve.executor.engine.logits_processing import LogitsProcessor
from trtserve.executor.engine.requests import FinishReason
from trtserve.executor.engine.sampling import SamplingParameters
from trtserve.executor.engine.sequence import BeamSearch, StopWords

END = 4
NEVER = -50.0


def _search(
    *, width: int = 2, max_tokens: int = 5, stop: Sequence[tuple[int, ...]] = (), **parameters: Any
) -> BeamSearch:
    resolved = SamplingParameters(beam_width=width, num_return_sequences=width, **parameters)
    prompt = np.array([9, 8])
    return BeamSearch(
        resolved,
        LogitsProcessor(resolved, prompt, vocab_size=5, end_id=END),
        end_id=END,
        max_tokens=max_tokens,
        stop_words=StopWords(stop, prompt) if stop else None,
    )


def _rows(*rows: Sequence[float]) -> Any:
    return np.array(rows, dtype=np.float32)


def test_first_step_splits_the_prompt_into_beams() -> None:
    search = _search()
    assert search.step(_rows([-1, -3, -2, -9, NEVER])) == ([0, 0], [0, 2])
    assert [(beam.tokens, beam.cum_log_prob) for beam in search.beams] == [([0], -1.0), ([2], -2.0)]
    assert search.step(_rows([-5, -1, -9, -9, NEVER], [-9, -9, -9, -0.5, NEVER])) == ([0, 1], [1, 3])
    assert [beam.origins for beam in search.beams] == [[0, 0], [0, 1]]
    assert search.longest == 2


def test_end_token_counts_only_among_the_best_candidates() -> None:
    search = _search(early_stopping=0)
    search.step(_rows([-1, -2, -8, -8, -3]))  # the end token is third of four: outside the beam width
    assert [beam.reason for beam in search.ranked()] == [FinishReason.NOT_FINISHED] * 2
    search.step(_rows([-9, -9, -9, -9, -0.5], [-9, -1, -9, -9, NEVER]))
    assert [beam.reason for beam in search.ranked()] == [FinishReason.END_ID, FinishReason.NOT_FINISHED]
    assert search.ranked()[0].tokens == [0]
    assert search.ranked()[0].cum_log_prob == pytest.approx(-1.5)


@pytest.mark.parametrize(("early_stopping", "done"), [(1, True), (0, False), (2, False)])
def test_early_stopping_ends_with_enough_finished_beams(early_stopping: int, done: bool) -> None:
    search = _search(early_stopping=early_stopping)
    search.step(_rows([-1, -1.1, -8, -8, NEVER]))
    search.step(_rows([-0.1, -9, -9, -9, -3], [-9, -9, -9, -9, -0.5]))  # one ends, and a better one continues
    search.step(_rows([-0.1, -9, -9, -9, -2], [-9, -9, -9, -9, -0.1]))
    assert search.done is done


def test_search_ends_when_no_beam_can_improve() -> None:
    """With length_penalty 1 scores are means: −4 is no better at the present length, but could be at the largest."""
    for early_stopping, done in ((0, True), (2, False)):
        search = _search(early_stopping=early_stopping, length_penalty=1.0, max_tokens=50)
        search.step(_rows([-1, -1.1, -8, -8, NEVER]))
        search.step(_rows([-9, -9, -9, -9, -0.5], [-9, -9, -9, -9, -0.5]))
        assert len(search.ranked()) == 2
        assert search.done is done


def test_beams_of_maximum_length_finish() -> None:
    search = _search(max_tokens=2, early_stopping=1)
    search.step(_rows([-1, -2, -8, -8, NEVER]))
    search.step(_rows([-0.1, -9, -9, -9, -1], [-9, -0.1, -9, -9, NEVER]))
    assert search.done
    assert [(beam.tokens, beam.reason) for beam in search.ranked()] == [
        ([0, 0], FinishReason.LENGTH),
        ([0], FinishReason.END_ID),
    ]


def test_length_penalty_counts_the_end_token() -> None:
    search = _search(max_tokens=3, length_penalty=2.0, early_stopping=0)
    search.step(_rows([-1, -1.2, -8, -8, NEVER]))
    search.step(_rows([-9, -0.2, -9, -9, -0.2], [-9, -9, -9, -9, -0.5]))
    search.step(_rows([-9, -1, -9, -9, NEVER], [-9, -9, -9, -9, -9]))
    best, second = search.ranked()
    # −2.2 / 3² against −1.2 / 2² and −1.7 / 2²
    assert (best.tokens, second.tokens) == ([0, 1, 1], [0])


def test_beams_ended_by_stop_words_are_replaced() -> None:
    search = _search(stop=[(0,), (8, 1)], early_stopping=0)
    search.step(_rows([-1, -2, -3, -4, NEVER]))
    assert sorted(beam.tokens[0] for beam in search.beams) == [2, 3]
    assert [beam.reason for beam in search.ranked()] == [FinishReason.STOP_WORDS] * 2


def test_banned_tokens_may_leave_fewer_beams() -> None:
    search = _search(width=3)
    minus = -np.inf
    search.step(_rows([-1, minus, -2, minus, minus]))
    assert len(search.beams) == 2
    search.step(_rows([minus] * 5, [minus] * 5))
    assert search.done
    assert search.ranked() == []


def test_restart_drops_all_beams() -> None:
    search = _search(repetition_penalty=2.0)
    logits = _rows([1, 2, 3, 4, -9])
    first = search.step(search.log_probs(logits))
    search.step(search.log_probs(np.repeat(logits, 2, axis=0)))
    search.restart()
    assert search.longest == 0
    assert search.step(search.log_probs(logits)) == first
