"""The vllm runtime from import to answers, behind a real Triton server, with a vLLM that counts."""

from __future__ import annotations

import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.counting_vllm import counting_python
from tests.support.peft_adapters import write_adapter
from tests.support.servers import running_server
from tests.support.waiting import wait_until
from trtserve.artifacts import Engine, ModelRepository
from trtserve.errors import RepositoryError, UnsupportedModelError, UsageError
from trtserve.executor.vllm.installation import VARIABLE
from trtserve.pipeline.import_spec import resolve_import
from trtserve.pipeline.importing import import_to_repository
from trtserve.process import tree
from trtserve.repository.assembling import plan_repository
from trtserve.repository.check import check_repository
from trtserve.server.state import Server
from trtserve.specs import BuildSpec, ConvertSpec, RepositorySpec
from trtserve.store import Store

pytestmark = pytest.mark.triton

NAME = "counting"


def imported(home: Path, **options: Any) -> ModelRepository:
    build = BuildSpec(runtime="vllm", max_seq_len=64, max_batch_size=4)
    convert = options.pop("convert", ConvertSpec())
    repository = RepositorySpec(vllm_python=str(counting_python(home / "vllm")), **options)
    spec = resolve_import("demo", name=NAME, convert=convert, build=build, repository=repository, store=Store(home))
    return import_to_repository(spec, store=Store(home))


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> ModelRepository:
    home = tmp_path_factory.mktemp("home")
    adapter = write_adapter(home / "adapter", modules={"self_attn.q_proj": (256, 256)}, target_modules=["q_proj"])
    return imported(home, lora={"poet": adapter}, settings={"block_size": "32"})


@pytest.fixture(scope="module")
def server(repository: ModelRepository, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("server")
    with pytest.MonkeyPatch.context() as patched:
        # Relative to the folder of `start`; the models have another one.
        patched.setenv(VARIABLE, os.path.relpath(counting_python(home / "vllm")))
        with running_server(repository.path, home=home, name=NAME, gateway=True) as running:
            yield running


def ask(port: int, path: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
    """The status and the body of an answer; status 0 when nothing listens."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
    except OSError:
        return 0, b""


def post(server: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    return dict(json.loads(ask(server.address.http_port, path, body)[1]))


def completion(server: Server, *prompt: int, **options: Any) -> dict[str, Any]:
    body = {"model": NAME, "prompt": list(prompt), "max_tokens": 4, "temperature": 0, **options}
    answer = post(server, "/v1/completions", body)
    assert "choices" in answer, answer
    return answer


def tokens(server: Server, *prompt: int, **options: Any) -> list[int]:
    """Return what the core model generates."""
    inputs = {"input_ids": list(prompt), "input_lengths": len(prompt), "request_output_len": 4, "end_id": 99}
    answer = post(server, "/v2/models/tensorrt_llm/generate", {**inputs, "exclude_input_in_output": True, **options})
    assert "output_ids" in answer, answer
    ids = answer["output_ids"]
    return [ids] if isinstance(ids, int) else ids


def test_the_repository_is_an_engines(repository: ModelRepository) -> None:
    engine = repository.path / "tensorrt_llm" / "1"
    content = json.loads((engine / "config.json").read_text())
    assert content["trtserve"]["vllm"] == "0.32.0+cpu"
    assert content["trtserve"]["engine_arguments"] == {"block_size": 32}
    assert (engine / "model" / "config.json").is_file()
    assert (engine / "lora" / "poet" / "adapter_model.safetensors").is_file()
    assert check_repository(repository).findings == ()


def test_its_core_model_is_no_engine_for_repo(repository: ModelRepository) -> None:
    engine, tokenizer = repository.path / "tensorrt_llm" / "1", repository.path / "preprocessing" / "1" / "tokenizer"
    with pytest.raises(UsageError, match="holds no engine, but a Hugging Face model for the vllm runtime"):
        plan_repository(Engine(path=engine), tokenizer, RepositorySpec(name="other"))


def test_the_core_model_answers(server: Server) -> None:
    assert tokens(server, 10, 11) == [12, 13, 14, 15]
    assert tokens(server, 97) == [98]  # the end token is not in the answer


def test_openais_api_has_top_logprobs_without_logits(server: Server) -> None:
    (choice,) = completion(server, 10, 11, logprobs=2)["choices"]
    assert choice["logprobs"]["token_logprobs"] == [-0.5] * 4
    assert [sorted(each.values()) for each in choice["logprobs"]["top_logprobs"]] == [[-1.5, -0.5]] * 4
    assert choice["finish_reason"] == "length"


def test_openais_api_echoes_a_prompt_with_log_probabilities(server: Server) -> None:
    (choice,) = completion(server, 10, 11, 12, logprobs=2, echo=True)["choices"]
    assert choice["logprobs"]["token_logprobs"] == [None] + [-0.5] * 6
    assert [each and sorted(each.values()) for each in choice["logprobs"]["top_logprobs"]] == [None] + [
        [-1.5, -0.5]
    ] * 6
    (choice,) = completion(server, 10, 11, 12, logprobs=0, echo=True)["choices"]
    assert choice["logprobs"]["token_logprobs"] == [None] + [-0.5] * 6


def test_an_adapter_by_name(server: Server) -> None:
    plain = completion(server, 10)["choices"][0]["text"]
    assert completion(server, 10, model="poet")["choices"][0]["text"] != plain
    known = json.loads((Path(server.repository) / "lora.json").read_text())["adapters"]["poet"]["task_id"]
    assert tokens(server, 10, lora_task_id=known) == [20, 30, 40, 50]


def test_refusals_name_the_runtimes_that_can(server: Server) -> None:
    asked = {"text_input": "What is ML?", "max_tokens": 4, "beam_width": 2}
    answer = post(server, f"/v2/models/{NAME}/generate", asked)
    assert "beam_width is not supported by the vllm runtime; the openvino, torch" in answer["error"]


def test_metrics_and_a_dead_engine_that_is_not_ready(server: Server) -> None:
    text = ask(server.address.metrics_port, "/metrics")[1].decode()
    assert 'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="tensorrt_llm",version="1"} 8' in text
    (side,) = [each for each in tree(server.instances[0].process) if b"engine_side" in cmdline(each.pid)]
    os.kill(side.pid, signal.SIGKILL)
    wait_until(lambda: ask(server.address.http_port, "/v2/health/ready")[0] == 503)


def cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_an_import_refuses_what_this_vllm_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="--set max_modle_len: neither a parameter"):
        imported(tmp_path, settings={"max_modle_len": "9"})
    with pytest.raises(UsageError, match="--use-parallel-embedding has no meaning with --runtime vllm"):
        imported(tmp_path, convert=ConvertSpec(use_parallel_embedding=True))
    with pytest.raises(RepositoryError, match=r"adapter_config.json has no target_modules"):
        imported(tmp_path, lora={"poet": write_adapter(tmp_path / "bare", modules={"self_attn.q_proj": (256, 256)})})
    names = property(lambda _: frozenset({"OtherForCausalLM"}))
    monkeypatch.setattr("trtserve.executor.vllm.installation.VllmInstallation.architectures", names)
    with pytest.raises(UnsupportedModelError, match="has no implementation of LlamaForCausalLM"):
        imported(tmp_path)
