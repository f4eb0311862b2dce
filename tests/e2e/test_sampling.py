"""Sampling inputs through Triton: the same random stream for the same seed, on every way and in every company."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.in_process import InProcess
from tests.support.model_server import ModelServer, Tensors, floats, integers
from tests.support.release_client import NEWEST, long_integers

pytestmark = pytest.mark.triton

PROMPT = [1, 80, 81, 82]
TEXT = "Sampling"
TEXT_MODELS = ("ensemble", "tensorrt_llm_bls", "tiny")
COUNT = 24
# Tensors of the core model and what they are in the executor.
CASES: dict[str, tuple[Tensors, dict[str, Any]]] = {
    "top_k": ({"runtime_top_k": integers(20), "seed": long_integers(5)}, {"top_k": 20, "seed": 5}),
    "top_p": (
        {"runtime_top_k": integers(0), "runtime_top_p": floats(0.8), "random_seed": long_integers(2**64 - 1)},
        {"top_k": 0, "top_p": float(np.float32(0.8)), "seed": 2**64 - 1},
    ),
    "both": (
        {"runtime_top_k": integers(50), "runtime_top_p": floats(0.5), "temperature": floats(2.0)},
        {"top_k": 50, "top_p": 0.5, "temperature": 2.0},
    ),
    "decay": (
        {
            "runtime_top_k": integers(0),
            "runtime_top_p": floats(1.0),
            "runtime_top_p_decay": floats(0.5),
            "runtime_top_p_min": floats(0.125),
            "runtime_top_p_reset_ids": integers(90),
        },
        {"top_k": 0, "top_p": 1.0, "top_p_decay": 0.5, "top_p_min": 0.125, "top_p_reset_ids": 90},
    ),
    "repetition": ({"repetition_penalty": floats(1.5)}, {"repetition_penalty": 1.5}),
    "presence": ({"presence_penalty": floats(0.5)}, {"presence_penalty": 0.5}),
    "frequency": ({"frequency_penalty": floats(0.25)}, {"frequency_penalty": 0.25}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_core_model_samples_as_the_executor(features: ModelServer, oracle: InProcess, case: str) -> None:
    tensors, sampling = CASES[case]
    with features.stream() as stream:
        (answer,) = stream.all("tensorrt_llm", {**NEWEST.core(PROMPT, COUNT, exclude_input_in_output=True), **tensors})
    assert answer["output_ids"][0, 0].tolist() == oracle.tokens(PROMPT, COUNT, sampling=sampling)


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_text_models_pass_on_every_setting(
    features: ModelServer, oracle: InProcess, features_tokenizer: Any, model: str
) -> None:
    body = {
        "top_k": 40,
        "top_p": 0.75,
        "temperature": 1.5,
        "repetition_penalty": 1.25,
        "presence_penalty": 0.25,
        "frequency_penalty": 0.125,
        "seed": 11,
        "min_tokens": 3,
    }
    status, answer = features.generate(model, {"text_input": TEXT, "max_tokens": COUNT, **body})
    ids = features_tokenizer.encode(TEXT)
    tokens = oracle.tokens(ids, COUNT, sampling=body)
    assert tokens != oracle.tokens(ids, COUNT)
    assert status == 200
    assert answer["text_output"] == features_tokenizer.decode(ids + tokens, skip_special_tokens=True)


@pytest.mark.parametrize("model", ["tensorrt_llm", *TEXT_MODELS])
def test_several_sequences(features: ModelServer, oracle: InProcess, features_tokenizer: Any, model: str) -> None:
    core = model == "tensorrt_llm"
    ids = PROMPT if core else features_tokenizer.encode(TEXT)
    sampling = {"top_k": 50, "seed": 3, "num_return_sequences": 3}
    results = oracle.results(ids, 6, sampling=sampling, output={"exclude_input_from_output": False})
    expected = {result.sequence_index: result.output_token_ids[0] for result in results}
    if core:
        tensors = {**NEWEST.core(ids, 6, top_k=50, num_return_sequences=3), "seed": long_integers(3)}
    else:
        tensors = NEWEST.text(TEXT, 6, num_return_sequences=3) | {"top_k": integers(50), "seed": long_integers(3)}
    with features.stream() as stream:
        answers = stream.all(model, tensors)
    found: dict[int, Any] = {}
    for answer in answers:
        value = answer["output_ids"][0, 0].tolist() if core else answer["text_output"].item().decode()
        found[answer["sequence_index"].item()] = value
    assert found == (
        expected
        if core
        else {
            number: features_tokenizer.decode(tokens, skip_special_tokens=True) for number, tokens in expected.items()
        }
    )
