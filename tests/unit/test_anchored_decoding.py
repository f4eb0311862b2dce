"""Postprocessing: a piece of a text keeps its leading space, a whole text does not get one."""

from __future__ import annotations

from typing import Any

import pytest

from trtserve.programs.shared.tokenizer import AnchoredDecoder

VOCABULARY = ["<s>", "▁a", "▁What", "▁is", "ing", "</s>"]


class SentencePieceLike:
    """Drops the space in front of the first word, as Llama's tokenizer does."""

    all_special_ids = (0, 5)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [VOCABULARY.index(f"▁{text}")]

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        kept = [i for i in ids if not (skip_special_tokens and i in self.all_special_ids)]
        return "".join(VOCABULARY[i] for i in kept).replace("▁", " ").removeprefix(" ")


@pytest.fixture
def decoder() -> Any:
    return AnchoredDecoder(SentencePieceLike(), skip_special_tokens=True)


def test_rows(decoder: Any) -> None:
    rows = [[0, 2, 3], [3], [4], [3, 4, 5], [], [5]]
    expected = ["What is", " is", "ing", " ising", "", ""]
    assert [decoder.decode(rows), decoder.decode(rows)] == [expected, expected]  # tokens are remembered


def test_special_tokens_can_be_kept() -> None:
    decoder = AnchoredDecoder(SentencePieceLike(), skip_special_tokens=False)
    assert decoder.decode([[3, 5]]) == [" is</s>"]
