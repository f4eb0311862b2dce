"""Convert, build and execute: greedy tokens equal those of transformers, alone, in mixed batches, in shards."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

from tests.support.goldens import Golden, GoldenCase, golden_names, load_golden
from tests.support.stages import build_engine, convert_model
from trtserve.artifacts import Engine, Model
from trtserve.executor import api
from trtserve.executor.engine.model import single_sequence
from trtserve.executor.openvino.paged_model import PagedModel
from trtserve.specs import BuildSpec, ConvertSpec


def make_engine(golden: Golden, folder: Path, *, tp_size: int) -> Engine:
    """The float32 engine (float32 KV cache) of a golden's model."""
    model = Model(path=golden.write_model(folder / "model"))
    checkpoint = convert_model(model, ConvertSpec(dtype="float32", tp_size=tp_size), out=folder / "checkpoint")
    spec = BuildSpec(max_batch_size=4, max_seq_len=256, runtime="openvino")
    return build_engine(checkpoint, spec, out=folder / "engine")


@pytest.fixture(scope="module", params=golden_names())
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Golden, Engine]:
    golden = load_golden(request.param)
    # Two ranks, so that what is served went through splitting and merging.
    return golden, make_engine(golden, tmp_path_factory.mktemp(golden.name), tp_size=2)


@pytest.fixture(scope="module")
def executor(served: tuple[Golden, Engine]) -> Iterator[api.Executor]:
    config = api.ExecutorConfig(kv_cache_config=api.KvCacheConfig(max_tokens=2048))
    with api.Executor(served[1].path, api.ModelType.DECODER_ONLY, config) as running:
        yield running


def greedy(executor: api.Executor, cases: list[GoldenCase]) -> list[list[int]]:
    """New tokens of each case, all enqueued at once."""
    requests = [
        api.Request(
            input_token_ids=case.prompt,
            max_tokens=len(case.tokens),
            output_config=api.OutputConfig(exclude_input_from_output=True),
        )
        for case in cases
    ]
    answers = []
    for identifier in executor.enqueue_requests(requests):
        last = executor.await_responses(identifier, timedelta(seconds=60))[-1]
        assert isinstance(last, api.Response)
        assert last.result.is_final
        answers.append(list(last.result.output_token_ids[0]))
    return answers


def test_each_prompt_alone(served: tuple[Golden, Engine], executor: api.Executor) -> None:
    for case in served[0].cases:
        assert greedy(executor, [case]) == [case.tokens]


def test_all_prompts_in_one_batch(served: tuple[Golden, Engine], executor: api.Executor) -> None:
    cases = [*served[0].cases, *reversed(served[0].cases)]
    assert greedy(executor, cases) == [case.tokens for case in cases]


def test_logits_of_the_prompt(served: tuple[Golden, Engine]) -> None:
    golden, engine = served
    model = PagedModel(engine.path, threads=2)
    blocks = -(-128 // model.tokens_per_block)
    model.allocate(blocks)
    for case in golden.cases:
        logits = model.forward(single_sequence(case.prompt, range(blocks), rows=[len(case.prompt) - 1]))
        np.testing.assert_allclose(logits[0, :: case.stride], case.logits, atol=2e-4)
