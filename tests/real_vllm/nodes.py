"""vLLM itself with two workers and on two "nodes" of the loopback: the tokens of one, nothing left of a killed part.

A part of `make test-vllm`, not of CI. Each engine takes a minute to start.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

import trtserve
from tests.support.waiting import wait_until
from trtserve.executor.api import Executor, ExecutorConfig, KvCacheConfig, ModelType, OutputConfig, Request, Response
from trtserve.executor.vllm import engine as vllm_engine
from trtserve.executor.vllm.arguments import LEADER, NODES
from trtserve.executor.vllm.installation import require_installation
from trtserve.executor.vllm.runtime import vllm_engine_config
from trtserve.host.ports import free_ports
from trtserve.pipeline.import_spec import resolve_import
from trtserve.pipeline.importing import import_to_repository
from trtserve.specs import BuildSpec, ConvertSpec, RepositorySpec
from trtserve.store import Store

PROMPTS = ([1, 60, 61, 62], [1, 300, 301, 302, 303], [5])
ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1"}
DEMO = Path(trtserve.__file__).with_name("demo")
DRAFTS = {"method": "ngram", "num_speculative_tokens": "4", "prompt_lookup_max": "3", "prompt_lookup_min": "1"}
REPEATED = [1, *[60, 61, 62, 63, 64] * 8]


def engine(folder: Path, port: int, tp_size: int, **settings: str) -> Path:
    """Write an engine's folder for the demo model."""
    config = vllm_engine_config(
        json.loads((DEMO / "config.json").read_text()),
        (DEMO / "model.safetensors").stat().st_size,
        ConvertSpec(dtype="float32", tp_size=tp_size),
        BuildSpec(max_seq_len=256, max_batch_size=4),
        {"enforce_eager": "true", "master_port": str(port + 1), **settings},
        require_installation(),
        named=None,
    )
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(dict(config.content)))
    (folder / "model").symlink_to(DEMO)
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
    """An engine on one node, with one place for requests."""
    os.environ.update(ENVIRONMENT)
    made = engine(tmp_path_factory.mktemp("alone") / "engine", 29400, 1, block_size="32")
    settings = ExecutorConfig(max_batch_size=1, kv_cache_config=KvCacheConfig(enable_block_reuse=True))
    with Executor(made, ModelType.DECODER_ONLY, settings) as executor:
        yield executor


def tokens(executor: Executor, prompt: list[int]) -> list[int]:
    asked = Request(prompt, 16, end_id=-1, output_config=OutputConfig(exclude_input_from_output=True))
    (response,) = executor.await_responses(executor.enqueue_request(asked))
    assert isinstance(response, Response)
    assert not response.has_error(), response.error_msg
    return response.result.output_token_ids[0]


@contextmanager
def two_nodes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Executor, subprocess.Popen[bytes]]]:
    (port,) = free_ports("127.0.0.1", 1)
    made = engine(folder, port, 2)
    for name, value in {LEADER: "127.0.0.1", NODES: "2", "VLLM_HOST_IP": "127.0.0.1", **ENVIRONMENT}.items():
        monkeypatch.setenv(name, value)
    words = [str(require_installation().python), str(Path(vllm_engine.__file__).with_name("engine_side.py"))]
    own = {**os.environ, "TRTSERVE_VLLM_NODE": "1", "VLLM_CPU_OMP_THREADS_BIND": "1"}
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0")
    with subprocess.Popen([*words, "follow", str(port)], env=own, start_new_session=True) as follower:
        try:
            with Executor(made, ModelType.DECODER_ONLY, ExecutorConfig()) as executor:
                yield executor, follower
        finally:
            with suppress(ProcessLookupError):
                os.killpg(follower.pid, signal.SIGKILL)


def fails(executor: Executor) -> bool:
    """Return whether the executor takes no more requests."""
    try:
        executor.await_responses(executor.enqueue_request(Request([1], 1)))
    except RuntimeError:
        return True
    return False


def left(group: int) -> list[int]:
    """Return the processes of a session or group that still run."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if group in (os.getpgid(process.pid), os.getsid(process.pid)) and process.status() != "zombie":
                found.append(process.pid)
    return found


def test_two_nodes_give_the_tokens_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: Executor) -> None:
    expected = [tokens(alone, prompt) for prompt in PROMPTS]
    with two_nodes(tmp_path / "two", monkeypatch) as (executor, follower):
        assert [tokens(executor, prompt) for prompt in PROMPTS] == expected
        leader = executor._loop._child.pid  # type: ignore[union-attr]
        executor.shutdown()
        assert follower.wait(60) == 0
        wait_until(lambda: not left(follower.pid) + left(leader), 30)


@pytest.mark.parametrize("victim", ["leader", "guard", "follower", "worker"])
def test_nothing_is_left_when_a_part_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str) -> None:
    with two_nodes(tmp_path / "two", monkeypatch) as (executor, follower):
        assert tokens(executor, PROMPTS[0])
        leader = executor._loop._child.pid  # type: ignore[union-attr]
        (main,) = psutil.Process(follower.pid).children()
        workers = [each.pid for each in main.children() if "VLLM" in " ".join(each.cmdline())]
        victims = {"leader": leader, "guard": follower.pid, "follower": main.pid, "worker": workers[0]}
        os.kill(victims[victim], signal.SIGKILL)
        wait_until(lambda: fails(executor), 30)
        assert follower.wait(60) != 0
        wait_until(lambda: not left(follower.pid) + left(leader), 30)
        executor.shutdown()


def test_salts_keep_prefixes_apart_and_priorities_decide_who_is_next(alone: Executor) -> None:
    output = OutputConfig(return_perf_metrics=True)

    def reused(salt: int) -> int:
        asked = Request([1, *range(200, 300)], 4, output_config=output, cache_salt_id=salt)
        (response,) = alone.await_responses(alone.enqueue_request(asked))
        assert isinstance(response, Response)
        assert response.result.request_perf_metrics is not None
        return response.result.request_perf_metrics.kv_cache_metrics.num_reused_blocks

    assert [reused(1), reused(1), reused(2), reused(2)] == [0, 3, 0, 3]
    first = alone.enqueue_request(Request([1], 100, streaming=True, end_id=-1))
    alone.await_responses(first)  # it has the only place before the others come
    low, high = (alone.enqueue_request(Request([2], 20, end_id=-1, priority=each)) for each in (0.1, 0.9))
    order: list[int] = []
    while len(order) < 3:
        ready = alone.await_responses(timeout=60)
        order += [each.request_id for each in ready if isinstance(each, Response) and each.result.is_final]
    assert order == [first, high, low]


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
