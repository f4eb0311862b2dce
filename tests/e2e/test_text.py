"""Words, lengths and ids of text requests, through every model."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.in_process import InProcess
from tests.support.model_server import ModelServer, flags, integers, texts
from tests.support.release_client import NEWEST
from tests.support.text_requests import MAX_SEQ_LEN

pytestmark = pytest.mark.triton

TEXT = "Words"
TEXT_MODELS = ("ensemble", "tensorrt_llm_bls", "tiny")
COUNT = 24


@pytest.fixture(scope="module")
def printable(oracle: InProcess, features_tokenizer: Any) -> list[int]:
    """A bias under which the random model writes letters only: a text that words can be found in."""
    letters = {features_tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "abcdefgh "}
    return sorted(letters)


@pytest.fixture(scope="module")
def ask(features: ModelServer, printable: list[int], features_tokenizer: Any) -> Callable[..., str]:
    """Return the new text of a request whose answer consists of the letters a … h and spaces."""
    words = features_tokenizer.batch_decode([[token] for token in printable])
    bias = {"embedding_bias_words": words, "embedding_bias_weights": [100.0] * len(words)}

    def new_text(model: str, **given: Any) -> str:
        body = {"text_input": TEXT, "max_tokens": COUNT, "exclude_input_in_output": True, **bias, **given}
        status, answer = features.generate(model, body)
        assert status == 200, answer
        text: str = answer["text_output"]
        return text

    return new_text


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_letters_only(ask: Callable[..., str], model: str) -> None:
    text = ask(model)
    assert len(text) == COUNT
    assert set(text) <= set("abcdefgh ")
    assert len(set(text)) > 2


@pytest.mark.parametrize("model", TEXT_MODELS)
@pytest.mark.parametrize("spaced", [False, True])
def test_stop_words_end_the_text_in_either_spelling(ask: Callable[..., str], model: str, spaced: bool) -> None:
    text = ask(model)
    word = text[9:12].strip()
    end = text.index(word) + len(word)
    given = f" {word}" if spaced else word
    assert ask(model, stop_words=["never", given]) == text[:end]


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_empty_word_lists_change_nothing(ask: Callable[..., str], model: str) -> None:
    assert ask(model, stop_words="", bad_words="") == ask(model, stop_words=["", ""], bad_words=[""]) == ask(model)


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_bad_words_do_not_come(ask: Callable[..., str], model: str) -> None:
    text = ask(model)
    letter, pair = text[4].strip() or text[5], text[10:12]
    assert letter not in ask(model, bad_words=[letter])
    assert pair not in ask(model, bad_words=["zz", pair])


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_end_id_and_least_length(
    ask: Callable[..., str], printable: list[int], features_tokenizer: Any, model: str
) -> None:
    text = ask(model)
    end = features_tokenizer.encode(text[5], add_special_tokens=False)[0]
    assert end in printable
    assert ask(model, end_id=end) == text[: text.index(text[5])]
    longer = ask(model, end_id=end, min_tokens=COUNT)
    assert len(longer) == COUNT
    assert text[5] not in longer
    assert ask(model, end_id=end, min_length=COUNT) == longer


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_prompt_in_the_answer(ask: Callable[..., str], model: str) -> None:
    assert ask(model, exclude_input_in_output=False) == TEXT + ask(model)


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_both_protocols_say_the_same(
    ask: Callable[..., str], features: ModelServer, printable: list[int], model: str, features_tokenizer: Any
) -> None:
    """A list of words, one of several tokens, over gRPC and HTTP."""
    text = ask(model)
    words: dict[str, Any] = {"bad_words": ["never", text[3:5]], "stop_words": ["never", text[15:18]]}
    letters = features_tokenizer.batch_decode([[token] for token in printable])
    bias: dict[str, Any] = {"embedding_bias_words": letters, "embedding_bias_weights": [100.0] * len(letters)}
    with features.stream() as stream:
        (answer,) = stream.all(model, NEWEST.text(TEXT, COUNT, exclude_input_in_output=True, **words, **bias))
    over_http = ask(model, **words)
    assert answer["text_output"].item().decode() == over_http
    assert over_http != text


def word_list(*words: list[int]) -> Any:
    """A list of words as the core model takes it: all ids, and where each word ends."""
    ids = [token for word in words for token in word]
    ends = np.cumsum([len(word) for word in words]).tolist()
    return np.array([[ids, ends + [-1] * (len(ids) - len(ends))]], dtype=np.int32)


def test_word_lists_of_the_core_model(features: ModelServer, oracle: InProcess) -> None:
    """Words of one and of several tokens; only the complete sequence of a bad word is forbidden."""
    prompt = [1, *range(50, 58)]
    tokens = oracle.tokens(prompt, COUNT)
    bad, stop = [tokens[2:4], [tokens[7]]], [tokens[10:13], [5, 6]]
    expected = oracle.tokens(prompt, COUNT, bad_words=bad)
    assert expected != tokens

    def new_tokens(**lists: Any) -> Any:
        with features.stream() as stream:
            asked = {**NEWEST.core(prompt, COUNT, exclude_input_in_output=True), **lists}
            (answer,) = stream.all("tensorrt_llm", asked)
        return answer["output_ids"][0, 0].tolist()

    assert new_tokens(bad_words_list=word_list(*bad)) == expected
    assert new_tokens(stop_words_list=word_list(*stop)) == tokens[:13]
    lists = {"bad_words_list": word_list(*bad), "stop_words_list": word_list(expected[8:10])}
    assert new_tokens(**lists) == oracle.tokens(prompt, COUNT, bad_words=bad, stop_words=[expected[8:10]])


def test_least_length_and_end_id_of_the_core_model(features: ModelServer, oracle: InProcess) -> None:
    prompt = [1, *range(50, 58)]
    end = oracle.tokens(prompt, COUNT)[4]
    with features.stream() as stream:
        for name in ("min_tokens", "min_length"):
            asked = {**NEWEST.core(prompt, COUNT, end_id=end, exclude_input_in_output=True), name: integers(9)}
            (answer,) = stream.all("tensorrt_llm", asked)
            expected = oracle.tokens(prompt, COUNT, end_id=end, sampling={"min_tokens": 9})
            assert answer["output_ids"][0, 0].tolist() == expected
            assert len(expected) >= 9


@pytest.mark.parametrize("model", ["tensorrt_llm", *TEXT_MODELS])
def test_more_tokens_than_fit_are_reduced(features: ModelServer, features_root: Path, model: str) -> None:
    """As with TensorRT-LLM: the answer ends at the engine's limit, and the log says so."""
    log = features_root / "server" / "triton.log"
    before = log.read_text().count("is reduced to 6")
    length = MAX_SEQ_LEN - 6
    prompt = "x" * (length - 1)  # after the first token
    ids = [1, *[60] * (length - 1)]
    asked = NEWEST.core(ids, 100_000) if model == "tensorrt_llm" else NEWEST.text(prompt, 100_000)
    counts = {"return_num_output_tokens": flags(True), "return_finish_reason": flags(True), "end_id": integers(-1)}
    with features.stream() as stream:
        (answer,) = stream.all(model, {**asked, **counts})
    assert (answer["num_output_tokens"].item(), answer["finish_reason"].item()) == (6, b"length")
    assert log.read_text().count(f"max_tokens (100000) is reduced to 6: the prompt has {length} tokens") > 0
    assert log.read_text().count("is reduced to 6") == before + 1


@pytest.mark.parametrize("model", TEXT_MODELS)
@pytest.mark.parametrize("kind", ["stop_words", "bad_words"])
def test_words_differ_between_the_rows_of_a_batch(
    ask: Callable[..., str],
    features: ModelServer,
    printable: list[int],
    features_tokenizer: Any,
    model: str,
    kind: str,
) -> None:
    """Two prompts of different length; each row's own list holds for it, and not that of the other."""
    prompts = ("ab", "abcd")
    first, second = (ask(model, text_input=prompt) for prompt in prompts)
    rows = [[first[4:6], "zz"], [second[9:12], ""]]
    expected = [ask(model, text_input=prompt, **{kind: row}) for prompt, row in zip(prompts, rows, strict=True)]
    swapped = [ask(model, text_input=prompt, **{kind: row}) for prompt, row in zip(prompts, rows[::-1], strict=True)]
    assert expected[0] != swapped[0]
    assert expected[1] != swapped[1]
    letters = features_tokenizer.batch_decode([[token] for token in printable])
    bias: dict[str, Any] = {"embedding_bias_words": letters, "embedding_bias_weights": [100.0] * len(letters)}
    lists = np.array([[word.encode() for word in row] for row in rows], dtype=np.object_)
    asked = NEWEST.text(prompts, COUNT, exclude_input_in_output=True, **bias)
    with features.stream() as stream:
        answers = stream.all(model, {**asked, kind: lists})
    assert {answer["batch_index"].item(): answer["text_output"].item().decode() for answer in answers} == dict(
        enumerate(expected)
    )


def test_a_body_that_is_no_utf8(features: ModelServer) -> None:
    body = json.dumps({"text_input": "caf?", "max_tokens": 4}).encode().replace(b"?", b"\xe9")
    with closing(features.connection(30)) as connection:
        connection.request("POST", "/v2/models/tiny/generate", body=body)
        answer = connection.getresponse()
        assert answer.status >= 400
        answer.read()


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_the_empty_text_is_a_prompt_of_the_first_token(
    features: ModelServer, oracle: InProcess, features_tokenizer: Any, model: str
) -> None:
    """The tokenizer puts its first token before every text."""
    with features.stream() as stream:
        (answer,) = stream.all(model, {**NEWEST.text("x", COUNT), "text_input": texts("")})
    expected = features_tokenizer.decode(oracle.tokens([1], COUNT), skip_special_tokens=True)
    assert expected
    assert answer["text_output"].item().decode() == expected
