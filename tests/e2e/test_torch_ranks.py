"""Engines of the torch runtime with several ranks: the real mpirun, a real Triton for each rank, and its answers.

On a machine with GPUs TRTSERVE_TEST_DEVICE=cuda runs the same tests with NCCL, as far as there are GPUs for the ranks.
`make ranks` adds launches of four and eight ranks.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.support.devices import DEVICE
from tests.support.in_process import END_ID, InProcess
from tests.support.launches import assert_gone, running_rank
from tests.support.model_server import ModelServer, Tensors, integers
from tests.support.servers import free_spec, started
from tests.support.stages import build_engine, convert_model
from tests.support.tiny_models import write_tiny_model
from trtserve.artifacts import Engine, Model, ModelRepository
from trtserve.errors import ServerDiedError, ServerStartError
from trtserve.host.gpus import count_gpus
from trtserve.repository.assembling import plan_repository
from trtserve.repository.profiles import CORE
from trtserve.repository.publishing import assemble_repository
from trtserve.server.plan import ServerPlan, plan_server
from trtserve.server.shutdown import end_server
from trtserve.server.start import start_server
from trtserve.server.state import Server
from trtserve.server.supervision import watch
from trtserve.server.triton.tritonserver import shared_memory_regions
from trtserve.specs import BuildSpec, ConvertSpec, RepositorySpec
from trtserve.store import Store

pytestmark = [pytest.mark.triton, pytest.mark.needs("torch")]

TOKENS = 24
# Long enough for two micro-batches of prompts, and of different lengths, so that prompts and generations mix.
PROMPTS = [[3 + (5 * i + 7 * length) % 250 for i in range(length)] for length in (1, 5, 17, 40, 33, 9)]
MANY = os.environ.get("TRTSERVE_RANKS") == "all"
LAUNCHES = [(1, 2), (2, 2), *([(4, 1), (8, 1), (4, 2), (2, 4)] if MANY else [])]
# Eight ranks have a head each, and four of them share a key/value head.
SIZES: dict[str, Any] = (
    {"num_hidden_layers": 5, "num_attention_heads": 8, "hidden_size": 128} if MANY else {"num_hidden_layers": 3}
)
# A rank that dies ends the launch within 10 s; this also holds on a machine that is busy with other tests.
END = 45.0


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    write_tiny_model(folder / "model", **SIZES)
    return folder


def engine_of(root: Path, tp: int, pp: int) -> Engine:
    checkpoint = convert_model(
        Model(path=root / "model"),
        ConvertSpec(dtype="float32", tp_size=tp, pp_size=pp),
        out=root / f"checkpoint-{tp}-{pp}",
    )
    spec = BuildSpec(runtime="torch", device=DEVICE, max_batch_size=8, max_seq_len=128)
    return build_engine(checkpoint, spec, out=root / f"engine-{tp}-{pp}")


@pytest.fixture(scope="module")
def expected(root: Path) -> list[list[int]]:
    """The answers of one rank, each request alone."""
    with closing(InProcess(engine_of(root, 1, 1).path)) as executor:
        return [executor.tokens(prompt, TOKENS) for prompt in PROMPTS]


def plan_of(root: Path, tp: int, pp: int, *, ready_timeout: float = 120.0) -> ServerPlan:
    """A launch of the core model alone: the other models have no ranks."""
    if DEVICE == "cuda" and count_gpus() < tp * pp:
        pytest.skip(f"{tp * pp} ranks need a GPU each")
    repository = root / f"repository-{tp}-{pp}"
    if not repository.exists():
        spec = RepositorySpec(name="tiny")
        whole = plan_repository(engine_of(root, tp, pp), root / "model", spec, out=root / f"all-{tp}-{pp}")
        shutil.copytree(assemble_repository(whole).path / CORE, repository / CORE)
        config = repository / CORE / "config.pbtxt"
        config.write_text(config.read_text().replace("preprocessing/1/tokenizer", str(root / "model")))
    server = replace(free_spec(f"ranks-{tp}-{pp}", ready_timeout=ready_timeout), oversubscribe=True)
    return plan_server(ModelRepository(path=repository), server, store=Store(root / "home"))


@contextmanager
def running(plan: ServerPlan) -> Iterator[Server]:
    server = started(lambda: start_server(plan))
    try:
        yield server
    except BaseException:
        sys.stderr.write(server.instances[0].log.read_text(errors="replace"))
        raise
    finally:
        end_server(server, plan.store)
        assert_gone(server, plan.store)


def answers(server: Server) -> list[list[int]]:
    """Every prompt at the same time."""

    def answer(prompt: list[int]) -> list[int]:
        inputs: Tensors = {
            "input_ids": np.array([prompt], dtype=np.int32),
            "input_lengths": integers(len(prompt)),
            "request_output_len": integers(TOKENS),
            "end_id": integers(END_ID),
        }
        with ModelServer(server.address).stream() as stream:
            (found,) = stream.all(CORE, inputs)
        length = int(found["sequence_length"][0, 0])
        return [int(token) for token in found["output_ids"][0, 0, len(prompt) : length]]

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(answer, PROMPTS))


@pytest.mark.parametrize(("tp", "pp"), LAUNCHES)
def test_ranks_answer_like_one(root: Path, expected: list[list[int]], tp: int, pp: int) -> None:
    with running(plan_of(root, tp, pp)) as server:
        assert (server.mode, len(server.instances[0].ranks)) == ("leader", tp * pp)
        assert answers(server) == expected
        # A second round finds the cache as the first one left it.
        assert answers(server) == expected
        threads = list(map(int, re.findall(r"has joined .*, (\d+) threads", server.instances[0].log.read_text())))
    assert len(threads) == tp * pp
    if DEVICE == "cpu":  # more threads than cores wait for each other: four ranks on two cores took ten times as long
        assert sum(threads) <= max(tp * pp, len(os.sched_getaffinity(0)))


@pytest.mark.parametrize("ranks", [2, *([8] if MANY else [])])
def test_a_rank_that_dies_ends_the_server(root: Path, expected: list[list[int]], ranks: int) -> None:
    plan = plan_of(root, ranks, 1)
    with running(plan) as server:
        assert answers(server) == expected
        processes = [psutil.Process(rank.pid) for rank in server.instances[0].ranks]
        processes[1].kill()
        with pytest.raises(ServerDiedError, match="Rank 1 was killed"):
            watch(server, plan.store, lambda: 0)
        assert not psutil.wait_procs(processes, timeout=END)[1]
    assert not shared_memory_regions(server.shm_prefix)


@pytest.mark.parametrize("ranks", [2, *([8] if MANY else [])])
def test_a_rank_that_is_stopped_ends_the_start(root: Path, ranks: int) -> None:
    plan = plan_of(root, ranks, 1, ready_timeout=60.0)
    stopped: list[int] = []

    def stop_rank() -> None:
        _, pid = running_rank(plan.name, 1, plan.store)
        rank = psutil.Process(pid)
        for process in (rank, *rank.children(recursive=True)):  # its stub would go on without it
            stopped.append(process.pid)
            process.suspend()

    with ThreadPoolExecutor(1) as pool:
        stopping = pool.submit(stop_rank)
        with pytest.raises(ServerStartError, match=r"was stopped by a signal \(SIGSTOP\)") as caught:
            start_server(plan)
        stopping.result()
    assert any(f"pid {pid}" in caught.value.message for pid in stopped)
