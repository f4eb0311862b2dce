"""Inputs next to the prompt: logit bias, embeddings of virtual tokens, adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.in_process import InProcess
from tests.support.model_server import ModelServer, Tensors, flags, floats, integers
from tests.support.release_client import NEWEST, long_integers
from trtserve.executor import api

pytestmark = pytest.mark.triton

PROMPT = [1, 70, 71, 72]
TEXT = "Prompts"
TEXT_MODELS = ("ensemble", "tensorrt_llm_bls", "tiny")
VOCABULARY, HIDDEN = 320, 64
NO_PROMPT = {"exclude_input_in_output": flags(True)}


def new_tokens(server: ModelServer, tensors: Tensors) -> list[int]:
    """New tokens of a request to the core model."""
    with server.stream() as stream:
        (answer,) = stream.all("tensorrt_llm", {**tensors, **NO_PROMPT})
    tokens: list[int] = answer["output_ids"][0, 0].tolist()
    return tokens


def test_bias_of_the_core_model(features: ModelServer, oracle: InProcess) -> None:
    bias = np.zeros(VOCABULARY, dtype=np.float32)
    bias[[65, 66]] = 50.0
    found = new_tokens(features, {**NEWEST.core(PROMPT, 8), "embedding_bias": bias[np.newaxis]})
    assert found == oracle.tokens(PROMPT, 8, embedding_bias=bias)
    assert set(found) <= {65, 66}


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_biased_words(features: ModelServer, model: str) -> None:
    body = {"text_input": TEXT, "max_tokens": 5, "exclude_input_in_output": True}
    words = {"embedding_bias_words": ["q"], "embedding_bias_weights": [200.0]}
    assert features.generate(model, {**body, **words})[1]["text_output"] == "qqqqq"


def table(seed: int) -> Any:
    """FP16 embeddings of four virtual tokens."""
    return np.random.default_rng(seed).normal(0, 0.5, (4, HIDDEN)).astype(np.float16)


VIRTUAL = [VOCABULARY, VOCABULARY + 1, VOCABULARY + 3, *PROMPT[1:]]


def tuned(rows: Any, extra: int | None = None) -> Tensors:
    """A request with a table as NVIDIA's client sends one."""
    tensors = {
        **NEWEST.core(VIRTUAL, 8),
        "prompt_embedding_table": rows[np.newaxis],
        "prompt_vocab_size": integers(len(rows)),
    }
    if extra is not None:
        ids = [extra if token >= VOCABULARY else 0 for token in VIRTUAL]
        tensors["prompt_table_extra_ids"] = np.array([ids], dtype=np.uint64)
    return tensors


def test_prompt_tables(features: ModelServer, oracle: InProcess) -> None:
    expected = [
        oracle.tokens(VIRTUAL, 8, prompt_tuning_config=api.PromptTuningConfig(table(seed), [5 + seed] * len(VIRTUAL)))
        for seed in (0, 1)
    ]
    assert expected[0] != expected[1]
    # The same ids twice, and ids of another table in between: blocks are reused by table, not by token.
    for seed in (0, 1, 0):
        assert new_tokens(features, tuned(table(seed), extra=5 + seed)) == expected[seed]


def test_blocks_are_reused_for_the_same_table_only(features: ModelServer) -> None:
    ids = [VOCABULARY + number % 4 for number in range(130)] + PROMPT[1:]
    extra = np.array([[9] * 130 + [0] * 3], dtype=np.uint64)

    def reused(number: int) -> int:
        tensors = {
            **NEWEST.core(ids, 2, return_perf_metrics=True),
            "prompt_embedding_table": table(number)[np.newaxis],
            "prompt_vocab_size": integers(4),
            "prompt_table_extra_ids": np.where(extra > 0, extra + np.uint64(number), extra),
        }
        with features.stream() as stream:
            (answer,) = stream.all("tensorrt_llm", tensors)
        return int(answer["kv_cache_reused_blocks"].item())

    assert reused(30) == 0
    assert reused(30) >= 2
    assert reused(31) == 0


def adapter(folder: Path) -> dict[str, Any]:
    """The tensors of an adapter, as NVIDIA's client reads them."""
    return {
        "lora_weights": np.load(folder / "model.lora_weights.npy").astype(np.float16),
        "lora_config": np.load(folder / "model.lora_config.npy").astype(np.int32),
    }


@pytest.fixture(scope="module")
def with_adapter(oracle: InProcess, features_adapters: dict[str, Path]) -> dict[str, list[int]]:
    """New tokens to PROMPT under each adapter."""
    found = {}
    for number, (name, folder) in enumerate(features_adapters.items(), start=101):
        weights, config = adapter(folder).values()
        found[name] = oracle.tokens(PROMPT, 8, lora_config=api.LoraConfig(number, weights[0], config[0]))
    return found


def test_adapters_by_tensors_then_by_task_id(
    features: ModelServer,
    oracle: InProcess,
    features_adapters: dict[str, Path],
    with_adapter: dict[str, list[int]],
) -> None:
    for number, (name, folder) in enumerate(features_adapters.items(), start=11):
        asked = {**NEWEST.core(PROMPT, 8), "lora_task_id": long_integers(number)}
        assert new_tokens(features, {**asked, **adapter(folder)}) == with_adapter[name]
        assert new_tokens(features, asked) == with_adapter[name]
    assert new_tokens(features, NEWEST.core(PROMPT, 8)) == oracle.tokens(PROMPT, 8)
    assert len({tuple(tokens) for tokens in with_adapter.values()}) == 2


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_adapters_by_name(
    features: ModelServer,
    oracle: InProcess,
    features_adapters: dict[str, Path],
    features_tokenizer: Any,
    model: str,
) -> None:
    ids = features_tokenizer.encode(TEXT)
    body = {"text_input": TEXT, "max_tokens": 8}
    for number, (name, folder) in enumerate(features_adapters.items(), start=201):
        weights, config = adapter(folder).values()
        tokens = oracle.tokens(ids, 8, lora_config=api.LoraConfig(number, weights[0], config[0]))
        for _ in range(2):
            status, answer = features.generate(model, {**body, "lora_name": name})
            assert (status, answer["text_output"]) == (
                200,
                features_tokenizer.decode(ids + tokens, skip_special_tokens=True),
            )
    plain = features_tokenizer.decode(ids + oracle.tokens(ids, 8), skip_special_tokens=True)
    assert features.generate(model, {**body, "lora_name": ""})[1]["text_output"] == plain


def test_draft_tokens_of_the_client(features: ModelServer, oracle: InProcess) -> None:
    """All of them right: one step gives them and one more."""
    tokens = oracle.tokens(PROMPT, 9)
    right = {"draft_input_ids": np.array([tokens[:8]], dtype=np.int32)}
    assert new_tokens(features, {**NEWEST.core(PROMPT, 9), **right}) == tokens
    wrong = {"draft_input_ids": np.array([[tokens[0], (tokens[1] + 1) % VOCABULARY]], dtype=np.int32)}
    found = new_tokens(features, {**NEWEST.core(PROMPT, 3), **wrong, "draft_acceptance_threshold": floats(0.5)})
    assert found == tokens[: len(found)]


@pytest.mark.parametrize("threshold", [None, 0.5])
def test_draft_logits_of_the_client(features: ModelServer, oracle: InProcess, threshold: float | None) -> None:
    """Logits of the engine itself: every draft token of theirs is taken."""
    wanted: Any = oracle.result(PROMPT, 9, output={"return_generation_logits": True})
    tokens = wanted.output_token_ids[0]
    logits = np.asarray(wanted.generation_logits, dtype=np.float32)[0, :8]
    draft: Tensors = {"draft_input_ids": np.array([tokens[:8]], dtype=np.int32), "draft_logits": logits[np.newaxis]}
    if threshold is not None:
        draft["draft_acceptance_threshold"] = floats(threshold)
    asked = {**NEWEST.core(PROMPT, 9, return_perf_metrics=True), **NO_PROMPT, **draft}
    with features.stream() as stream:
        (answer,) = stream.all("tensorrt_llm", asked)
    assert answer["output_ids"][0, 0].tolist() == tokens
    assert (answer["total_draft_tokens"].item(), answer["acceptance_rate"].item()) == (8, 1.0)


def test_confident_draft_tokens_are_checked_by_the_target(features: ModelServer, oracle: InProcess) -> None:
    """A token is taken where p > threshold · q: with q near 1, one that the target finds improbable is not."""
    tokens = oracle.tokens(PROMPT, 4)
    wrong = [(token + 1) % VOCABULARY for token in tokens]
    logits = np.zeros((1, len(wrong), VOCABULARY), dtype=np.float32)
    logits[0, range(len(wrong)), wrong] = 100.0
    draft = {"draft_input_ids": np.array([wrong], dtype=np.int32), "draft_logits": logits}
    asked = {**NEWEST.core(PROMPT, 5, return_perf_metrics=True), **NO_PROMPT, **draft}
    with features.stream() as stream:
        (answer,) = stream.all("tensorrt_llm", {**asked, "draft_acceptance_threshold": floats(0.5)})
    assert answer["total_accepted_draft_tokens"].item() == 0
    assert answer["output_ids"].reshape(-1).tolist()[0] == tokens[0]
