"""Families with experts, through convert, build and execute, against transformers.

A token whose router hesitates between two experts goes to the other one when numbers are rounded, and its logits then
differ by much. So narrow engines are judged by the median token, and by how many tokens are far off.
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
from trtserve.artifacts import Engine
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
    folder = write_tiny_model(tmp_path_factory.mktemp("family") / "model", family, gain=1.0, **overrides)
    oracle = Oracle(folder)
    return Original(folder, oracle.logits(SEQUENCE), [oracle.continuation(prompt, NEW_TOKENS) for prompt in PROMPTS])


def differences(original: Original, engine: Engine) -> npt.NDArray[np.float32]:
    """Root mean square of each token's difference, as a share of the standard deviation of all logits."""
    ours = PagedSteps(PagedModel(engine.path, threads=1), {"a": SEQUENCE}).run(SCHEDULE)["a"]
    shares: npt.NDArray[np.float32] = np.sqrt(np.square(ours - original.logits).mean(axis=-1)) / original.logits.std()
    return shares


def test_float32_is_transformers(original: Original, tmp_path: Path) -> None:
    engine = engine_of(original.folder, tmp_path, EXACT, BUILD)
    assert differences(original, engine).max() < 1e-5
    assert len({token for tokens in original.continuations for token in tokens}) > 10
    requests = [(prompt, NEW_TOKENS) for prompt in PROMPTS]
    assert greedy_tokens(engine.path, requests) == original.continuations


@pytest.mark.parametrize("precision", NARROW)
def test_narrow_engines_stay_within_bounds(original: Original, precision: str, tmp_path: Path) -> None:
    spec, median, far = NARROW[precision]
    shares = differences(original, engine_of(original.folder, tmp_path, spec, BUILD))
    assert np.median(shares) < median
    assert (shares > FAR).mean() < far
