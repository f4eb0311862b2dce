"""What `status` adds to a state file: gauges, precision, and whether this is the machine of the build."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.http_pages import answering
from tests.support.server_records import proxy_record, server_record
from trtserve.artifacts import Manifest, ModelRepository
from trtserve.cli import run
from trtserve.errors import ServerDiedError, ServerNotReadyError
from trtserve.gateway.settings import GatewaySettings
from trtserve.host.machine import describe
from trtserve.process import ProcessId
from trtserve.repository.profiles import CLASSES_FILE, classes_json
from trtserve.repository.served import inspect_repository
from trtserve.server.doctor.stub import write_probe_repository
from trtserve.server.state import Failure, GatewayState, Server, log_file, write_state
from trtserve.server.status import server_status
from trtserve.store import Store

GAUGE = "nv_trt_llm_kv_cache_block_metrics"
ANSWERS = {
    "/metrics": "".join(
        f'{GAUGE}{{kv_cache_block_type="{kind}",model="tensorrt_llm",version="1"}} {value}\n'
        for kind, value in {"max": 96, "used": 12, "tokens_per": 32, "fraction": 0.125}.items()
    ),
    "/v2/repository/index": json.dumps(
        [{"name": "a", "state": "READY"}, {"name": "b", "state": "UNAVAILABLE", "reason": "broken"}]
    ),
    "/v2/health/ready": "",
}


def recorded(repository: Path, port: int) -> Server:
    server = server_record(http_port=port, grpc_port=1, metrics_port=port, repository=repository, model="probe")
    write_state(server, Store())
    return server


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """An engine of another machine."""
    folder = write_probe_repository(tmp_path / "repository")
    engine = folder / "tensorrt_llm" / "1"
    engine.mkdir(parents=True)
    own = {"runtime": "openvino", "compute_precision": "bf16", "kv_precision": "u8"}
    (engine / "config.json").write_text(json.dumps({"trtserve": own, "build_config": {"max_seq_len": 4096}}))
    elsewhere = {**describe(), "machine": "sparc"}
    Manifest(kind="repository", name="demo", fingerprint="0", facts={"machine": elsewhere}).write(folder)
    return folder


def give_parameters(repository: Path, parameters: dict[str, str]) -> None:
    """Make `repository` hold a core model with these parameters."""
    core = repository / "tensorrt_llm"
    rows = [f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}' for name, value in parameters.items()]
    (core / "config.pbtxt").write_text("\n".join(['name: "tensorrt_llm"', 'backend: "python"', *rows]))
    (core / "1" / "model.py").touch()
    (core / "1" / CLASSES_FILE).write_text(classes_json("tensorrt_llm", "1.2") or "")


def test_status_says_that_a_server_has_a_page_and_a_key(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(ANSWERS.__getitem__) as port:
        server = recorded(repository, port)
        own = ProcessId.of(os.getpid())
        assert own is not None
        file = tmp_path / "settings.json"
        told = GatewaySettings(
            name="demo", host="127.0.0.1", port=port, triton_http="a:1", triton_grpc="a:2", metrics="a:3", model=""
        )
        gateway = GatewayState(process=own, log=tmp_path / "log", settings=file)
        (instance,) = server.instances
        write_state(replace(server, instances=(replace(instance, gateway=gateway),)), Store())
        for settings, said in (
            (replace(told, ui=True, key_file=tmp_path / "key"), f"demo: page {server.url}/, clients need its API key"),
            (replace(told, ui=True), f"demo: page {server.url}/\n"),
            (told, ""),
        ):
            settings.write(file)
            run(["status"])
            shown = capsys.readouterr().err
            assert said in shown
            assert ("page http" in shown, "API key" in shown) == (settings.ui, settings.key_file is not None)


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        ({"a": "unloaded", "b": "unloaded"}, "0 of 2 loaded, the others at their first request"),
        ({"a": "loaded", "b": "loaded"}, "2 of 2 loaded"),
    ],
)
def test_a_port_for_many_models_says_how_many_are_loaded(
    kept: dict[str, str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_state(server_record("many", kept=kept), Store())
    run(["status"])
    assert said in " ".join(capsys.readouterr().out.split())


def test_a_dead_proxy_names_its_own_log(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with answering(ANSWERS.__getitem__) as port:
        server = recorded(repository, port)
        log = log_file("demo@proxy", Store())
        proxy = proxy_record(port, log=log, pid=os.getpid(), started=1.0)
        write_state(replace(server, proxy=proxy), Store())
        assert run(["status", "demo"]) == ServerDiedError.code
        assert f"log:   {log}" in capsys.readouterr().err
        assert run(["status"]) == ServerDiedError.code
        assert str(log) in capsys.readouterr().err.replace("\n", "")


def test_everything_is_shown(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with answering(ANSWERS.__getitem__) as port:
        server = recorded(repository, port)
        (status,) = server_status("demo")
        assert run(["status"]) == 0
    assert status.server == server
    assert (status.state, status.reason) == ("ready", "")
    assert status.models == {"a": "READY", "b": "UNAVAILABLE broken"}
    assert status.kv_blocks == {"max": 96, "used": 12, "tokens_per": 32}
    captured = capsys.readouterr()
    expected = [
        "demo",
        "ready",
        "-",
        "probe",
        "1 of 2 ready",
        f"127.0.0.1:{port}",
        "1",
        str(port),
        str(os.getpid()),
        "streamed",
    ]
    columns, row = (line.split("\t") for line in captured.out.splitlines())
    assert (columns[:2], columns[-2:]) == (["name", "state"], ["kv cache", "restarts"])
    assert row == [*expected, "compute bf16, kv u8", "0 running, 0 done", "12 of 96 blocks of 32 tokens", "0"]
    assert "built on a machine with machine sparc" in captured.err
    (_, short) = status.warnings
    assert "max_seq_len 3072 instead of the engine's 4096" in short
    assert "The KV cache holds 3072 tokens" in captured.err


def test_ignored_parameters_are_listed(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    give_parameters(repository, {"gpu_device_ids": "0,1", "executor_worker_path": "/w", "num_nodes": "", "max_": "1"})
    with answering(ANSWERS.__getitem__) as port:
        recorded(repository, port)
        (status,) = server_status("demo")
        assert run(["status", "demo"]) == 0
    assert status.ignored_parameters == ("gpu_device_ids", "executor_worker_path")
    said = "demo: parameters ignored on this runtime: gpu_device_ids, executor_worker_path"
    assert capsys.readouterr().err.count(said) == 1


@pytest.mark.parametrize(
    ("blocks", "count"), [({"max": 2, "tokens_per": 32}, 1), ({"max": 3, "tokens_per": 32}, 0), ({}, 0)]
)
def test_a_sufficient_kv_cache_gives_no_warning(blocks: dict[str, int], count: int, repository: Path) -> None:
    (repository / "tensorrt_llm" / "1" / "config.json").write_text(json.dumps({"build_config": {"max_seq_len": 96}}))
    served = inspect_repository(ModelRepository(path=repository))
    assert len(served.cache_warnings(blocks)) == count


def test_a_repository_that_was_removed_leaves_the_rest(tmp_path: Path) -> None:
    with answering(ANSWERS.__getitem__) as port:
        recorded(tmp_path / "gone", port)
        (status,) = server_status()
    assert (status.state, status.precision, status.warnings) == ("ready", {}, ())


def test_a_server_that_does_not_answer_is_reported(repository: Path) -> None:
    with answering(ANSWERS.__getitem__) as port:
        recorded(repository, port)
        assert server_status()[0].state == "ready"
    (found,) = server_status()
    assert (found.state, found.reason) == ("degraded", f"demo: its HTTP port {port} does not report it as ready")
    assert run(["status"]) == ServerNotReadyError.code


def test_status_of_a_failed_server_names_it_once_and_gives_the_commands(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = recorded(repository, 1)
    failure = Failure(time=0, message=f"{server.name}: tritonserver ended")
    write_state(replace(server, state="failed", failure=failure), Store())
    assert run(["status"]) == ServerDiedError.code
    shown = " ".join(capsys.readouterr().err.split())
    assert f"error: {server.name} has failed: tritonserver ended" in shown
    again = f"trtserve start --name {server.name} --model-repository {repository}"
    assert f"trtserve stop {server.name} && {again}" in shown
