"""Goldens belong to the script and the weights in this tree; where torch is, they are made again and compared.

A quarter of them are; TRTSERVE_ALL=1 (`make families`) makes all.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tests.golden.make_goldens import MODELS, make, script_hash
from tests.support.families import EVERY
from tests.support.goldens import golden_names, load_golden


def test_every_model_of_the_script_has_a_golden_and_none_is_left_over() -> None:
    assert golden_names() == sorted(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_goldens_carry_the_hashes_of_their_script_and_weights(tmp_path: Path, name: str) -> None:
    golden = load_golden(name)
    assert golden.script_sha256 == script_hash(), "run python -m tests.golden.make_goldens"
    weights = golden.write_model(tmp_path) / "model.safetensors"
    assert hashlib.sha256(weights.read_bytes()).hexdigest() == golden.weights_sha256
    assert all(len(set(case.tokens)) > 5 for case in golden.cases)


@pytest.mark.needs("torch")
@pytest.mark.parametrize("name", list(MODELS) if EVERY else list(MODELS)[::4])
def test_transformers_still_gives_the_goldens(name: str) -> None:
    golden, again = load_golden(name), make(name)
    assert golden.weights_sha256 == again["weights_sha256"]
    for recorded, case in zip(golden.cases, again["cases"], strict=True):
        assert recorded.prompt == case["prompt"]
        assert recorded.tokens == case["tokens"]
        assert recorded.logits == pytest.approx(case["logits"], abs=1e-3)
