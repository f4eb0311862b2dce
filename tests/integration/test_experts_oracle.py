"""Families with experts, through convert, build and execute, against transformers.

A token whose router hesitates between two experts goes to the other one when numbers are rounded, and its logits then
differ by much. So narrow engines are judged by the median token, and by how many tokens are far off.
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

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {}),
    "mixtral, window": ("mixtral", {"sliding_window": 24}),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen2_moe, windows, renormalised": ("qwen2_moe", {"use_sliding_window": True, "norm_topk_prob": True}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe, not renormalised": ("qwen3_moe", {"norm_topk_prob": False}),
}
EXACT = ConvertSpec(dtype="float32", tp_size=4, moe_ep_size=2)
# Root mean square of a token's difference as a share of the standard deviation of the logits: that of the median
# token, and how many tokens may have more than `FAR`.
NARROW: dict[str, tuple[ConvertSpec, float, float]] = {
    "float16": (ConvertSpec(dtype="float16"), 0.025, 0.05),
    "bfloat16": (ConvertSpec(dtype="bfloat16"), 0.025, 0.05),
    "int8": (ConvertSpec(dtype="float16", quantize="int8"), 0.06, 0.1),
}
FAR = 0.2
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
    folder = write_tiny_model(tmp_path_factory.mktemp("family") / "model", family, gain=1.0, **overrides)
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


def differences(original: Original, engine: Engine) -> npt.NDArray[np.float32]:
    """Root mean square of each token's difference, as a share of the standard deviation of all logits."""
    ours = PagedSteps(PagedModel(engine.path, threads=1), {"a": SEQUENCE}).run(SCHEDULE)["a"]
    shares: npt.NDArray[np.float32] = np.sqrt(np.square(ours - original.logits).mean(axis=-1)) / original.logits.std()
    return shares


def test_float32_is_transformers(original: Original, tmp_path: Path) -> None:
    engine = make_engine(original, EXACT, tmp_path)
    assert differences(original, engine).max() < 1e-5
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


@pytest.mark.parametrize("precision", NARROW)
def test_narrow_engines_stay_within_bounds(original: Original, precision: str, tmp_path: Path) -> None:
    spec, median, far = NARROW[precision]
    shares = differences(original, make_engine(original, spec, tmp_path))
    assert np.median(shares) < median
    assert (shares > FAR).mean() < far
