"""Beam search through Triton: every beam, best first, as the executor of the same engine finds them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.in_process import InProcess
from tests.support.model_server import ModelServer, Tensors, flags, floats
from tests.support.release_client import NEWEST

pytestmark = pytest.mark.triton

PROMPT = [1, 60, 61, 62]
TEXT = "Beams"
TEXT_MODELS = ("ensemble", "tensorrt_llm_bls", "tiny")
SETTINGS: dict[str, tuple[Tensors, dict[str, Any]]] = {
    "width": ({}, {}),
    "long ones": ({"len_penalty": floats(2.0)}, {"length_penalty": 2.0}),
    "early": ({"early_stopping": flags(True)}, {"early_stopping": 1}),
    "different": ({"beam_search_diversity_rate": floats(0.5)}, {"beam_search_diversity_rate": 0.5}),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_beams_of_the_core_model(features: ModelServer, oracle: InProcess, case: str) -> None:
    tensors, sampling = SETTINGS[case]
    expected: Any = oracle.result(PROMPT, 8, sampling={"beam_width": 3, **sampling}, output={"return_log_probs": True})
    asked = NEWEST.core(PROMPT, 8, beam_width=3, exclude_input_in_output=True, return_log_probs=True)
    with features.stream() as stream:
        (answer,) = stream.all("tensorrt_llm", {**asked, **tensors})
    lengths = [len(beam) for beam in expected.output_token_ids]
    assert answer["sequence_length"].tolist() == [lengths]
    found = [row[:length] for row, length in zip(answer["output_ids"][0].tolist(), lengths, strict=True)]
    assert found == expected.output_token_ids
    np.testing.assert_allclose(answer["cum_log_probs"], [expected.cum_log_probs], rtol=1e-5)
    assert answer["output_log_probs"].shape == (1, 3, max(lengths))


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_beams_of_text(features: ModelServer, oracle: InProcess, features_tokenizer: Any, model: str) -> None:
    ids = features_tokenizer.encode(TEXT)
    expected = oracle.result(ids, 6, sampling={"beam_width": 2}, output={"exclude_input_from_output": False})
    with features.stream() as stream:
        (answer,) = stream.all(model, NEWEST.text(TEXT, 6, beam_width=2))
    texts = [features_tokenizer.decode(beam, skip_special_tokens=True) for beam in expected.output_token_ids]
    assert [text.decode() for text in answer["text_output"].reshape(-1)] == texts
    status, over_http = features.generate(model, {"text_input": TEXT, "max_tokens": 6, "beam_width": 2})
    assert (status, over_http["text_output"]) == (200, texts)


def test_streamed_beams_are_whole_each_time(features: ModelServer, oracle: InProcess) -> None:
    expected = oracle.result(PROMPT, 6, sampling={"beam_width": 2}).output_token_ids
    with features.stream() as stream:
        answers = stream.all("tensorrt_llm", NEWEST.core(PROMPT, 6, beam_width=2, streaming=True))
    lengths = [int(answer["sequence_length"].max()) for answer in answers]
    assert lengths == sorted(lengths)
    last = answers[-1]
    found = zip(last["output_ids"][0].tolist(), last["sequence_length"][0].tolist(), strict=True)
    assert [row[:length] for row, length in found] == expected


def test_fewer_beams_come_back_on_demand(features: ModelServer, oracle: InProcess) -> None:
    expected = oracle.result(PROMPT, 6, sampling={"beam_width": 3}).output_token_ids
    asked = NEWEST.core(PROMPT, 6, beam_width=3, num_return_sequences=2, exclude_input_in_output=True)
    with features.stream() as stream:
        (answer,) = stream.all("tensorrt_llm", asked)
    assert answer["output_ids"].shape[1] == 2
    assert answer["output_ids"][0, 0, : len(expected[0])].tolist() == expected[0]


@pytest.mark.parametrize("model", ["tensorrt_llm", *TEXT_MODELS])
def test_logits_and_log_probs_of_every_beam(
    features: ModelServer, oracle: InProcess, features_tokenizer: Any, model: str
) -> None:
    core = model == "tensorrt_llm"
    asked = NEWEST.core if core else NEWEST.text
    ids = PROMPT if core else features_tokenizer.encode(TEXT)
    output = {"return_log_probs": True, "return_generation_logits": True}
    expected: Any = oracle.result(ids, 5, sampling={"beam_width": 3}, output=output, end_id=-1)
    tensors = asked(PROMPT if core else TEXT, 5, beam_width=3, end_id=-1, **output)  # type: ignore[arg-type]
    with features.stream() as stream:
        (answer,) = stream.all(model, tensors)
    np.testing.assert_allclose(answer["cum_log_probs"], [expected.cum_log_probs], rtol=1e-4)
    np.testing.assert_allclose(answer["output_log_probs"], [expected.log_probs], rtol=1e-4)
    assert answer["generation_logits"].shape == (1, 3, 5, 320)
    np.testing.assert_allclose(answer["generation_logits"][0], expected.generation_logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_length_penalty_of_text(features: ModelServer, oracle: InProcess, features_tokenizer: Any, model: str) -> None:
    """Text models call it `length_penalty`."""
    ids = features_tokenizer.encode(TEXT)
    for penalty in (0.0, 3.0):
        sampling = {"beam_width": 4, "length_penalty": penalty}
        expected = oracle.result(ids, 40, sampling=sampling, output={"exclude_input_from_output": False})
        body = {"text_input": TEXT, "max_tokens": 40, "beam_width": 4, "length_penalty": penalty}
        status, answer = features.generate(model, body)
        texts = [features_tokenizer.decode(beam, skip_special_tokens=True) for beam in expected.output_token_ids]
        assert (status, answer["text_output"]) == (200, texts)
