"""Every output that a request can ask for, through core model, ensemble and BLS, over gRPC and HTTP."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.in_process import InProcess
from tests.support.model_server import ModelServer, Tensors, flags, integers
from tests.support.release_client import NEWEST

pytestmark = pytest.mark.triton

PROMPT = [1, 40, 41, 42, 43]
TEXT = "Outputs"
TEXT_MODELS = ("ensemble", "tensorrt_llm_bls", "tiny")
VOCABULARY = 320
ALWAYS = ("batch_index",)  # for clients of 0.12 and 0.13
PERFORMANCE = {
    "kv_cache_alloc_new_blocks",
    "kv_cache_reused_blocks",
    "kv_cache_alloc_total_blocks",
    "arrival_time_ns",
    "first_scheduled_time_ns",
    "first_token_time_ns",
    "last_token_time_ns",
    "acceptance_rate",
    "total_accepted_draft_tokens",
    "total_draft_tokens",
}


def once(server: ModelServer, model: str, tensors: Tensors) -> Tensors:
    """The only answer to a request."""
    with server.stream() as stream:
        (answer,) = stream.all(model, tensors)
    return answer


def test_only_requested_outputs_are_computed(features: ModelServer) -> None:
    assert set(once(features, "tensorrt_llm", NEWEST.core(PROMPT, 4))) == {"output_ids", "sequence_length", *ALWAYS}
    for model in TEXT_MODELS:
        assert set(once(features, model, NEWEST.text(TEXT, 4))) == {"text_output", *ALWAYS}


def test_log_probs_of_the_core_model(features: ModelServer, oracle: InProcess) -> None:
    expected: Any = oracle.result(PROMPT, 6, output={"return_log_probs": True})
    answer = once(features, "tensorrt_llm", NEWEST.core(PROMPT, 6, return_log_probs=True, exclude_input_in_output=True))
    assert answer["output_ids"].tolist() == [expected.output_token_ids]
    assert answer["output_log_probs"].shape == (1, 1, 6)
    np.testing.assert_allclose(answer["output_log_probs"][0], expected.log_probs, rtol=1e-5)
    np.testing.assert_allclose(answer["cum_log_probs"], [expected.cum_log_probs], rtol=1e-5)
    np.testing.assert_allclose(answer["output_log_probs"].sum(), answer["cum_log_probs"].sum(), rtol=1e-5)


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_log_probs_of_text(features: ModelServer, oracle: InProcess, features_tokenizer: Any, model: str) -> None:
    expected: Any = oracle.result(features_tokenizer.encode(TEXT), 6, output={"return_log_probs": True})
    answer = once(features, model, NEWEST.text(TEXT, 6, return_log_probs=True))
    assert set(answer) == {"text_output", "cum_log_probs", "output_log_probs", *ALWAYS}
    np.testing.assert_allclose(answer["output_log_probs"][0], expected.log_probs, rtol=1e-5)
    np.testing.assert_allclose(answer["cum_log_probs"], [expected.cum_log_probs], rtol=1e-5)


def test_log_probs_over_http(features: ModelServer) -> None:
    status, answer = features.generate("tiny", {"text_input": TEXT, "max_tokens": 6, "return_log_probs": True})
    assert status == 200
    assert len(answer["output_log_probs"]) == 6
    assert sum(answer["output_log_probs"]) == pytest.approx(answer["cum_log_probs"], rel=1e-4)


def test_streamed_log_probs_hold_the_whole_history(features: ModelServer, oracle: InProcess) -> None:
    expected = oracle.result(PROMPT, 5, output={"return_log_probs": True}).log_probs
    with features.stream() as stream:
        answers = stream.all("tensorrt_llm", NEWEST.core(PROMPT, 5, streaming=True, return_log_probs=True))
    assert expected is not None
    lengths = [answer["output_log_probs"].shape[2] for answer in answers]
    assert lengths == sorted(lengths)
    np.testing.assert_allclose(answers[-1]["output_log_probs"][0], expected, rtol=1e-5)


def test_generation_logits(features: ModelServer, oracle: InProcess) -> None:
    expected: Any = oracle.result(PROMPT, 6, output={"return_generation_logits": True})
    answer = once(features, "tensorrt_llm", NEWEST.core(PROMPT, 6, return_generation_logits=True))
    logits = answer["generation_logits"]
    assert logits.dtype == np.float32
    assert logits.shape == (1, 1, 6, VOCABULARY)
    np.testing.assert_allclose(logits[0], expected.generation_logits, rtol=1e-4, atol=1e-5)
    assert logits[0, 0].argmax(axis=-1).tolist() == answer["output_ids"][0, 0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_generation_logits_of_text(features: ModelServer, model: str) -> None:
    answer = once(features, model, NEWEST.text(TEXT, 3, return_generation_logits=True))
    assert answer["generation_logits"].shape == (1, 1, 3, VOCABULARY)


@pytest.mark.parametrize("model", ["tensorrt_llm", *TEXT_MODELS])
def test_performance(features: ModelServer, model: str) -> None:
    asked = NEWEST.core if model == "tensorrt_llm" else NEWEST.text
    prompt: Any = PROMPT if model == "tensorrt_llm" else TEXT
    answer = once(features, model, asked(prompt, 4, return_perf_metrics=True))
    assert set(answer) - {"output_ids", "sequence_length", "text_output", *ALWAYS} == PERFORMANCE
    assert {answer[name].shape for name in PERFORMANCE} == {(1, 1)}
    names = ("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns")
    times = [answer[name].item() for name in names]
    assert times == sorted(times)
    assert times[0] > 0
    # A block of an earlier request is reused, not allocated.
    assert answer["kv_cache_alloc_total_blocks"].item() + answer["kv_cache_reused_blocks"].item() > 0


def test_counts_of_tokens(features: ModelServer) -> None:
    tensors = NEWEST.core(PROMPT, 4, return_num_input_tokens=True, return_num_output_tokens=True)
    answer = once(features, "tensorrt_llm", tensors)
    assert (answer["num_input_tokens"].item(), answer["num_output_tokens"].item()) == (len(PROMPT), 4)


@pytest.mark.parametrize("model", ["tensorrt_llm", *TEXT_MODELS])
@pytest.mark.parametrize("streaming", [False, True])
def test_finish_reason_comes_once(features: ModelServer, model: str, streaming: bool) -> None:
    core = model == "tensorrt_llm"
    tensors = NEWEST.core(PROMPT, 4, streaming=streaming) if core else NEWEST.text(TEXT, 4, streaming=streaming)
    with features.stream() as stream:
        answers = stream.all(model, {**tensors, "return_finish_reason": flags(True)})
    assert [answer["finish_reason"].reshape(-1).tolist() for answer in answers if "finish_reason" in answer] == [
        [b"length"]
    ]
    # BLS may still have to send the bytes of half a character.
    assert any("finish_reason" in answer for answer in answers[-2:])


def test_finish_reasons(features: ModelServer, oracle: InProcess) -> None:
    tokens = oracle.tokens(PROMPT, 8)
    stop = np.array([[tokens[3:5], [2, -1]]], dtype=np.int32)
    asked = NEWEST.core(PROMPT, 8)
    for change, expected in (
        ({"stop_words_list": stop}, b"stop_words"),
        ({"end_id": integers(tokens[4])}, b"end_id"),
        ({}, b"length"),
    ):
        answer = once(features, "tensorrt_llm", {**asked, **change, "return_finish_reason": flags(True)})
        assert answer["finish_reason"].tolist() == [[expected]]
