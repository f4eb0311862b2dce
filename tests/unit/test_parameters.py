"""The declaration of the parameters of the models: complete, sorted into classes, told to the models in its words."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support import model_modules
from trtserve.releases import RELEASES
from trtserve.triton.parameters import (
    CLASSES_FILE,
    PARAMETERS,
    classes_json,
    find_parameter,
    parameter_classes,
    set_without_meaning,
)
from trtserve.triton.profiles import BLS, CORE, POSTPROCESSING, PREPROCESSING

# Of the issue: what changes results and cannot be done on the openvino runtime.
REFUSED = {
    "encoder_model_path",
    "sink_token_length",
    "decoding_mode",
    "lookahead_window_size",
    "lookahead_ngram_size",
    "lookahead_verification_set_size",
    "medusa_choices",
    "eagle_choices",
    "enable_trt_overlap",
}
IGNORED = {
    "FORCE_CPU_ONLY_INPUT_TENSORS",
    "cross_kv_cache_fraction",
    "kv_cache_host_memory_bytes",
    "kv_cache_onboard_blocks",
    "gpu_device_ids",
    "participant_ids",
    "num_nodes",
    "executor_worker_path",
    "gpu_weights_percent",
    "enable_context_fmha_fp32_acc",
    "multi_block_mode",
    "cuda_graph_mode",
    "cuda_graph_cache_size",
    "speculative_decoding_fast_logits",
    "xgrammar_tokenizer_info_path",
}


@pytest.mark.parametrize("release", RELEASES)
def test_each_release_declares_a_name_once(release: str) -> None:
    for model, rows in PARAMETERS.items():
        names = [row.name for row in rows if row.within(release)]
        assert len(names) == len(set(names)), model


def test_what_a_row_says_fits_together() -> None:
    for row in [row for rows in PARAMETERS.values() for row in rows]:
        words = (*row.values.choices, *row.fate.impossible, *row.fate.neutral, row.text)
        assert all(row.values.accepts(word) for word in words if word), row.name
        assert (row.fate.kind == "effective") == (row.fate.why == ""), row.name
        assert not (row.fate.kind == "no meaning" and row.fate.differs), row.name
        assert row.meaning, row.name


def test_classes_of_the_core_model() -> None:
    classes = parameter_classes(CORE, "1.2")
    assert set(classes["refused"]) == REFUSED
    assert set(classes["without_meaning"]) == IGNORED


def test_classes_follow_the_release() -> None:
    old = parameter_classes(CORE, "0.12")
    assert "lookahead_window_size" not in old["refused"]
    assert "cuda_graph_mode" not in old["without_meaning"]
    row = find_parameter(CORE, "decoding_mode", "0.12")
    assert row is not None
    assert row.fate.impossible == ("medusa",)


def test_only_models_with_such_parameters_get_a_file() -> None:
    assert classes_json(POSTPROCESSING, "1.2") is None
    assert json.loads(classes_json(BLS, "1.2") or "")["refused"].keys() == {"multimodal_encoders_name"}
    assert json.loads(classes_json(PREPROCESSING, "0.12") or "")["refused"].keys() == {"visual_model_path"}


def test_texts_of_the_template_are_not_settings() -> None:
    literals = {"FORCE_CPU_ONLY_INPUT_TENSORS": "no", "gpu_device_ids": " ", "max_beam_width": "2"}
    assert set_without_meaning(CORE, literals, "1.2") == []
    given = {"FORCE_CPU_ONLY_INPUT_TENSORS": "yes", "gpu_device_ids": "0"}
    assert set_without_meaning(CORE, given, "1.2") == ["FORCE_CPU_ONLY_INPUT_TENSORS", "gpu_device_ids"]


def read(monkeypatch: pytest.MonkeyPatch, folder: Path, parameters: dict[str, str]) -> tuple[Any, list[str]]:
    """The parameters that are left to the core model when it is loaded from `folder`, and what it says of them."""
    classes = model_modules.load(monkeypatch, CORE, "parameter_classes")
    model_parameters: Any = model_modules.load(monkeypatch, CORE, "model_parameters")
    config = {"parameters": {name: {"string_value": value} for name, value in parameters.items()}}
    said: list[str] = []
    left = classes.check_classes(model_parameters.ModelParameters(config, folder, said.append), folder, said.append)
    return left, said


def loaded(monkeypatch: pytest.MonkeyPatch, folder: Path, parameters: dict[str, str]) -> list[str]:
    """What the core model says of `parameters` when it is loaded from `folder`."""
    return read(monkeypatch, folder, parameters)[1]


def test_the_model_lists_what_has_no_meaning_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / CLASSES_FILE).write_text(classes_json(CORE, "1.2") or "")
    given = {"gpu_device_ids": "0", "cuda_graph_mode": "true", "executor_worker_path": "${executor_worker_path}"}
    (line,) = loaded(monkeypatch, tmp_path, given)
    assert line == "Parameters without meaning on this runtime: gpu_device_ids, cuda_graph_mode"
    assert loaded(monkeypatch, tmp_path, {"decoding_mode": "top_k", "sink_token_length": "0"}) == []


def test_what_has_no_meaning_is_not_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / CLASSES_FILE).write_text(classes_json(CORE, "1.2") or "")
    given = dict.fromkeys(IGNORED, "0,1;2,3") | {"max_beam_width": "2"}
    left, _ = read(monkeypatch, tmp_path, given)
    assert {name for name in given if left.text(name) is not None} == {"max_beam_width"}
    assert left.integer("max_beam_width") == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [("sink_token_length", "4"), ("decoding_mode", "Medusa"), ("eagle_choices", "{0}"), ("enable_trt_overlap", "TRUE")],
)
def test_the_model_refuses_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, value: str) -> None:
    (tmp_path / CLASSES_FILE).write_text(classes_json(CORE, "1.2") or "")
    with pytest.raises(ValueError, match=re.escape(f"Parameter {name} is '{value}', which this runtime cannot")):
        loaded(monkeypatch, tmp_path, {name: value})


def test_without_the_file_everything_is_left_to_the_executor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert loaded(monkeypatch, tmp_path, {"sink_token_length": "4", "gpu_device_ids": "0"}) == []
