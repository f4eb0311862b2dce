"""The tables of the Triton models against independent ones, which another person read from NVIDIA's files."""

from __future__ import annotations

import pytest

from tests.doubles import model_tables
from tests.doubles.model_tables import MODELS, parse_release
from trtserve.nvidia.releases import RELEASES
from trtserve.repository.profiles import TensorSpec, llmapi_model, profile

# The reference dates the counters "1.x" (0.20 and later); the commit that the double cites is of 1.0.
COUNTERS = {"return_num_input_tokens", "return_num_output_tokens", "num_input_tokens", "num_output_tokens"}
# Types that are chosen when a repository is filled.
CHOSEN = {"$logits": "LOGITS", "$encoder": "FEATURES", "$prompt": "TABLE", "$lora": "FP16"}
Facts = tuple[str, str, str, str, str]


def facts_of_product(direction: str, tensor: TensorSpec) -> Facts:
    flags = "".join(
        letter for letter, given in (("o", tensor.optional), ("r", tensor.ragged), ("s", tensor.scalar)) if given
    )
    kind = CHOSEN.get(tensor.type, tensor.type)
    return direction, tensor.name, kind, "x".join(map(str, tensor.dims)), flags or "-"


def facts_of_double(model: str, release: str) -> set[Facts]:
    rows = model_tables.tensors(model, parse_release(release))
    return {(row.direction, row.name, row.kind, row.dims, row.flags) for row in rows}


def as_in_upstream(model: str, fact: Facts) -> Facts:
    """Ensemble and BLS of trtserve take the core model's type of prompt tables; NVIDIA's have FP16 for whatever type.

    Triton refuses an ensemble whose tensor has another type than the model's, so BF16 needs the former.
    """
    chosen = model in ("ensemble", "tensorrt_llm_bls") and fact[1:3] == ("prompt_embedding_table", "TABLE")
    return (fact[0], fact[1], "FP16", *fact[3:]) if chosen else fact


def without_counters(facts: set[Facts], release: str) -> set[Facts]:
    if release not in ("0.20", "0.21"):
        return facts
    return {fact for fact in facts if fact[1] not in COUNTERS}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("release", RELEASES)
def test_tensors(release: str, model: str) -> None:
    own = profile(release).models[model]
    found = {facts_of_product("in", tensor) for tensor in own.inputs}
    found |= {facts_of_product("out", tensor) for tensor in own.outputs}
    found = {as_in_upstream(model, fact) for fact in found}
    assert without_counters(found, release) == without_counters(facts_of_double(model, release), release)


@pytest.mark.parametrize("release", [each for each in RELEASES if parse_release(each) >= (0, 19)])
def test_tensors_of_the_llm_api(release: str) -> None:
    own = llmapi_model(release, own=False)
    found = {facts_of_product("in", tensor) for tensor in own.inputs}
    found |= {facts_of_product("out", tensor) for tensor in own.outputs}
    assert found == facts_of_double("llmapi", release)


@pytest.mark.parametrize("model", [model for model in MODELS if model != "ensemble"])
@pytest.mark.parametrize("release", RELEASES)
def test_parameters(release: str, model: str) -> None:
    own = {row.name for row in profile(release).models[model].parameters}
    assert own == set(model_tables.parameters(model, parse_release(release)))


@pytest.mark.parametrize("release", RELEASES)
def test_steps_of_the_ensemble(release: str) -> None:
    found = {
        (step.model, direction, link.name, link.ensemble_tensor)
        for step in profile(release).models["ensemble"].steps
        for direction, links in (("in", step.inputs), ("out", step.outputs))
        for link in links
        if release not in ("0.20", "0.21") or link.name not in COUNTERS
    }
    rows = model_tables.steps(parse_release(release))
    assert found == {(row.model, row.direction, row.tensor, row.ensemble_tensor) for row in rows}
