"""LoRA adapters on their way through preprocessing: by tensors, or by a name of lora.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trtserve.programs.preprocessing.model import adapter_outputs
from trtserve.programs.shared.lora_names import LoraNames

WEIGHTS = np.arange(6, dtype=np.float16).reshape(1, 2, 3)
CONFIG = np.array([[[1, 0, 8], [1, 1, 8]]], dtype=np.int32)


@pytest.fixture
def adapters(tmp_path: Path) -> Any:
    """`adapter_outputs` with a repository that knows the adapter `fr`."""
    folder = tmp_path / "lora" / "fr"
    folder.mkdir(parents=True)
    np.save(folder / "model.lora_weights.npy", WEIGHTS)
    np.save(folder / "model.lora_config.npy", CONFIG)
    (tmp_path / "lora.json").write_text(json.dumps({"adapters": {"fr": {"task_id": 7, "folder": "lora/fr"}}}))
    known = LoraNames(tmp_path)
    return lambda inputs, weights="TYPE_FP16", batch=1: adapter_outputs(inputs, known, weights, batch)


def names(*values: str) -> Any:
    return np.array([[value.encode()] for value in values], dtype=np.object_)


def test_none(adapters: Any) -> None:
    assert adapters({}) == {}
    assert adapters({"LORA_NAME": names("")}) == {}


def test_tensors_of_the_client_are_handed_on(adapters: Any) -> None:
    task = np.array([[3]], dtype=np.uint64)
    assert adapters({"LORA_TASK_ID": task}) == {"OUT_LORA_TASK_ID": task}
    found = adapters({"LORA_TASK_ID": task, "LORA_WEIGHTS": WEIGHTS, "LORA_CONFIG": CONFIG, "QUERY": names("x")})
    assert set(found) == {"OUT_LORA_TASK_ID", "OUT_LORA_WEIGHTS", "OUT_LORA_CONFIG"}


@pytest.mark.parametrize(("declared", "dtype"), [("TYPE_FP16", "float16"), ("TYPE_FP32", "float32")])
def test_a_name_gives_all_three(adapters: Any, declared: str, dtype: str) -> None:
    found = adapters({"LORA_NAME": names("fr", "fr")}, declared, 2)
    assert found["OUT_LORA_TASK_ID"].tolist() == [[7], [7]]
    assert found["OUT_LORA_WEIGHTS"].dtype == dtype
    assert np.array_equal(found["OUT_LORA_WEIGHTS"], np.repeat(WEIGHTS, 2, axis=0))
    assert np.array_equal(found["OUT_LORA_CONFIG"], np.repeat(CONFIG, 2, axis=0))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"LORA_NAME": names("de")}, "lora_name is 'de', which this repository does not know; it has fr"),
        ({"LORA_NAME": names("fr", "")}, "lora_name differs between the rows"),
        ({"LORA_NAME": np.array([[b"\xe9"]], dtype=object)}, "lora_name is not valid UTF-8"),
        ({"LORA_NAME": names("fr"), "LORA_TASK_ID": np.array([[7]])}, "cannot be given too"),
    ],
)
def test_refused(adapters: Any, inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        adapters(inputs)
