"""Features of the BLS model itself: stop words on text, beams, several sequences, their streams and ends."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tests.support.model_server import ModelServer, Tensors, integers, texts
from tests.support.text_requests import answers, ask, is_idle, request, text_of, word_in
from tests.support.waiting import wait_until

pytestmark = pytest.mark.triton

NAME = "tiny"
PROMPT = "What is machine learning?"
COUNT = 40
BROKEN = "\N{REPLACEMENT CHARACTER}"


@pytest.fixture(scope="module")
def whole(features: ModelServer) -> str:
    """The answer without the prompt, when nothing stops it."""
    return text_of(ask(features, NAME, PROMPT, COUNT, exclude_input_in_output=True, end_id=-1))


@pytest.fixture(scope="module")
def word(whole: str) -> str:
    """Three characters, so three tokens of the tiny tokenizer, in the middle of the answer."""
    return word_in(whole, start=8)


def joined(pieces: list[Tensors]) -> str:
    return "".join(text_of(piece) for piece in pieces)


def until(text: str, word: str) -> str:
    return text[: text.index(word) + len(word)]


@pytest.mark.parametrize("exclude", [True, False])
def test_text_ends_behind_the_stop_word(features: ModelServer, whole: str, word: str, exclude: bool) -> None:
    options: dict[str, Any] = {"stop_words": ["", word], "end_id": -1, "return_finish_reason": True}
    answer = ask(features, NAME, PROMPT, COUNT, exclude_input_in_output=exclude, **options)
    assert text_of(answer) == ("" if exclude else PROMPT) + until(whole, word)
    assert answer["finish_reason"].reshape(-1).tolist() == [b"stop_words"]


def test_stop_words_of_the_prompt_do_not_count(features: ModelServer, whole: str) -> None:
    answer = ask(features, NAME, PROMPT, COUNT, stop_words=[PROMPT[:7]], end_id=-1, exclude_input_in_output=False)
    assert text_of(answer) == PROMPT + whole


def test_streamed_text_ends_behind_the_stop_word(features: ModelServer, whole: str, word: str) -> None:
    asked = request(PROMPT, COUNT, stream=True, stop_words=[word], end_id=-1, return_finish_reason=True)
    pieces = answers(features, NAME, asked)
    assert joined(pieces) == until(whole, word)
    assert pieces[-1]["finish_reason"].reshape(-1).tolist() == [b"stop_words"]


def test_a_stop_in_the_text_ends_the_request(features: ModelServer, whole: str) -> None:
    """The word stands for a byte that is not a character: the core model cannot match it as ids."""
    wait_until(lambda: is_idle(features))
    before = features.metric("nv_llm_output_token_len_sum")
    asked = request(PROMPT, 900, stream=True, stop_words=[BROKEN], end_id=-1)
    assert joined(answers(features, NAME, asked)) == until(whole, BROKEN)
    wait_until(lambda: features.metric("nv_llm_output_token_len_sum") > before)
    wait_until(lambda: is_idle(features))
    assert features.metric("nv_llm_output_token_len_sum") - before < 450


def test_rows_of_a_batch_stop_by_themselves(features: ModelServer) -> None:
    prompts = ("one", "and two", "three, at last")
    single = [text_of(ask(features, NAME, prompt, 30, exclude_input_in_output=True, end_id=-1)) for prompt in prompts]
    words = [word_in(single[0], start=3), "", word_in(single[2], start=3, size=2)]
    tensors: Tensors = {
        "text_input": texts(*prompts),
        "max_tokens": integers(30, 30, 30),
        "stop_words": texts(*words),
        "end_id": integers(-1, -1, -1),
        "stream": np.ones((3, 1), dtype=np.bool_),
    }
    found = {0: "", 1: "", 2: ""}
    for piece in answers(features, NAME, tensors):
        found[piece["batch_index"].item()] += text_of(piece)
    assert found == {0: until(single[0], words[0]), 1: single[1], 2: until(single[2], words[2])}
    whole = answers(features, NAME, {**tensors, "stream": np.zeros((3, 1), dtype=np.bool_)})
    texts_of_rows = {answer["batch_index"].item(): text_of(answer) for answer in whole}
    assert texts_of_rows == {row: prompts[row] + text for row, text in found.items()}


@pytest.mark.parametrize("stream", [True, False])
def test_sequences_of_one_prompt(features: ModelServer, stream: bool) -> None:
    """NVIDIA's BLS model drops num_return_sequences."""
    sampled: dict[str, Any] = {"top_k": 20, "temperature": 1.5, "end_id": -1, "exclude_input_in_output": True}
    alone = [text_of(ask(features, NAME, PROMPT, 16, seed=5 + index, **sampled)) for index in range(3)]
    assert len(set(alone)) == 3
    asked = request(PROMPT, 16, seed=5, num_return_sequences=3, stream=stream, **sampled)
    found = {0: "", 1: "", 2: ""}
    for piece in answers(features, NAME, asked):
        found[piece["sequence_index"].item()] += text_of(piece)
    assert [found[index] for index in range(3)] == alone


def test_beams_come_whole_each_time(features: ModelServer) -> None:
    whole = ask(features, NAME, PROMPT, 12, beam_width=3, exclude_input_in_output=True)["text_output"].tolist()
    assert len(whole) == 3
    pieces = answers(features, NAME, request(PROMPT, 12, beam_width=3, stream=True))
    assert pieces[-1]["text_output"].tolist() == whole
    assert all(piece["text_output"].shape == (3,) for piece in pieces)
    assert len(pieces) > 1


def test_beams_are_cut_one_by_one(features: ModelServer) -> None:
    whole = [
        text.decode()
        for text in ask(features, NAME, PROMPT, 20, beam_width=3, exclude_input_in_output=True, end_id=-1)[
            "text_output"
        ]
    ]
    assert any(BROKEN in text for text in whole)
    options: dict[str, Any] = {"beam_width": 3, "exclude_input_in_output": True, "end_id": -1}
    answer = ask(features, NAME, PROMPT, 20, stop_words=[BROKEN], return_finish_reason=True, **options)
    assert [text.decode() for text in answer["text_output"]] == [
        until(text, BROKEN) if BROKEN in text else text for text in whole
    ]
    reasons = [reason == b"stop_words" for reason in answer["finish_reason"].reshape(-1)]
    assert reasons == [BROKEN in text for text in whole]


def test_outputs_come_with_the_text(features: ModelServer) -> None:
    answer = ask(features, NAME, PROMPT, 6, return_log_probs=True, return_generation_logits=True, end_id=-1)
    assert answer["output_log_probs"].shape == (1, 1, 6)
    assert answer["generation_logits"].shape[:3] == (1, 1, 6)
    assert np.isclose(answer["output_log_probs"].sum(), answer["cum_log_probs"].sum(), rtol=1e-4)


def test_finish_reasons(features: ModelServer, whole: str) -> None:
    def reason(**options: Any) -> list[bytes]:
        found = ask(features, NAME, PROMPT, 8, return_finish_reason=True, **options)["finish_reason"]
        return [bytes(each) for each in found.reshape(-1)]

    assert reason(end_id=-1) == [b"length"]
    assert "finish_reason" not in ask(features, NAME, PROMPT, 4)
    pieces = answers(features, NAME, request(PROMPT, 8, stream=True, end_id=-1, return_finish_reason=True))
    assert joined(pieces) == whole[: len(joined(pieces))]
    assert pieces[-1]["finish_reason"].reshape(-1).tolist() == [b"length"]


def test_many_streams_stop_together(features: ModelServer, whole: str, word: str) -> None:
    """Requests that stop by their text are cancelled in the core model while others end there by themselves."""

    def ended(number: int) -> str:
        words = [word] if number % 2 else ["never written"]
        return joined(answers(features, NAME, request(PROMPT, COUNT, stream=True, stop_words=words, end_id=-1)))

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ended, range(32)))
    assert found == [until(whole, word) if number % 2 else whole for number in range(32)]
    wait_until(lambda: is_idle(features))
