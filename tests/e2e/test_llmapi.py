"""Repositories of the LLM API in a real Triton, on a stand-in for TensorRT-LLM: NVIDIA's layout, and the alias."""

from __future__ import annotations

import json
import shutil
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.support.model_server import ModelServer, flags, integers, serving, texts
from tests.support.tiny_models import write_tiny_model
from tests.support.waiting import wait_until
from trtserve.artifacts import Model, ModelRepository
from trtserve.bench.plan import plan_benchmark
from trtserve.bench.run import run_benchmark
from trtserve.cli import run
from trtserve.client.endpoint import Endpoint
from trtserve.client.metrics import read_heartbeats
from trtserve.programs.shared.run_folder import VARIABLE
from trtserve.repository.llmapi import plan_llmapi_repository
from trtserve.repository.publishing import assemble_repository
from trtserve.specs import BenchSpec, RepositorySpec

pytestmark = pytest.mark.triton

STAND_INS = Path(__file__).parents[1] / "support" / "stand_ins"
PROMPT = "What is machine learning?"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> ModelRepository:
    root = tmp_path_factory.mktemp("llmapi")
    model = write_tiny_model(root / "model")
    spec = RepositorySpec(name="tiny", settings={"kv_cache_config.free_gpu_memory_fraction": "0.5"})
    made = assemble_repository(plan_llmapi_repository(Model(path=model), spec, out=root / "made"))
    return ModelRepository(path=made.path.rename(root / "moved"), manifest=made.manifest)


@pytest.fixture(scope="module")
def server(repository: ModelRepository, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelServer]:
    with pytest.MonkeyPatch.context() as patch:
        # The stub looks into the folder of its model for modules, and not into PYTHONPATH.
        shutil.copytree(STAND_INS / "tensorrt_llm", repository.path / "tensorrt_llm" / "1" / "tensorrt_llm")
        patch.setenv("OMPI_COMM_WORLD_RANK", "0")
        patch.setenv(VARIABLE, str(repository.path.parent))
        with serving(repository.path, tmp_path_factory.mktemp("server")) as ready:
            yield ready


def words(count: int) -> str:
    return "".join(f" w{number}" for number in range(count))


def test_nvidias_shape(server: ModelServer) -> None:
    body = {"text_input": PROMPT, "sampling_param_max_tokens": 3, "sampling_param_exclude_input_from_output": True}
    status, answer = server.generate("tensorrt_llm", {**body, "return_finish_reason": True})
    assert status == 200
    assert (answer["text_output"], answer["finish_reason"]) == (words(3), "length")
    assert "stop_reason" not in answer
    events = server.generate_stream("tensorrt_llm", {**body, "streaming": True})
    assert [event["text_output"] for event in events] == [words(1), words(2), words(3)]
    assert server.generate("tensorrt_llm", {"text_input": PROMPT, "sampling_param_max_tokens": 2})[1][
        "text_output"
    ] == PROMPT + words(2)


def test_the_alias_takes_the_bodies_of_the_other_runtimes(server: ModelServer) -> None:
    body = {"text_input": PROMPT, "max_tokens": 4, "bad_words": "", "stop_words": "", "pad_id": 2, "end_id": 2}
    status, answer = server.generate("tiny", body)
    assert (status, answer["text_output"]) == (200, PROMPT + words(4))
    more = {"temperature": 0.5, "top_k": 4, "top_p": 0.0, "seed": 7, "min_length": 1, "beam_width": 1}
    status, answer = server.generate("tiny", {**body, **more, "exclude_input_in_output": True})
    assert (status, answer["text_output"]) == (200, words(4))


def test_stop_and_bad_words_through_the_alias(server: ModelServer) -> None:
    body = {"text_input": PROMPT, "max_tokens": 9, "exclude_input_in_output": True, "return_finish_reason": True}
    _, answer = server.generate("tiny", {**body, "stop_words": ["w2"], "bad_words": ["w1"]})
    assert (answer["text_output"], answer["finish_reason"]) == (" w0 w2", "stop_words")


def test_streams_of_the_alias_are_pieces(server: ModelServer) -> None:
    events = server.generate_stream("tiny", {"text_input": PROMPT, "max_tokens": 5, "stream": True})
    assert [event["text_output"] for event in events] == [f" w{number}" for number in range(5)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"beam_width": 2}, "beam_width is not supported on the llmapi runtime"),
        ({"return_log_probs": True}, "return_log_probs is not supported"),
        ({"seed": 1, "random_seed": 2}, "Two names of one setting"),
        ({"max_tokens": 0}, "max_tokens must be a single value > 0"),
        ({"top_p": 1.5}, "top_p"),
    ],
)
def test_unsupported_inputs_are_refused_by_name(server: ModelServer, change: dict[str, Any], message: str) -> None:
    status, answer = server.generate("tiny", {"text_input": PROMPT, "max_tokens": 4, **change})
    assert status >= 400
    assert message in answer["error"]


def test_many_streams_at_once(server: ModelServer) -> None:
    """Every stream is complete, through two python models that push to each other."""
    from concurrent.futures import ThreadPoolExecutor

    def ask(count: int) -> str:
        events = server.generate_stream("tiny", {"text_input": PROMPT, "max_tokens": count, "stream": True})
        return "".join(str(event["text_output"]) for event in events)

    with ThreadPoolExecutor(8) as pool:
        counts = [5 + number % 7 for number in range(24)]
        assert list(pool.map(ask, counts)) == [words(count) for count in counts]


@pytest.mark.parametrize("model", ["tensorrt_llm", "tiny"])
def test_benchmarks_count_every_token_once(server: ModelServer, repository: ModelRepository, model: str) -> None:
    """NVIDIA's model repeats all text and tokens in each answer, the alias sends only new ones."""
    endpoint = Endpoint(grpc_port=server.address.grpc_port, repository=repository.path)
    spec = BenchSpec(model=model, num_requests=3, warmup_requests=1, calibrate=False)
    report = run_benchmark(plan_benchmark(spec, endpoint))
    assert report.tokens_counted_by == "server"
    assert report.statistics.short_answers == 0
    assert report.statistics.finish_reasons == {"length": 3}
    for record in report.records:
        assert "".join(response.text or "" for response in record.responses) == words(record.requested_tokens)
        assert [tokens for _, tokens in record.arrivals] == [1] * record.requested_tokens


def test_a_stop_reaches_the_request_behind_the_alias(server: ModelServer) -> None:
    with server.stream() as stream, server.stream() as other:
        tensors = {"text_input": texts(PROMPT), "max_tokens": integers(100_000), "stream": flags(True)}
        stream.send("tiny", tensors, request_id="endless")
        assert stream.next()[0]["text_output"][0] == b" w0"
        stop = {"text_input": np.array([b""], dtype=np.object_), "stop": np.array([True])}
        other.send("tensorrt_llm", stop, request_id="endless")
        with pytest.raises(Exception, match="Request cancelled by client"):
            other.next()
        with pytest.raises(Exception, match="Request cancelled by client"):
            deque(iter(stream.next, None), maxlen=0)


def test_query_asks_the_alias(server: ModelServer, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("query", PROMPT, "-u", f"127.0.0.1:{server.address.grpc_port}", "--model", "tiny", "--max-tokens", "4")
    for more in ((), ("--stream",), ("--protocol", "http", "-u", f"127.0.0.1:{server.address.http_port}")):
        assert run([*asked, *more]) == 0
        assert capsys.readouterr().out == "w0 w1 w2 w3\n"
    assert run([*asked, "--json", "--stream", "--stop-words", "w2", "--return-num-input-tokens"]) == 0
    found = json.loads(capsys.readouterr().out)["result"]
    assert (found["output_tokens"], found["input_tokens"], found["sequences"][0]["finish_reason"]) == (
        *(3, 4),
        "stop_words",
    )
    assert run([*asked, "--beam-width", "2"]) == 41
    assert "beam_width is not supported on the llmapi runtime" in capsys.readouterr().err
    # Of a server that was not started here the benchmark knows no tokenizer, of which it makes texts.
    assert run(["bench", "token-norm-dist", "--url", asked[3]]) == 2
    assert "the server's tokenizer is not available here" in capsys.readouterr().err


def test_a_dead_llm_is_told_to_the_supervisor_and_ends_the_process_of_its_model(
    server: ModelServer, repository: ModelRepository
) -> None:
    def told() -> list[tuple[str | None, int]]:
        return [(each.failure, each.open_requests) for each in read_heartbeats(repository.path.parent)]

    wait_until(lambda: told() == [(None, 0)])  # the first beat, or the end of the requests before
    (beat,) = read_heartbeats(repository.path.parent)
    wait_until(lambda: read_heartbeats(repository.path.parent)[0].time > beat.time)
    server.generate("tensorrt_llm", {"text_input": "End.", "sampling_param_max_tokens": 1})
    wait_until(lambda: read_heartbeats(repository.path.parent)[0].failure is not None)
    assert read_heartbeats(repository.path.parent)[0].failure == "TensorRT-LLM says that its LLM has ended"
    wait_until(lambda: psutil.Process(beat.pid).status() == psutil.STATUS_ZOMBIE)  # Triton does not wait for it
