"""Tensors and parameters of each release, and of all releases together."""

from __future__ import annotations

import pytest

from trtserve.nvidia.releases import RELEASES
from trtserve.repository.profiles import (
    BLS,
    CORE,
    ENSEMBLE,
    MODELS,
    PREPROCESSING,
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


# What no release has: the finish reason, and adapters by name.
ADAPTER = {"LORA_NAME", "LORA_TASK_ID", "LORA_WEIGHTS", "LORA_CONFIG"}
OWN_INPUTS = {
    PREPROCESSING: ADAPTER,
    CORE: {"return_finish_reason"},
    ENSEMBLE: {"return_finish_reason", "lora_name"},
    BLS: {"return_finish_reason", "lora_name", "draft_acceptance_threshold"},
}
OWN_OUTPUTS = {
    PREPROCESSING: {"OUT_LORA_TASK_ID", "OUT_LORA_WEIGHTS", "OUT_LORA_CONFIG"},
    **{model: {"finish_reason"} for model in (CORE, ENSEMBLE, BLS)},
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
