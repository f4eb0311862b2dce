"""`preprocessing` and `postprocessing` called by themselves, as NVIDIA's end_to_end_test.py calls them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.support.model_server import ModelServer, Tensors, integers, texts
from tests.support.text_requests import ask, text_of

pytestmark = pytest.mark.triton

VOCABULARY = 320
END = 2
"""The tokenizer's end id, with which it pads too."""
PROMPT, COUNT = "Processing", 12
Infer = Callable[[str, Tensors], Tensors]


@pytest.fixture(params=["grpc", "http"])
def infer(request: pytest.FixtureRequest, features: ModelServer) -> Infer:
    """One unary call: neither model is decoupled."""
    return features.infer if request.param == "grpc" else features.infer_http


def query(*prompts: str, **more: Any) -> Tensors:
    return {"QUERY": texts(*prompts), "REQUEST_OUTPUT_LEN": integers(*[COUNT] * len(prompts)), **more}


def words(*rows: list[str]) -> Any:
    """BYTES [rows, words]."""
    return np.array([[word.encode() for word in row] for row in rows], dtype=np.object_)


def same(found: Tensors, expected: dict[str, tuple[type, Any]]) -> None:
    """The outputs have exactly these names, types, shapes and values."""
    assert set(found) == set(expected)
    for name, (kind, values) in expected.items():
        wanted: Any = np.array(values, dtype=kind)
        assert (name, found[name].dtype, found[name].shape) == (name, wanted.dtype, wanted.shape)
        np.testing.assert_array_equal(found[name], wanted, err_msg=name)


def test_outputs_of_a_batch_that_asks_for_nothing_special(infer: Infer, features_tokenizer: Any) -> None:
    """Rows are padded on the right with the pad id; lists that were not given have no words."""
    short, long = features_tokenizer.encode("ab"), features_tokenizer.encode("abcd")
    expected: dict[str, tuple[type, Any]] = {
        "INPUT_ID": (np.int32, [[*short, END, END], long]),
        "REQUEST_INPUT_LEN": (np.int32, [[3], [5]]),
        "DECODER_INPUT_ID": (np.int32, [[END], [END]]),
        "REQUEST_DECODER_INPUT_LEN": (np.int32, [[1], [1]]),
        "REQUEST_OUTPUT_LEN": (np.int32, [[COUNT], [COUNT]]),
        "BAD_WORDS_IDS": (np.int32, np.zeros((2, 2, 0))),
        "STOP_WORDS_IDS": (np.int32, np.zeros((2, 2, 0))),
        "EMBEDDING_BIAS": (np.float32, np.zeros((2, 0))),
        "OUT_END_ID": (np.int32, [[END], [END]]),
        "OUT_PAD_ID": (np.int32, [[END], [END]]),
    }
    same(infer("preprocessing", query("ab", "abcd")), expected)


def test_words_bias_and_ids_of_each_row(infer: Infer, features_tokenizer: Any) -> None:
    """Each word with and without a space before it; a row's list is padded with 0 and −1."""
    a, b, c, space = features_tokenizer.encode("abc ", add_special_tokens=False)
    bias = np.zeros((2, VOCABULARY))
    bias[0, a], bias[0, b], bias[1, c] = 1.5, -2.0, 4.0
    found = infer(
        "preprocessing",
        query(
            "ab",
            "abcd",
            BAD_WORDS_DICT=words(["a", "bb"], ["c", ""]),
            STOP_WORDS_DICT=words([""], ["c"]),
            EMBEDDING_BIAS_WORDS=words(["a", "b"], ["c", "c"]),
            EMBEDDING_BIAS_WEIGHTS=np.array([[1.5, -2.0], [3.0, 1.0]], dtype=np.float32),
            END_ID=integers(7, 8),
            PAD_ID=integers(9, 10),
            DECODER_QUERY=texts("", "c"),
            PROMPT_TABLE_EXTRA_ID=np.array([[5], [6]], dtype=np.uint64),
        ),
    )
    expected: dict[str, tuple[type, Any]] = {
        "INPUT_ID": (np.int32, [[1, a, b, 9, 9], [1, a, b, c, c + 1]]),
        "REQUEST_INPUT_LEN": (np.int32, [[3], [5]]),
        "DECODER_INPUT_ID": (np.int32, [[9, 9], [1, c]]),
        "REQUEST_DECODER_INPUT_LEN": (np.int32, [[1], [2]]),
        "REQUEST_OUTPUT_LEN": (np.int32, [[COUNT], [COUNT]]),
        "BAD_WORDS_IDS": (
            np.int32,
            [
                [[a, space, a, b, b, space, b, b], [1, 3, 5, 8, -1, -1, -1, -1]],
                [[c, space, c, 0, 0, 0, 0, 0], [1, 3, -1, -1, -1, -1, -1, -1]],
            ],
        ),
        "STOP_WORDS_IDS": (np.int32, [[[0, 0, 0], [-1, -1, -1]], [[c, space, c], [1, 3, -1]]]),
        "EMBEDDING_BIAS": (np.float32, bias),
        "OUT_END_ID": (np.int32, [[7], [8]]),
        "OUT_PAD_ID": (np.int32, [[9], [10]]),
        # These texts have no ids of table rows.
        "OUT_PROMPT_TABLE_EXTRA_IDS": (np.uint64, np.zeros((2, 5))),
    }
    same(found, expected)


def test_texts_of_beams(infer: Infer, features_tokenizer: Any) -> None:
    """Ids [batch, beams, length] are cut to their lengths; the texts come row by row and beam by beam."""
    ids = np.array(
        [features_tokenizer.encode(text, add_special_tokens=False) for text in ("abcd", "efgh", "ijkl", "mnop")]
    )
    tensors = {
        "TOKENS_BATCH": ids.reshape(2, 2, 4).astype(np.int32),
        "SEQUENCE_LENGTH": np.array([[4, 2], [1, 0]], dtype=np.int32),
    }
    same(infer("postprocessing", tensors), {"OUTPUT": (object, [b"abcd", b"ef", b"i", b""])})


def test_special_tokens_and_halves_of_letters(infer: Infer, features_tokenizer: Any) -> None:
    snow = features_tokenizer.encode("☃", add_special_tokens=False)
    tensors = {"TOKENS_BATCH": np.array([[[1, *snow, END]]], dtype=np.int32), "SEQUENCE_LENGTH": integers(5)}
    same(infer("postprocessing", tensors), {"OUTPUT": (object, ["☃".encode()])})
    found = infer("postprocessing", {**tensors, "SEQUENCE_LENGTH": integers(2)})
    assert found["OUTPUT"].tolist() == ["\N{REPLACEMENT CHARACTER}".encode()]


def test_lengths_that_fit_no_row_are_refused(infer: Infer) -> None:
    from tritonclient.utils import InferenceServerException

    tensors = {"TOKENS_BATCH": np.zeros((1, 2, 3), dtype=np.int32), "SEQUENCE_LENGTH": integers(3)}
    with pytest.raises(InferenceServerException, match="SEQUENCE_LENGTH has 1 entries for 2 rows"):
        infer("postprocessing", tensors)


CHAINS: dict[str, Tensors] = {
    # What end_to_end_test.py sends in every case.
    "empty lists": {"BAD_WORDS_DICT": words([""]), "STOP_WORDS_DICT": words([""])},
    "words": {"BAD_WORDS_DICT": words(["a", "b"]), "STOP_WORDS_DICT": words(["never"])},
    "bias": {"EMBEDDING_BIAS_WORDS": words(["q", "r"]), "EMBEDDING_BIAS_WEIGHTS": np.array([[90, 91]], np.float32)},
}
CLIENT_NAMES = {
    "BAD_WORDS_DICT": "bad_words",
    "STOP_WORDS_DICT": "stop_words",
    "EMBEDDING_BIAS_WORDS": "embedding_bias_words",
    "EMBEDDING_BIAS_WEIGHTS": "embedding_bias_weights",
}


def by_hand(features: ModelServer, infer: Infer, given: Tensors) -> str:
    """The three models one after the other; the core model is decoupled, so that it takes a stream only."""
    made = infer("preprocessing", query(PROMPT, **given))
    asked = {
        "input_ids": made["INPUT_ID"],
        "input_lengths": made["REQUEST_INPUT_LEN"],
        "request_output_len": made["REQUEST_OUTPUT_LEN"],
        "bad_words_list": made["BAD_WORDS_IDS"],
        "stop_words_list": made["STOP_WORDS_IDS"],
        "embedding_bias": made["EMBEDDING_BIAS"],
        "end_id": made["OUT_END_ID"],
        "pad_id": made["OUT_PAD_ID"],
    }
    with features.stream() as stream:
        (answer,) = stream.all("tensorrt_llm", asked)
    tokens = {"TOKENS_BATCH": answer["output_ids"], "SEQUENCE_LENGTH": answer["sequence_length"]}
    text: str = infer("postprocessing", tokens)["OUTPUT"].item().decode()
    return text


@pytest.mark.parametrize("case", CHAINS)
def test_calling_the_models_one_by_one_gives_the_same_text(features: ModelServer, infer: Infer, case: str) -> None:
    found = by_hand(features, infer, CHAINS[case])
    assert found.startswith(PROMPT)
    assert len(found) > len(PROMPT)
    given = {CLIENT_NAMES[name]: value for name, value in CHAINS[case].items()}
    for model in ("ensemble", "tensorrt_llm_bls", "tiny"):
        assert text_of(ask(features, model, PROMPT, COUNT, **given)) == found
    assert by_hand(features, infer, {}) == text_of(ask(features, "ensemble", PROMPT, COUNT))
