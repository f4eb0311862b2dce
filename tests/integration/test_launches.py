"""Every launch mode: the real mpirun around the strict double of tritonserver, from its start to a clean machine."""

from __future__ import annotations

import json
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.double_engines import write_core_model, write_engine_folder
from tests.support.doubles import Doubles
from tests.support.servers import HOST, free_spec
from trtserve.artifacts import ModelRepository
from trtserve.errors import PortInUseError, RepositoryError, ServerDiedError, ServerStartError, UsageError
from trtserve.launch.ranks import rank_processes
from trtserve.ports import free_ports, is_free
from trtserve.process import program
from trtserve.servers import Server, condition, find_server, list_servers, recorded_server, state_file
from trtserve.specs import ServerSpec
from trtserve.start import checks, life, plan_server, readiness, serve_foreground, start_server, stop_server
from trtserve.store import Store
from trtserve.triton.server import is_ready, shared_memory_regions

# `make launches` asks for twenty.
KILLS = int(os.environ.get("TRTSERVE_KILLS", "2"))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """The store that commands use too."""
    return Store(tmp_path / "home")


def repository_of(tmp_path: Path, *, tp: int = 2, **models: str) -> ModelRepository:
    """Core models, each with parameters such as `gpu_device_ids=0,1`, around one engine."""
    path, engine = tmp_path / "repository", tmp_path / "engine"
    for name, text in (models or {"tensorrt_llm": ""}).items():
        parameters = dict(pair.split("=") for pair in text.split())
        write_core_model(path, name, str(engine), **parameters)
    write_engine_folder(engine, tp=tp)
    return ModelRepository(path=path)


@contextmanager
def started(repository: ModelRepository, store: Store, **changes: Any) -> Iterator[Server]:
    """A ready server, stopped at the end, of which nothing may be left."""
    spec = replace(free_spec("launched"), oversubscribe=True, **changes)
    server = start_server(repository, spec, store=store)
    try:
        yield server
    finally:
        if recorded_server(server.name, store) is not None:
            stop_server(server.name, store=store)
        assert_gone(server, store)


def assert_gone(server: Server, store: Store) -> None:
    """No process, port, shared memory, session folder of mpirun or state file is left; the logs are."""
    assert not [process for process in psutil.process_iter() if mentions(process, server)]
    for instance in server.instances:
        for port in (instance.http_port, instance.grpc_port, instance.metrics_port):
            assert is_free(server.host, port)
        assert not (Path(tempfile.gettempdir()) / f"ompi.{instance.pid}").exists()
        assert instance.log.exists()
    assert not shared_memory_regions(server.shm_prefix)
    assert not state_file(server.name, store).exists()


def mentions(process: psutil.Process, server: Server) -> bool:
    """Whether a process belongs to a server: the prefix of its shared memory is in every command line of it."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE and any(server.shm_prefix in word for word in process.cmdline())
    except psutil.Error:
        return False


def eventually(wanted: Callable[[], object], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not wanted():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "trtserve", *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=180, check=False)


def start_flags(spec: ServerSpec) -> list[str]:
    ports = {"--http-port": spec.http_port, "--grpc-port": spec.grpc_port, "--metrics-port": spec.metrics_port}
    return [f"{flag}={port}" for flag, port in ports.items()]


def test_leader(tmp_path: Path, store: Store, doubles: Doubles) -> None:
    repository = repository_of(tmp_path)
    with started(repository, store, gpus=(2, 3)) as server:
        assert (condition(server), server.mode, len(server.ranks)) == (("running", ""), "leader", 2)
        calls = sorted(doubles.calls("tritonserver"), key=lambda call: call.rank)
        assert [call.rank for call in calls] == [0, 1]
        assert all(call.environment["CUDA_VISIBLE_DEVICES"] == "2,3" for call in calls)
        assert all(call.cwd == repository.path for call in calls)
        assert "--load-model=tensorrt_llm" in calls[1].arguments
        assert len(shared_memory_regions(server.shm_prefix)) == 2
        again = command("start", "--model-repository", str(repository.path), "--name", "launched", "--detach")
        assert again.returncode == 32, again.stderr
    # Rank 0 was asked and ended in order, and the others with it.
    assert "Waiting for in-flight requests" in server.log.read_text()
    assert "Terminating worker process" in server.log.read_text()


@pytest.mark.parametrize("container", ["24.08", "25.05", "26.03"])
def test_every_form_of_the_command_is_taken(container: str, tmp_path: Path, store: Store, doubles: Doubles) -> None:
    doubles.configure(container=container)
    path = write_core_model(tmp_path / "repository", "tensorrt_llm", str(tmp_path / "engine"))
    write_engine_folder(tmp_path / "engine", tp=1, container=container)
    with started(ModelRepository(path=path), store) as server:
        assert is_ready(server.address)


def test_a_rank_that_dies_ends_the_foreground(tmp_path: Path, store: Store, doubles: Doubles) -> None:
    doubles.configure(die_rank=1, die_when="ready", die_signal=9)
    repository = repository_of(tmp_path)
    ended = command("start", "--model-repository", str(repository.path), "--oversubscribe", *start_flags(free_spec()))
    assert ended.returncode == 35, ended.stderr
    assert "Rank 1 was killed (signal 9" in ended.stderr
    assert "CUDA runtime error in cudaMalloc: out of memory" in ended.stderr
    assert list_servers(store) == []


def test_a_rank_that_dies_while_loading_is_named(tmp_path: Path, store: Store, doubles: Doubles) -> None:
    doubles.configure(die_rank=1, die_when="start", die_code=3, load_seconds=5)
    spec = replace(free_spec(), oversubscribe=True)
    with pytest.raises(ServerStartError, match="Rank 1 ended with code 3 before the server was ready") as caught:
        start_server(repository_of(tmp_path), spec, store=store)
    assert "out of memory" in caught.value.message
    assert list_servers(store) == []


def test_a_rank_that_ends_quietly_while_loading_is_noticed(
    tmp_path: Path, store: Store, doubles: Doubles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mpirun lets a rank go that ends with code 0, and the others wait for it."""
    monkeypatch.setattr(readiness, "_RANK_INTERVAL", 0.1)
    monkeypatch.setattr(readiness, "_LET_GO", 0.5)
    doubles.configure(die_rank=1, die_when="start", die_after=1.0, die_code=0, load_seconds=2)
    spec = replace(free_spec(), oversubscribe=True)
    with pytest.raises(ServerStartError, match="Rank 1 of 2 has ended before the server was ready") as caught:
        start_server(repository_of(tmp_path), spec, store=store)
    assert "rank 1: no process" in caught.value.message
    assert list_servers(store) == []


def test_a_rank_that_ends_quietly_ends_the_server(
    tmp_path: Path, store: Store, doubles: Doubles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(life, "_EXPLANATION", 0.2)
    doubles.configure(die_rank=1, die_when="ready", die_after=1.5, die_code=0)
    spec = replace(free_spec(), oversubscribe=True)
    seen: list[Server] = []
    with pytest.raises(ServerDiedError, match="rank 1 of 2 has ended by itself"):
        serve_foreground(repository_of(tmp_path), spec, store=store, on_ready=seen.append)
    assert_gone(seen[0], store)


def test_the_deadline_names_the_missing_rank(tmp_path: Path, store: Store, doubles: Doubles) -> None:
    doubles.configure(hang_rank=1)
    spec = replace(free_spec(ready_timeout=1.5), oversubscribe=True)
    with pytest.raises(ServerStartError, match=r"not ready after 1\.5 s.* Rank \d keeps the others waiting") as caught:
        start_server(repository_of(tmp_path), spec, store=store)
    for rank in (0, 1):
        assert f"rank {rank}: " in caught.value.message
    assert "% CPU; last line: " in caught.value.message


def test_an_engine_of_another_machine_is_explained(tmp_path: Path, store: Store, doubles: Doubles) -> None:
    doubles.configure(sm=80)
    spec = replace(free_spec(), oversubscribe=True)
    with pytest.raises(ServerStartError, match="incompatible device"):
        start_server(repository_of(tmp_path, tp=1), spec, store=store)


def test_another_world_size_needs_another_engine(tmp_path: Path, store: Store) -> None:
    repository = repository_of(tmp_path)
    with pytest.raises(UsageError, match=r"--world-size is 4; the engine was built for 2 rank\(s\)") as caught:
        plan_server(repository, ServerSpec(world_size=4), store=store, elsewhere=True)
    assert "--tp_size 4" in str(caught.value.hint)


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
        assert len(server.ranks) == 5
        assert {call.environment["TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES"] for call in doubles.calls("tritonserver")} == {
            "0"
        }


def test_models_that_claim_the_same_gpu(tmp_path: Path, store: Store, doubles: Doubles) -> None:
    repository = repository_of(tmp_path, a="gpu_device_ids=0,1", b="gpu_device_ids=1,2")
    with pytest.raises(RepositoryError, match="GPU 1 is claimed by both a and b"):
        plan_server(repository, ServerSpec(multi_model=True), store=store)


@pytest.mark.parametrize(
    ("parameter", "words"),
    [
        (" executor_worker_path=/opt/nowhere/trtllmExecutorWorker", r"are /opt/nowhere/trtllmExecutorWorker \("),
        (
            "",
            r"are .*/trtllmExecutorWorker \(executor_worker_path, which is not set\), not on this machine",
        ),
    ],
)
def test_workers_that_are_not_there(
    parameter: str, words: str, tmp_path: Path, store: Store, doubles: Doubles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "WORKER", str(tmp_path / "opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker"))
    repository = repository_of(tmp_path, a=f"gpu_device_ids=0,1{parameter}")
    with pytest.raises(RepositoryError, match=f"The workers of a {words}") as caught:
        start_server(repository, replace(free_spec(), multi_model=True), store=store)
    assert str(doubles.worker) in str(caught.value.hint)


def test_two_instances_behind_a_proxy(tmp_path: Path, store: Store, doubles: Doubles) -> None:
    repository = repository_of(tmp_path)
    proxy_port = free_ports(HOST, 1)[0]
    with started(repository, store, instances=2, proxy_port=proxy_port, auto_ports=True) as server:
        assert condition(server) == ("running", "")
        devices = {call.environment["CUDA_VISIBLE_DEVICES"] for call in doubles.calls("tritonserver")}
        assert devices == {"0,1", "2,3"}
        assert len(doubles.calls("tritonserver")) == 4
        (shown,) = json.loads(command("status", "--json").stdout)["result"]
        assert len(shown["server"]["more"]) == 1
        assert f"{server.http_port},{server.more[0].http_port}" in command("status").stdout
        assert server.proxy is not None
        check_proxy(server, proxy_port)
        with pytest.raises(PortInUseError, match="taken by trtserve's server launched"):
            start_server(repository, replace(free_spec("b"), http_port=server.more[0].http_port), store=store)
        os.kill(server.more[0].ranks[0][0], signal.SIGKILL)
        assert eventually(lambda: condition(find_server(store=store))[0] == "failed")


def check_proxy(server: Server, port: int) -> None:
    """The configuration through a real nginx where there is one: both instances answer through its port."""
    assert server.proxy is not None
    text = server.proxy.read_text()
    assert all(f"server {HOST}:{instance.http_port} " in text for instance in server.instances)
    nginx = program("nginx", os.environ["PATH"] + ":/usr/sbin")
    # .ci/run installs it.
    assert nginx is not None or os.environ.get("TRTSERVE_ORACLE") != "required"
    if nginx is None:
        return
    line = [str(nginx), "-e", "stderr", "-p", str(server.proxy.parent), "-c", str(server.proxy)]
    checked = subprocess.run([*line, "-t"], capture_output=True, text=True, timeout=30, check=False)
    assert checked.returncode == 0, checked.stderr
    with subprocess.Popen(line, stderr=subprocess.DEVNULL) as process:
        try:
            assert eventually(lambda: not is_free(HOST, port))
            for _ in range(4):
                with urllib.request.urlopen(f"http://{HOST}:{port}/v2/health/ready", timeout=10) as answer:
                    assert answer.status == 200
        finally:
            process.terminate()


def llmapi_repository(tmp_path: Path, world_size: int) -> ModelRepository:
    folder = tmp_path / "repository" / "tensorrt_llm" / "1"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text("class TritonPythonModel:\n    pass\n")
    (folder / "helpers.py").write_text("")
    (folder / "model.yaml").write_text(
        f"model: TinyLlama/TinyLlama-1.1B-Chat-v1.0\nbackend: pytorch\ntensor_parallel_size: {world_size}\n"
        "triton_config:\n  decoupled: true\n"
    )
    (folder.parent / "config.pbtxt").write_text(
        'name: "tensorrt_llm"\nbackend: "python"\nmodel_transaction_policy { decoupled: true }\n'
        'input [ { name: "text_input" data_type: TYPE_STRING dims: [ -1 ] } ]\n'
        'output [ { name: "text_output" data_type: TYPE_STRING dims: [ -1 ] } ]\n'
        "instance_group [ { count: 1 kind: KIND_CPU } ]\n"
    )
    return ModelRepository(path=tmp_path / "repository")


@pytest.mark.parametrize("world_size", [1, 2])
def test_llmapi(world_size: int, tmp_path: Path, store: Store, doubles: Doubles) -> None:
    doubles.configure(container="25.12")
    with started(llmapi_repository(tmp_path, world_size), store, trtllm_version="1.1.0") as server:
        assert server.mode == "llmapi"
        assert len(doubles.calls("tritonserver")) == 1
        assert len(doubles.calls("trtllm-llmapi-launch")) == (2 if world_size > 1 else 0)


def test_ranks_killed_at_random_moments_leave_nothing(tmp_path: Path, store: Store, doubles: Doubles) -> None:
    repository = repository_of(tmp_path, tp=4)
    seed = int(os.environ.get("TRTSERVE_SEED", "5"))
    chance = random.Random(seed)
    for number in range(KILLS):
        rank, moment = chance.randrange(4), chance.uniform(0, 2)
        doubles.configure(load_seconds=chance.uniform(0, 2))
        name = f"kill{number}-{secrets.token_hex(2)}"
        spec = free_spec(name)
        line = [sys.executable, "-m", "trtserve", "start", "--model-repository", str(repository.path), "--name", name]
        with subprocess.Popen([*line, "--oversubscribe", *start_flags(spec)], stderr=subprocess.PIPE, text=True) as one:
            server, victim = running_rank(name, rank, store)
            time.sleep(moment)
            os.kill(victim, signal.SIGKILL)
            _, errors = one.communicate(timeout=120)
        words = f"seed {seed}, launch {number}: rank {rank} after {moment:.2f} s: {errors}"
        assert one.returncode in (32, 35), words
        assert f"Rank {rank} was killed" in errors, words
        assert_gone(server, store)


def running_rank(name: str, rank: int, store: Store) -> tuple[Server, int]:
    """The server of this name and the process of one of its ranks, as soon as there is one."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        server = recorded_server(name, store)
        if server is not None and (process := rank_processes(server.identity).get(rank)) is not None:
            return server, process.pid
        time.sleep(0.02)
    raise AssertionError(f"{name} never had a rank {rank}")
