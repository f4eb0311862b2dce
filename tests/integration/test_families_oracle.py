"""Families through convert, build and execute, against transformers: tokens in float32, logits in every precision.

The bounds are those of the root mean square of the difference, as a share of the standard deviation of the logits.
They hold for random models of `GAIN`; a swapped or missing part of a model makes that share 0.5 and more.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.paged_steps import PagedSteps
from tests.support.tiny_models import write_tiny_model
from tests.support.transformers_oracle import Oracle, engine_of, greedy_tokens
from trtserve.executor.paged_model import PagedModel
from trtserve.specs import BuildSpec, ConvertSpec

pytestmark = pytest.mark.oracle

# Tied embeddings are left to the goldens: random models with them repeat their last token.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, dynamic scaling": ("llama_dynamic", {"attention_bias": True, "mlp_bias": True}),
    "mistral, window": ("mistral", {"sliding_window": 24}),
    "qwen2": ("qwen2", {}),
    "qwen2, windows": ("qwen2", {"use_sliding_window": True}),
    "qwen3": ("qwen3", {"tie_word_embeddings": False}),
    "gemma": ("gemma", {"tie_word_embeddings": False}),
    "gemma2, no cap of scores": ("gemma2", {"attn_logit_softcapping": None, "tie_word_embeddings": False}),
    "gemma3": ("gemma3", {"tie_word_embeddings": False}),
    "gemma3, capped logits": (
        "gemma3",
        {"final_logit_softcapping": 30.0, "rope_scaling": None, "tie_word_embeddings": False},
    ),
}
PRECISIONS: dict[str, tuple[ConvertSpec, float]] = {
    "float32": (ConvertSpec(dtype="float32", tp_size=2), 1e-5),
    "float16": (ConvertSpec(dtype="float16"), 0.05),
    "bfloat16": (ConvertSpec(dtype="bfloat16"), 0.05),
    "int8": (ConvertSpec(dtype="float16", quantize="int8"), 0.09),
}
GAIN = 1.0
SEQUENCE = [int(token) for token in np.random.default_rng(11).integers(3, 259, 150)]
SCHEDULE = [{"a": 64}, {"a": 70}, *[{"a": 1}] * 4, {"a": 12}]
PROMPTS = [SEQUENCE[:3], SEQUENCE[20:65]]
NEW_TOKENS = 20
BUILD = BuildSpec(max_seq_len=256, runtime="openvino")


@dataclass(frozen=True)
class Original:
    """A model, its logits for `SEQUENCE` [150, vocab], and its continuations of `PROMPTS`."""

    folder: Path
    logits: npt.NDArray[np.float32]
    continuations: list[list[int]]


@pytest.fixture(scope="module", params=FAMILIES)
def original(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Original:
    family, overrides = FAMILIES[request.param]
    folder = write_tiny_model(tmp_path_factory.mktemp("family") / "model", family, gain=GAIN, **overrides)
    oracle = Oracle(folder)
    return Original(folder, oracle.logits(SEQUENCE), [oracle.continuation(prompt, NEW_TOKENS) for prompt in PROMPTS])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_logits_are_those_of_transformers(original: Original, precision: str, tmp_path: Path) -> None:
    spec, bound = PRECISIONS[precision]
    engine = engine_of(original.folder, tmp_path, spec, BUILD)
    ours = PagedSteps(PagedModel(engine.path, threads=1), {"a": SEQUENCE}).run(SCHEDULE)["a"]
    difference = np.sqrt(np.square(ours - original.logits).mean()) / original.logits.std()
    assert difference < bound


def test_greedy_tokens_are_those_of_transformers(original: Original, tmp_path: Path) -> None:
    engine = engine_of(original.folder, tmp_path, PRECISIONS["float32"][0], BUILD)
    assert len({token for tokens in original.continuations for token in tokens}) > 10
    requests = [(prompt, NEW_TOKENS) for prompt in PROMPTS]
    assert greedy_tokens(engine.path, requests) == original.continuations
