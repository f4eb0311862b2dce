"""Features of requests on a float32 engine of a random llama: log-probs, logits, drafts, pauses and reuse."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.stages import build_engine, convert_model
from tests.support.tiny_models import write_tiny_model
from tests.support.transformers_oracle import ENGINES
from trtserve.artifacts import Model
from trtserve.executor import api
from trtserve.specs import BuildSpec, ConvertSpec

Floats = npt.NDArray[np.float64]

VOCAB = 320
PROMPTS = [np.random.default_rng(seed).integers(3, VOCAB, size=length).tolist() for seed, length in ((1, 5), (2, 70))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("features") / "model", "llama", seed=5)


@pytest.fixture(scope="module", params=ENGINES)
def runtime(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def _build(folder: Path, runtime: str, name: str, **features: Any) -> Path:
    build = BuildSpec(max_batch_size=8, max_seq_len=128, max_num_tokens=96, **ENGINES[runtime], **features)
    checkpoint = convert_model(Model(path=folder), ConvertSpec(dtype="float32"), out=folder.parent / "checkpoint")
    return build_engine(checkpoint, build, out=folder.parent / runtime / name).path


@pytest.fixture(scope="module")
def gathering(folder: Path, runtime: str) -> Iterator[api.Executor]:
    """An engine that gives logits, in chunks of at most 96 tokens."""
    logits = {"gather_context_logits": True, "gather_generation_logits": True}
    engine = _build(folder, runtime, "gathering", **logits, max_beam_width=2)
    config = api.ExecutorConfig(enable_chunked_context=True, max_num_tokens=64, max_beam_width=2)
    with api.Executor(engine, api.ModelType.DECODER_ONLY, config) as running:
        yield running


@pytest.fixture(scope="module")
def drafting(folder: Path, runtime: str) -> Iterator[api.Executor]:
    """An engine that verifies drafts, with blocks that are used again."""
    engine = _build(folder, runtime, "drafting", max_draft_len=8, speculative_decoding_mode="draft_tokens_external")
    config = api.ExecutorConfig(kv_cache_config=api.KvCacheConfig(enable_block_reuse=True))
    with api.Executor(engine, api.ModelType.DECODER_ONLY, config) as running:
        yield running


@pytest.fixture(scope="module")
def logits_of(folder: Path) -> Any:
    """Logits f64[n, V] of the original model after each of n tokens."""
    import torch
    import transformers

    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def compute(tokens: list[int]) -> Floats:
        with torch.inference_mode():
            logits: Floats = model(torch.tensor([tokens]), use_cache=False).logits[0].double().numpy()
        return logits

    return compute


def _results(executor: api.Executor, requests: list[api.Request]) -> list[list[Any]]:
    """All results of each request."""
    found: list[list[Any]] = []
    for number in executor.enqueue_requests(requests):
        results: list[Any] = []
        while not results or not results[-1].is_final:
            responses: Any = executor.await_responses(number, timedelta(seconds=60))
            assert responses, "no answer"
            results += [response.result for response in responses]
        found.append(results)
    return found


def _request(prompt: list[int], count: int, **other: Any) -> api.Request:
    output = api.OutputConfig(exclude_input_from_output=True, **other.pop("output", {}))
    sampling = api.SamplingConfig(**other.pop("sampling", {}))
    return api.Request(prompt, count, output_config=output, sampling_config=sampling, **other)


@pytest.mark.needs("torch")
@pytest.mark.parametrize("prompt", PROMPTS, ids=["5", "70"])
def test_log_probs_and_logits_equal_transformers(gathering: api.Executor, logits_of: Any, prompt: list[int]) -> None:
    wanted = {"return_log_probs": True, "return_context_logits": True, "return_generation_logits": True}
    ((result,),) = _results(gathering, [_request(prompt, 12, output=wanted)])
    (tokens,) = result.output_token_ids
    expected = logits_of([*prompt, *tokens[:-1]])
    np.testing.assert_allclose(result.context_logits, expected[: len(prompt)], atol=2e-4)
    np.testing.assert_allclose(result.generation_logits[0], expected[len(prompt) - 1 :], atol=2e-4)
    rows = expected[len(prompt) - 1 :]
    shifted = rows - rows.max(axis=1, keepdims=True)
    log_probs = (shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))[range(12), tokens]
    assert result.log_probs[0] == pytest.approx(log_probs, abs=1e-4)
    assert result.cum_log_probs == pytest.approx([log_probs.sum()], abs=1e-3)


@pytest.mark.needs("torch")
def test_logits_of_beams_equal_transformers(gathering: api.Executor, logits_of: Any) -> None:
    engine_allows = {"beam_width": 2}
    request = _request(PROMPTS[0], 6, sampling=engine_allows, output={"return_generation_logits": True})
    ((result,),) = _results(gathering, [request])
    assert result.generation_logits.shape == (2, 6, VOCAB)
    for beam, tokens in enumerate(result.output_token_ids):
        expected = logits_of([*PROMPTS[0], *tokens[:-1]])[len(PROMPTS[0]) - 1 :]
        np.testing.assert_allclose(result.generation_logits[beam], expected, atol=2e-4)


@pytest.mark.needs("torch")
@pytest.mark.parametrize("right", [True, False], ids=["right", "half wrong"])
def test_drafts_equal_plain_decoding(drafting: api.Executor, logits_of: Any, right: bool) -> None:
    """An answer by drafts of four tokens, each request continuing where the last one ended."""
    prompt = PROMPTS[1]
    ((plain,),) = _results(drafting, [_request(prompt, 30)])
    (expected,) = plain.output_token_ids
    assert expected[0] == int(logits_of(prompt)[-1].argmax())
    random, tokens, requests = np.random.default_rng(3), list[int](), 0
    while len(tokens) < 24:
        draft = expected[len(tokens) : len(tokens) + 4]
        if not right:
            draft[int(random.integers(len(draft)))] = int(random.integers(VOCAB))
        drafts = api.ExternalDraftTokensConfig(draft)
        ((result,),) = _results(drafting, [_request([*prompt, *tokens], 1, external_draft_tokens_config=drafts)])
        tokens += result.output_token_ids[0]
        requests += 1
    assert tokens == expected[: len(tokens)]
    assert requests == 5 if right else requests > 5


@pytest.mark.needs("torch")
def test_pauses_do_not_change_the_answers(folder: Path, runtime: str) -> None:
    engine = _build(folder, runtime, "plain")
    prompts = [np.random.default_rng(seed).integers(3, VOCAB, size=20).tolist() for seed in range(6)]
    requests = [
        _request(
            prompt,
            60,
            streaming=seed % 2 == 0,
            sampling={"top_k": 30, "temperature": 1.5, "seed": seed} if seed % 3 else {},
            output={"return_log_probs": True},
        )
        for seed, prompt in enumerate(prompts)
    ]
    answers = []
    records: list[api.IterationStats] = []
    for policy, tokens in (("GUARANTEED_NO_EVICT", 1024), ("MAX_UTILIZATION", 256)):
        config = api.ExecutorConfig(
            scheduler_config=api.SchedulerConfig(api.CapacitySchedulerPolicy[policy]),
            kv_cache_config=api.KvCacheConfig(max_tokens=tokens),
        )
        with api.Executor(engine, api.ModelType.DECODER_ONLY, config) as executor:
            answers.append(_results(executor, requests))
            records = executor.get_latest_iteration_stats()
    assert sum(each.inflight_batching_stats.num_paused_requests for each in records if each.inflight_batching_stats) > 0
    for calm, paused in zip(*answers, strict=True):
        assert [result.output_token_ids for result in calm] == [result.output_token_ids for result in paused]
        assert calm[-1].log_probs[0] == pytest.approx(paused[-1].log_probs[0], abs=1e-4)


@pytest.mark.needs("torch")
def test_engines_for_openvino_import_no_torch(folder: Path) -> None:
    program = (
        "import sys; from trtserve.executor import api; "
        "api.Executor(sys.argv[1], api.ModelType.DECODER_ONLY, api.ExecutorConfig()).shutdown(); "
        "print(sorted(name for name in sys.modules if name.split('.')[0] == 'torch'))"
    )
    command = [sys.executable, "-c", program, str(_build(folder, "openvino", "plain"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
