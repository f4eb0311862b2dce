"""The torch runtime behind a real Triton: the same five models, and the answers of OpenVINO's float32 engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.in_process import InProcess
from tests.support.model_server import ModelServer, serving
from tests.support.release_client import NEWEST
from tests.support.stages import build_engine, make_repository
from trtserve.artifacts import Checkpoint, Engine
from trtserve.specs import BuildSpec, RepositorySpec
from trtserve.specs.command_line import spec_of

pytestmark = [pytest.mark.triton, pytest.mark.needs("torch")]

PROMPTS = ([1, 60, 61, 62], list(range(3, 80)))
TEXT = "What is ML?"
SEED = np.array([[7]], dtype=np.uint64)


@pytest.fixture(scope="module")
def server(
    features_root: Path,
    features_model: Path,
    features_checkpoint: Checkpoint,
    features_engine: Engine,
    features_adapters: dict[str, Path],
) -> Iterator[ModelServer]:
    """A server with every feature of `features_engine`, on PyTorch."""
    assert features_engine.manifest is not None
    spec = replace(spec_of(BuildSpec, features_engine.manifest.facts["built_with"]), runtime="torch", device="cpu")
    engine = build_engine(features_checkpoint, spec, out=features_root / "torch-engine")
    named = RepositorySpec(name="tiny", lora=features_adapters)
    repository = make_repository(engine, features_model, named, out=features_root / "torch")
    with serving(repository.path, features_root / "torch-server") as running:
        yield running


def test_text_equals_openvinos(server: ModelServer, oracle: InProcess, features_tokenizer: Any) -> None:
    expected = oracle.tokens(features_tokenizer.encode(TEXT), 20)
    status, answer = server.generate("tiny", {"text_input": TEXT, "max_tokens": 20})
    text = features_tokenizer.decode(expected, skip_special_tokens=True)
    assert (status, answer["text_output"].removeprefix(TEXT)) == (200, text)
    assert len(set(expected)) > 5


def test_tokens_of_mixed_requests_equal_openvinos(server: ModelServer, oracle: InProcess) -> None:
    sampled: dict[str, Any] = {"top_k": 20, "top_p": 0.9, "temperature": 1.5}
    with server.stream() as stream:
        for prompt in PROMPTS:
            stream.send("tensorrt_llm", NEWEST.core(prompt, 12), "greedy")
            stream.send("tensorrt_llm", {**NEWEST.core(prompt, 12, **sampled), "seed": SEED}, "sampled")
            found: dict[str, list[int]] = {}
            while len(found) < 2:
                answer, _, number = stream.next()
                if answer:
                    found[number] = answer["output_ids"][0, 0, len(prompt) :].tolist()
            assert found == {
                "greedy": oracle.tokens(prompt, 12),
                "sampled": oracle.tokens(prompt, 12, sampling={**sampled, "seed": 7}),
            }


def test_beams_equal_openvinos(server: ModelServer, oracle: InProcess) -> None:
    expected = oracle.result(PROMPTS[0], 8, sampling={"beam_width": 3})
    with server.stream() as stream:
        asked = NEWEST.core(PROMPTS[0], 8, beam_width=3, exclude_input_in_output=True)
        (answer,) = stream.all("tensorrt_llm", asked)
    lengths = answer["sequence_length"][0].tolist()
    found = [row[:length] for row, length in zip(answer["output_ids"][0].tolist(), lengths, strict=True)]
    assert found == expected.output_token_ids
