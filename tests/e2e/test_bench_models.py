"""`trtserve bench` of a real engine: the same traffic through the core model and through the models that take text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.in_process import InProcess
from tests.support.model_server import ModelServer
from trtserve.bench.plan import plan_benchmark
from trtserve.bench.report import BenchReport
from trtserve.bench.run import run_benchmark
from trtserve.client.endpoint import Endpoint
from trtserve.errors import RequestError
from trtserve.specs import BenchSpec

pytestmark = pytest.mark.triton

TEXT_MODELS = ("ensemble", "tensorrt_llm_bls", "tiny")


@pytest.fixture(scope="module")
def endpoint(features: ModelServer, features_root: Path) -> Endpoint:
    address = features.address
    return Endpoint(
        host=address.host,
        http_port=address.http_port,
        grpc_port=address.grpc_port,
        repository=features_root / "repository",
    )


def measure(endpoint: Endpoint, model: str, **settings: object) -> BenchReport:
    spec = {"num_requests": 6, "input_mean": 24, "output_mean": 12, "warmup_requests": 1, **settings}
    return run_benchmark(plan_benchmark(BenchSpec(model=model, calibrate=False, **spec), endpoint))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def core(endpoint: Endpoint) -> BenchReport:
    return measure(endpoint, "tensorrt_llm")


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_text_models_do_the_work_of_the_core_model(endpoint: Endpoint, core: BenchReport, model: str) -> None:
    """As many tokens in and out as the core model's for the same seed, by the server's own count."""
    report = measure(endpoint, model)
    assert (core.tokens_counted_by, report.tokens_counted_by) == ("output_ids", "server")
    lengths = [[(each.input_tokens, each.output_tokens) for each in found.records] for found in (core, report)]
    assert lengths[0] == lengths[1]
    assert report.statistics.short_answers == 0
    assert report.statistics.time_to_first_token_ms.count == 6
    assert report.limits == core.limits
    # The server counted the prompts as the tokenizer does.
    assert not any("not the server's tokenizer" in note for note in report.notes)


def test_conversations_with_an_engine_in_this_process(endpoint: Endpoint) -> None:
    """Every answer is read twice: for the next prompt, and for the record."""
    report = measure(
        endpoint, "tensorrt_llm", traffic="sessions", turns=2, in_process=str(endpoint.repository), concurrency=2
    )
    assert report.statistics.counts.completed == 6
    first, second = report.records[:2]
    assert second.input_tokens > first.input_tokens + first.output_tokens == first.input_tokens + first.requested_tokens


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """Six prompts whose answers get 39 tokens."""
    words = " ".join(["word"] * 30)
    entries = [{"input": f"prompt {number}", "instruction": "go on", "output": words} for number in range(6)]
    (tmp_path / "data.json").write_text(json.dumps(entries))
    return tmp_path / "data.json"


@pytest.mark.parametrize("model", ["tensorrt_llm", *TEXT_MODELS])
def test_datasets(endpoint: Endpoint, dataset: Path, model: str) -> None:
    report = measure(endpoint, model, dataset=dataset)
    # <s> and the 14 characters of "prompt 0 go on".
    assert {(each.input_tokens, each.output_tokens) for each in report.records} == {(15, 39)}


def test_answers_end_at_the_tokenizers_end_token(
    endpoint: Endpoint, dataset: Path, features_model: Path, features_tokenizer: Any, oracle: InProcess, tmp_path: Path
) -> None:
    """The end token is made one that the first answer has."""
    answer = oracle.tokens(features_tokenizer.encode("prompt 0 go on"), 39, end_id=-1)
    end = answer[8]
    copied = shutil.copytree(features_model, tmp_path / "model")
    config = json.loads((copied / "tokenizer_config.json").read_text())
    config["eos_token"] = features_tokenizer.convert_ids_to_tokens(end)
    (copied / "tokenizer_config.json").write_text(json.dumps(config))
    report = measure(endpoint, "tensorrt_llm", dataset=dataset, tokenizer=copied, ignore_eos=False)
    assert report.records[0].output_tokens == answer.index(end)
    assert report.records[0].finish_reason == "end_id"
    assert report.statistics.short_answers >= 1


def test_models_without_prompts(endpoint: Endpoint) -> None:
    with pytest.raises(RequestError, match="neither text nor token ids"):
        measure(endpoint, "preprocessing")
