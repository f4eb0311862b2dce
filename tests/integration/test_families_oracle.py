"""Families through convert, build and execute, against transformers: tokens in float32, logits in every precision.

The bounds are those of the root mean square of the difference, as a share of the standard deviation of the logits.
They hold for random models of `GAIN`; a swapped or missing part of a model makes that share 0.5 and more.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.paged_steps import PagedSteps
from tests.support.tiny_models import write_tiny_model
from trtserve.artifacts import Engine, Model
from trtserve.build import build_engine
from trtserve.convert import convert_model
from trtserve.executor import api
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


@dataclass(frozen=True)
class Original:
    """A model, its logits for `SEQUENCE` [150, vocab], and its continuations of `PROMPTS`."""

    folder: Path
    logits: npt.NDArray[np.float32]
    continuations: list[list[int]]


@pytest.fixture(scope="module", params=FAMILIES)
def original(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Original:
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    family, overrides = FAMILIES[request.param]
    folder = write_tiny_model(tmp_path_factory.mktemp("family") / "model", family, gain=GAIN, **overrides)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()

    def logits(tokens: list[int]) -> npt.NDArray[np.float32]:
        with torch.inference_mode():
            values: npt.NDArray[np.float32] = model(torch.tensor([tokens]), use_cache=False).logits[0].numpy()
        return values

    continuations = []
    for prompt in PROMPTS:
        tokens = list(prompt)
        for _ in range(NEW_TOKENS):
            tokens.append(int(logits(tokens)[-1].argmax()))
        continuations.append(tokens[len(prompt) :])
    return Original(folder, logits(SEQUENCE), continuations)


def make_engine(original: Original, spec: ConvertSpec, folder: Path) -> Engine:
    checkpoint = convert_model(Model(path=original.folder), spec, out=folder / "checkpoint")
    return build_engine(checkpoint, BuildSpec(max_seq_len=256, runtime="openvino"), out=folder / "engine")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_logits_are_those_of_transformers(original: Original, precision: str, tmp_path: Path) -> None:
    spec, bound = PRECISIONS[precision]
    engine = make_engine(original, spec, tmp_path)
    ours = PagedSteps(PagedModel(engine.path, threads=1), {"a": SEQUENCE}).run(SCHEDULE)["a"]
    difference = np.sqrt(np.square(ours - original.logits).mean()) / original.logits.std()
    assert difference < bound


def test_greedy_tokens_are_those_of_transformers(original: Original, tmp_path: Path) -> None:
    engine = make_engine(original, PRECISIONS["float32"][0], tmp_path)
    requests = [
        api.Request(prompt, NEW_TOKENS, output_config=api.OutputConfig(exclude_input_from_output=True))
        for prompt in PROMPTS
    ]
    with api.Executor(engine.path, api.ModelType.DECODER_ONLY, api.ExecutorConfig()) as executor:
        answers = []
        for number in executor.enqueue_requests(requests):
            (last,) = executor.await_responses(number, timedelta(seconds=60))
            assert isinstance(last, api.Response)
            answers.append(list(last.result.output_token_ids[0]))
    assert len({token for tokens in original.continuations for token in tokens}) > 10
    assert answers == original.continuations
