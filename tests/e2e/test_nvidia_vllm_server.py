"""A repository of NVIDIA's backend `vllm` behind a real Triton server, with a vLLM that counts."""

from __future__ import annotations

import base64
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.test_vllm_server import ask, cmdline, post
from tests.support.counting_vllm import counting_python, nvidia_repository, pooling_repository
from tests.support.model_server import ModelServer
from tests.support.servers import running_server
from tests.support.waiting import wait_until
from trtserve.client.endpoint import Endpoint
from trtserve.client.query import generate
from trtserve.client.spec import QuerySpec
from trtserve.errors import RequestError
from trtserve.process import tree
from trtserve.server.state import Server

pytestmark = pytest.mark.triton


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("home")
    repository = nvidia_repository(home / "repository", max_model_len=64, max_num_seqs=4, enable_lora="true")
    adapter = home / "poet"
    adapter.mkdir()
    (repository / "vllm_model" / "1" / "multi_lora.json").write_text(json.dumps({"poet": str(adapter)}))
    patch = pytest.MonkeyPatch()
    patch.setenv("TRTSERVE_VLLM_PYTHON", str(counting_python(home / "vllm")))
    with running_server(repository, home=home, gateway=True) as running:
        yield running
    patch.undo()


@pytest.fixture(scope="module")
def pooling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("pooling")
    yield from pooling_server(home, nvidia_repository(home / "repository", runner="pooling"))


@pytest.fixture(scope="module")
def scoring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("scoring")
    repository = pooling_repository(home, counting_python(home / "named"))
    yield from pooling_server(home, repository.rename(home / "moved"), named=True)


def pooling_server(home: Path, repository: Path, *, named: bool = False) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRTSERVE_VLLM_PYTHON", "" if named else str(counting_python(home / "vllm")))
        with running_server(repository, home=home, gateway=True) as running:
            yield running


def asked(server: Server, prompt: str = "\n", **sampling: Any) -> dict[str, Any]:
    """Ask the model. The byte of a line feed is 10, so it counts on from there."""
    body = {"text_input": prompt, "sampling_parameters": json.dumps(sampling)}
    return post(server, "/v2/models/vllm_model/generate", {**body, "return_finish_reason": True})


def test_the_prompt_is_repeated_unless_it_is_excluded(server: Server) -> None:
    answer = asked(server, max_tokens="3")  # NVIDIA's backend takes numbers in texts
    assert (answer["text_output"], answer["finish_reason"]) == ("\n 11 12 13", "length")
    body = {"text_input": "\n", "exclude_input_in_output": True, "parameters": {"max_tokens": 2}}
    assert post(server, "/v2/models/vllm_model/generate", body)["text_output"] == " 11 12"


def test_what_it_cannot_do_is_refused_by_name(server: Server) -> None:
    assert "SamplingParams has no best" in asked(server, best=1)["error"]
    assert "LoRA painter is not in multi_lora.json, which has poet" in asked(server, lora_name="painter")["error"]
    assert "n is 5000" in asked(server, n=5000)["error"]
    body: dict[str, Any] = {"text_input": "\n", "image": "AAAA"}
    assert "image is for NVIDIA's own backend" in post(server, "/v2/models/vllm_model/generate", body)["error"]
    body = {"text_input": "\n", "stream": True, "exclude_input_in_output": False}
    answer = ask(server.address.http_port, "/v2/models/vllm_model/generate_stream", body)[1]
    assert b"cannot begin with the prompt" in answer
    assert asked(server, max_tokens=2, lora_name="poet")["text_output"] == "\n 20 30"


def test_query_asks_in_vllms_words(server: Server) -> None:
    endpoint = Endpoint(http_port=server.address.http_port, grpc_port=server.address.grpc_port)
    options = {"max_tokens": 6, "return_log_probs": True, "return_num_input_tokens": True}
    pieces: list[str] = []
    found = generate(QuerySpec(prompts=("\nA",), options=options, stream=True), endpoint, on_text=pieces.append)
    assert (found.text, found.output_tokens, found.input_tokens) == ("66 67 68 69 70 71", 6, 2)
    assert len(pieces) == 3  # the counting vLLM makes two tokens at once
    assert found.sequences[0].log_probs == [-0.5] * 6
    assert found.sequences[0].finish_reason == "length"
    several = generate(QuerySpec(prompts=("\nA",), options={"max_tokens": 2, "num_return_sequences": 2}), endpoint)
    assert [each.text for each in several.sequences] == ["66 67"] * 2
    with pytest.raises(RequestError, match="LoRA painter"):
        generate(QuerySpec(prompts=("\nA",), options={"lora": "painter"}), endpoint)


def completion(server: Server, **body: Any) -> Any:
    asked = {"model": "vllm_model", "prompt": "A", "max_tokens": 4, **body}
    status, answer = ask(server.address.http_port, "/v1/completions", asked)
    if body.get("stream"):
        events = [line.removeprefix(b"data: ") for line in answer.splitlines() if line.startswith(b"data: {")]
        return [json.loads(event)["choices"][0] for event in events]
    return json.loads(answer)["choices"] if status == 200 else json.loads(answer)["error"]["message"]


def test_openais_api_asks_it_too(server: Server) -> None:
    assert [each["text"] for each in completion(server, n=2, temperature=1, seed=2**63)] == [" 66 67 68 69"] * 2
    (stopped,) = completion(server, stop=["67"])
    assert (stopped["text"], stopped["finish_reason"]) == (" 66 ", "stop")
    first, last = completion(server, stream=True)
    assert (first["text"], first["finish_reason"], last["finish_reason"]) == (" 66 67", None, "length")
    (ended,) = completion(server, stop_token_ids=[67], logit_bias={"5": 3}, min_p=0.1, guided_regex="a+")
    assert (ended["text"], ended["finish_reason"]) == (" 66 67", "stop")
    assert "logprobs are not available for 'vllm_model'" in completion(server, logprobs=1)


def vectors(server: Server, path: str = "/v1/embeddings", **body: Any) -> Any:
    status, answer = ask(server.address.http_port, path, {"model": "vllm_model", **body})
    return json.loads(answer) if status == 200 else json.loads(answer)["error"]["message"]


def test_a_pooling_model_makes_vectors(pooling: Server, server: Server) -> None:
    found = vectors(pooling, input=["ab", "xyz"])
    assert [row["embedding"] for row in found["data"]] == [[2, 97, 98], [3, 120, 122]]
    assert [row["index"] for row in found["data"]] == [0, 1]
    assert found["usage"] == {"prompt_tokens": 5, "total_tokens": 5}
    for ids in ([7, 8], [[7, 8]]):
        (row,) = vectors(pooling, input=ids, dimensions=2)["data"]
        assert row["embedding"] == [2, 7]
    (row,) = vectors(pooling, input="ab", encoding_format="base64")["data"]
    assert np.frombuffer(base64.b64decode(row["embedding"]), np.float32).tolist() == [2, 97, 98]
    many = vectors(pooling, input=[chr(97 + number % 26) for number in range(300)])["data"]
    assert [row["embedding"][1] for row in many] == [97 + number % 26 for number in range(300)]
    assert vectors(pooling, input="").startswith("input must not be empty")
    assert "vLLM does not like this prompt" in vectors(pooling, input=["ok", "["])  # the byte 91
    assert "needs a pooling model" in vectors(server, input="ab")
    assert "embedding_request must be a JSON object" in asked(pooling)["error"]


def test_a_pooling_model_ranks_documents(pooling: Server) -> None:
    body = {"query": "aaaa", "documents": ["zzz", "aaaa", "~"], "top_n": 2}
    first, second = vectors(pooling, "/v1/rerank", **body)["results"]
    assert (first["index"], first["document"], first["relevance_score"]) == (1, {"text": "aaaa"}, pytest.approx(1))
    assert second["relevance_score"] < 1
    found = vectors(pooling, "/v1/rerank", **body | {"return_documents": False})
    assert "document" not in found["results"][0]
    assert found["usage"]["total_tokens"] == 12


def test_a_model_that_reads_query_and_document_together_ranks_documents(scoring: Server, pooling: Server) -> None:
    body = {"query": "aaaa", "documents": ["xyz", "aaaa", "~"]}
    found = vectors(scoring, "/v1/rerank", **body)
    assert [(row["index"], row["relevance_score"]) for row in found["results"]] == [(2, 126), (0, 122), (1, 97)]
    assert found["usage"]["total_tokens"] == 8 + 9 + 6
    assert "it reads query and document together, which /v1/rerank does" in vectors(scoring, input="ab")
    for given, message in (
        ({"query": "a", "input": "b"}, "reads no pairs of query and document"),
        ({"query": "a", "input": [1]}, "query of embedding_request must be a text"),
    ):
        tensors = {"text_input": "", "embedding_request": json.dumps(given)}
        assert message in post(pooling, "/v2/models/vllm_model/generate", tensors)["error"]


def test_a_client_that_goes_frees_its_place(server: Server) -> None:
    folder = Path(server.repository).parent
    tensors = {"text_input": np.array([b"`"], object), "stream": np.array([True])}  # 96 stops after the first tokens
    with ModelServer(server.address).stream() as stream:
        stream.send("vllm_model", tensors)
        stream.next()
        wait_until(lambda: [beat["open_requests"] for beat in beats(folder)] == [1])
    wait_until(lambda: [beat["open_requests"] for beat in beats(folder)] == [0])


def beats(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in folder.rglob("*.heartbeat")]


def test_a_dead_engine_is_not_ready(server: Server) -> None:
    (side,) = [each for each in tree(server.instances[0].process) if b"engine_side" in cmdline(each.pid)]
    os.kill(side.pid, signal.SIGKILL)
    wait_until(lambda: ask(server.address.http_port, "/v2/health/ready")[0] == 503)
