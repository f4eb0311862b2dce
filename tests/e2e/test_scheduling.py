"""Batching and scheduling settings of the core model do not change answers; metrics show their effect."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.in_process import InProcess
from tests.support.model_server import ModelServer, integers, serving
from tests.support.release_client import NEWEST, long_integers
from tests.support.stages import make_repository
from tests.support.waiting import wait_until
from trtserve.artifacts import Engine
from trtserve.specs import RepositorySpec

pytestmark = pytest.mark.triton

PROMPTS = [[1, 10 + number, 20, 30 + number] for number in range(12)]
COUNT = 120
# Eight blocks, of which a request of the test needs four in the end: requests must wait, or be paused.
BASE = {"max_tokens_in_paged_kv_cache": "256", "max_beam_width": "1", "ngram_max_draft_len": "0"}
FIT_TO_THEIR_END = 2


def served(root: Path, name: str, engine: Engine, model: Path, settings: dict[str, str]) -> Iterator[ModelServer]:
    """A server on a repository with these settings."""
    spec = RepositorySpec(name="tiny", settings=BASE | settings)
    repository = make_repository(engine, model, spec, out=root / name)
    with serving(repository.path, root / f"{name}-server") as server:
        yield server


@pytest.fixture(scope="module")
def pausing(features_root: Path, features_engine: Engine, features_model: Path) -> Iterator[ModelServer]:
    """max_utilization, reuse of blocks, and a queue with sixteen places; statistics often enough to be seen."""
    settings = {"batch_scheduler_policy": "max_utilization", "max_queue_size": "16", "stats_check_period_ms": "5"}
    reuse = {"enable_kv_cache_reuse": "true"}
    yield from served(features_root, "pausing", features_engine, features_model, settings | reuse)


@pytest.fixture(scope="module")
def static(features_root: Path, features_engine: Engine, features_model: Path) -> Iterator[ModelServer]:
    """V1 batching."""
    settings = {"batching_strategy": "V1", "enable_kv_cache_reuse": "false"}
    yield from served(features_root, "static", features_engine, features_model, settings)


def answers(server: ModelServer, prompt: list[int], count: int = COUNT, *, streaming: bool = False) -> list[list[int]]:
    """New tokens of a sampled request, by response."""
    tensors = NEWEST.core(prompt, count, streaming=streaming, top_k=30, exclude_input_in_output=True, end_id=-1)
    with server.stream() as stream:
        found = stream.all("tensorrt_llm", {**tensors, "seed": long_integers(prompt[1])})
    return [each["output_ids"].reshape(-1).tolist() for each in found]


@pytest.fixture(scope="module")
def expected(oracle: InProcess) -> list[list[int]]:
    return [oracle.tokens(prompt, COUNT, sampling={"top_k": 30, "seed": prompt[1]}, end_id=-1) for prompt in PROMPTS]


def most_scheduled(server: ModelServer, streaming: bool, expected: list[list[int]]) -> float:
    """Send all requests at once, check the answers, and return the most requests that were computed together."""
    most = 0.0
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        asked = [pool.submit(answers, server, prompt, streaming=streaming) for prompt in PROMPTS]
        while not all(each.done() for each in asked):
            most = max(most, server.metric("nv_trt_llm_request_metrics", 'request_type="scheduled"'))
    assert [[token for part in each.result() for token in part] for each in asked] == expected
    return most


@pytest.mark.parametrize("streaming", [False, True])
def test_paused_requests_go_on_without_gap_or_repeat(
    pausing: ModelServer, expected: list[list[int]], streaming: bool
) -> None:
    """More are computed at once than the cache has room for to their end, so that some must have been paused."""
    wait_until(lambda: most_scheduled(pausing, streaming, expected) > FIT_TO_THEIR_END)


@pytest.mark.parametrize("streaming", [False, True])
def test_static_batches(static: ModelServer, expected: list[list[int]], streaming: bool) -> None:
    """Static batches do not stream: the answer comes in one piece, without the prompt."""
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        found = list(pool.map(lambda prompt: answers(static, prompt, streaming=streaming), PROMPTS))
    assert found == [[tokens] for tokens in expected]


def families(server: ModelServer) -> set[str]:
    """Names of TensorRT-LLM's metric families."""
    names = ("inflight_batcher", "v1", "request", "general", "kv_cache_block", "runtime_memory")
    return {name for name in names if server.has_metric(f"nv_trt_llm_{name}_metrics")}


def test_metrics_of_static_batches(static: ModelServer) -> None:
    """No request takes the place of an ended one before the complete batch has ended."""
    assert families(static) == {"v1", "request", "general", "kv_cache_block", "runtime_memory"}
    assert static.has_metric("nv_trt_llm_v1_metrics", 'v1_specific_metric="total_context_tokens"')
    seen = dict.fromkeys(("total_generation_tokens", "empty_generation_slots"), 0.0)

    def ask_for_different_lengths() -> bool:
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            counts = [COUNT if number % 2 else 5 for number in range(len(PROMPTS))]
            asked = [pool.submit(answers, static, *each) for each in zip(PROMPTS, counts, strict=True)]
            while not all(each.done() for each in asked):
                for label, value in seen.items():
                    found = static.metric("nv_trt_llm_v1_metrics", f'v1_specific_metric="{label}"')
                    seen[label] = max(value, found)
        return all(seen.values())

    wait_until(ask_for_different_lengths)


def test_metrics_of_reuse(features: ModelServer) -> None:
    """The same long prompt twice: the second request takes blocks of the first."""
    prompt = [1, *range(40, 168)]
    tensors = NEWEST.core(prompt, 4, return_perf_metrics=True)
    with features.stream() as stream:
        stream.all("tensorrt_llm", tensors)
        (found,) = stream.all("tensorrt_llm", tensors)
    assert found["kv_cache_reused_blocks"].item() >= 3
    wait_until(lambda: features.metric("nv_trt_llm_kv_cache_block_metrics", 'kv_cache_block_type="reused"') >= 3)
    assert families(features) == {"inflight_batcher", "request", "general", "kv_cache_block", "runtime_memory"}


def two_blocks(seed: int) -> list[int]:
    """Return a prompt of two blocks and one more token, which is computed in every request."""
    ids: list[int] = np.random.default_rng(seed).integers(3, 320, 65).tolist()
    return ids


def core_answer(server: ModelServer, ids: list[int], count: int = 1, **retention: int) -> tuple[list[int], int]:
    """New tokens, and how many blocks of the prompt were still there; a retention word is a range's or the answer's."""
    tensors = NEWEST.core(ids, count, return_perf_metrics=True, exclude_input_in_output=True, end_id=-1)
    with server.stream() as stream:
        (found,) = stream.all(
            "tensorrt_llm", tensors | {f"retention_{name}": integers(value) for name, value in retention.items()}
        )
    return found["output_ids"].reshape(-1).tolist(), int(found["kv_cache_reused_blocks"].item())


def test_retention_decides_which_blocks_stay(pausing: ModelServer) -> None:
    """Each request leaves two of the cache's eight blocks; later requests evict those of the lowest priority."""
    whole = {"token_range_starts": 0, "token_range_ends": -1}
    kept, plain, expired = two_blocks(1), two_blocks(2), two_blocks(3)
    core_answer(pausing, kept, **whole, token_range_priorities=90, token_range_durations_ms=600_000)
    core_answer(pausing, plain)
    core_answer(pausing, expired, **whole, token_range_priorities=90, token_range_durations_ms=1)
    for seed in range(10, 16):
        core_answer(pausing, two_blocks(seed))
    reused = [core_answer(pausing, prompt)[1] for prompt in (kept, plain, expired)]
    assert reused == [2, 0, 0]


def test_retention_of_the_answers_blocks(pausing: ModelServer) -> None:
    kept, plain = two_blocks(4)[:10], two_blocks(5)[:10]
    tokens, _ = core_answer(pausing, kept, 60, decode_priority=90, decode_duration_ms=600_000)
    others, _ = core_answer(pausing, plain, 60)
    for seed in range(20, 26):
        core_answer(pausing, two_blocks(seed))
    assert core_answer(pausing, [*kept, *tokens])[1] >= 2
    assert core_answer(pausing, [*plain, *others])[1] == 0


def test_a_full_queue_refuses_what_does_not_fit(pausing: ModelServer) -> None:
    """A request with more rows than the queue has places is refused as one, and no other request."""
    body: dict[str, Any] = {"text_input": "x", "max_tokens": 4, "num_return_sequences": 17, "top_k": 5}
    status, refused = pausing.generate("tiny", body)
    assert status >= 400
    assert "Maximum queue size of 16 has been reached" in refused["error"]
    assert pausing.generate("tiny", {"text_input": "x", "max_tokens": 4})[0] == 200
