"""Gemma 3 that sees images: our engine of its text model against the whole model in transformers, and `check`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.paged_steps import PagedSteps
from tests.support.stages import convert_model
from tests.support.tiny_models import read_safetensors, write_safetensors
from tests.support.tiny_vision import Spelling, write_tiny_vision_model
from tests.support.transformers_oracle import Oracle, engine_of, greedy_tokens
from trtserve.artifacts import Model
from trtserve.errors import CheckError
from trtserve.executor.openvino.paged_model import PagedModel
from trtserve.pipeline.parity import check_checkpoint, require_passed
from trtserve.specs import BuildSpec, ConvertSpec

pytestmark = pytest.mark.needs("torch")

SEQUENCE = [int(token) for token in np.random.default_rng(11).integers(3, 259, 150)]
PROMPT = SEQUENCE[20:65]
NEW_TOKENS = 20
SPELLINGS: tuple[Spelling, ...] = ("published", "newer")


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_logits_and_tokens_are_those_of_the_whole_model(spelling: Spelling, tmp_path: Path) -> None:
    folder = write_tiny_vision_model(tmp_path / "model", spelling, gain=1.0, tie_word_embeddings=False)
    oracle = Oracle(folder)
    build = BuildSpec(max_seq_len=256, runtime="openvino")
    engine = engine_of(folder, tmp_path, ConvertSpec(dtype="float32", tp_size=2), build)
    steps = PagedSteps(PagedModel(engine.path, threads=1), {"a": SEQUENCE})
    ours, theirs = steps.run([{"a": 64}, {"a": 86}])["a"], oracle.logits(SEQUENCE)
    assert np.sqrt(np.square(ours - theirs).mean()) / theirs.std() < 1e-5
    expected = oracle.continuation(PROMPT, NEW_TOKENS)
    assert len(set(expected)) > 10
    assert greedy_tokens(engine.path, [(PROMPT, NEW_TOKENS)]) == [expected]


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("convert", [{"dtype": "bfloat16"}, {"dtype": "float16", "quantize": "int8"}])
def test_the_check_compares_the_text_model(spelling: Spelling, convert: Any, tmp_path: Path) -> None:
    folder = write_tiny_vision_model(
        tmp_path / "model", spelling, dtype="bfloat16", gain=1.0, tie_word_embeddings=False
    )
    checkpoint = convert_model(Model(path=folder), ConvertSpec(**convert), out=tmp_path / "checkpoint")
    require_passed(check_checkpoint(checkpoint.path, folder))


def test_the_check_sees_a_fault_of_the_text_model(tmp_path: Path) -> None:
    folder = write_tiny_vision_model(tmp_path / "model", gain=1.0, tie_word_embeddings=False)
    checkpoint = convert_model(Model(path=folder), ConvertSpec(dtype="float32"), out=tmp_path / "checkpoint")
    tensors = dict(read_safetensors(folder / "model.safetensors"))
    name = "language_model.model.layers.1.self_attn.q_norm.weight"
    tensors[name] = tensors[name] + np.float32(1)
    write_safetensors(folder / "model.safetensors", tensors)
    with pytest.raises(CheckError):
        require_passed(check_checkpoint(checkpoint.path, folder))
