"""Every launch mode: the real mpirun around the strict double of tritonserver, from its start to a clean machine."""

from __future__ import annotations

import os
import random
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.support.double_engines import write_core_model, write_engine_folder
from tests.support.doubles import Doubles
from tests.support.launches import (
    assert_gone,
    command,
    family,
    llmapi_repository,
    repository_of,
    running_rank,
    running_server,
    start_flags,
    started,
)
from tests.support.servers import free_spec
from tests.support.waiting import eventually, wait_until
from trtserve.artifacts import ModelRepository
from trtserve.errors import RepositoryError, ServerDiedError, ServerRunningError, ServerStartError
from trtserve.server import checks, start
from trtserve.server.plan import plan_server
from trtserve.server.shutdown import stop_server
from trtserve.server.start import start_server
from trtserve.server.state import Server, list_servers, recorded_server
from trtserve.server.status import server_state
from trtserve.server.supervision import serve_foreground
from trtserve.server.triton.tritonserver import is_ready, shared_memory_regions
from trtserve.store import Store

KILLS = int(os.environ.get("TRTSERVE_KILLS", "4"))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """The store that commands use too."""
    return Store(tmp_path / "home")


def test_leader(tmp_path: Path, store: Store, doubles: Doubles) -> None:
    repository = repository_of(tmp_path)
    with started(repository, store, gpus=(2, 3)) as server:
        assert (server_state(server), server.mode, len(server.instances[0].ranks)) == (("ready", ""), "leader", 2)
        calls = sorted(doubles.calls("tritonserver"), key=lambda call: call.rank)
        assert [call.rank for call in calls] == [0, 1]
        assert all(call.environment["CUDA_VISIBLE_DEVICES"] == "2,3" for call in calls)
        assert all(call.cwd == repository.path for call in calls)
        assert "--load-model=tensorrt_llm" in calls[1].arguments
        assert len(shared_memory_regions(server.shm_prefix)) == 2
        again = command("start", "--model-repository", str(repository.path), "--name", "launched", "--detach")
        assert again.returncode == ServerRunningError.code, again.stderr
    # Rank 0 was asked and ended in order, and the others with it.
    assert "Waiting for in-flight requests" in server.instances[0].log.read_text()
    assert "Terminating worker process" in server.instances[0].log.read_text()


def test_a_start_runs_its_plan_and_plans_nothing_again(
    tmp_path: Path, store: Store, doubles: Doubles, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_server(repository_of(tmp_path, tp=1), replace(free_spec("planned"), oversubscribe=True), store=store)
    monkeypatch.setattr("trtserve.server.plan.plan_server", None)
    monkeypatch.setattr("trtserve.server.plan.inspect_repository", None)
    server = start_server(plan)
    stop_server("planned", store=store)
    assert server.address == plan.instances[0].address
    (call,) = doubles.calls("tritonserver")
    assert tuple(call.arguments) == plan.instances[0].launch.groups[0][1:]


@pytest.mark.parametrize("container", ["24.08", "25.05", "26.03"])
def test_commands_of_every_release_start(container: str, tmp_path: Path, store: Store, doubles: Doubles) -> None:
    doubles.configure(container=container)
    path = write_core_model(tmp_path / "repository", "tensorrt_llm", str(tmp_path / "engine"))
    write_engine_folder(tmp_path / "engine", tp=1, container=container)
    with started(ModelRepository(path=path), store) as server:
        assert is_ready(server.address)


def test_a_rank_that_dies_ends_the_foreground(tmp_path: Path, store: Store, doubles: Doubles) -> None:
    doubles.configure(die_rank=1, die_when="asked", die_signal=9)
    repository = repository_of(tmp_path)
    arguments = ["start", "--model-repository", str(repository.path), "--oversubscribe", *start_flags(free_spec())]
    with ThreadPoolExecutor() as pool:
        running = pool.submit(command, *arguments)
        wait_until(lambda: running.done() or any(server.ready_since for server in list_servers(store)), 180)
        doubles.let_rank_die()
        ended = running.result()
    assert ended.returncode == 35, ended.stderr
    assert "Rank 1 was killed (signal 9" in ended.stderr
    assert "CUDA runtime error in cudaMalloc: out of memory" in ended.stderr
    assert list_servers(store) == []


def test_a_rank_that_dies_while_loading_is_named(tmp_path: Path, store: Store, doubles: Doubles) -> None:
    doubles.configure(die_rank=1, die_when="start", die_code=3, load_seconds=5)
    spec = replace(free_spec(), oversubscribe=True)
    with pytest.raises(ServerStartError, match="Rank 1 ended with code 3 before the server was ready") as caught:
        start_server(plan_server(repository_of(tmp_path), spec, store=store))
    assert "out of memory" in caught.value.message
    assert list_servers(store) == []


def test_a_rank_that_exits_with_0_while_loading_is_reported(
    tmp_path: Path, store: Store, doubles: Doubles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mpirun lets a rank go that ends with code 0, and the others wait for it."""
    monkeypatch.setattr(start, "_RANK_INTERVAL", 0.1)
    monkeypatch.setattr(start, "_JOB_END", 0.5)
    doubles.configure(die_rank=1, die_when="start", die_after=1.0, die_code=0, load_seconds=2)
    spec = replace(free_spec(), oversubscribe=True)
    with pytest.raises(ServerStartError, match="Rank 1 of 2 ended before the server was ready") as caught:
        start_server(plan_server(repository_of(tmp_path), spec, store=store))
    assert "rank 1: no process" in caught.value.message
    assert list_servers(store) == []


def test_a_rank_that_exits_with_0_ends_the_server(
    tmp_path: Path, store: Store, doubles: Doubles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trtserve.server.status._EXPLANATION", 0.2)
    doubles.configure(die_rank=1, die_when="asked", die_code=0)
    spec = replace(free_spec(), oversubscribe=True)
    seen: list[Server] = []

    def on_ready(server: Server) -> None:
        seen.append(server)
        doubles.let_rank_die()

    with pytest.raises(ServerDiedError, match="rank 1 of 2 has ended"):
        serve_foreground(plan_server(repository_of(tmp_path), spec, store=store), on_ready=on_ready)
    assert_gone(seen[0], store)


def test_the_deadline_names_the_missing_rank(tmp_path: Path, store: Store, doubles: Doubles) -> None:
    doubles.configure(hang_rank=1)
    spec = replace(free_spec(ready_timeout=1.5), oversubscribe=True)
    with pytest.raises(ServerStartError, match=r"not ready after 1\.5 s.* keeps the others waiting:") as caught:
        start_server(plan_server(repository_of(tmp_path), spec, store=store))
    for rank in (0, 1):
        assert f"rank {rank}: " in caught.value.message
    assert "% CPU; last line: " in caught.value.message


def test_an_engine_of_another_machine_is_explained(tmp_path: Path, store: Store, doubles: Doubles) -> None:
    doubles.configure(sm=80)
    spec = replace(free_spec(), oversubscribe=True)
    with pytest.raises(ServerStartError, match="incompatible device"):
        start_server(plan_server(repository_of(tmp_path, tp=1), spec, store=store))


def test_orchestrator(tmp_path: Path, store: Store, doubles: Doubles) -> None:
    worker = f"executor_worker_path={doubles.worker}"
    repository = repository_of(tmp_path, a=f"gpu_device_ids=0,1 {worker}", b=f"gpu_device_ids=2,3 {worker}")
    with started(repository, store, multi_model=True) as server:
        (call,) = doubles.calls("tritonserver")
        assert call.environment["TRTLLM_ORCHESTRATOR"] == call.environment["TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES"] == "1"
        assert "--cuda-memory-pool-byte-size=3:0" in call.arguments
        assert server.mode == "orchestrator"


def test_orchestrator_with_workers_of_its_own(tmp_path: Path, store: Store, doubles: Doubles) -> None:
    repository = repository_of(
        tmp_path, a="gpu_device_ids=0,1 participant_ids=1,2", b="gpu_device_ids=2,3 participant_ids=3,4"
    )
    with started(repository, store, multi_model=True, spawn_processes=False, world_size=5) as server:
        assert len(server.instances[0].ranks) == 5
        assert {call.environment["TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES"] for call in doubles.calls("tritonserver")} == {
            "0"
        }


def test_an_orchestrator_with_several_instances_of_a_model(tmp_path: Path, store: Store, doubles: Doubles) -> None:
    repository = repository_of(tmp_path, a=f"gpu_device_ids=0,1;2,3 executor_worker_path={doubles.worker}")
    config = repository.path / "a" / "config.pbtxt"
    config.write_text(config.read_text().replace("count: 1 ", "count: 2 "))
    with started(repository, store, multi_model=True) as server:
        assert len(doubles.calls("tritonserver")) == 1
        # A worker for each GPU of each instance.
        assert (
            len([each for each in family(server, store) if f"{doubles.worker.name} a" in " ".join(each.cmdline())]) == 4
        )


@pytest.mark.parametrize(
    ("parameter", "words"),
    [
        (" executor_worker_path=/opt/nowhere/trtllmExecutorWorker", r"/opt/nowhere/trtllmExecutorWorker \("),
        ("", r".*/trtllmExecutorWorker \(executor_worker_path, which is not set\), which is not on this machine"),
    ],
)
def test_missing_workers_are_refused(
    parameter: str, words: str, tmp_path: Path, store: Store, doubles: Doubles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "WORKER", str(tmp_path / "opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker"))
    repository = repository_of(tmp_path, a=f"gpu_device_ids=0,1{parameter}")
    with pytest.raises(RepositoryError, match=f"The worker of a is {words}") as caught:
        start_server(plan_server(repository, replace(free_spec(), multi_model=True), store=store))
    assert str(doubles.worker) in str(caught.value.hint)


@pytest.mark.parametrize("world_size", [1, 2])
def test_llmapi(world_size: int, tmp_path: Path, store: Store, doubles: Doubles) -> None:
    doubles.configure(container="25.12")
    with started(llmapi_repository(tmp_path, world_size), store, trtllm_version="1.1.0") as server:
        assert server.mode == "llmapi"
        assert len(doubles.calls("tritonserver")) == 1
        assert len(doubles.calls("trtllm-llmapi-launch")) == (2 if world_size > 1 else 0)


@dataclass(frozen=True, kw_only=True)
class Kill:
    """One launch of four ranks: which of them is killed, how long after it was seen, and how long all of them load."""

    name: str
    seed: int
    rank: int
    moment: float
    load: float


def test_ranks_killed_at_random_moments_leave_nothing(tmp_path: Path, doubles: Doubles) -> None:
    """Four launches at a time, each in its own store: most of a launch is waiting."""
    repository = repository_of(tmp_path, tp=4)
    seed = int(os.environ.get("TRTSERVE_SEED", "5"))
    chance = random.Random(seed)
    kills = [
        Kill(
            name=f"kill{number}-{secrets.token_hex(2)}",
            seed=seed,
            rank=chance.randrange(4),
            moment=chance.uniform(0, 2),
            load=chance.uniform(0, 2),
        )
        for number in range(KILLS)
    ]
    with ThreadPoolExecutor(max_workers=4) as pool:
        launches = [pool.submit(killed_launch, kill, repository, tmp_path / kill.name, doubles) for kill in kills]
    for kill, launch in zip(kills, launches, strict=True):
        code, errors = launch.result()
        assert code in (32, 35), f"{kill}: {errors}"
        assert f"Rank {kill.rank} was killed" in errors, f"{kill}: {errors}"


def killed_launch(kill: Kill, repository: ModelRepository, home: Path, doubles: Doubles) -> tuple[int, str]:
    """Start, kill one rank, and check that nothing is left; return the exit code and the messages."""
    store = Store(home)
    environment = {**doubles.environment(load_seconds=kill.load), "TRTSERVE_HOME": str(home)}
    with foreground(repository, kill.name, environment) as one:
        server, victim = running_rank(kill.name, kill.rank, store)
        time.sleep(kill.moment)
        os.kill(victim, signal.SIGKILL)
        _, errors = one.communicate(timeout=120)
    assert_gone(server, store)
    return one.returncode, errors


@contextmanager
def foreground(
    repository: ModelRepository, name: str, environment: dict[str, str] | None = None, *more: str
) -> Iterator[subprocess.Popen[str]]:
    """`trtserve start` as a command, which is ended with its launch when the test fails."""
    line = [sys.executable, "-m", "trtserve", "start", "--model-repository", str(repository.path), "--name", name]
    line += ["--oversubscribe", "--auto-ports", *start_flags(free_spec(name)), *more]
    with subprocess.Popen(line, stderr=subprocess.PIPE, text=True, env=environment) as one:
        try:
            yield one
        except BaseException:
            one.terminate()
            raise


def ready(name: str, store: Store) -> Server:
    """The server of this name when its start is complete."""
    running_server(name, store)
    assert eventually(lambda: (found := recorded_server(name, store)) is None or found.state == "ready")
    return running_server(name, store)


def test_a_killed_worker_of_an_orchestrator_leaves_nothing(tmp_path: Path, store: Store, doubles: Doubles) -> None:
    worker = f"executor_worker_path={doubles.worker}"
    repository = repository_of(tmp_path, a=f"gpu_device_ids=0,1 {worker}", b=f"gpu_device_ids=2,3 {worker}")
    with foreground(repository, "spawned", None, "--multi-model") as one:
        server = ready("spawned", store)
        workers = [each for each in family(server, store) if any(str(doubles.worker.name) in w for w in each.cmdline())]
        assert len(workers) == 4
        workers[0].kill()
        _, errors = one.communicate(timeout=120)
    assert (one.returncode, "Rank 0 was killed" in errors) == (35, True), errors
    assert_gone(server, store)


def test_a_killed_rank_next_to_an_orchestrator_leaves_nothing(tmp_path: Path, store: Store, doubles: Doubles) -> None:
    repository = repository_of(
        tmp_path, a="gpu_device_ids=0,1 participant_ids=1,2", b="gpu_device_ids=2,3 participant_ids=3,4"
    )
    flags = ("--multi-model", "--disable-spawn-processes", "--world-size=5")
    with foreground(repository, "ranks", None, *flags) as one:
        server = ready("ranks", store)
        os.kill(running_rank("ranks", 3, store)[1], signal.SIGKILL)
        _, errors = one.communicate(timeout=120)
    assert (one.returncode, "Rank 3 was killed" in errors) == (35, True), errors
    assert_gone(server, store)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_node_of_the_llm_api_leaves_nothing(rank: int, tmp_path: Path, store: Store, doubles: Doubles) -> None:
    doubles.configure(container="25.12")
    with foreground(llmapi_repository(tmp_path, 2), "nodes", None, "--trtllm-version=1.1.0") as one:
        server = ready("nodes", store)
        os.kill(running_rank("nodes", rank, store)[1], signal.SIGKILL)
        _, errors = one.communicate(timeout=120)
    # mpirun does not report rank 0 while a tritonserver that is not its child holds the rank's output.
    words = "nodes: rank 0" if rank == 0 else "Rank 1 was killed"
    assert (one.returncode, words in errors) == (35, True), errors
    assert_gone(server, store)
