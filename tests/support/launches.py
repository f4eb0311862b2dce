"""Launches of the doubles: repositories, servers that are stopped again, and checks that nothing is left."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from tests.support.double_engines import write_core_model, write_engine_folder
from tests.support.servers import free_spec
from tests.support.waiting import eventually
from trtserve.artifacts import ModelRepository
from trtserve.host.ports import is_free
from trtserve.server.plan import plan_server
from trtserve.server.rank_processes import rank_processes
from trtserve.server.shutdown import stop_server
from trtserve.server.start import start_server
from trtserve.server.state import Server, last_record, list_servers, recorded_server, run_folder
from trtserve.server.triton.tritonserver import shared_memory_regions
from trtserve.specs import ServerSpec
from trtserve.store import Store


def repository_of(tmp_path: Path, *, tp: int = 2, **models: str) -> ModelRepository:
    """Core models, each with parameters such as `gpu_device_ids=0,1`, around one engine."""
    path, engine = tmp_path / "repository", tmp_path / "engine"
    for name, text in (models or {"tensorrt_llm": ""}).items():
        parameters = dict(pair.split("=") for pair in text.split())
        write_core_model(path, name, str(engine), **parameters)
    write_engine_folder(engine, tp=tp)
    return ModelRepository(path=path)


def llmapi_repository(tmp_path: Path, world_size: int) -> ModelRepository:
    """Write a repository of the LLM API for so many ranks."""
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


@contextmanager
def started(repository: ModelRepository, store: Store, **changes: Any) -> Iterator[Server]:
    """Start a server, stop it at the end, and check that nothing is left."""
    spec = replace(free_spec("launched"), oversubscribe=True, **changes)
    before = descendants()
    server = start_server(plan_server(repository, spec, store=store))
    try:
        # What finds nothing while the server runs would find nothing afterwards either.
        assert server.instances[0].process.pid in {process.pid for process in family(server, store)}
        yield server
    finally:
        if recorded_server(server.name, store) is not None:
            stop_server(server.name, store=store)
        assert_gone(server, store)
        assert not descendants() - before


def assert_gone(server: Server, store: Store) -> None:
    """No process, port, shared memory, session folder of mpirun or state file is left; the logs are."""
    left = family(server, store)
    assert not left, [(process.pid, process.name()) for process in left]
    for instance in server.instances:
        for port in (instance.address.http_port, instance.address.grpc_port, instance.address.metrics_port):
            assert is_free(server.address.host, port)
        assert not (Path(tempfile.gettempdir()) / f"ompi.{instance.process.pid}").exists()
        assert instance.log.exists()
    assert not shared_memory_regions(server.shm_prefix)
    assert server.name not in {each.name for each in list_servers(store)}
    recorded = last_record(server.name, store)
    assert recorded is not None
    assert recorded.state in ("stopped", "failed")
    assert not run_folder(server.name, store).exists()


def family(server: Server, store: Store) -> set[psutil.Process]:
    """Every living process of a launch, whoever started it: daemons of mpirun, ranks, workers, stubs, waiting scripts.

    A process belongs to it when its command line has the prefix of the server's shared memory, when it is in the
    session of one of the instances, or when its environment is that of the store, which each test has for itself.
    """
    sessions = {instance.process.pid for instance in server.instances}
    return {process for process in psutil.process_iter() if _belongs(process, server, store, sessions)}


def _belongs(process: psutil.Process, server: Server, store: Store, sessions: set[int]) -> bool:
    try:
        if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
            return False
        return (
            any(server.shm_prefix in word for word in process.cmdline())
            or os.getsid(process.pid) in sessions
            or process.environ().get("TRTSERVE_HOME") == str(store.root)
        )
    except (psutil.Error, OSError):  # it has ended meanwhile, or is another user's
        return False


def descendants() -> set[psutil.Process]:
    """The living processes below this one."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.add(process)
    return found


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "trtserve", *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=180, check=False)


def start_flags(spec: ServerSpec) -> list[str]:
    ports = {"--http-port": spec.http_port, "--grpc-port": spec.grpc_port, "--metrics-port": spec.metrics_port}
    return [*(f"{flag}={port}" for flag, port in ports.items()), *(["--raw-http"] if spec.raw_http else [])]


def running_rank(name: str, rank: int, store: Store) -> tuple[Server, int]:
    """The server of this name and the process of one of its ranks, as soon as there is one."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        server = recorded_server(name, store)
        if server is not None and (process := rank_processes(server.instances[0].process).get(rank)) is not None:
            return server, process.pid
        time.sleep(0.02)
    raise AssertionError(f"{name} never had a rank {rank}")


def running_server(name: str, store: Store) -> Server:
    """The server of this name as soon as it is recorded."""
    assert eventually(lambda: recorded_server(name, store) is not None)
    server = recorded_server(name, store)
    assert server is not None
    return server
