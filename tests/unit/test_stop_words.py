"""Stop words at the end of a sequence, also those that begin in the prompt."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtserve.executor.engine.sequence import StopWords

TOKENS = st.lists(st.integers(0, 2), max_size=6)


@given(
    prompt=TOKENS.filter(bool),
    generated=TOKENS,
    token=st.integers(0, 2),
    words=st.lists(TOKENS.filter(bool), min_size=1),
)
def test_stop_words_match_the_end_of_the_sequence(
    prompt: list[int], generated: list[int], token: int, words: list[list[int]]
) -> None:
    whole = [*prompt, *generated, token]
    expected = any(whole[-len(word) :] == word for word in words)
    assert StopWords([tuple(word) for word in words], np.array(prompt)).end(generated, token) is expected


@pytest.mark.parametrize(("word", "found"), [((7,), True), ((5, 6, 7), True), ((4, 5, 6, 7), False), ((6,), False)])
def test_stop_words_longer_than_the_sequence_never_match(word: tuple[int, ...], found: bool) -> None:
    assert StopWords([word], np.array([5])).end([6], 7) is found
