"""Words, lengths and ids of text requests: what each way through the models makes of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from tests.support.in_process import InProcess
from tests.support.model_server import ModelServer, texts
from tests.support.release_client import NEWEST

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
    """The new text of a request whose answer consists of the letters a … h and spaces."""
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
def test_words_that_ask_for_nothing(ask: Callable[..., str], model: str) -> None:
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


@pytest.mark.parametrize("model", ["ensemble", "tiny"])
def test_words_differ_between_the_rows_of_a_batch(features: ModelServer, oracle: InProcess, model: str) -> None:
    """Two prompts of different length; each has its own list."""
    tokens = [oracle.tokens([1, *b"ab"], 8), oracle.tokens([1, *b"abcd"], 8)]
    assert len(tokens) == 2  # the ids of the byte tokenizer are not those of the bytes: only the shape matters here
    asked = NEWEST.text(["ab", "abcd"], 8)
    rows = np.array([[b"x", b"yy"], [b"zzz", b""]], dtype=np.object_)
    with features.stream() as stream:
        answers = stream.all(model, {**asked, "stop_words": rows, "bad_words": rows})
    assert sorted(answer["batch_index"].item() for answer in answers) == [0, 1]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a megabyte": ({"text_input": "word " * 200_000}, "exceeds maximum input length"),
    "bias without weights": ({"embedding_bias_words": ["a"]}, "must be given together"),
    "bias of another length": (
        {"embedding_bias_words": ["a", "b"], "embedding_bias_weights": [1.0]},
        "both must have the same length",
    ),
    "an adapter that nobody knows": ({"lora_name": "none"}, "lora_name is 'none'"),
}


@pytest.mark.parametrize("model", TEXT_MODELS)
@pytest.mark.parametrize("case", BAD)
def test_bad_texts_are_told(features: ModelServer, model: str, case: str) -> None:
    change, message = BAD[case]
    status, answer = features.generate(model, {"text_input": TEXT, "max_tokens": 4, **change})
    assert status >= 400
    assert message in answer["error"]
    assert "Traceback" not in answer["error"]
    assert len(answer["error"]) < 500


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_text_that_is_no_utf8(features: ModelServer, model: str) -> None:
    from tritonclient.utils import InferenceServerException

    tensors = {**NEWEST.text("x", 4), "text_input": np.array([[b"caf\xe9"]], dtype=np.object_)}
    with features.stream() as stream, pytest.raises(InferenceServerException, match="text_input is not valid UTF-8"):
        stream.all(model, tensors)


def test_a_body_that_is_no_utf8(features: ModelServer) -> None:
    body = json.dumps({"text_input": "caf?", "max_tokens": 4}).encode().replace(b"?", b"\xe9")
    with closing(features.connection(30)) as connection:
        connection.request("POST", "/v2/models/tiny/generate", body=body)
        answer = connection.getresponse()
        assert answer.status >= 400
        answer.read()


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_the_empty_text_is_a_prompt_of_the_first_token(features: ModelServer, oracle: InProcess, model: str) -> None:
    """The tokenizer puts its first token in front of every text; without special tokens there would be none."""
    with features.stream() as stream:
        (answer,) = stream.all(model, {**NEWEST.text("x", 4), "text_input": texts("")})
    assert answer["text_output"].size == 1
