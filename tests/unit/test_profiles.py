"""The release table: what each release has, and what the union of all of them is."""

from __future__ import annotations

import pytest

from trtserve.errors import UsageError
from trtserve.releases import RELEASES, normalize_release
from trtserve.triton.profiles import BLS, CORE, ENSEMBLE, MODELS, PREPROCESSING, profile


def names(release: str | None, model: str, side: str = "inputs") -> set[str]:
    return {tensor.name for tensor in getattr(profile(release).models[model], side)}


@pytest.mark.parametrize("release", [*RELEASES, None])
def test_no_name_stands_twice(release: str | None) -> None:
    for model in profile(release).models.values():
        for rows in (model.inputs, model.outputs, model.parameters):
            listed = [row.name for row in rows]
            assert len(listed) == len(set(listed))


@pytest.mark.parametrize(
    ("release", "inputs", "outputs", "parameters"),
    [("0.12", 38, 7, 31), ("0.16", 47, 12, 37), ("0.19", 60, 19, 45), ("1.2", 62, 21, 46)],
)
def test_size_of_the_core_model(release: str, inputs: int, outputs: int, parameters: int) -> None:
    core = profile(release).models[CORE]
    assert (len(core.inputs), len(core.outputs), len(core.parameters)) == (inputs, outputs, parameters)


def test_renamed_inputs() -> None:
    for model in (CORE, ENSEMBLE, BLS):
        assert {"min_length", "random_seed"} <= names("0.19", model)
        assert not {"min_tokens", "seed"} & names("0.19", model)
        assert {"min_tokens", "seed"} <= names("0.20", model)
        assert not {"min_length", "random_seed"} & names("1.2", model)
        assert {"min_length", "random_seed", "min_tokens", "seed"} <= names(None, model)


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
def test_union_has_the_inputs_of_every_release_and_the_newest_outputs(model: str) -> None:
    of_releases = set().union(*(names(release, model) for release in RELEASES)) - {"PROMPT_EMBEDDING_TABLE"}
    assert names(None, model) == of_releases | OWN_INPUTS.get(model, set())
    assert names(None, model, "outputs") == names("1.2", model, "outputs") | OWN_OUTPUTS.get(model, set())


@pytest.mark.parametrize("release", RELEASES)
def test_no_release_has_what_is_our_own(release: str) -> None:
    for model in MODELS:
        assert not names(release, model) & OWN_INPUTS.get(model, set())
        assert not names(release, model, "outputs") & OWN_OUTPUTS.get(model, set())


@pytest.mark.parametrize("model", MODELS)
def test_old_clients_need_no_new_input(model: str) -> None:
    required = {tensor.name for tensor in profile().models[model].inputs if not tensor.optional}
    for release in RELEASES:
        assert required <= {tensor.name for tensor in profile(release).models[model].inputs if not tensor.optional}


def test_changes_of_shape_and_type() -> None:
    def row(release: str, model: str, name: str) -> tuple[str, tuple[int, ...], bool]:
        (found,) = [tensor for tensor in profile(release).models[model].inputs if tensor.name == name]
        return found.type, found.dims, found.optional

    assert row("0.14", CORE, "input_ids") == ("INT32", (-1,), False)
    assert row("0.15", CORE, "input_ids") == ("INT32", (-1,), True)
    assert row("0.16", CORE, "draft_logits")[0] == "FP32"
    assert row("0.17", CORE, "draft_logits")[0] == "$logits"
    assert row("0.12", BLS, "image_input")[1] == (3, 224, 224)
    assert row("0.14", BLS, "image_input")[1] == (3, -1, -1)
    assert row("0.15", BLS, "image_input")[1] == (-1, 3, -1, -1)


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


def test_release_words() -> None:
    assert normalize_release("0.18.2") == "0.18"
    assert normalize_release("v1.2.1") == "1.2"
    with pytest.raises(UsageError, match=r"covers 0\.12 … 1\.2"):
        normalize_release("0.11")
