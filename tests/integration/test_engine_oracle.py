"""Logits of float32 engines, through convert and build, equal those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.paged_steps import PagedSteps
from tests.support.tiny_models import write_tiny_model
from trtserve.artifacts import Model
from trtserve.build import build_engine
from trtserve.convert import convert_model
from trtserve.executor.paged_model import PagedModel
from trtserve.specs import BuildSpec, ConvertSpec

pytestmark = pytest.mark.oracle

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3, tied, scaled": ("llama3", {}),
    "llama, linear scaling": ("llama_linear", {}),
    "mistral": ("mistral", {}),
    "mistral, window": ("mistral", {"sliding_window": 24}),
    "gpt2": ("gpt2", {}),
}
LENGTHS = {"a": 150, "b": 40}
SCHEDULE = [{"a": 64}, {"a": 70, "b": 33}, *[{"a": 1, "b": 1}] * 4, {"b": 3, "a": 12}]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tp_size", [1, 2])
def test_logits_equal_transformers(name: str, tp_size: int, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    family, overrides = MODELS[name]
    folder = write_tiny_model(tmp_path / "model", family, **overrides)
    checkpoint = convert_model(Model(path=folder), ConvertSpec(dtype="float32", tp_size=tp_size), out=tmp_path / "made")
    engine = build_engine(checkpoint, BuildSpec(), out=tmp_path / "engine")
    random = np.random.default_rng(11)
    sequences = {key: [int(token) for token in random.integers(3, 259, length)] for key, length in LENGTHS.items()}
    ours = PagedSteps(PagedModel(engine.path, threads=1), sequences).run(SCHEDULE)
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    for key, ids in sequences.items():
        with torch.no_grad():
            theirs = oracle(torch.tensor([ids])).logits[0].numpy()
        assert np.ptp(theirs) > 1
        np.testing.assert_allclose(ours[key], theirs, atol=1e-4)
