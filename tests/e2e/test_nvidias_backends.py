"""Repositories of TensorRT-LLM engines in a real Triton: the C++ backend and the bindings are strict stand-ins."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine_folders import write_engine
from tests.support.model_server import ModelServer, flags, integers, serving, texts
from tests.support.stages import make_repository
from tests.support.tiny_models import write_tiny_model
from trtserve.server.triton.installation import find_triton, prepare_backends
from trtserve.specs import RepositorySpec

pytestmark = pytest.mark.triton

STAND_INS = Path(__file__).parents[1] / "support" / "stand_ins"
PROMPT = "What is machine learning?"
BODY = {"text_input": PROMPT, "max_tokens": 6, "bad_words": "", "stop_words": "", "pad_id": 2, "end_id": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("hf") / "model")


@pytest.fixture(scope="module")
def expected(model: Path) -> Any:
    """Text of the prompt and the tokens that count on from its last one."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(model))

    def text(count: int) -> str:
        ids = tokenizer.encode(PROMPT)
        ids += [(ids[-1] + number) % 320 for number in range(1, count + 1)]
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    return text


def repository(root: Path, model: Path, **changes: Any) -> Path:
    """Two models in one repository, moved after it was made."""
    engine = write_engine(root / "engine", version="0.19.0", build={"max_batch_size": 2})
    spec = RepositorySpec(name="tiny", **changes)
    made = make_repository(engine, model, spec, out=root / "made")
    other = RepositorySpec(name="other", suffix="_b", **changes)
    make_repository(engine, model, other, into=made.path)
    return made.path.rename(root / "moved")


@pytest.fixture(scope="module", params=["tensorrtllm", "python"])
def server(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ModelServer]:
    root = tmp_path_factory.mktemp(request.param)
    path = repository(root, model, triton_backend=request.param)
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "python":
            patch.setenv("TRTSERVE_STAND_IN_RELEASE", "0.19.0")
            for core in ("tensorrt_llm", "tensorrt_llm_b"):  # the stub looks for modules in the folder of its model
                for package in ("tensorrt_llm", "torch"):
                    shutil.copytree(STAND_INS / package, path / core / "1" / package)
        with serving(path, root / "server", backends=with_backend(root)) as ready:
            yield ready


def with_backend(root: Path) -> Path:
    """Return a folder of backends with the stand-in next to the real python backend."""
    from trtserve.store import Store

    folder = prepare_backends(find_triton(), Store(root / "server" / "home"))
    shutil.copytree(STAND_INS / "tensorrtllm_backend", folder / "tensorrtllm")
    return folder


@pytest.mark.parametrize("name", ["ensemble", "tensorrt_llm_bls", "tiny", "ensemble_b", "other"])
def test_the_guides_request_bodies(server: ModelServer, name: str, expected: Any) -> None:
    status, answer = server.generate(name, BODY)
    assert (status, answer["text_output"]) == (200, expected(6))


@pytest.mark.parametrize("name", ["ensemble", "tiny", "other"])
def test_streams(server: ModelServer, name: str, expected: Any) -> None:
    events = server.generate_stream(name, {**BODY, "stream": True})
    assert PROMPT + "".join(str(event["text_output"]) for event in events) == expected(6)
    assert len(events) > 1


def test_many_streams_at_once(server: ModelServer, expected: Any) -> None:
    def ask(count: int) -> str:
        events = server.generate_stream("tiny", {**BODY, "max_tokens": count, "stream": True})
        return PROMPT + "".join(str(event["text_output"]) for event in events)

    counts = [8 + number % 9 for number in range(40)]
    with ThreadPoolExecutor(10) as pool:
        assert list(pool.map(ask, counts)) == [expected(count) for count in counts]


def test_stop_words_end_the_core_request(server: ModelServer, expected: Any) -> None:
    word = expected(4)[-2:]
    status, answer = server.generate("tiny", {**BODY, "max_tokens": 200, "stop_words": [word]})
    assert status == 200
    assert answer["text_output"].endswith(word)
    events = server.generate_stream("tiny", {**BODY, "max_tokens": 20_000, "stream": True, "stop_words": [word]})
    assert "".join(str(event["text_output"]) for event in events).endswith(word)


def test_a_disconnected_client_stops_its_request(server: ModelServer) -> None:
    """Each process of the BLS model serves one stream: more of them would wait for 40 s otherwise."""
    tensors = {"text_input": texts(PROMPT), "max_tokens": integers(20_000), "stream": flags(True)}
    for _ in range(4):
        with server.stream() as stream:
            stream.send("tiny", tensors)
            assert stream.next()[0]["text_output"].size == 1
    assert server.generate("tiny", BODY)[0] == 200
