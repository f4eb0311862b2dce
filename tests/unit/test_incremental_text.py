"""Pieces of streamed text: they join to the whole, and none ends inside a character."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from trtserve.programs.bls import texts as module

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def decode(rows: Sequence[list[int]]) -> list[str]:
    """A byte-level vocabulary: id = byte."""
    return [bytes(row).decode("utf-8", errors="replace") for row in rows]


def pieces(text: Any, data: bytes, sizes: Sequence[int]) -> list[str]:
    result, at = [], 0
    for size in sizes:
        result.append(text.add(list(data[at : at + size])))
        at += size
    return [*result, text.finish()]


@pytest.mark.parametrize("seed", range(30))
def test_pieces_join(seed: int) -> None:
    generator = random.Random(seed)
    words = ["a", " b", "é", "東", "🙂", " ", "\n", "☃"]
    data = "".join(generator.choice(words) for _ in range(60)).encode()
    if seed % 2:
        data = generator.randbytes(200)  # impossible characters are part of what a model may write
    sizes = [generator.choice([0, 1, 1, 1, 2, 3]) for _ in range(len(data))]
    sizes.append(max(0, len(data) - sum(sizes)))
    found = pieces(module.IncrementalText(decode), data, sizes)
    assert "".join(found) == decode([list(data)])[0]
    assert not any(piece.endswith(REPLACEMENT) for piece in found[:-1])


def test_half_character_is_held_back() -> None:
    text = module.IncrementalText(decode)
    first, second = "é".encode()
    assert [text.add([first]), text.add([second]), text.finish()] == ["", "é", ""]
    assert [text.add([first]), text.finish()] == ["", REPLACEMENT]


def test_accumulated_text() -> None:
    text = module.AccumulatedText(decode)
    data = list("aé".encode())
    assert [text.add(data[:1]), text.add(data[1:2]), text.add(data[2:]), text.finish()] == ["a", "a", "aé", ""]
    assert text.add(data[1:2]) == "aé"
    assert text.finish() == "aé" + REPLACEMENT
