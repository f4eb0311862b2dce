"""LongRoPE against transformers: sequences beyond the original positions have their own rotation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.paged_steps import PagedSteps
from tests.support.tiny_models import write_tiny_model
from tests.support.transformers_oracle import ENGINES, Oracle, engine_of, greedy_tokens
from trtserve.executor.engine.limits import EngineOptions
from trtserve.executor.loaders import load_model
from trtserve.executor.openvino.paged_model import PagedModel
from trtserve.specs import BuildSpec, ConvertSpec

pytestmark = pytest.mark.needs("torch")

LENGTHS = {"a": 150, "b": 40}
SCHEDULE = [{"a": 64}, {"a": 70, "b": 33}, *[{"a": 1, "b": 1}] * 4, {"b": 3, "a": 12}]
SEQUENCES = {
    key: [int(token) for token in np.random.default_rng(11 + length).integers(3, 259, length)]
    for key, length in LENGTHS.items()
}


@pytest.mark.parametrize("runtime", ENGINES)
def test_long_sequences_have_their_own_rotation(runtime: str, tmp_path: Path) -> None:
    """One sequence beyond the original positions and one within them, mixed in steps."""
    folder = write_tiny_model(tmp_path / "model", "phi3_long", partial_rotary_factor=1.0)
    build = BuildSpec(max_seq_len=256, **ENGINES[runtime])
    engine = engine_of(folder, tmp_path, ConvertSpec(dtype="float32"), build)
    model: Any = load_model(engine.path, EngineOptions())
    assert model.long_rope_beyond == 64
    steps = PagedSteps(model, SEQUENCES)
    parts: dict[str, list[npt.NDArray[np.float32]]] = {key: [] for key in SEQUENCES}
    for new in SCHEDULE:
        flags = np.array([len(SEQUENCES[key]) > 64 for key in new])
        for key, logits in steps.step(new, long_sequences=flags).items():
            parts[key].append(logits)
    oracle = Oracle(folder)
    expected = {key: oracle.logits(ids) for key, ids in SEQUENCES.items()}
    for key, theirs in expected.items():
        np.testing.assert_allclose(np.concatenate(parts[key]), theirs, atol=2e-4)
    short = PagedSteps(model, {"a": SEQUENCES["a"]}).run([{"a": 150}])["a"]
    assert float(np.abs(short - expected["a"]).max()) > 0.1


def test_an_engine_for_original_positions_needs_no_flags(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", "phi3_long")
    engine = engine_of(folder, tmp_path, ConvertSpec(dtype="float32"), BuildSpec(max_seq_len=64)).path
    model = PagedModel(engine, threads=1)
    assert model.long_rope_beyond is None
    ours = PagedSteps(model, {"b": SEQUENCES["b"]}).run([{"b": 30}, {"b": 10}])["b"]
    np.testing.assert_allclose(ours, Oracle(folder).logits(SEQUENCES["b"]), atol=2e-4)


@pytest.mark.parametrize("runtime", ENGINES)
@pytest.mark.parametrize("chunked", [True, False])
def test_requests_are_rotated_by_their_length(runtime: str, chunked: bool, tmp_path: Path) -> None:
    """Greedy tokens of requests with a long prompt, a short one, and one that becomes long, mixed in a batch."""
    folder = write_tiny_model(tmp_path / "model", "phi3_long", seed=5)
    build = BuildSpec(max_num_tokens=160, max_seq_len=256, **ENGINES[runtime])
    engine = engine_of(folder, tmp_path, ConvertSpec(dtype="float32"), build).path
    requests = [(SEQUENCES[key], count) for key, count in (("a", 10), ("b", 20), ("b", 40), ("b", 25))]
    answers = greedy_tokens(engine, requests, enable_chunked_context=chunked, max_num_tokens=50 if chunked else None)
    oracle = Oracle(folder)
    assert answers == [oracle.continuation(prompt, count) for prompt, count in requests]
