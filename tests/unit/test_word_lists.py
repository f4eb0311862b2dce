"""The tensors of bad words, stop words and logit bias, and the ids of a word after a space and after anything else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trtserve.programs.preprocessing import word_lists

BYTES = {chr(number): number for number in range(32, 127)} | {"\n": 10}
WORDS = ["end", "▁end", "▁", "e", "n", "d", "E", "\n"]


def byte_level(text: str) -> list[int]:
    """As GPT-2 without merges: a space is a token like others."""
    return [BYTES[letter] for letter in text]


def sentencepiece(text: str) -> list[int]:
    """As Llama: a space is put in front of the text, and `▁end` is one token."""
    pieces, rest = [], "▁" + text.replace(" ", "▁")
    while rest:
        piece = max((word for word in WORDS if rest.startswith(word)), key=len)
        pieces.append(WORDS.index(piece))
        rest = rest[len(piece) :]
    return pieces


def bert(text: str) -> list[int]:
    """White space is dropped."""
    return [WORDS.index(word) for word in text.split()]


@pytest.mark.parametrize("word", ["end", " end"])
def test_every_spelling_is_found(word: str) -> None:
    assert sorted(word_lists.Spellings(byte_level).of(word)) == sorted([byte_level("end"), byte_level(" end")])
    bare, spaced = [0], [1]
    found = word_lists.Spellings(sentencepiece).of(word)
    assert bare in found
    assert spaced in found
    assert len(found) == (2 if word == "end" else 3)  # two spaces, as NVIDIA's model encodes a word with one
    assert word_lists.Spellings(bert).of(word) == [[0]]


@pytest.mark.parametrize(("word", "count"), [("", 0), (" ", 1), ("\n", 1), (" \n", 1)])
def test_white_space_has_one_spelling(word: str, count: int) -> None:
    assert len(word_lists.Spellings(byte_level).of(word)) == count


def test_a_tokenizer_that_joins_with_anything() -> None:
    """The ids after the anchor are not those of a word when the tokenizer joins the two."""

    def joining(text: str) -> list[int]:
        return [len(text)]

    assert word_lists.Spellings(joining).of("end") == [[3]]


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
