"""vLLM itself: two workers with n-gram drafts, and NVIDIA's backend `vllm`. A part of `make test-vllm`, not of CI."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import trtserve
from tests.real_vllm.nodes import ENVIRONMENT, PROMPTS, engine, tokens
from tests.support.counting_vllm import nvidia_repository
from tests.support.servers import running_server
from trtserve.client.endpoint import Endpoint
from trtserve.client.query import generate, generate_each
from trtserve.client.spec import QuerySpec
from trtserve.executor.api import Executor, ExecutorConfig, ModelType
from trtserve.pipeline.import_spec import resolve_import
from trtserve.pipeline.importing import import_to_repository
from trtserve.specs import BuildSpec, ConvertSpec, RepositorySpec
from trtserve.store import Store

DRAFTS = {"method": "ngram", "num_speculative_tokens": "4", "prompt_lookup_max": "3", "prompt_lookup_min": "1"}
REPEATED = [1, *[60, 61, 62, 63, 64] * 8]


def test_two_workers_with_drafts_give_the_tokens_of_our_own_runtime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**ENVIRONMENT, "VLLM_CPU_OMP_THREADS_BIND": "0|1"}.items():
        monkeypatch.setenv(name, value)
    store = Store(tmp_path / "home")
    spec = resolve_import(
        "demo",
        convert=ConvertSpec(dtype="float32"),
        build=BuildSpec(runtime="openvino"),
        repository=RepositorySpec(),
        store=store,
    )
    own = import_to_repository(spec, store=store).path / "tensorrt_llm" / "1"
    with Executor(own, ModelType.DECODER_ONLY, ExecutorConfig()) as openvino:
        expected = [tokens(openvino, prompt) for prompt in (*PROMPTS, REPEATED)]
    made = engine(tmp_path / "two", 29400, 2, **{f"speculative_config.{name}": text for name, text in DRAFTS.items()})
    with Executor(made, ModelType.DECODER_ONLY, ExecutorConfig(iter_stats_max_iterations=1000)) as executor:
        assert [tokens(executor, prompt) for prompt in (*PROMPTS, REPEATED)] == expected
        records = executor.get_latest_iteration_stats()
    drafted = [each.specdec_stats for each in records if each.specdec_stats is not None]
    assert sum(each.num_draft_tokens for each in drafted) > 0
    assert sum(each.num_accepted_tokens for each in drafted) > 0


def test_nvidias_backend_answers_as_the_five_models_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    demo = str(Path(trtserve.__file__).with_name("demo"))
    own: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 256,
        "kv_cache_memory_bytes": 200_000_000,
    }
    repository = nvidia_repository(tmp_path / "repository", model=demo, **own)
    with running_server(repository, home=tmp_path, gateway=True, ready_timeout=300) as server:
        endpoint = Endpoint(http_port=server.address.http_port, grpc_port=server.address.grpc_port)
        options = {"max_tokens": 12, "return_log_probs": True}
        pieces: list[str] = []
        plain = generate(QuerySpec(prompts=("What is ML?",), options=options), endpoint)
        spec = QuerySpec(prompts=("What is ML?",), options=options, stream=True)
        streamed = generate(spec, endpoint, on_text=pieces.append)
        assert plain.text == streamed.text == "".join(pieces).lstrip()
        assert plain.text.startswith("Machine learning is")
        assert (plain.output_tokens, streamed.output_tokens) == (12, 12)
        assert plain.sequences[0].log_probs == pytest.approx(streamed.sequences[0].log_probs, abs=1e-4)
        sampled = {"max_tokens": 8, "num_return_sequences": 3, "top_p": 0.9, "temperature": 1.8, "seed": 5}
        first, again = generate_each(QuerySpec(prompts=("What is",) * 2, options=sampled), endpoint)
        assert [each.text for each in first.sequences] == [each.text for each in again.sequences]
        assert len({each.text for each in first.sequences}) > 1
        schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}}, "required": ["a"]}
        guide = {"guide_type": "json_schema", "guide": json.dumps({**schema, "additionalProperties": False})}
        wanted = {**guide, "max_tokens": 64}
        (answer,) = generate_each(QuerySpec(prompts=("hi",), options=wanted), endpoint)
        assert answer.text.startswith("{")
