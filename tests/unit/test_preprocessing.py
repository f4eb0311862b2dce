"""The model `preprocessing` by itself: the ids that end an answer, and texts that are too long to be encoded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.tiny_models import write_byte_tokenizer
from trtserve.programs.preprocessing.model import TritonPythonModel

MOST = 32


@pytest.fixture
def model(tmp_path: Path) -> TritonPythonModel:
    """A tokenizer of bytes, with three ids that end an answer, and an engine for 32 tokens."""
    (tmp_path / "tokenizer").mkdir()
    write_byte_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "generation_config.json").write_text('{"eos_token_id": [2, 7, 9]}')
    (tmp_path / "engine").mkdir()
    engine = {"build_config": {"max_seq_len": MOST}, "pretrained_config": {"vocab_size": 320}}
    (tmp_path / "engine" / "config.json").write_text(json.dumps(engine))
    folders = {"tokenizer_dir": tmp_path / "tokenizer", "gpt_model_path": tmp_path / "engine"}
    parameters = {name: {"string_value": str(folder)} for name, folder in folders.items()}
    made = TritonPythonModel()
    config = {"parameters": parameters, "output": [{"name": "STOP_WORDS_IDS", "data_type": "TYPE_INT32"}]}
    repository = tmp_path / "repository" / "preprocessing"
    made.initialize({"model_config": json.dumps(config), "model_repository": str(repository), "model_version": "1"})
    return made


def inputs(text: str, **more: Any) -> dict[str, Any]:
    return {"QUERY": np.array([[text.encode()]], dtype=object), "REQUEST_OUTPUT_LEN": np.array([[4]]), **more}


def test_all_ids_that_end_an_answer_end_it(model: TritonPythonModel) -> None:
    made = model._process(inputs("Hi"))
    assert made["OUT_END_ID"].tolist() == [[2]]
    assert made["STOP_WORDS_IDS"].tolist() == [[[7, 9], [1, 2]]]
    words = np.array([["b"]], dtype="S1").astype(object)
    both = model._process(inputs("Hi", STOP_WORDS_DICT=words))["STOP_WORDS_IDS"]
    assert both[0, 0, :2].tolist() == [7, 9]
    assert both.shape[2] > 2


def test_a_client_that_chooses_its_end_gets_no_other(model: TritonPythonModel) -> None:
    assert model._process(inputs("Hi", END_ID=np.array([[-1]])))["STOP_WORDS_IDS"].size == 0


@pytest.mark.parametrize("count", [1 << 20, 3000])
def test_a_text_that_cannot_fit_is_not_encoded_whole(
    model: TritonPythonModel, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[int] = []
    encode = model._tokenizer.encode

    def count_and_encode(text: str, **more: Any) -> Any:
        encoded.append(len(text))
        return encode(text, **more)

    monkeypatch.setattr(model._tokenizer, "encode", count_and_encode)
    monkeypatch.setattr(model, "_most_bytes", 10_000)
    with pytest.raises(ValueError, match="exceeds maximum input length"):
        model._process(inputs("x" * count))
    assert sum(encoded) <= 16 * MOST
