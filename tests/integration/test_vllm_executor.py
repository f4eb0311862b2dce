"""The executor on a vLLM that counts: a real child process, real frames, and every way in which it may end."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from tests.support.counting_vllm import counting_engine, counting_python
from tests.support.executors import answer_of, collect
from tests.support.waiting import wait_until
from trtserve.executor.api import (
    Executor,
    ExecutorConfig,
    FinishReason,
    LoraConfig,
    ModelType,
    OutputConfig,
    Request,
    SamplingConfig,
)
from trtserve.executor.vllm import engine as vllm_engine
from trtserve.executor.vllm.arguments import LEADER, NODES
from trtserve.host.ports import free_ports


def start(folder: Path, **settings: Any) -> Executor:
    return Executor(folder, ModelType.DECODER_ONLY, ExecutorConfig(**settings))


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
    with start(counting_engine(tmp_path_factory.mktemp("engine"), adapters={7: "poet"})) as made:
        yield made


def request(*prompt: int, **given: Any) -> Request:
    output = given.pop("output", {})
    keywords = {"max_tokens": 5, "end_id": 99, "output_config": OutputConfig(exclude_input_from_output=True, **output)}
    return Request(input_token_ids=list(prompt), **{**keywords, **given})


def tokens(executor: Executor, asked: Request) -> list[list[int]]:
    """Return the tokens of each response."""
    (responses,) = collect(executor, [executor.enqueue_request(asked)]).values()
    return [each.result.output_token_ids[0] for each in responses]


def test_an_answer_comes_once_and_a_stream_has_one_response_for_each_token(executor: Executor) -> None:
    assert tokens(executor, request(1, 2)) == [[3, 4, 5, 6, 7]]
    assert tokens(executor, request(1, 2, streaming=True)) == [[3], [4], [5], [6], [7]]
    assert tokens(executor, request(1, 2, streaming=True, return_all_generated_tokens=True))[-1] == [3, 4, 5, 6, 7]
    with_prompt = Request(input_token_ids=[1, 2], max_tokens=2, end_id=99)
    assert tokens(executor, with_prompt) == [[1, 2, 3, 4]]


def test_the_end_token_is_not_in_the_answer_and_stop_words_are(executor: Executor) -> None:
    ended = answer_of(executor, request(97)).result
    assert (ended.output_token_ids, ended.finish_reasons) == ([[98]], [FinishReason.END_ID])
    for words in ([[4]], [[3, 4]], [[50], [2, 3, 4]]):
        stopped = answer_of(executor, request(1, 2, stop_words=words)).result
        assert (stopped.output_token_ids, stopped.finish_reasons) == ([[3, 4]], [FinishReason.STOP_WORDS])
    assert tokens(executor, request(1, 2, streaming=True, stop_words=[[3, 4]])) == [[3], [4]]


def test_bad_words_and_adapters_reach_vllm(executor: Executor) -> None:
    assert tokens(executor, request(1, bad_words=[[3]], max_tokens=3)) == [[2, 4, 5]]
    assert tokens(executor, request(1, lora_config=LoraConfig(7), max_tokens=2)) == [[11, 21]]


def test_greedy_sequences_are_copies_and_sampled_ones_are_vllms(executor: Executor) -> None:
    for sampling in ({"num_return_sequences": 3}, {"num_return_sequences": 3, "top_k": 5, "temperature": 0.5}):
        asked = request(1, sampling_config=SamplingConfig(**sampling), max_tokens=2)
        (responses,) = collect(executor, [executor.enqueue_request(asked)]).values()
        assert [each.result.sequence_index for each in responses] == [0, 1, 2]
        assert [each.result.is_final for each in responses] == [False, False, True]


def test_log_probs_and_the_most_likely_tokens(executor: Executor) -> None:
    asked = request(1, max_tokens=2, output={"return_log_probs": True})
    asked.top_log_probs = 2
    result = answer_of(executor, asked).result
    assert (result.log_probs, result.cum_log_probs) == ([[-0.5, -0.5]], [-1.0])
    assert result.top_log_probs == [[(2, -0.5), (3, -1.5)], [(3, -0.5), (4, -1.5)]]
    asked = request(98, max_tokens=2, streaming=True, end_id=0, output={"return_log_probs": True})
    asked.top_log_probs = 1
    (responses,) = collect(executor, [executor.enqueue_request(asked)]).values()  # 99, and the end
    assert [each.result.top_log_probs for each in responses] == [[[(99, -0.5)]], []]
    assert [each.result.log_probs for each in responses] == [[[-0.5]], [[-0.5]]]


def test_a_stream_interval_puts_tokens_that_come_together_into_one_response(tmp_path: Path) -> None:
    with start(counting_engine(tmp_path, arguments={"stream_interval": 2})) as executor:
        assert tokens(executor, request(1, 2, streaming=True)) == [[3, 4], [5, 6], [7]]
        assert tokens(executor, request(1, 2, streaming=True, stop_words=[[3, 4, 5]])) == [[3, 4], [5]]
        assert tokens(executor, request(1, 2, streaming=True, end_id=6)) == [[3, 4], [5]]
        asked = request(1, streaming=True, max_tokens=3, output={"return_log_probs": True})
        asked.top_log_probs = 1
        (responses,) = collect(executor, [executor.enqueue_request(asked)]).values()
        assert [each.result.top_log_probs for each in responses] == [[[(2, -0.5)], [(3, -0.5)]], [[(4, -0.5)]]]


def test_metrics_of_requests_and_iterations(executor: Executor) -> None:
    executor.get_latest_iteration_stats()
    metrics = answer_of(executor, request(*range(1, 40), output={"return_perf_metrics": True})).result
    assert metrics.request_perf_metrics is not None
    timing, cache = metrics.request_perf_metrics.timing_metrics, metrics.request_perf_metrics.kv_cache_metrics
    assert timing.arrival_time <= timing.first_token_time <= timing.last_token_time
    assert (cache.num_total_allocated_blocks, cache.num_reused_blocks) == (3, 1)
    wait_until(lambda: executor.get_latest_iteration_stats()[-1].num_active_requests == 0)
    answer_of(executor, request(1))
    records = executor.get_latest_iteration_stats()
    assert max(each.num_active_requests for each in records) == 1
    assert records[0].kv_cache_stats is not None
    assert records[0].kv_cache_stats.max_num_blocks == 8
    assert records[0].kv_cache_stats.tokens_per_block == 16


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (
            {"sampling_config": SamplingConfig(beam_width=2)},
            "beam_width is not supported by the vllm runtime; the",
        ),
        ({"sampling_config": SamplingConfig(no_repeat_ngram_size=2)}, "no_repeat_ngram_size is not supported"),
        ({"sampling_config": SamplingConfig(top_k=5, temperature=3.0)}, "temperature is 3; vLLM takes 0 … 2"),
        ({"position_ids": [0]}, "position_ids is not supported by the vllm runtime"),
        ({"output": {"return_context_logits": True}}, "return_context_logits is not supported"),
        ({"lora_config": LoraConfig(8)}, "lora_task_id 8 is not an adapter of this repository (it has 7)"),
        ({"embedding_bias": np.zeros(3, np.float32)}, "The embedding bias has 3 entries"),
    ],
)
def test_what_vllm_cannot_do_is_refused_by_name(executor: Executor, asked: dict[str, Any], reason: str) -> None:
    assert reason in answer_of(executor, request(1, **asked)).error_msg


def test_prompts_that_do_not_fit_and_vllms_own_refusals(executor: Executor) -> None:
    assert "Prompt length (64) exceeds maximum input length (63)" in answer_of(executor, request(*[1] * 64)).error_msg
    assert "Token id 100 of the prompt is outside" in answer_of(executor, request(100)).error_msg
    assert "vLLM does not like this prompt" in answer_of(executor, request(91)).error_msg
    assert tokens(executor, request(1, max_tokens=2)) == [[2, 3]]  # it goes on


def test_a_cancelled_request_ends_at_once_and_its_blocks_are_free(executor: Executor) -> None:
    number = executor.enqueue_request(request(96, streaming=True))
    wait_until(lambda: executor.get_num_responses_ready(number) == 2)
    executor.cancel_request(number)
    assert collect(executor, [number])[number][-1].result.finish_reasons == [FinishReason.CANCELLED]
    last = executor.get_latest_iteration_stats()[-1]
    assert last.kv_cache_stats is not None
    assert (last.num_active_requests, last.kv_cache_stats.used_num_blocks) == (0, 0)
    executor.cancel_request(number)  # of an id that is unknown now
    assert tokens(executor, request(1, max_tokens=2)) == [[2, 3]]
    # vLLM has ended the other one too.
    assert {each.num_active_requests for each in executor.get_latest_iteration_stats()} <= {0, 1}


def test_a_request_out_of_time(executor: Executor) -> None:
    late = answer_of(executor, request(93, allotted_time_ms=timedelta(milliseconds=10)))
    assert late.result.finish_reasons == [FinishReason.TIMED_OUT]


def test_a_full_queue(tmp_path: Path) -> None:
    with start(counting_engine(tmp_path, max_batch_size=1), max_queue_size=1) as executor:
        numbers = [executor.enqueue_request(request(93)) for _ in range(2)]
        with pytest.raises(RuntimeError, match="Maximum queue size of 1 has been reached"):
            executor.enqueue_request(request(1))
        for number in numbers:
            executor.cancel_request(number)


def test_a_vllm_that_does_not_start_says_why(tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    folder.mkdir()
    with pytest.raises(RuntimeError, match="vLLM does not start: ValueError: the weights are damaged"):
        start(counting_engine(folder))


def test_a_damaged_adapter_is_found_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="vLLM does not start: ValueError: the adapter is damaged"):
        start(counting_engine(tmp_path, adapters={7: "damaged"}))


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [(92, "EngineCore encountered an issue"), (94, r"vLLM's process \d+ \(.+\) is stopped")],
    ids=["dead engine", "stopped worker"],
)
def test_a_dead_engine_answers_what_is_open_and_leaves_nothing(tmp_path: Path, prompt: int, reason: str) -> None:
    executor = start(counting_engine(tmp_path))
    first = executor.enqueue_request(request(93))
    second = executor.enqueue_request(request(prompt))
    found = collect(executor, [first, second])
    for responses in found.values():
        assert responses[-1].has_error()
    with pytest.raises(RuntimeError, match=reason):
        executor.await_responses(timeout=5)
    with pytest.raises(RuntimeError, match=reason):
        executor.enqueue_request(request(1))
    wait_until_gone(child_of(executor))
    executor.shutdown()


@pytest.mark.parametrize("prompt", [93, 90], ids=["alone", "with a forked child, which has its pipe"])
def test_a_killed_child(tmp_path: Path, prompt: int) -> None:
    executor = start(counting_engine(tmp_path))
    number = executor.enqueue_request(request(prompt))
    if prompt == 90:
        wait_until(lambda: bool(psutil.Process(child_of(executor)).children()))
    os.kill(child_of(executor), signal.SIGKILL)
    assert "vLLM's process has ended with code -9" in collect(executor, [number])[number][0].error_msg
    executor.shutdown()


def test_a_stopped_child_hangs_and_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = start(counting_engine(tmp_path))
    assert executor.hang() is None
    executor.enqueue_request(request(95))
    wait_until(lambda: any(_group(pid) == child_of(executor) != pid for pid in psutil.pids()))
    os.kill(child_of(executor), signal.SIGSTOP)
    monkeypatch.setattr(vllm_engine, "_LONGEST_SILENCE", 2.0)
    wait_until(lambda: executor.hang() is not None)
    wait_until_gone(child_of(executor))
    executor.shutdown()


def test_an_engine_that_makes_no_step_hangs_and_one_that_works_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(vllm_engine, "time", SimpleNamespace(monotonic=lambda: now, time=time.time))
    monkeypatch.setattr(vllm_engine, "_LONGEST_SILENCE", math.inf)
    executor = start(counting_engine(tmp_path))
    executor.enqueue_request(request(93))
    for _ in range(3):  # a request that is not streamed answers only at its end, but steps are made
        now += 200
        answer_of(executor, request(1, max_tokens=20))
        assert executor.hang() is None

    def hangs() -> bool:
        nonlocal now
        now += 301  # what the engine side said of the last step may arrive at this time
        return "has made no step for" in str(executor.hang())

    wait_until(hangs)
    executor.shutdown()


def test_the_child_ends_with_the_executor(tmp_path: Path) -> None:
    executor = start(counting_engine(tmp_path))
    child, number = child_of(executor), executor.enqueue_request(request(1, max_tokens=20))
    executor.shutdown()
    with pytest.raises(RuntimeError, match="Shutdown called"):
        executor.await_responses(number)
    wait_until_gone(child)


@contextmanager
def two_nodes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Executor, subprocess.Popen[bytes]]]:
    """An executor and its follower on the loopback."""
    (port,) = free_ports("127.0.0.1", 1)
    folder.mkdir()
    engine = counting_engine(folder, arguments={"master_port": port + 1})
    monkeypatch.setenv(LEADER, "127.0.0.1")
    monkeypatch.setenv(NODES, "2")
    python = str(counting_python(folder / "environment"))
    words = [python, str(Path(vllm_engine.__file__).with_name("engine_side.py")), "follow", str(port)]
    with subprocess.Popen(words, env={**os.environ, "TRTSERVE_VLLM_NODE": "1"}, start_new_session=True) as follower:
        try:
            with start(engine) as executor:
                assert tokens(executor, request(1, max_tokens=2)) == [[2, 3]]
                wait_until(lambda: bool(psutil.Process(follower.pid).children()))
                yield executor, follower
        finally:
            with suppress(ProcessLookupError):
                os.killpg(follower.pid, signal.SIGKILL)


def test_a_follower_ends_in_order_with_its_leader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with two_nodes(tmp_path / "engine", monkeypatch) as (executor, follower):
        follower.terminate()  # the cluster asks all at once: requests of the leader still need the follower
        assert tokens(executor, request(1, max_tokens=2)) == [[2, 3]]
        executor.shutdown()
        assert follower.wait(60) == 0
        wait_until_gone(follower.pid)


@pytest.mark.parametrize("victim", ["leader", "guard", "follower", "worker"])
def test_when_a_node_dies_nothing_is_left_on_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str) -> None:
    with two_nodes(tmp_path / "engine", monkeypatch) as (executor, follower):
        number = executor.enqueue_request(request(93))
        leader, (main,) = child_of(executor), psutil.Process(follower.pid).children()
        (worker,) = main.children()
        victims = {"leader": leader, "guard": follower.pid, "follower": main.pid, "worker": worker.pid}
        os.kill(victims[victim], signal.SIGKILL)
        reason = "has ended with code -9" if victim == "leader" else "the follower on node 1 has ended"
        assert reason in collect(executor, [number])[number][0].error_msg
        assert follower.wait(60) != 0
        wait_until_gone(main.pid)
        wait_until_gone(leader)
        executor.shutdown()


def child_of(executor: Executor) -> int:
    loop = executor._loop
    assert isinstance(loop, vllm_engine.VllmEngine)
    return loop._child.pid


def wait_until_gone(group: int) -> None:
    """Wait until no process of vLLM's group is left."""
    wait_until(lambda: not any(_group(pid) == group for pid in psutil.pids()))


def _group(pid: int) -> int | None:
    try:
        return None if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE else os.getpgid(pid)
    except (psutil.Error, OSError):
        return None
