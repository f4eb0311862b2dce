"""Pieces of streamed text join to the whole, none ends inside a character, and stop words end them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from trtserve.programs.bls import texts

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
    found = pieces(texts.IncrementalText(decode), data, sizes)
    assert "".join(found) == decode([list(data)])[0]
    assert not any(piece.endswith(REPLACEMENT) for piece in found[:-1])


def test_half_character_is_held_back() -> None:
    text = texts.IncrementalText(decode)
    first, second = "é".encode()
    assert [text.add([first]), text.add([second]), text.finish()] == ["", "é", ""]
    assert [text.add([first]), text.finish()] == ["", REPLACEMENT]


def test_accumulated_text() -> None:
    text = texts.AccumulatedText(decode)
    data = list("aé".encode())
    assert [text.add(data[:1]), text.add(data[1:2]), text.add(data[2:]), text.finish()] == ["a", "a", "aé", ""]
    assert text.add(data[1:2]) == "aé"
    assert text.finish() == "aé" + REPLACEMENT


def result(*beams: str, **others: Any) -> dict[str, Any]:
    """An answer of the core model with these beams, short ones padded with -1."""
    rows = [list(beam.encode()) for beam in beams]
    ids = np.full((1, len(rows), max(map(len, rows))), -1, dtype=np.int32)
    for index, row in enumerate(rows):
        ids[0, index, : len(row)] = row
    lengths = np.array([[len(row) for row in rows]], dtype=np.int32)
    return {"output_ids": ids, "sequence_length": lengths, **others}


def reasons(*names: str) -> Any:
    return np.array([[name.encode() for name in names]], dtype=np.object_)


def number(value: int) -> Any:
    return np.array([[value]], dtype=np.int32)


def text_of(answer: Any) -> list[str]:
    return [text.decode() for text in answer["text_output"]]


@pytest.mark.parametrize("seed", range(40))
def test_streamed_text_ends_where_the_full_text_does(seed: int) -> None:
    generator = random.Random(seed)
    text = "".join(generator.choice("ab c") for _ in range(40))
    words = texts.StopWords(["".join(generator.choice("ab c") for _ in range(size)) for size in (0, 3, 5)])
    stopped, pieces, at = texts.StoppedText(words), [], 0
    while at < len(text):
        size = generator.randint(0, 4)
        pieces.append(stopped.add(text[at : at + size]))
        at += size
    end = words.end(text)
    assert "".join(pieces) == text[:end]
    assert stopped.stopped == (end is not None)


def test_the_word_that_is_completed_first_ends_the_text() -> None:
    words = texts.StopWords(["long word", "ng"])
    assert "a long word"[: words.end("a long word")] == "a long"
    assert words.end("a long word", 6) is None
    assert not texts.StopWords(["", ""])


def test_stop_words_in_the_prompt_do_not_count() -> None:
    words = [texts.StopWords(["stop"])]
    whole = texts.FullTexts(decode, words, [list(b"stop it")])
    answer = whole.add(
        result(
            "stop it, and stop now", "stop it: go on", "stop it. stop", finish_reason=reasons("length", "end_id", "x")
        )
    )
    assert text_of(answer) == ["stop it, and stop", "stop it: go on", "stop it. stop"]
    assert answer["finish_reason"].tolist() == [[b"stop_words", b"end_id", b"stop_words"]]
    assert whole.stopped == set()
    without = texts.FullTexts(decode, words, None)
    assert text_of(without.add(result("now stop it"))) == ["now stop"]
    assert without.stopped == {(0, 0)}


def test_answers_may_lack_the_expected_prompt() -> None:
    """A repository by hand may leave the prompt out without saying so to the BLS model."""
    whole = texts.FullTexts(decode, [texts.StopWords(["b"])], [list(b"ab")])
    assert text_of(whole.add(result("b and b"))) == ["b"]


def test_each_row_has_its_own_stop_words() -> None:
    words = [texts.StopWords(["x"]), texts.StopWords(["y"])]
    streamed = texts.StreamedTexts(decode, words, accumulate=False)
    sent: dict[int, str] = {0: "", 1: ""}
    for row, piece in ((0, "ay"), (1, "ax"), (0, "xz"), (1, "cyd"), (0, "more"), (1, "more")):
        answer = streamed.add(result(piece, batch_index=number(row)))
        sent[row] += text_of(answer)[0]
    assert sent == {0: "ayx", 1: "axcy"}
    assert streamed.stopped == {(0, 0), (1, 0)}
    assert list(streamed.finish()) == []


def test_a_streamed_stop_word_is_the_finish_reason() -> None:
    streamed = texts.StreamedTexts(decode, [texts.StopWords(["no"])], accumulate=False)
    assert text_of(streamed.add(result("n"))) == ["n"]
    assert text_of(streamed.add(result("ow"))) == ["o"]
    last: Any = streamed.add(result("", finish_reason=reasons("cancelled")))
    assert (text_of(last), last["finish_reason"].tolist()) == ([""], [[b"stop_words"]])


def test_each_sequence_stops_separately() -> None:
    streamed = texts.StreamedTexts(decode, [texts.StopWords(["b"])], accumulate=False)
    first = [text_of(streamed.add(result(piece, sequence_index=number(0))))[0] for piece in ("a", "b", "c")]
    second = [text_of(streamed.add(result(piece, sequence_index=number(1))))[0] for piece in ("a", "c", "b")]
    assert (first, second) == (["a", "b", ""], ["a", "c", "b"])


def test_an_empty_last_result_is_not_sent() -> None:
    streamed = texts.StreamedTexts(decode, [texts.StopWords()], accumulate=False)
    assert text_of(streamed.add(result(""))) == [""]
    assert streamed.add(result("")) is None
    assert streamed.add(result("", finish_reason=reasons("end_id"))) is not None


def test_accumulated_text_ends_at_the_stop_word() -> None:
    streamed = texts.StreamedTexts(decode, [texts.StopWords(["c d"])], accumulate=True)
    found = [text_of(streamed.add(result(piece)))[0] for piece in ("a", "bc", " de", "f")]
    assert found == ["a", "abc", "abc d", "abc d"]
    assert streamed.stopped == {(0, 0)}


def test_the_finish_reason_comes_with_the_end_of_the_text() -> None:
    """A character whose second half never comes is shown as broken when its sequence ends."""
    half = {**result("ab"), "finish_reason": reasons("length")}
    half["output_ids"][0, 0, 1] = "é".encode()[0]
    for accumulate in (False, True):
        streamed = texts.StreamedTexts(decode, [texts.StopWords()], accumulate=accumulate)
        assert text_of(streamed.add(half)) == ["a\N{REPLACEMENT CHARACTER}"]
        assert list(streamed.finish()) == []
