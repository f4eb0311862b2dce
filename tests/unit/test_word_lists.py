"""The tensors of bad words, stop words and logit bias in preprocessing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trtserve.programs.preprocessing import word_lists

IDS = {"cat": [5], "dogs": [7, 8], "": [], "a b c": [1, 2, 3]}
SPELLINGS = {**{word: [ids] if ids else [] for word, ids in IDS.items()}, "bird": [[9], [4, 6]], "wing": [[4, 6], [3]]}


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([["cat", "dogs"]], [[[5, 7, 8], [1, 3, -1]]]),
        ([[""]], [[[0], [-1]]]),
        ([[]], [[[0], [-1]]]),
        ([["", "cat"]], [[[5], [1]]]),
        ([["cat"], ["a b c"]], [[[5, 0, 0], [1, -1, -1]], [[1, 2, 3], [3, -1, -1]]]),
        ([["bird"]], [[[9, 4, 6], [1, 3, -1]]]),
        ([["bird", "wing", "bird"]], [[[9, 4, 6, 3], [1, 3, 4, -1]]]),
    ],
)
def test_layout(rows: list[list[str]], expected: list[Any]) -> None:
    result = word_lists.word_list(rows, SPELLINGS.__getitem__)
    assert result.dtype == np.int32
    assert result.tolist() == expected


def test_absent() -> None:
    assert word_lists.empty_word_list(3).shape == (3, 2, 0)


def test_bias_adds_up() -> None:
    weights = np.array([[1.5, -2.0]], dtype=np.float32)
    bias = word_lists.embedding_bias([["cat", "dogs"]], weights, IDS.__getitem__, 10)
    assert bias.tolist() == [[0, 0, 0, 0, 0, 1.5, 0, -2, -2, 0]]
    repeated = word_lists.embedding_bias([["cat", "cat"]], weights, IDS.__getitem__, 10)
    assert repeated[0, 5] == -0.5


@pytest.mark.parametrize("weight", [float("nan"), float("inf")])
def test_bias_must_be_a_number(weight: float) -> None:
    with pytest.raises(ValueError, match=f"embedding_bias_weights has {weight}"):
        word_lists.embedding_bias([["cat"]], np.array([[weight]], dtype=np.float32), IDS.__getitem__, 10)


def test_bias_stays_within_the_vocabulary() -> None:
    with pytest.raises(ValueError, match="'dogs' has token 8, outside the vocabulary of 8"):
        word_lists.embedding_bias([["dogs"]], np.ones((1, 1), dtype=np.float32), IDS.__getitem__, 8)


def test_bias_needs_a_weight_per_word() -> None:
    with pytest.raises(ValueError, match="1 words and embedding_bias_weights has 2 weights"):
        word_lists.embedding_bias([["cat"]], np.ones((1, 2), dtype=np.float32), IDS.__getitem__, 10)
