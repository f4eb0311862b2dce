"""Stages of a pipeline in one process: what they answer is what one model answers, whatever is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.executors import collect
from tests.support.stages import build_engine, convert_model
from tests.support.tiny_models import write_tiny_model
from trtserve.artifacts import Model
from trtserve.executor import api
from trtserve.executor.engine.limits import resolve_limits
from trtserve.executor.interface.convert import engine_options
from trtserve.executor.loaders import load_model, read_engine_config
from trtserve.specs import BuildSpec, ConvertSpec

pytestmark = pytest.mark.needs("torch")

ROUNDS = 2  # the second one finds blocks of the first
STEP = 64  # tokens; the longest prompt takes two steps
KINDS: list[dict[str, Any]] = [
    {},
    {"sampling_config": {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "seed": 7}},
    {"sampling_config": {"repetition_penalty": 1.3, "presence_penalty": 0.2, "temperature": 1.2, "seed": 3}},
    {"sampling_config": {"min_tokens": 10}, "stop_words": [[9, 9], [40]], "bad_words": [[7], [8, 9]]},
    {"output_config": {"return_context_logits": True, "return_generation_logits": True}},
    {"output_config": {"return_log_probs": True}, "sampling_config": {"top_k": 10, "seed": 5}},
]


def _requests() -> list[api.Request]:
    found = []
    for number in range(3 * len(KINDS)):
        kind = dict(KINDS[number % len(KINDS)])
        sampling = api.SamplingConfig(**kind.pop("sampling_config", {}))
        output = api.OutputConfig(exclude_input_from_output=True, **kind.pop("output_config", {}))
        length = (1, 17, 40, 70, 5)[number % 5]
        prompt = [3 + (5 * place + 7 * number) % 250 for place in range(length)]
        found.append(api.Request(prompt, 6 + number, sampling_config=sampling, output_config=output, end_id=2, **kind))
    return found


def _answers(engine: Path, stages: int) -> tuple[list[Any], Any]:
    """Return the results of all requests, and the model."""
    from tests.support.torch_stages import LocalStages

    config = api.ExecutorConfig(enable_chunked_context=True, kv_cache_config=api.KvCacheConfig(max_tokens=4096))
    options = engine_options(config)
    model: Any = LocalStages(engine, stages) if stages > 1 else load_model(engine, options)
    with api.Executor.from_model(model, resolve_limits(read_engine_config(engine), options), config) as executor:
        found: list[Any] = []
        for _ in range(ROUNDS):
            asked = executor.enqueue_requests(_requests())
            cancelled = executor.enqueue_request(api.Request([5] * 30, 60, end_id=2))
            executor.cancel_request(cancelled)
            answers = collect(executor, [*asked, cancelled])
            found += [answers[number][-1].result for number in asked]
    return found, model


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folder, found = tmp_path_factory.mktemp("stages"), {}
    write_tiny_model(folder / "model", num_hidden_layers=3)
    for stages in (1, 2, 3):
        spec = ConvertSpec(dtype="float32", pp_size=stages)
        checkpoint = convert_model(Model(path=folder / "model"), spec, out=folder / f"checkpoint-{stages}")
        build = BuildSpec(
            runtime="torch",
            device="cpu",
            max_batch_size=8,
            max_seq_len=128,
            max_num_tokens=STEP,
            gather_context_logits=True,
            gather_generation_logits=True,
        )
        found[stages] = build_engine(checkpoint, build, out=folder / f"engine-{stages}").path
    return found


@pytest.mark.parametrize("stages", [2, 3])
def test_stages_answer_like_one_model(engines: dict[int, Path], stages: int) -> None:
    (expected, _), (found, model) = _answers(engines[1], 1), _answers(engines[stages], stages)
    for one, several in zip(expected, found, strict=True):
        assert several.output_token_ids == one.output_token_ids
        for name in ("context_logits", "generation_logits", "log_probs"):
            first, second = getattr(one, name), getattr(several, name)
            assert (first is None) == (second is None)
            if first is not None:
                np.testing.assert_allclose(second, first, atol=2e-4)
    assert model.parts.count(8 // stages) > model.parts.count(8), "steps were not divided"
