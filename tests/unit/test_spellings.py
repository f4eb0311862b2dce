"""The spellings of bad and stop words: the ids of a word after a space and after anything else."""

from __future__ import annotations

from typing import Any

import pytest

from trtserve.programs.preprocessing.word_lists import Spellings

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


@pytest.fixture
def spellings() -> Any:
    return Spellings


@pytest.mark.parametrize("word", ["end", " end"])
def test_every_spelling_is_found(spellings: Any, word: str) -> None:
    assert sorted(spellings(byte_level).of(word)) == sorted([byte_level("end"), byte_level(" end")])
    bare, spaced = [0], [1]
    found = spellings(sentencepiece).of(word)
    assert bare in found
    assert spaced in found
    assert len(found) == (2 if word == "end" else 3)  # two spaces, as NVIDIA's model encodes a word with one
    assert spellings(bert).of(word) == [[0]]


@pytest.mark.parametrize(("word", "count"), [("", 0), (" ", 1), ("\n", 1), (" \n", 1)])
def test_white_space_has_one_spelling(spellings: Any, word: str, count: int) -> None:
    assert len(spellings(byte_level).of(word)) == count


def test_a_tokenizer_that_joins_with_anything(spellings: Any) -> None:
    """The ids behind the anchor are not those of a word when the tokenizer joins the two."""

    def joining(text: str) -> list[int]:
        return [len(text)]

    assert spellings(joining).of("end") == [[3]]
