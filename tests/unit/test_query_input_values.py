"""`--input NAME=VALUE`: texts and files become tensors of the declared type and shape."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.support.described_models import described
from trtserve.client.request import input_tensor, split_input
from trtserve.errors import UsageError

CORE = described("tensorrt_llm")
BLS = described("tensorrt_llm_bls")


@pytest.mark.parametrize(
    ("name", "text", "shape", "values"),
    [
        ("runtime_top_k", "3", (1, 1), [3]),
        ("temperature", "0.5", (1, 1), [0.5]),
        ("temperature", "1", (1, 1), [1.0]),
        ("streaming", "true", (1, 1), [True]),
        ("streaming", "No", (1, 1), [False]),
        ("seed", str(2**64 - 1), (1, 1), [2**64 - 1]),
        ("draft_input_ids", "4, 5,6", (1, 3), [4, 5, 6]),
        ("draft_input_ids", "[4,5]", (1, 2), [4, 5]),
        ("embedding_bias", "0,-1.5", (1, 2), [0.0, -1.5]),
        ("stop_words_list", "[[7,8],[1,2]]", (1, 2, 2), [7, 8, 1, 2]),
        ("draft_logits", "[[0.5,1],[2,3]]", (1, 2, 2), [0.5, 1.0, 2.0, 3.0]),
        ("guided_decoding_guide", '{"type": "object"}', (1, 1), ['{"type": "object"}']),
        ("guided_decoding_guide", "[0-9]+", (1, 1), ["[0-9]+"]),
    ],
)
def test_values_become_declared_tensors(name: str, text: str, shape: tuple[int, ...], values: list[object]) -> None:
    tensor = input_tensor(CORE, name, text, rows=1)
    assert (tensor.shape, tensor.flat()) == (shape, values)


@pytest.mark.parametrize(
    ("text", "words"),
    [('["a", "b, c"]', ["a", "b, c"]), ("a, b", ["a, b"]), ("[not json", ["[not json"]), ("[]", []), ("[1]", ["[1]"])],
)
def test_texts_are_not_split_at_commas(text: str, words: list[str]) -> None:
    assert input_tensor(BLS, "stop_words", text, rows=1).flat() == words


def test_value_is_repeated_for_every_batch_row() -> None:
    tensor = input_tensor(CORE, "draft_input_ids", "4,5", rows=3)
    assert (tensor.shape, tensor.flat()) == ((3, 2), [4, 5] * 3)
    assert input_tensor(BLS, "stop_words", "x", rows=2).flat() == ["x", "x"]


def test_value_with_a_batch_axis_is_not_repeated() -> None:
    tensor = input_tensor(CORE, "draft_input_ids", "[[4,5],[6,7]]", rows=2)
    assert (tensor.shape, tensor.flat()) == ((2, 2), [4, 5, 6, 7])
    assert input_tensor(BLS, "stop_words", '[["a"],["b"]]', rows=2).flat() == ["a", "b"]


def test_values_are_read_from_files(tmp_path: Path) -> None:
    np.save(tmp_path / "logits.npy", np.ones((2, 3), np.float64))
    (tmp_path / "ids.json").write_text("[1, 2]")
    (tmp_path / "ids.csv").write_text("3,4\n")
    (tmp_path / "grammar").write_text("root ::= 'é'")
    logits = input_tensor(CORE, "draft_logits", f"@{tmp_path}/logits.npy", rows=1)
    assert (logits.shape, len(logits.raw())) == ((1, 2, 3), 24)
    assert input_tensor(CORE, "draft_input_ids", f"@{tmp_path}/ids.json", rows=1).flat() == [1, 2]
    assert input_tensor(CORE, "draft_input_ids", f"@{tmp_path}/ids.csv", rows=1).flat() == [3, 4]
    assert input_tensor(CORE, "guided_decoding_guide", f"@{tmp_path}/grammar", rows=1).flat() == ["root ::= 'é'"]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("runtime_top_k", "two", r"'two'; expected INT32 \[1\]"),
        ("runtime_top_k", "2.5", r"'2.5'; expected INT32 \[1\]"),
        ("runtime_top_k", "1,2", r"shape \[2\]; .* expects INT32 \[1\]"),
        ("runtime_top_k", str(2**31), r"outside .* expected INT32 \[1\]"),
        ("seed", "-1", r"outside .* expected UINT64 \[1\]"),
        ("temperature", "warm", r"expected FP32 \[1\]"),
        ("temperature", "", r"expected FP32 \[1\]"),
        ("streaming", "2", r"expected BOOL \[1\]"),
        ("draft_input_ids", "[1.5]", r"expected INT32 \[-1\]"),
        ("draft_input_ids", "[[1],[2]]", r"shape \[2, 1\]; .* expects INT32 \[-1\]"),
        ("draft_input_ids", "[1,", r"not a JSON list; expected INT32 \[-1\]"),
        ("draft_logits", "[[1],[2,3]]", "different lengths"),
        ("draft_logits", '["a"]', "not numbers"),
        ("draft_logits", "1,2", r"shape \[2\]; .* expects FP32 \[-1, -1\]"),
        ("draft_logits", "@/nowhere.npy", "cannot be read"),
        ("guided_decoding_guide", '["a", "b"]', r"shape \[2\]; .* expects STRING \[1\]"),
    ],
)
def test_errors_name_the_declared_type_and_shape(name: str, text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        input_tensor(CORE, name, text, rows=1)


def test_invalid_npy_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.npy").write_bytes(b"PK\x03\x04")
    with pytest.raises(UsageError, match=r"not an \.npy file"):
        input_tensor(CORE, "draft_logits", f"@{tmp_path}/x.npy", rows=1)
    np.save(tmp_path / "texts.npy", np.array(["a"]))
    with pytest.raises(UsageError, match=r"expected FP32"):
        input_tensor(CORE, "draft_logits", f"@{tmp_path}/texts.npy", rows=1)


def test_unknown_input_gets_a_suggestion() -> None:
    with pytest.raises(UsageError, match="no input 'temperatur'") as caught:
        input_tensor(CORE, "temperatur", "1", rows=1)
    assert "Did you mean 'temperature'" in str(caught.value.hint)


@pytest.mark.parametrize("text", ["temperature", "=1", ""])
def test_input_without_a_name_or_a_value_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="NAME=VALUE"):
        split_input(text)


def test_value_may_contain_equals_signs() -> None:
    assert split_input("guide=a=b") == ("guide", "a=b")
    assert json.loads(split_input('x={"a": "="}')[1]) == {"a": "="}
