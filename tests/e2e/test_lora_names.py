"""Adapters by name, and NVIDIA's multi-LoRA example: requests with and without adapters in one batch."""

from __future__ import annotations

import itertools
import json
import runpy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.gateways import running_gateway
from tests.support.model_server import ModelServer, Tensors, flags, floats, integers, serving, texts
from tests.support.peft_adapters import write_adapter
from tests.support.stages import convert_adapter, make_repository
from tests.support.text_requests import answers, ask, is_idle, request, text_of
from tests.support.waiting import wait_until
from trtserve.artifacts import Engine
from trtserve.specs import RepositorySpec

pytestmark = pytest.mark.triton

NAME = "tiny"
ADAPTERS = ("", "left", "right")
PROMPT = "What is machine learning?"
QUESTIONS = ("What is the capital of the USA? \\n answer:", "美国的首都在哪里? \\n答案:")


def text(server: ModelServer, adapter: str, prompt: str = PROMPT, **options: Any) -> str:
    return text_of(ask(server, NAME, prompt, 12, lora_name=adapter, exclude_input_in_output=True, **options))


def adapter_tensors(folder: Path, number: int) -> Tensors:
    """Return what NVIDIA's client sends for `--lora-path FOLDER --lora-task-id NUMBER`."""
    return {
        "lora_task_id": np.array([[number]], dtype=np.uint64),
        "lora_weights": np.load(folder / "model.lora_weights.npy"),
        "lora_config": np.load(folder / "model.lora_config.npy"),
    }


def test_an_adapter_name_means_its_tensors(features: ModelServer, features_adapters: dict[str, Path]) -> None:
    named = {name: text(features, name) for name in ADAPTERS}
    assert len(set(named.values())) == 3
    assert named[""] == text_of(ask(features, NAME, PROMPT, 12, exclude_input_in_output=True))
    for number, (name, folder) in enumerate(features_adapters.items()):
        tensors = adapter_tensors(folder, 100 + number)
        assert text_of(ask(features, NAME, PROMPT, 12, exclude_input_in_output=True, **tensors)) == named[name]
        later = {"lora_task_id": tensors["lora_task_id"]}
        assert text_of(ask(features, NAME, PROMPT, 12, exclude_input_in_output=True, **later)) == named[name]


def test_names_work_in_the_ensemble_too(features: ModelServer) -> None:
    for name in ADAPTERS:
        asked = request(PROMPT, 12, lora_name=name, exclude_input_in_output=True)
        (answer,) = answers(features, "ensemble", asked)
        assert text_of(answer) == text(features, name)


def test_streamed_and_batched(features: ModelServer) -> None:
    pieces = answers(features, NAME, request(PROMPT, 12, lora_name="left", stream=True))
    assert "".join(map(text_of, pieces)) == text(features, "left")
    tensors = {
        "text_input": texts(PROMPT, "another prompt"),
        "max_tokens": integers(12, 12),
        "lora_name": texts("right", "right"),
        "exclude_input_in_output": flags(True, True),
    }
    found = {answer["batch_index"].item(): text_of(answer) for answer in answers(features, NAME, tensors)}
    assert found == {0: text(features, "right"), 1: text(features, "right", "another prompt")}


@pytest.mark.parametrize("model", [NAME, "ensemble"])
def test_an_unknown_name_is_answered_with_the_names(features: ModelServer, model: str) -> None:
    status, answer = features.generate(model, {"text_input": PROMPT, "max_tokens": 4, "lora_name": "nobody"})
    assert status >= 400
    assert "lora_name is 'nobody'" in answer["error"]
    assert "left, right" in answer["error"]


def test_the_example_asks_with_each_adapter(features: ModelServer, capsys: pytest.CaptureFixture[str]) -> None:
    example = Path(__file__).parents[2] / "examples" / "lora_by_name.py"
    runpy.run_path(str(example))["main"](f"127.0.0.1:{features.address.grpc_port}", "left", "right")
    printed = capsys.readouterr().out
    for name in ADAPTERS[1:]:
        assert f"{name}: {text(features, name).lstrip(' ')}\n" in printed


def test_name_and_id_together_are_refused(features: ModelServer) -> None:
    body = {"text_input": PROMPT, "max_tokens": 4, "lora_name": "left", "lora_task_id": 7}
    status, answer = features.generate(NAME, body)
    assert status >= 400
    assert "lora_name and lora_task_id" in answer["error"]


def core_request(ids: list[int], adapter: Tensors) -> Tensors:
    """A line of the seed's loop: `--top-k 0 --top-p 0.5 --request-output-len 10 --text … --lora-path …`."""
    return {
        "input_ids": np.array([ids], dtype=np.int32),
        "input_lengths": integers(len(ids)),
        "request_output_len": integers(10),
        "runtime_top_k": integers(0),
        "runtime_top_p": floats(0.5),
        "streaming": flags(False),
        "end_id": integers(2),
        "pad_id": integers(2),
        **adapter,
    }


def test_several_adapters_and_none_in_one_batch(
    features: ModelServer, features_tokenizer: Any, features_adapters: dict[str, Path]
) -> None:
    """The multi-LoRA example of the backend's README: six requests at once, two prompts × (none, one, the other)."""
    adapters = [{}, *(adapter_tensors(folder, 7 + index) for index, folder in enumerate(features_adapters.values()))]
    asked = [
        core_request(features_tokenizer.encode(prompt), adapter)
        for prompt, adapter in itertools.product(QUESTIONS, adapters)
    ]

    def output(tensors: Tensors) -> list[int]:
        (answer,) = answers(features, "tensorrt_llm", tensors)
        ids: list[int] = answer["output_ids"].reshape(-1).tolist()
        return ids

    alone = [output(tensors) for tensors in asked]
    assert len({tuple(ids) for ids in alone}) == 6
    with ThreadPoolExecutor(6) as pool:
        for _ in range(3):
            assert list(pool.map(output, asked)) == alone
    wait_until(lambda: is_idle(features))


MANY = [f"adapter-{number}" for number in range(6)]


@pytest.fixture(scope="module")
def crowded(features_root: Path, features_model: Path, features_engine: Engine) -> Iterator[ModelServer]:
    """Six adapters, a cache for five of them (14 336 bytes each), and four requests at once."""
    modules = {"self_attn.q_proj": (64, 64), "self_attn.v_proj": (64, 32)}
    folders = {}
    for seed, name in enumerate(MANY):
        source = write_adapter(features_root / "many" / name, modules=modules, rank=8, seed=20 + seed)
        folders[name] = convert_adapter(str(source), out=features_root / "many-converted" / name).path
    settings = {"lora_cache_optimal_adapter_size": "8", "lora_cache_max_adapter_size": "8"}
    settings |= {"lora_cache_host_memory_bytes": "75000"}
    spec = RepositorySpec(name=NAME, lora=folders, settings=settings)
    repository = make_repository(features_engine, features_model, spec, out=features_root / "crowded")
    with serving(repository.path, features_root / "crowded-server") as server:
        yield server


def test_adapters_that_were_evicted_are_sent_again(crowded: ModelServer) -> None:
    first = [text(crowded, name) for name in MANY]
    assert len(set(first)) == len(MANY)
    assert [text(crowded, name) for name in MANY] == first
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda name: text(crowded, name), MANY * 3)) == first * 3


def test_an_id_alone_is_not_found_once_it_was_evicted(crowded: ModelServer, features_adapters: dict[str, Path]) -> None:
    """Clients of the core model must send the tensors again, as with TensorRT-LLM; the error says so."""
    from tritonclient.utils import InferenceServerException

    tensors = adapter_tensors(features_adapters["left"], 77)
    asked = core_request([1, 60, 61], {})
    (first,) = answers(crowded, "tensorrt_llm", asked | tensors)
    alone = asked | {"lora_task_id": tensors["lora_task_id"]}
    (again,) = answers(crowded, "tensorrt_llm", alone)
    assert again["output_ids"].tolist() == first["output_ids"].tolist()
    for name in MANY:
        text(crowded, name)
    with pytest.raises(InferenceServerException, match="not found in cache"):
        answers(crowded, "tensorrt_llm", alone)
    (sent_again,) = answers(crowded, "tensorrt_llm", asked | tensors)
    assert sent_again["output_ids"].tolist() == first["output_ids"].tolist()


def test_an_adapter_is_loaded_and_unloaded_by_a_call(
    features: ModelServer, features_root: Path, features_adapters: dict[str, Path], tmp_path: Path
) -> None:
    keys = {name: tmp_path / name for name in ("key", "admin")}
    for name, file in keys.items():
        file.write_text(f"{name}-0123456789abcdef\n")
        file.chmod(0o600)
    repository = features_root / "repository"
    address, before = features.address, text(features, "left")
    settings: dict[str, Any] = {
        "own": False,
        "model": "",
        "repository": repository,
        "key_file": keys["key"],
        "admin_key_file": keys["admin"],
        "request_log": tmp_path / "requests.jsonl",
    }
    with running_gateway(tmp_path, address.http_port, grpc_port=address.grpc_port, **settings) as gateway:

        def call(path: str, key: str = "admin", **body: Any) -> tuple[int, str]:
            headers = {"Authorization": f"Bearer {key}-0123456789abcdef", "Content-Type": "application/json"}
            with gateway.connected() as connection:
                connection.request("POST", path, json.dumps(body), headers)
                answer = connection.getresponse()
                return answer.status, answer.read().decode()

        folder = str(features_adapters["left"])
        for key in ("key", "nobody"):
            assert call("/v1/load_lora_adapter", key, lora_name="later", lora_path=folder)[0] == 401
        for nowhere in ("/nowhere", "/" + "x" * 300, "~nobody-here/x", "/a\0b"):
            status, answer = call("/v1/load_lora_adapter", lora_name="later", lora_path=nowhere)
            assert (status, "There is no folder" in answer) == (404, True), answer
        for taken in ("tensorrt_llm", "ensemble"):
            status, answer = call("/v1/load_lora_adapter", lora_name=taken, lora_path=folder)
            assert (status, "is taken on this server" in answer) == (400, True), answer
        assert call("/v1/load_lora_adapter", lora_name="later", lora_path=folder)[0] == 200
        try:
            asked: dict[str, Any] = {"model": "later", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
            status, answer = call("/v1/completions", "key", **asked)
            assert (status, json.loads(answer)["choices"][0]["text"]) == (200, before)
            log = tmp_path / "requests.jsonl"
            wait_until(lambda: "/v1/completions" in log.read_text())
            (line,) = (each for each in map(json.loads, log.read_text().splitlines()) if "completion_tokens" in each)
            assert line["adapter"] == "later"
            assert line["completion_tokens"] == json.loads(answer)["usage"]["completion_tokens"] > 0
            assert line.keys().isdisjoint({"request", "answers"})
            assert text(features, "later") == before  # over gRPC, by a model that has run all the time
            status, answer = call("/v1/load_lora_adapter", lora_name="later", lora_path=folder)
            assert (status, "is taken on this server" in answer) == (400, True)
        finally:
            assert call("/v1/unload_lora_adapter", lora_name="later")[0] == 200
        assert call("/v1/completions", "key", **asked)[0] == 404
        assert call("/v1/unload_lora_adapter", lora_name="later")[0] == 404
