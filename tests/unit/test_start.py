"""What `start` knows before it launches anything, what it says of the risks, and the commands around it."""

from __future__ import annotations

import json
import os
import re
import socket
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.server_records import server_record
from trtserve.artifacts import Manifest, Model, ModelRepository
from trtserve.cli import run
from trtserve.errors import (
    MachineError,
    ModelNotFoundError,
    PortInUseError,
    RepositoryError,
    ServerRunningError,
    ServerStartError,
    UsageError,
)
from trtserve.gateway.settings import read_key
from trtserve.host.machine import describe, differences
from trtserve.host.ports import free_ports, is_free, next_free
from trtserve.nvidia.containers import ContainerRun
from trtserve.process import ProcessId
from trtserve.repository.served import inspect_repository
from trtserve.server.doctor.stub import write_probe_repository
from trtserve.server.plan import plan_server, with_free_ports
from trtserve.server.repositories import find_repository
from trtserve.server.start import require_members, start_server
from trtserve.server.state import state_file, write_state
from trtserve.server.triton.tritonserver import start_error
from trtserve.specs import ServerSpec
from trtserve.store import NameRecord, Store

HOST = "127.0.0.1"


@pytest.fixture
def repository(tmp_path: Path) -> ModelRepository:
    return ModelRepository(path=write_probe_repository(tmp_path / "probe"))


def with_engine(repository: ModelRepository, **config: object) -> ModelRepository:
    engine = repository.path / "tensorrt_llm" / "1"
    engine.mkdir(parents=True)
    (engine / "config.json").write_text(json.dumps(config))
    (engine / "rank0.xml").touch()
    (engine / "rank0.bin").write_bytes(bytes(100))
    return repository


def recorded(store: Store, name: str, repository: Path, imported: str) -> None:
    paths: dict[str, Any] = dict.fromkeys(("source", "model", "checkpoint", "engine"), "x")
    store.record(NameRecord(name=name, repository=str(repository), imported=imported, **paths))


def test_the_last_import_is_the_default(tmp_path: Path) -> None:
    store = Store(tmp_path / "home")
    with pytest.raises(ModelNotFoundError) as caught:
        find_repository(store=store)
    assert caught.value.hint == "Import a model: trtserve import demo"
    first, second = (write_probe_repository(tmp_path / name) for name in ("first", "second"))
    recorded(store, "first", first, "2026-01-01")
    recorded(store, "second", second, "2026-01-02")
    assert find_repository(store=store).path == second
    assert find_repository("first", store=store).path == first
    with pytest.raises(ModelNotFoundError, match="Nothing was imported under the name third") as caught:
        find_repository("third", store=store)
    assert caught.value.hint == "Imported: second, first. To make it: trtserve import MODEL --name third"
    for name, then in (("llama-2-7b", ""), ("org/x", ", then trtserve start x")):
        with pytest.raises(ModelNotFoundError, match=f"{name} has not been imported yet") as caught:
            find_repository(name, store=store)
        assert caught.value.hint == f"Import it first: trtserve import {name}{then}"


def test_a_repository_made_by_repo_is_found_by_name(tmp_path: Path) -> None:
    store = Store(tmp_path / "home")
    for mark, created in (("1", "2026-01-02"), ("2", "2026-01-01")):
        path = write_probe_repository(store.folder(ModelRepository) / f"fast-{mark}")
        Manifest(kind="repository", name="fast", fingerprint=mark * 64, created=created).write(path)
    assert find_repository("fast", store=store).path.name == "fast-1"
    with pytest.raises(ModelNotFoundError) as caught:
        find_repository("third", store=store)
    assert caught.value.hint == "Made by `trtserve repo`: fast. To make it: trtserve import MODEL --name third"


@pytest.mark.parametrize(("source", "words"), [("fast", "fast"), ("acme/fast", "acme/fast --name fast")])
def test_a_model_that_was_only_downloaded(source: str, words: str, tmp_path: Path) -> None:
    store = Store(tmp_path)
    folder = store.folder(Model) / "fast-1"
    folder.mkdir(parents=True)
    Manifest(kind="model", name="fast", fingerprint="1" * 64, spec={"source": source}).write(folder)
    with pytest.raises(ModelNotFoundError, match="fast was only downloaded") as caught:
        find_repository("fast", store=store)
    assert caught.value.hint == f"Import it: trtserve import {words}"


def test_a_name_and_a_path_contradict_each_other(repository: ModelRepository) -> None:
    with pytest.raises(UsageError, match="give one"):
        find_repository("demo", path=repository.path)


def test_plan_writes_nothing(repository: ModelRepository, tmp_path: Path) -> None:
    store = Store(tmp_path / "home")
    plan = plan_server(repository, ServerSpec(http_port=9000), store=store)
    assert plan.name == "probe"
    assert plan.served.model == "probe"
    assert not plan.served.streaming
    (instance,) = plan.instances
    assert instance.gateway is not None
    assert instance.gateway.settings.port == 9000
    assert f"--http-port={instance.address.inner_http_port}" in instance.launch.command.argv
    assert plan.instances[0].launch.command.cwd == repository.path
    assert not store.root.exists()


@pytest.mark.parametrize("name", ["../x", "", "a b", ".hidden"])
def test_names_that_cannot_be_files_are_refused(repository: ModelRepository, name: str, tmp_path: Path) -> None:
    named = ModelRepository(path=repository.path, manifest=Manifest(kind="repository", name=name, fingerprint="0"))
    # An empty --name is not the default.
    for of, spec in ((named, ServerSpec()), (repository, ServerSpec(name=name))):
        with pytest.raises(UsageError, match="cannot name a server"):
            plan_server(of, spec, store=Store(tmp_path))


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_time_to_become_ready_is_above_zero(seconds: float) -> None:
    with pytest.raises(UsageError, match="--ready-timeout"):
        ServerSpec(ready_timeout=seconds)


def test_shards_of_the_openvino_runtime_need_one_process(repository: ModelRepository, tmp_path: Path) -> None:
    mapping = {"tp_size": 4, "pp_size": 1}
    with_engine(repository, pretrained_config={"mapping": mapping}, trtserve={"runtime": "openvino"})
    plan = plan_server(repository, ServerSpec(world_size=4), store=Store(tmp_path))
    assert plan.served.world_size == 4
    assert plan.served.engine_bytes == 100


@pytest.mark.parametrize(
    ("file", "before", "after", "words"),
    [
        ("config.pbtxt", "count: 1", "count: ${count}", r"config\.pbtxt, line 11: the placeholder \$\{count\}"),
        ("config.pbtxt", "backend:", "backendd:", "backendd"),
        ("1/model.py", None, "", r"The model probe has no .*1/model\.py"),
        ("config.pbtxt", None, "", "holds no model"),
    ],
)
def test_a_repository_that_triton_would_reject(
    file: str, before: str | None, after: str, words: str, repository: ModelRepository
) -> None:
    path = repository.path / "probe" / file
    if before is None:
        path.unlink()
    else:
        path.write_text(path.read_text().replace(before, after))
    with pytest.raises(RepositoryError, match=words):
        inspect_repository(repository)


def test_a_damaged_engine_says_what_to_do(repository: ModelRepository) -> None:
    with_engine(repository)
    (config,) = repository.path.glob("*/1/config.json")
    config.write_text("{broken")
    with pytest.raises(RepositoryError, match="is not JSON") as caught:
        inspect_repository(repository)
    assert "trtserve repo" in str(caught.value.hint)


def test_a_key_file_that_is_missing_is_named_once() -> None:
    with pytest.raises(UsageError) as caught:
        read_key(Path("nofile"))
    assert caught.value.message == "The key file nofile cannot be read: No such file or directory."


def test_alias_and_precision_come_from_the_files(repository: ModelRepository) -> None:
    (repository.path / "demo").mkdir()
    config = 'name: "demo"\nbackend: "python"\nmodel_transaction_policy { decoupled: true }\n'
    (repository.path / "demo" / "config.pbtxt").write_text(config)
    (repository.path / "demo" / "1").mkdir()
    (repository.path / "demo" / "1" / "model.py").touch()
    with_engine(repository, trtserve={"runtime": "openvino", "compute_precision": "f32", "kv_precision": "u8"})
    manifest = Manifest(kind="repository", name="other", fingerprint="0", facts={"alias": "demo"})
    served = inspect_repository(ModelRepository(path=repository.path, manifest=manifest))
    assert (served.model, served.streaming) == ("demo", True)
    assert served.precision == {"compute_precision": "f32", "kv_precision": "u8"}


@pytest.mark.parametrize(
    ("algorithm", "words"), [(None, "float16"), ("W8A16", "int8"), ("FP8", "FP8")], ids=["plain", "int8", "foreign"]
)
def test_precision_of_the_weights(algorithm: str | None, words: str, repository: ModelRepository) -> None:
    quantized = {"dtype": "float16", "quantization": {"quant_algo": algorithm}}
    own = {"runtime": "openvino", "compute_precision": "bf16", "kv_precision": "u8"}
    with_engine(repository, pretrained_config=quantized, trtserve=own)
    precision = inspect_repository(repository).precision
    assert next(iter(precision.items())) == ("weights_precision", words)


def test_another_machine_is_noticed() -> None:
    here = describe()
    assert differences(here) == []
    (text,) = differences({**here, "bfloat16": 1 - int(here["bfloat16"])})
    assert "bfloat16" in text


def test_taken_port_names_its_owner_before_anything_starts(repository: ModelRepository, tmp_path: Path) -> None:
    store = Store(tmp_path / "home")
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        others = free_ports(HOST, 2)
        spec = ServerSpec(http_port=others[0], grpc_port=port, metrics_port=others[1])
        with pytest.raises(
            PortInUseError, match=rf"--grpc-port {port} is taken by process {os.getpid()} \(.*python"
        ) as caught:
            start_server(plan_server(repository, spec, store=store))
    assert caught.value.hint is not None
    assert "--auto-ports" in caught.value.hint
    assert not list(store.servers.glob("*"))


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_an_address_of_another_machine_is_not_a_taken_port(host: str) -> None:
    with pytest.raises(UsageError, match=f"Nothing can listen on {host}, port 9999"):
        is_free(host, 9999)


def test_a_name_is_served_under_its_address(repository: ModelRepository, tmp_path: Path) -> None:
    plan = plan_server(repository, ServerSpec(host="localhost"), store=Store(tmp_path))
    assert plan.instances[0].address.host == "127.0.0.1"
    assert "--grpc-address=127.0.0.1" in plan.instances[0].launch.command.argv


@pytest.mark.parametrize("host", ["::1", "[::1]", "host.invalid", "", "a" * 70])
def test_a_host_without_ipv4_address_is_refused(repository: ModelRepository, host: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"cannot listen on {re.escape(host)}: .*IPv4"):
        plan_server(repository, ServerSpec(host=host), store=Store(tmp_path))


def test_auto_ports_take_the_next_free_ones() -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        assert not is_free(HOST, port)
        spec = with_free_ports(ServerSpec(http_port=port, grpc_port=port + 1, metrics_port=port + 2))
        ports = [spec.http_port, spec.grpc_port, spec.metrics_port]
        assert port not in ports
        assert len(set(ports)) == 3
        with pytest.raises(MachineError, match="is free"):
            next_free(HOST, port, taken=range(port, port + 100))


def test_dry_run_prints_the_whole_command(repository: ModelRepository, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["start", "--model-repository", str(repository.path), "--dry-run", "--", "--log-verbose=1"]) == 0
    printed = capsys.readouterr().out
    assert "transaction_policy: no-streaming" in printed
    assert f"cd {repository.path} && env PATH=" in printed
    assert "--log-verbose=1\ngateway: " in printed
    assert " -m trtserve.gateway " in printed.splitlines()[-1]
    assert run(["start", "--model-repository", str(repository.path), "--dry-run", "--json", "--name", "x"]) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    assert (result["name"], result["processes"]) == ("x", 1)


def test_a_path_where_a_name_is_expected_is_explained(repository: ModelRepository, tmp_path: Path) -> None:
    store = Store(tmp_path / "home")
    with pytest.raises(ModelNotFoundError, match="is a path") as caught:
        find_repository(str(repository.path), store=store)
    assert str(caught.value.hint).endswith(f"trtserve start --model-repository {repository.path}")
    folder = tmp_path / "hugging"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    with pytest.raises(ModelNotFoundError) as caught:
        find_repository(str(folder), store=store)
    assert caught.value.hint == f"Import the model first: trtserve import {folder}"


def test_stubs_in_a_container_are_not_missed(repository: ModelRepository, tmp_path: Path) -> None:
    plan = plan_server(repository, ServerSpec(), store=Store(tmp_path))
    assert plan.served.python_models
    with pytest.raises(ServerStartError, match="ended while the server became ready"):
        require_members(server_record(store=plan.store), plan)
    boxed = replace(plan.instances[0], container=ContainerRun(image="image", name="boxed"))
    require_members(server_record(store=plan.store, container="boxed"), replace(plan, instances=(boxed,)))


def test_running_already_names_the_model(repository: ModelRepository, tmp_path: Path) -> None:
    store = Store(tmp_path / "home")
    plan = plan_server(repository, ServerSpec(), store=store)
    server = server_record(plan.name, store=store)
    write_state(server, store)
    with pytest.raises(ServerRunningError, match="already running") as caught:
        start_server(plan)
    assert f"trtserve start --model-repository {repository.path} --name OTHER" in str(caught.value.hint)
    recorded(store, "mine", repository.path, "2026-01-01")
    with pytest.raises(ServerRunningError) as caught:
        start_server(plan)
    assert "trtserve start mine --name OTHER --auto-ports" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["stop"], 33, "No server is running"),
        (["stop", "demo"], 33, "No server demo is running"),
        (["stop", "demo", "--all"], 2, "give one"),
        (["stop", "--all"], 0, "No server is running"),
        (["status"], 33, "No server is running"),
        (["status", "--json"], 33, "No server is running"),
        (["status", "demo"], 33, "No server demo is running"),
        (["logs"], 33, "No server is running"),
        (["logs", "--json", "--follow"], 2, "cannot be combined"),
        (["start"], 10, "Nothing has been imported yet"),
    ],
)
def test_without_a_server(arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == code
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.out == "" or "--json" in arguments
    if arguments == ["status", "--json"]:
        assert json.loads(captured.out)["result"] == []


@pytest.mark.parametrize(("crashes", "starts"), [(0, 1), (2, 3), (3, 3)])
def test_a_start_that_crashed_by_chance_is_repeated(
    crashes: int, starts: int, repository: ModelRepository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = 0

    def crash(*_: object) -> str:
        nonlocal tried
        tried += 1
        if tried > crashes:
            return "ready"
        error = ServerStartError("tritonserver was ended by signal 6")
        error.by_chance = True
        raise error

    monkeypatch.setattr("trtserve.server.start._start_on_ports", crash)
    plan = plan_server(repository, ServerSpec(), store=Store(tmp_path))
    with pytest.raises(ServerStartError) if crashes == 3 else nullcontext():
        assert start_server(plan) == "ready"  # type: ignore[comparison-overlap]
    assert tried == starts


def test_a_crash_of_the_python_backend_is_by_chance(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("terminate called after throwing an instance of 'boost::interprocess::lock_exception'\n")
    error = start_error(ProcessId(pid=2**22 + 1, started=0.0), log)
    assert isinstance(error, ServerStartError)
    assert error.by_chance


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], []),
        (["--raw-http"], ["--raw-http: Triton itself answers on --http-port"]),
        (["--host", "0.0.0.0", "--no-auth"], ["can reach 0.0.0.0, and need no API key. Nothing is encrypted. "]),
        (["--host", "0.0.0.0", "--api-key", "k" * 20, "--no-tls"], ["can reach 0.0.0.0. Nothing is encrypted. "]),
        (["--host", "0.0.0.0", "--no-auth", "--raw-http"], ["--raw-http: Triton", "can reach 0.0.0.0, and need no"]),
    ],
)
@pytest.mark.parametrize("instead", [["--dry-run"], ["--systemd", "--out", "x.service"]])
def test_a_dry_run_and_a_unit_warn_as_a_start_does(
    repository: ModelRepository,
    flags: list[str],
    words: list[str],
    instead: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    line = ["start", "--model-repository", str(repository.path), *flags, *instead]
    assert run(line) == (2 if "--systemd" in instead and "--api-key" in flags else 0)
    said = " ".join(capsys.readouterr().err.split())
    assert all(each in said for each in words), said
    assert ("can reach" in said) == any("can reach" in each for each in words)
    assert ("--raw-http" in said) == ("--raw-http" in flags)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--host", "0.0.0.0"], "would answer everyone"),
        (["--host", "0.0.0.0", "--api-key-file", "key"], "the API key and all prompts would be readable"),
        (["--host", "0.0.0.0", "--raw-http"], "lets everyone on the network crash this server"),
        (["--api-key-file", "absent"], "absent"),
    ],
)
@pytest.mark.parametrize("instead", [["--dry-run"], ["--systemd", "--out", "x.service"]])
def test_a_dry_run_and_a_unit_refuse_what_a_start_refuses(
    repository: ModelRepository,
    flags: list[str],
    message: str,
    instead: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["start", "--model-repository", str(repository.path), *flags, *instead]) == UsageError.code
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "x.service").exists()


def test_a_dry_run_says_that_the_server_runs_already(
    repository: ModelRepository, capsys: pytest.CaptureFixture[str]
) -> None:
    start = ["start", "--model-repository", str(repository.path), "--name", "x", "--auto-ports", "--dry-run"]
    said = "A start on this machine would be refused: The server x is already running"
    for age, warned in ((0.0, True), (100.0, False)):
        write_state(server_record("x", age=age), Store())
        assert run(start) == 0
        assert (said in " ".join(capsys.readouterr().err.split())) == warned
        assert state_file("x", Store()).exists(), "a dry run removes nothing"


def test_a_dry_run_warns_of_a_taken_port(repository: ModelRepository, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = str(taken.getsockname()[1])
        assert run(["start", "--model-repository", str(repository.path), "--http-port", port, "--dry-run"]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert f"A start on this machine would be refused: --http-port {port} is taken by" in said
