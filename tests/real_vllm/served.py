"""vLLM itself on a CPU behind the five models of a real Triton server: `make test-vllm`, not a part of CI.

$TRTSERVE_VLLM_PYTHON is its interpreter. One server starts for all tests, which takes a minute.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.support.model_server import ModelServer
from tests.support.peft_adapters import write_adapter
from tests.support.release_client import NEWEST
from tests.support.servers import running_server
from tests.support.waiting import wait_until
from trtserve.host.machine import SHARED_MEMORY
from trtserve.pipeline.import_spec import resolve_import
from trtserve.pipeline.importing import import_to_repository
from trtserve.process import tree
from trtserve.server.state import Server
from trtserve.specs import BuildSpec, ConvertSpec, RepositorySpec
from trtserve.store import Store

pytestmark = pytest.mark.triton

NAME = "real"
PROMPTS = ([1, 60, 61, 62], [1, 300, 301, 302, 303], list(range(3, 80)), [5])
COUNT = 24
# vLLM's settings that save time where nothing is measured.
ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1"}
SETTINGS = {"enforce_eager": "true", "block_size": "32"}
ORACLE = """
import json, sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
for prompt in json.loads(sys.argv[2]):
    ids = model.generate(torch.tensor([prompt]), max_new_tokens=int(sys.argv[3]), do_sample=False, eos_token_id=2)
    print(json.dumps(ids[0, len(prompt):].tolist()))
"""
ECHO = (
    ORACLE.split("for prompt", maxsplit=1)[0]
    + """
ids = torch.tensor([json.loads(sys.argv[2])])
rows = model(ids).logits[0].log_softmax(-1)
print(json.dumps(rows[range(ids.shape[1] - 1), ids[0, 1:]].tolist()))
"""
)
ROWS = (
    ORACLE.split("for prompt", maxsplit=1)[0]
    + """
print(json.dumps(model.get_input_embeddings().weight[json.loads(sys.argv[2])].tolist()))
"""
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    os.environ.update(ENVIRONMENT)
    home = tmp_path_factory.mktemp("home")
    modules = {"self_attn.o_proj": (256, 256), "self_attn.q_proj": (256, 256)}
    names: dict[str, Any] = {"target_modules": ["o_proj", "q_proj"], "lora_alpha": 64}
    adapter = write_adapter(home / "adapter", modules=modules, layers=4, rank=8, **names)
    spec = resolve_import(
        "demo",
        name=NAME,
        convert=ConvertSpec(dtype="float32"),
        build=BuildSpec(runtime="vllm", max_seq_len=512, max_lora_rank=8, max_prompt_embedding_table_size=4),
        repository=RepositorySpec(lora={"poet": adapter}, settings=SETTINGS, enable_kv_cache_reuse=True),
        store=Store(home),
    )
    repository = import_to_repository(spec, store=Store(home))
    with running_server(repository.path, home=home, name=NAME, gateway=True, ready_timeout=300) as running:
        made = shared_memory_and_sockets(running)
        assert {each.parent for each in made} == {SHARED_MEMORY, Path(tempfile.gettempdir())}
        yield running
    wait_until(lambda: not any(each.exists() for each in made))


def shared_memory_and_sockets(server: Server) -> set[Path]:
    """Return the shared memory that vLLM's processes have, and the folder of their sockets."""
    found = set[Path]()
    for process in tree(server.instances[0].process):
        maps, own = (Path(f"/proc/{process.pid}/{name}").read_text(errors="replace") for name in ("maps", "environ"))
        found |= {Path(word) for word in maps.split() if word.startswith(f"{SHARED_MEMORY}/psm_")}
        found |= {Path(each.partition("=")[2]) for each in own.split("\0") if each.startswith("VLLM_RPC_BASE_PATH=")}
    return found


@pytest.fixture
def models(server: Server) -> ModelServer:
    return ModelServer(server.address)


def generated(answers: list[dict[str, Any]]) -> list[int]:
    return [int(token) for answer in answers for token in answer["output_ids"].reshape(-1)]


def core(models: ModelServer, prompt: list[int], count: int = COUNT, **options: Any) -> list[dict[str, Any]]:
    """Return the responses of a stream."""
    with models.stream() as stream:
        return stream.all("tensorrt_llm", NEWEST.core(prompt, count, streaming=True, **options))


def oracle(server: Server, script: str, prompt: list[int]) -> str:
    """Run a script in vLLM's environment, with the model's folder and a prompt."""
    python = os.environ["TRTSERVE_VLLM_PYTHON"]
    words = [f"{python}/bin/python" if Path(python).is_dir() else python, "-c", script]
    folder = Path(server.repository) / "tensorrt_llm" / "1" / "model"
    return subprocess.run([*words, str(folder), json.dumps(prompt)], capture_output=True, text=True, check=True).stdout


def openai(server: Server, path: str, **body: Any) -> dict[str, Any]:
    url = f"http://127.0.0.1:{server.address.http_port}/v1/{path}"
    answer = httpx.post(url, json={"model": NAME, "max_tokens": 16, "temperature": 0, **body}, timeout=120)
    found: dict[str, Any] = answer.json()
    assert answer.status_code == 200, found
    return found


def test_greedy_tokens_are_those_of_transformers(models: ModelServer, server: Server) -> None:
    folder = Path(server.repository) / "tensorrt_llm" / "1" / "model"
    python = os.environ["TRTSERVE_VLLM_PYTHON"]
    python = f"{python}/bin/python" if Path(python).is_dir() else python
    words = [python, "-c", ORACLE, str(folder), json.dumps(PROMPTS), str(COUNT)]
    expected = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    for prompt, line in zip(PROMPTS, expected, strict=True):
        wanted = [token for token in json.loads(line) if token != 2]
        assert generated(core(models, prompt)) == wanted


def test_a_stream_has_one_response_for_each_token(models: ModelServer) -> None:
    answers = core(models, PROMPTS[0], 12, end_id=-1)
    assert [answer["output_ids"].size for answer in answers] == [1] * 12


def test_stop_words_and_bad_words(models: ModelServer) -> None:
    plain = generated(core(models, PROMPTS[0], 12, end_id=-1))
    two = np.array([[plain[3:5], [2, -1]]], dtype=np.int32)
    tensors = NEWEST.core(PROMPTS[0], 12, streaming=True, end_id=-1)
    with models.stream() as stream:
        stopped = stream.all("tensorrt_llm", {**tensors, "stop_words_list": two})
        without = stream.all("tensorrt_llm", {**tensors, "bad_words_list": np.array([[plain[3:4], [1]]], np.int32)})
    assert generated(stopped) == plain[:5]
    assert generated(without)[:3] == plain[:3]
    assert plain[3] not in generated(without)


def test_a_seed_repeats_an_answer(models: ModelServer) -> None:
    def sampled(seed: int) -> list[int]:
        tensors = NEWEST.core(PROMPTS[0], 12, streaming=True, end_id=-1, top_k=0, top_p=0.9, temperature=1.8)
        with models.stream() as stream:
            return generated(stream.all("tensorrt_llm", {**tensors, "seed": np.array([[seed]], np.uint64)}))

    assert sampled(1) == sampled(1) != sampled(2)


def test_openais_api(server: Server) -> None:
    (choice,) = openai(server, "completions", prompt="What is ML?", logprobs=2)["choices"]
    probabilities = choice["logprobs"]
    for own, tops in zip(probabilities["token_logprobs"], probabilities["top_logprobs"], strict=True):
        assert own == pytest.approx(max(tops.values()), abs=1e-4)  # greedy
        assert len(tops) == 2
    texts = [each["text"] for each in openai(server, "completions", prompt="What is ML?", n=3)["choices"]]
    assert len(texts) == 3
    assert len(set(texts)) == 1
    biased = openai(server, "completions", prompt="What is ML?", logit_bias={"300": 100}, max_tokens=4)
    assert biased["choices"][0]["text"] != choice["text"]
    without = openai(server, "completions", prompt="What is ML?", bad_words=["learning"])["choices"][0]["text"]
    assert "learning" in choice["text"]
    assert "learning" not in without
    penalised = openai(server, "completions", prompt="a a a a", presence_penalty=1.5, frequency_penalty=1.5)
    assert penalised["choices"][0]["finish_reason"] in ("stop", "length")


def test_a_guide_has_no_white_space_to_the_limit(server: Server) -> None:
    number = {"type": "integer", "maximum": 99}
    schema = {"type": "object", "properties": {"a": number}, "required": ["a"], "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    asked = [{"role": "user", "content": "hi"}]
    answer = openai(server, "chat/completions", messages=asked, response_format=wanted, max_tokens=64)
    assert list(json.loads(answer["choices"][0]["message"]["content"])) == ["a"]


def test_a_prompt_echoed_with_log_probabilities_is_transformers(server: Server) -> None:
    body = {"prompt": PROMPTS[0], "echo": True, "logprobs": 2, "max_tokens": 1}
    rows = openai(server, "completions", **body)["choices"][0]["logprobs"]
    expected = json.loads(oracle(server, ECHO, PROMPTS[0]))
    assert rows["token_logprobs"][0] is None
    assert rows["token_logprobs"][1 : len(PROMPTS[0])] == pytest.approx(expected, abs=1e-3)


def test_rows_of_a_prompt_table_are_tokens(server: Server, models: ModelServer) -> None:
    rows = np.array(json.loads(oracle(server, ROWS, [61, 62])), np.float16)
    table: dict[str, Any] = {"prompt_embedding_table": rows[None], "prompt_vocab_size": np.array([[2]], np.int32)}
    vocabulary = json.loads((Path(server.repository) / "tensorrt_llm/1/model/config.json").read_text())["vocab_size"]
    tensors = NEWEST.core([1, 60, vocabulary, vocabulary + 1], 12, streaming=True, end_id=-1)
    extra = {"prompt_table_extra_ids": np.array([[0, 0, 7, 7]], np.uint64)}
    with models.stream() as stream:
        found = generated(stream.all("tensorrt_llm", {**tensors, **table, **extra}))
    assert found == generated(core(models, PROMPTS[0], 12, end_id=-1))


def test_an_adapter_by_name_and_by_task_id(server: Server, models: ModelServer) -> None:
    plain = openai(server, "completions", prompt="What is ML?")["choices"][0]["text"]
    assert openai(server, "completions", prompt="What is ML?", model="poet")["choices"][0]["text"] != plain
    task = json.loads((Path(server.repository) / "lora.json").read_text())["adapters"]["poet"]["task_id"]
    tensors = NEWEST.core(PROMPTS[0], 12, streaming=True)
    with models.stream() as stream:
        known = stream.all("tensorrt_llm", {**tensors, "lora_task_id": np.array([[task]], np.uint64)})
    assert generated(known) != generated(core(models, PROMPTS[0], 12))


def test_blocks_are_reused_and_times_are_in_order(models: ModelServer) -> None:
    prompt = [1, *range(100, 200)]
    tensors = {**NEWEST.core(prompt, 4), "return_perf_metrics": np.array([[True]])}
    with models.stream() as stream:
        stream.all("tensorrt_llm", tensors)
        (answer,) = stream.all("tensorrt_llm", tensors)
    assert answer["kv_cache_reused_blocks"].item() == 3
    times = [answer[f"{name}_time_ns"].item() for name in ("arrival", "first_scheduled", "first_token", "last_token")]
    assert times == sorted(times)


def test_a_cancelled_request_frees_its_place(models: ModelServer) -> None:
    active = ("nv_trt_llm_request_metrics", 'request_type="active"')
    with models.stream() as stream:
        stream.send("tensorrt_llm", NEWEST.core(PROMPTS[0], 500, streaming=True, end_id=-1))
        stream.next()
        wait_until(lambda: models.metric(*active) == 1, 10)
    wait_until(lambda: models.metric(*active) == 0, 10)


def test_sixteen_streams_lose_no_token(models: ModelServer) -> None:
    begin = time.monotonic()
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda _: len(generated(core(models, PROMPTS[1], 60, end_id=-1))), range(16)))
    assert found == [60] * 16
    print(f"\n16 streams: {16 * 60 / (time.monotonic() - begin):.0f} tokens/s")  # noqa: T201 - a figure of this run


def test_a_dead_engine_is_not_ready(server: Server, models: ModelServer) -> None:
    root = server.instances[0].process
    (engine,) = [each for each in tree(root) if b"EngineCore" in Path(f"/proc/{each.pid}/cmdline").read_bytes()]
    members = [each for each in tree(root) if b"VLLM" in Path(f"/proc/{each.pid}/cmdline").read_bytes()]
    os.kill(engine.pid, signal.SIGKILL)
    url = f"http://127.0.0.1:{server.address.http_port}/v2/health/ready"
    wait_until(lambda: httpx.get(url).status_code == 503, 30)
    wait_until(lambda: not any(each.alive() for each in members), 30)
