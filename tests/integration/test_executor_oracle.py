"""The executor on float32 engines of random models: tokens equal transformers', whatever the batch and the chunks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

from tests.support.stages import build_engine, convert_model
from tests.support.tiny_models import write_tiny_model
from tests.support.transformers_oracle import ENGINES
from trtserve.artifacts import Model
from trtserve.executor import api
from trtserve.specs import BuildSpec, ConvertSpec

FAMILIES = ("llama", "llama3", "mistral", "gpt2")
MAX_NUM_TOKENS = 72
PROMPT_LENGTHS = (1, 2, 31, 32, 33, 45, 64, 70)
NEW_TOKENS = (36, 3, 20, 12, 1, 10, 8, 4)
# name: (chunked context, policy)
SCHEDULES = {
    "whole prompts": (False, None),
    "first come": (True, api.ContextChunkingPolicy.FIRST_COME_FIRST_SERVED),
    "equal progress": (True, api.ContextChunkingPolicy.EQUAL_PROGRESS),
}


@dataclass(frozen=True)
class Original:
    """A model, prompts of mixed lengths, and the answers of transformers."""

    folder: Path
    prompts: list[list[int]]
    expected: list[list[int]]


@dataclass(frozen=True)
class Case:
    """An engine, prompts, and the answers of transformers."""

    engine: Path
    prompts: list[list[int]]
    expected: list[list[int]]


@pytest.fixture(scope="module", params=FAMILIES)
def original(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Original:
    folder = write_tiny_model(tmp_path_factory.mktemp(request.param) / "model", request.param, seed=5)
    random = np.random.default_rng(11)
    prompts = [random.integers(3, 320, size=length).tolist() for length in PROMPT_LENGTHS]
    return Original(folder, prompts, _continue_with_transformers(folder, prompts))


@pytest.fixture(scope="module", params=ENGINES)
def case(request: pytest.FixtureRequest, original: Original) -> Case:
    out = original.folder.parent
    checkpoint = convert_model(Model(path=original.folder), ConvertSpec(dtype="float32"), out=out / "checkpoint")
    limits = BuildSpec(max_batch_size=8, max_seq_len=128, max_num_tokens=MAX_NUM_TOKENS, **ENGINES[request.param])
    engine = build_engine(checkpoint, limits, out=out / request.param)
    return Case(engine.path, original.prompts, original.expected)


def _continue_with_transformers(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Return the most probable continuation of each prompt alone, each token from the complete sequence."""
    import torch
    import transformers

    torch.set_num_threads(1)  # more would wait for each other on a busy machine
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    continuations = []
    for prompt, count in zip(prompts, NEW_TOKENS, strict=True):
        tokens = list(prompt)
        with torch.inference_mode():
            for _ in range(count):
                tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
        continuations.append(tokens[len(prompt) :])
    return continuations


@pytest.fixture(params=list(SCHEDULES.values()), ids=list(SCHEDULES))
def executor(request: pytest.FixtureRequest, case: Case) -> Iterator[api.Executor]:
    chunked, policy = request.param
    config = api.ExecutorConfig(
        enable_chunked_context=chunked,
        scheduler_config=api.SchedulerConfig(context_chunking_policy=policy),
        kv_cache_config=api.KvCacheConfig(max_tokens=512),  # less than all prompts need together
    )
    with api.Executor(case.engine, api.ModelType.DECODER_ONLY, config) as running:
        yield running


def _generate(executor: api.Executor, requests: list[api.Request]) -> list[list[int]]:
    """New tokens of each request, all enqueued at once."""
    answers = []
    for number in executor.enqueue_requests(requests):
        (last,) = executor.await_responses(number, timedelta(seconds=60))
        assert isinstance(last, api.Response)
        answers.append(last.result.output_token_ids[0])
    return answers


def _request(prompt: list[int], count: int, sampling: api.SamplingConfig | None = None) -> api.Request:
    return api.Request(
        prompt,
        count,
        sampling_config=sampling or api.SamplingConfig(),
        output_config=api.OutputConfig(exclude_input_from_output=True),
    )


@pytest.mark.needs("torch")
def test_greedy_tokens_in_a_mixed_batch_equal_transformers(case: Case, executor: api.Executor) -> None:
    requests = [_request(prompt, count) for prompt, count in zip(case.prompts, NEW_TOKENS, strict=True)]
    assert len({token for tokens in case.expected for token in tokens}) > 30
    assert _generate(executor, requests) == case.expected


@pytest.mark.needs("torch")
def test_greedy_tokens_alone_equal_transformers(case: Case) -> None:
    with api.Executor(case.engine, api.ModelType.DECODER_ONLY, api.ExecutorConfig()) as executor:
        requests = [_request(prompt, count) for prompt, count in zip(case.prompts, NEW_TOKENS, strict=True)]
        assert [_generate(executor, [request])[0] for request in requests] == case.expected


@pytest.mark.needs("torch")
def test_sampled_tokens_do_not_depend_on_batch_or_chunks(case: Case, executor: api.Executor) -> None:
    samplings = [
        api.SamplingConfig(top_k=20, temperature=1.5, seed=1),
        api.SamplingConfig(top_p=0.9, seed=2),
        api.SamplingConfig(top_k=50, top_p=0.7, temperature=2.0),
        api.SamplingConfig(),
    ]
    requests = [_request(prompt, 12, sampling) for prompt, sampling in zip(case.prompts, samplings * 2, strict=True)]
    alone = [_generate(executor, [request])[0] for request in requests]
    assert _generate(executor, requests) == alone
    reseeded = [_request(case.prompts[0], 12, api.SamplingConfig(top_k=20, temperature=1.5, seed=s)) for s in (1, 3)]
    first, other = _generate(executor, reseeded)
    assert first == alone[0] != other
