"""A model written for TensorRT-LLM's Python bindings, served by `start --bindings` on the embedded executor."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.in_process import InProcess
from tests.support.model_server import ModelServer
from tests.support.release_client import ReleaseClient
from tests.support.servers import running_server
from tests.support.upstream_repositories import write_upstream
from trtserve.artifacts import Engine

pytestmark = pytest.mark.triton

RELEASE = "0.16"
PROGRAM = Path(__file__).parents[1] / "support" / "documented_models" / "core_model.py"
PROMPT = [1, 90, 91, 92]


@pytest.fixture(scope="module")
def repository(features_root: Path, features_engine: Engine, features_model: Path) -> Path:
    """The core model of NVIDIA's layout, with placeholders of optional parameters left, and a program of our own."""
    folder = features_root / "bindings-repository"
    write_upstream(
        folder, RELEASE, engine=features_engine.path, tokenizer=features_model, backend="python", placeholders=True
    )
    for model in folder.iterdir():
        if model.name != "tensorrt_llm":
            shutil.rmtree(model)
    shutil.copyfile(PROGRAM, folder / "tensorrt_llm" / "1" / "model.py")
    return folder


@pytest.fixture(scope="module")
def server(repository: Path, features_root: Path) -> Iterator[ModelServer]:
    with running_server(repository, home=features_root / "bindings-home", bindings=RELEASE) as running:
        yield ModelServer(running.address)


def test_answers_are_those_of_the_executor(server: ModelServer, oracle: InProcess) -> None:
    client = ReleaseClient(RELEASE)
    with server.stream() as stream:
        (whole,) = stream.all("tensorrt_llm", client.core(PROMPT, 8, return_log_probs=True))
        pieces = stream.all("tensorrt_llm", client.core(PROMPT, 8, streaming=True))
    expected = oracle.tokens(PROMPT, 8)
    assert whole["output_ids"].tolist() == [[PROMPT + expected]]
    assert whole["cum_log_probs"].item() < 0
    assert [token for piece in pieces for token in piece["output_ids"].reshape(-1).tolist()] == expected


def test_an_error_of_the_executor_reaches_the_client(server: ModelServer) -> None:
    from tritonclient.utils import InferenceServerException

    tensors = ReleaseClient(RELEASE).core([1, 10**6], 4)
    with pytest.raises(InferenceServerException, match="outside the vocabulary"), server.stream() as stream:
        stream.all("tensorrt_llm", tensors)
