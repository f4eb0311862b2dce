"""Tensors and parameters of each release, and which of them the embedded executor ignores or refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from trtserve.nvidia.releases import RELEASES
from trtserve.programs.shared.parameters import ModelParameters, check_classes
from trtserve.repository.profiles import (
    BLS,
    CLASSES_FILE,
    CORE,
    ENSEMBLE,
    MODELS,
    POSTPROCESSING,
    PREPROCESSING,
    classes_json,
    find_parameter,
    ignored_settings,
    parameter_classes,
    parameters_of,
    profile,
)


def names(release: str | None, model: str, side: str = "inputs") -> set[str]:
    return {tensor.name for tensor in getattr(profile(release).models[model], side)}


@pytest.mark.parametrize("release", [*RELEASES, None])
def test_names_are_unique(release: str | None) -> None:
    for model in profile(release).models.values():
        for rows in (model.inputs, model.outputs, model.parameters):
            listed = [row.name for row in rows]
            assert len(listed) == len(set(listed))


# What no release has: the finish reason, adapters by name, the most likely tokens without logits, and min_p.
ADAPTER = {"LORA_NAME", "LORA_TASK_ID", "LORA_WEIGHTS", "LORA_CONFIG"}
OWN_INPUTS = {
    PREPROCESSING: ADAPTER,
    CORE: {"return_finish_reason", "num_top_log_probs", "return_prompt_log_probs", "min_p", "images"},
    ENSEMBLE: {"return_finish_reason", "lora_name"},
    BLS: {"return_finish_reason", "lora_name", "draft_acceptance_threshold"},
}
OWN_OUTPUTS = {
    PREPROCESSING: {"OUT_LORA_TASK_ID", "OUT_LORA_WEIGHTS", "OUT_LORA_CONFIG"},
    **{model: {"finish_reason"} for model in (ENSEMBLE, BLS)},
    CORE: {
        *("finish_reason", "top_log_probs_ids", "top_log_probs"),
        *("prompt_log_probs", "prompt_top_log_probs_ids", "prompt_top_log_probs"),
    },
}


@pytest.mark.parametrize("model", MODELS)
def test_union_has_inputs_of_all_releases_and_outputs_of_the_newest(model: str) -> None:
    of_releases = set().union(*(names(release, model) for release in RELEASES)) - {"PROMPT_EMBEDDING_TABLE"}
    assert names(None, model) == of_releases | OWN_INPUTS.get(model, set())
    assert names(None, model, "outputs") == names("1.2", model, "outputs") | OWN_OUTPUTS.get(model, set())


@pytest.mark.parametrize("release", RELEASES)
def test_added_tensors_belong_to_no_release(release: str) -> None:
    for model in MODELS:
        assert not names(release, model) & OWN_INPUTS.get(model, set())
        assert not names(release, model, "outputs") & OWN_OUTPUTS.get(model, set())


@pytest.mark.parametrize("model", MODELS)
def test_old_clients_need_no_new_input(model: str) -> None:
    required = {tensor.name for tensor in profile().models[model].inputs if not tensor.optional}
    for release in RELEASES:
        assert required <= {tensor.name for tensor in profile(release).models[model].inputs if not tensor.optional}


@pytest.mark.parametrize("release", [*RELEASES, None])
def test_ensemble_is_connected(release: str | None) -> None:
    """Each step takes what the ensemble or an earlier step gives, and gives only what its model has."""
    table = profile(release)
    ensemble = table.models[ENSEMBLE]
    known = {tensor.name for tensor in ensemble.inputs}
    used: set[str] = set()
    for step in ensemble.steps:
        model = table.models[step.model]
        assert {link.name for link in step.inputs} <= {tensor.name for tensor in model.inputs}
        assert {link.name for link in step.outputs} <= {tensor.name for tensor in model.outputs}
        assert {tensor.name for tensor in model.inputs if not tensor.optional} <= {link.name for link in step.inputs}
        taken = {link.ensemble_tensor for link in step.inputs}
        assert taken <= known
        used |= taken
        known |= {link.ensemble_tensor for link in step.outputs}
    assert {tensor.name for tensor in ensemble.outputs} <= known
    assert {tensor.name for tensor in ensemble.inputs} <= used


@pytest.mark.parametrize("release", RELEASES)
def test_each_release_declares_a_name_once(release: str) -> None:
    for model in MODELS:
        names = [row.name for row in parameters_of(model) if row.within(release)]
        assert len(names) == len(set(names)), model


def test_rows_are_consistent() -> None:
    for row in [row for model in MODELS for row in parameters_of(model)]:
        support = row.support
        words = (*row.values.choices, *support.refused_values, *support.accepted_values, row.unset)
        assert all(row.values.accepts(word) for word in words if word), row.name
        assert (support.kind == "effective") == (support.why == ""), row.name
        assert not (support.kind == "ignored" and support.differs), row.name
        assert row.meaning, row.name


def test_classes_follow_the_release() -> None:
    old = parameter_classes(CORE, "0.12")
    assert "lookahead_window_size" not in old["refused"]
    assert "cuda_graph_mode" not in old["ignored"]
    row = find_parameter(CORE, "decoding_mode", "0.12")
    assert row is not None
    assert row.support.refused_values == ("medusa",)


def test_only_models_with_ignored_or_refused_parameters_get_a_file() -> None:
    assert classes_json(POSTPROCESSING, "1.2") is None
    assert json.loads(classes_json(BLS, "1.2") or "")["refused"].keys() == {"multimodal_encoders_name"}
    assert json.loads(classes_json(PREPROCESSING, "0.12") or "")["refused"].keys() == {"visual_model_path"}


def test_default_texts_of_the_template_do_not_count_as_settings() -> None:
    literals = {"FORCE_CPU_ONLY_INPUT_TENSORS": "no", "gpu_device_ids": " ", "max_beam_width": "2"}
    assert ignored_settings(CORE, literals, "1.2") == []
    given = {"FORCE_CPU_ONLY_INPUT_TENSORS": "yes", "gpu_device_ids": "0"}
    assert ignored_settings(CORE, given, "1.2") == ["FORCE_CPU_ONLY_INPUT_TENSORS", "gpu_device_ids"]


def read(folder: Path, parameters: dict[str, str]) -> tuple[Any, list[str]]:
    """The parameters that are left to the core model when it is loaded from `folder`, and what it says of them."""
    config = {"parameters": {name: {"string_value": value} for name, value in parameters.items()}}
    said: list[str] = []
    left = check_classes(ModelParameters(config, folder, said.append), folder, said.append)
    return left, said


def loaded(folder: Path, parameters: dict[str, str]) -> list[str]:
    """What the core model says of `parameters` when it is loaded from `folder`."""
    return read(folder, parameters)[1]


def test_the_model_logs_ignored_parameters_once(tmp_path: Path) -> None:
    (tmp_path / CLASSES_FILE).write_text(classes_json(CORE, "1.2") or "")
    given = {"gpu_device_ids": "0", "cuda_graph_mode": "true", "executor_worker_path": "${executor_worker_path}"}
    (line,) = loaded(tmp_path, given)
    assert line == "Parameters ignored on this runtime: gpu_device_ids, cuda_graph_mode"
    assert loaded(tmp_path, {"decoding_mode": "top_k", "sink_token_length": "0"}) == []


def test_parameters_that_the_engine_uses_are_kept(tmp_path: Path) -> None:
    (tmp_path / CLASSES_FILE).write_text(classes_json(CORE, "1.2") or "")
    config = {"parameters": {"gpu_device_ids": {"string_value": "1"}, "cuda_graph_mode": {"string_value": "true"}}}
    said: list[str] = []
    left = check_classes(ModelParameters(config, tmp_path, said.append), tmp_path, said.append, kept=["gpu_device_ids"])
    assert (left.text("gpu_device_ids"), left.text("cuda_graph_mode")) == ("1", None)
    assert said == ["Parameters ignored on this runtime: cuda_graph_mode"]


def test_ignored_parameters_are_not_read(tmp_path: Path) -> None:
    (tmp_path / CLASSES_FILE).write_text(classes_json(CORE, "1.2") or "")
    given = dict.fromkeys(parameter_classes(CORE, "1.2")["ignored"], "0,1;2,3") | {"max_beam_width": "2"}
    left, _ = read(tmp_path, given)
    assert {name for name in given if left.text(name) is not None} == {"max_beam_width"}
    assert left.integer("max_beam_width") == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [("sink_token_length", "4"), ("decoding_mode", "Medusa"), ("eagle_choices", "{0}"), ("enable_trt_overlap", "TRUE")],
)
def test_the_model_names_a_refused_parameter(tmp_path: Path, name: str, value: str) -> None:
    (tmp_path / CLASSES_FILE).write_text(classes_json(CORE, "1.2") or "")
    with pytest.raises(
        ValueError, match=re.escape(f"Parameter {name} is '{value}', which this runtime does not support")
    ):
        loaded(tmp_path, {name: value})


def test_without_the_file_all_parameters_reach_the_executor(tmp_path: Path) -> None:
    assert loaded(tmp_path, {"sink_token_length": "4", "gpu_device_ids": "0"}) == []
