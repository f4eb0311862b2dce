"""Parameters of config.pbtxt in a real Triton: what they change, and which are ignored or refused."""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.in_process import InProcess
from tests.support.model_server import ModelServer, Tensors, flags, integers, serving
from tests.support.release_client import NEWEST, long_integers
from tests.support.stages import build_engine, make_repository
from tests.support.text_requests import answers, ask, request, text_of
from tests.support.waiting import wait_until
from trtserve.artifacts import Checkpoint, Engine
from trtserve.executor import api
from trtserve.specs import BuildSpec, RepositorySpec

pytestmark = pytest.mark.triton

NAME = "tiny"
STEP, WINDOW = 64, 48
LONG = [1, *range(20, 220)]
"""Longer than a step of the engine, and than its attention sees."""
IGNORED = {
    "gpu_device_ids": "0,1;2,3",
    "cuda_graph_mode": "true",
    "xgrammar_tokenizer_info_path": "/of/a/machine/with/GPUs.json",
}
UNKNOWN_WORD = 'parameters { key: "batch_scheduler_policy" value { string_value: "first_come" } }\n'
FRACTION, QUEUED, REPORTED = 0.002, 0.2, 0.5
"""Of the free memory; seconds."""
TASK = 7
EFFECTIVE = {
    "kv_cache_free_gpu_mem_fraction": str(FRACTION),
    "enable_kv_cache_reuse": "false",
    "enable_chunked_context": "true",
    "max_attention_window_size": str(WINDOW),
    "exclude_input_in_output": "true",
    "normalize_log_probs": "false",
    "decoding_mode": "top_k",
    "max_queue_delay_microseconds": str(round(QUEUED * 1e6)),
    # So long that no check for cancelled requests happens during these tests.
    "cancellation_check_period_ms": "600000",
    "stats_check_period_ms": str(round(REPORTED * 1000)),
    "iter_stats_max_iterations": "50",
    # Nothing of Triton's shows the statistics of requests: tests/unit/test_executor_requests.py has their effect.
    "request_stats_max_iterations": "50",
    "preprocessing.add_special_tokens": "false",
    "postprocessing.skip_special_tokens": "false",
    "tensorrt_llm_bls.accumulate_tokens": "true",
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parameters")


@pytest.fixture(scope="module")
def repository(
    root: Path, features_checkpoint: Checkpoint, features_model: Path, features_adapters: dict[str, Path]
) -> Path:
    """The same weights as those of every other test, on an engine with short steps."""
    limits = BuildSpec(
        max_batch_size=8,
        max_seq_len=512,
        max_num_tokens=STEP,
        runtime="openvino",
        lora_plugin="auto",
        lora_target_modules=("attn_q", "attn_k", "attn_v"),
        max_lora_rank=8,
    )
    shutil.copytree(features_adapters["left"], root / "prefetched" / str(TASK))
    engine = build_engine(features_checkpoint, limits, out=root / "engine")
    spec = RepositorySpec(
        name=NAME,
        preprocessing_instance_count=2,
        postprocessing_instance_count=2,
        settings=IGNORED | EFFECTIVE | {"lora_prefetch_dir": str(root / "prefetched")},
    )
    made = make_repository(engine, features_model, spec, out=root / "repository").path
    # `repo` refuses what is no such word; NVIDIA's tool fills in anything.
    config = made / "tensorrt_llm" / "config.pbtxt"
    config.write_text(config.read_text() + UNKNOWN_WORD)
    return made


@pytest.fixture(scope="module")
def server(root: Path, repository: Path) -> Iterator[ModelServer]:
    with serving(repository, root / "server") as ready:
        yield ready


@pytest.fixture(scope="module")
def windowed(features_engine: Engine) -> Iterator[InProcess]:
    """The same window, but prompts that are computed in one step."""
    cache = api.KvCacheConfig(max_attention_window=[WINDOW])
    executor = InProcess(features_engine.path, kv_cache_config=cache, normalize_log_probs=False)
    yield executor
    executor.close()


def core(server: ModelServer, tensors: Tensors) -> Tensors:
    (answer,) = answers(server, "tensorrt_llm", tensors)
    return answer


@pytest.mark.usefixtures("server")
def test_parameters_without_effect_are_listed_once(root: Path) -> None:
    log = (root / "server" / "triton.log").read_text()
    assert log.count(f"Parameters ignored on this runtime: {', '.join(IGNORED)}") == 1
    (listed,) = [line for line in log.splitlines() if "Parameters ignored" in line]
    assert "executor_worker_path" not in listed


@pytest.mark.usefixtures("server")
def test_an_unknown_value_is_a_warning_as_upstream(root: Path) -> None:
    log = (root / "server" / "triton.log").read_text()
    assert "Parameter batch_scheduler_policy is 'first_come'" in log


def test_long_prompts_go_in_chunks_through_a_sliding_window(
    server: ModelServer, windowed: InProcess, oracle: InProcess
) -> None:
    expected = windowed.tokens(LONG, 40)
    assert expected != oracle.tokens(LONG, 40)
    # `exclude_input_in_output` is the model's: the request does not ask for it.
    assert core(server, NEWEST.core(LONG, 40))["output_ids"].tolist() == [[expected]]


def test_log_probs_are_not_scaled_to_the_tokens_that_were_left(server: ModelServer, windowed: InProcess) -> None:
    sampling: dict[str, Any] = {"top_k": 3, "seed": 8}
    expected: Any = windowed.result([1, 30, 31], 8, sampling=sampling, output={"return_log_probs": True})
    asked = NEWEST.core([1, 30, 31], 8, top_k=3, return_log_probs=True)
    answer = core(server, {**asked, "seed": long_integers(8)})
    assert answer["output_ids"].tolist() == [expected.output_token_ids]
    np.testing.assert_allclose(answer["output_log_probs"][0], expected.log_probs, rtol=1e-5)
    np.testing.assert_allclose(answer["output_log_probs"].sum(), answer["cum_log_probs"].sum(), rtol=1e-5)


@pytest.mark.parametrize("model", ["ensemble", NAME])
def test_special_tokens_are_not_added_and_not_hidden(server: ModelServer, model: str) -> None:
    words: dict[str, Any] = {"embedding_bias_words": ["<s>"], "embedding_bias_weights": np.array([[200.0]], "f4")}
    asked = request("abc", 3, exclude_input_in_output=True, return_num_input_tokens=flags(True), **words)
    (answer,) = answers(server, model, asked)
    assert answer["num_input_tokens"].item() == 3
    assert text_of(answer).replace(" ", "") == "<s><s><s>"


def test_an_accumulating_stream_repeats_the_text_so_far(server: ModelServer) -> None:
    whole = text_of(ask(server, NAME, "abc", 12, end_id=-1, exclude_input_in_output=True))
    pieces = [text_of(piece) for piece in answers(server, NAME, request("abc", 12, stream=True, end_id=-1))]
    assert len(pieces) > 1
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(pieces))
    assert pieces[-1] == whole


@pytest.mark.usefixtures("server")
def test_a_restricting_decoding_mode_is_reported(root: Path) -> None:
    assert "decoding_mode top_k is ignored" in (root / "server" / "triton.log").read_text()


def test_requests_choose_their_sampling_in_every_decoding_mode(server: ModelServer, windowed: InProcess) -> None:
    """TensorRT-LLM's mode top_k leaves the tokens of such a request undefined."""
    expected = windowed.tokens([1, 30, 31], 12, sampling={"top_p": 0.9, "seed": 5})
    assert expected != windowed.tokens([1, 30, 31], 12)
    asked = {**NEWEST.core([1, 30, 31], 12, top_k=0, top_p=0.9), "seed": long_integers(5)}
    assert core(server, asked)["output_ids"].tolist() == [[expected]]


def test_the_kv_cache_takes_its_share_of_the_memory(server: ModelServer, root: Path) -> None:
    """Compared with an executor of the same share: free memory changes, and the default is far smaller."""
    found = server.metric("nv_trt_llm_kv_cache_block_metrics", 'kv_cache_block_type="max"')
    blocks = []
    for fraction in (FRACTION, None):
        cache = api.KvCacheConfig(free_gpu_memory_fraction=fraction)
        config = api.ExecutorConfig(kv_cache_config=cache)
        with api.Executor(root / "engine", api.ModelType.DECODER_ONLY, config) as beside:
            first: Any = beside.get_latest_iteration_stats()[0]
            blocks.append(first.kv_cache_stats.max_num_blocks)
    share, default = blocks
    assert share / 2 < found < share * 2
    assert found > 4 * default


def test_no_block_is_reused(server: ModelServer, oracle: InProcess) -> None:
    prompt = [1, *range(50, 90)]
    beside: list[Any] = [oracle.result(prompt, 4, output={"return_perf_metrics": True}) for _ in range(2)]
    assert beside[1].request_perf_metrics.kv_cache_metrics.num_reused_blocks > 0
    for _ in range(2):
        answer = core(server, NEWEST.core(prompt, 4, return_perf_metrics=True))
        assert answer["kv_cache_reused_blocks"].item() == 0


def test_prefetched_adapters_are_known_by_their_ids(
    server: ModelServer, windowed: InProcess, features_adapters: dict[str, Path]
) -> None:
    arrays = [np.load(features_adapters["left"] / f"model.lora_{kind}.npy")[0] for kind in ("weights", "config")]
    prompt = [1, 60, 61, 62]
    expected = windowed.tokens(prompt, 12, lora_config=api.LoraConfig(TASK, *arrays))
    assert expected != windowed.tokens(prompt, 12)
    assert core(server, NEWEST.core(prompt, 12, lora_task_id=TASK))["output_ids"].tolist() == [[expected]]


def test_requests_wait_for_the_queue_delay(server: ModelServer) -> None:
    def seconds() -> float:
        started = time.monotonic()
        core(server, NEWEST.core([1, 30], 1))
        return time.monotonic() - started

    assert min(seconds() for _ in range(4)) > 0.9 * QUEUED


def test_metrics_refresh_once_per_period(server: ModelServer) -> None:
    seen: list[float] = []
    begun = time.monotonic()
    while time.monotonic() < begun + 3 * REPORTED or len(set(seen)) < 2:
        core(server, NEWEST.core([1, 30], 2))
        seen.append(server.metric("nv_trtserve_tokens_total", 'token_type="generated"'))
    changes, periods = len(set(seen)) - 1, (time.monotonic() - begun) / REPORTED
    assert 1 <= changes <= periods + 1


def test_a_cancelled_request_ends_at_the_next_check(server: ModelServer) -> None:
    """It runs to its own end here, since the next check is far away."""
    tokens = server.metric("nv_llm_output_token_len_sum")
    with server.stream() as stream:
        stream.send("tensorrt_llm", {**NEWEST.core([1, 30], 400, streaming=True), "end_id": integers(-1)})
        assert not stream.next()[1]
    wait_until(lambda: server.metric("nv_llm_output_token_len_sum") >= tokens + 400)
