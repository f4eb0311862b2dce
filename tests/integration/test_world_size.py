"""On GPUs: an import under an alias, then `start --world-size 4`, with doubles of NVIDIA's tools."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.support.doubles import Doubles
from tests.support.hub import Hub, running_hub
from tests.support.servers import HOST
from tests.support.tiny_models import write_tiny_model
from trtserve.artifacts import Checkpoint, Engine, ModelRepository
from trtserve.artifacts.engine_config import EngineConfig
from trtserve.cli.app import run
from trtserve.errors import RepositoryError, UsageError
from trtserve.executor import runtimes
from trtserve.host.ports import free_ports
from trtserve.pipeline.import_spec import recorded_spec
from trtserve.pipeline.world_size import repository_for, with_world_size
from trtserve.repository.served import inspect_repository
from trtserve.server.engine_fit import wants_rebuild
from trtserve.server.repositories import find_repository
from trtserve.specs import ServerSpec
from trtserve.store import Store

ALIAS = "llama-2-7b"


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Four GPUs, TensorRT-LLM 1.2.1, a hub with one model, and a store where `llama-2-7b` was imported."""

    doubles: Doubles
    hub: Hub
    home: Path


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """A machine on which `auto` finds the GPU and the package."""
    folder = tmp_path_factory.mktemp("world")
    doubles = Doubles(folder / "doubles", container="26.07", version="1.2.1", gpus=4)
    (folder / "gpus" / "0").mkdir(parents=True)
    with running_hub() as hub, pytest.MonkeyPatch.context() as patch:
        hub.add("meta-llama/Llama-2-7b-hf", write_tiny_model(folder / "tiny"))
        doubles.install(patch)
        patch.syspath_prepend(str(doubles.packages("1.2.1")))
        patch.setattr(runtimes, "_NVIDIA_GPUS", folder / "gpus")
        patch.setenv("HF_ENDPOINT", hub.endpoint)
        patch.setenv("TRTSERVE_HOME", str(folder / "home"))
        flags = ("--max-seq-len", "128", "--max-batch-size", "2", "--no-streaming", "--gemm-plugin", "auto")
        assert run(["import", ALIAS, *flags, "--quiet"]) == 0
        yield Machine(doubles=doubles, hub=hub, home=folder / "home")


@pytest.fixture
def store(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("TRTSERVE_HOME", str(machine.home))
    monkeypatch.setenv("HF_ENDPOINT", machine.hub.endpoint)
    return Store()


@pytest.fixture
def imported(store: Store) -> ModelRepository:
    return find_repository(ALIAS)


def _ports() -> list[str]:
    flags = ("--http-port", "--grpc-port", "--metrics-port")
    return [f"{flag}={port}" for flag, port in zip(flags, free_ports(HOST, 3), strict=True)]


def _result(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)["result"]


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_dry_run_shows_stages_and_launch(
    machine: Machine, imported: ModelRepository, capsys: pytest.CaptureFixture[str]
) -> None:
    engines = _names(Store().folder(Engine))
    assert run(["start", ALIAS, "--world-size", "2", "--dry-run"]) == 0
    shown = capsys.readouterr()
    assert f"{ALIAS} was imported for 1 rank; first these stages are run with tp 2." in shown.err
    stages = [line.split()[:2] for line in shown.out.splitlines()]
    assert stages[:4] == [["model", "reuse"], ["convert", "make"], ["build", "make"], ["repo", "make"]]
    assert "--gemm_plugin auto" in shown.out
    assert shown.out.count("tritonserver --model-repository=") == 2
    assert run(["start", ALIAS, "--world-size", "2", "--dry-run", "--json"]) == 0
    planned = _result(capsys)
    assert (planned["processes"], len(planned["stages"])) == (2, 4)
    assert "repositories/llama-2-7b-FINGERPRINT" in planned["command"]
    assert _names(Store().folder(Engine)) == engines
    assert not machine.doubles.calls("tritonserver")


def test_start_rebuilds_an_import_for_another_world_size(
    machine: Machine,
    imported: ModelRepository,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)  # no path of the record depends on where `import` ran
    ports = _ports()
    assert run(["start", ALIAS, "--world-size", "4", "--detach", *ports]) == 0
    shown = capsys.readouterr()
    assert f"World size 4: {ALIAS} was imported for 1 rank, so it is converted and built again with tp 4" in shown.err
    assert "Mode: leader, 4 ranks" in shown.err
    try:
        calls = machine.doubles.calls("tritonserver")
        assert sorted(call.rank for call in calls) == [0, 1, 2, 3]
        again = machine.doubles.calls("trtllm-build")[-1].arguments
        assert ("--max_batch_size", "2") in pairwise(again)
        assert run(["status", "--json"]) == 0
        (status,) = _result(capsys)
        assert (status["state"], status["server"]["mode"], len(status["server"]["instances"][0]["ranks"])) == (
            "ready",
            "leader",
            4,
        )
        assert run(["logs", ALIAS]) == 0
        assert "[1,3]<stderr>" in capsys.readouterr().out
        assert run(["list"]) == 0
        assert f"{ALIAS} (another build)" in capsys.readouterr().out
        assert run(["inspect", ALIAS]) == 0
        assert "ranks      1 (" in capsys.readouterr().out
        assert run(["inspect", status["server"]["repository"]]) == 0
        assert "ranks      4 (tp_size 4" in capsys.readouterr().out
        # A second one is refused before anything is built for it.
        builds = len(machine.doubles.calls("trtllm-build"))
        assert run(["start", ALIAS, "--world-size", "2", "--detach"]) == 38
        assert "is already running" in capsys.readouterr().err
        assert len(machine.doubles.calls("trtllm-build")) == builds
    finally:
        assert run(["stop", ALIAS, "--quiet"]) == 0
    assert find_repository(ALIAS).path == imported.path
    monkeypatch.setenv("HF_ENDPOINT", f"http://{HOST}:9")  # nothing listens there
    assert run(["start", ALIAS, "--world-size", "4", "--detach", *ports]) == 0
    assert "Engine" in (printed := capsys.readouterr().err)
    assert printed.count("is reused") == 5  # and the announcement
    assert run(["stop", ALIAS, "--quiet"]) == 0
    assert len(machine.doubles.calls("trtllm-build")) == builds


def test_launch_problems_are_reported_before_the_build(
    machine: Machine, imported: ModelRepository, capsys: pytest.CaptureFixture[str]
) -> None:
    builds = len(machine.doubles.calls("trtllm-build"))
    assert run(["start", ALIAS, "--world-size", "8", "--auto-ports"]) == 30
    assert "8 ranks need a GPU each; this machine has 4" in capsys.readouterr().err
    assert run(["start", ALIAS, "--world-size", "2", "--gpus", "0", "--auto-ports"]) == 2
    assert "--gpus names 1 GPU; 2 ranks need 2" in capsys.readouterr().err
    assert run(["start", ALIAS, "--world-size", "3", "--dry-run"]) != 0  # 4 heads
    assert "3" in capsys.readouterr().err
    assert len(machine.doubles.calls("trtllm-build")) == builds


@pytest.mark.parametrize("more", [(), ("--dry-run",)], ids=["", "dry-run"])
def test_without_rebuilding_it_is_refused(
    more: tuple[str, ...], imported: ModelRepository, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["start", ALIAS, "--world-size", "4", "--no-rebuild", *more]) == 2
    printed = capsys.readouterr().err
    assert "--world-size 4 needs it converted and built again (tp 4)" in printed
    command = printed[printed.index("trtserve import hf:meta-llama/Llama-2-7b-hf@") :]
    assert " --tp-size 4 " in command
    # It makes the same as `start`.
    assert run([*shlex.split(command)[1:], "--dry-run", "--json"]) == 0
    by_hand = _result(capsys)["stages"]
    assert run(["start", ALIAS, "--world-size", "4", "--dry-run", "--json"]) == 0
    assert by_hand == _result(capsys)["stages"]


def test_repositories_that_fit_or_were_not_imported_are_left_alone(imported: ModelRepository, tmp_path: Path) -> None:
    assert repository_for(imported, ServerSpec(world_size=1), rebuild=False) is imported
    elsewhere = replace(imported, path=tmp_path / "copy")
    shutil.copytree(imported.path, elsewhere.path)
    assert repository_for(elsewhere, ServerSpec(world_size=2)) is elsewhere


def test_imports_of_older_versions_are_left_alone(imported: ModelRepository) -> None:
    (record,) = Store().recorded()
    Store().record(replace(record, spec={}))
    try:
        assert repository_for(imported, ServerSpec(world_size=2)) is imported
    finally:
        Store().record(record)


def test_an_import_can_be_read_again(imported: ModelRepository) -> None:
    spec = recorded_spec(Store().recorded()[0])
    assert spec is not None
    assert (spec.build.max_seq_len, spec.build.gemm_plugin, spec.repository.streaming) == (128, "auto", False)
    assert spec.source.startswith("hf:meta-llama/Llama-2-7b-hf@")  # the commit, not the branch


def test_paths_of_an_import_are_absolute(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny_model(tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    assert run(["import", "./tiny", "--name", "near", "--runtime", "llmapi", "--out", "made", "--quiet"]) == 0
    record = next(each for each in store.recorded() if each.name == "near")
    spec = recorded_spec(record)
    assert spec is not None
    assert (spec.source, spec.out) == (f"local:{tmp_path / 'tiny'}", tmp_path / "made")
    assert run(["remove", "near"]) == 0


def test_pipeline_stages_stay_when_they_divide_the_world_size(imported: ModelRepository) -> None:
    spec = recorded_spec(Store().recorded()[0])
    assert spec is not None
    staged = replace(spec, convert=replace(spec.convert, pp_size=2))
    assert (with_world_size(staged, 4).convert.tp_size, with_world_size(staged, 4).convert.pp_size) == (2, 2)
    assert (with_world_size(staged, 3).convert.tp_size, with_world_size(staged, 3).convert.pp_size) == (3, 1)


def test_the_llm_api_is_assembled_again(
    store: Store, tmp_path: Path, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tiny_model(tmp_path / "tiny")
    assert run(["import", str(tmp_path / "tiny"), "--name", "api", "--runtime", "llmapi", "--quiet"]) == 0
    capsys.readouterr()
    checkpoints = _names(Store().folder(Checkpoint))
    assert run(["start", "api", "--world-size", "2", "--dry-run", "--json"]) == 0
    planned = _result(capsys)
    assert [stage["action"] for stage in planned["stages"]] == ["reuse", "make"]
    assert "trtllm-llmapi-launch" in planned["command"]
    assert run(["start", "api", "--world-size", "2", "--detach", *_ports()]) == 0
    assert "so it is assembled again with tp 2" in capsys.readouterr().err
    assert run(["stop", "api", "--quiet"]) == 0
    # What is there already is checked by a dry run as by a start.
    (made,) = [path for path in Store().folder(ModelRepository).glob("api-*") if _parallelism(path) == 2]
    (made / "tensorrt_llm" / "1" / "model.py").rename(made / "model.py")
    assert run(["start", "api", "--world-size", "2", "--dry-run"]) == RepositoryError.code
    assert "model.py" in capsys.readouterr().err
    assert _names(Store().folder(Checkpoint)) == checkpoints
    assert run(["remove", "api"]) == 0


def _parallelism(repository: Path) -> int:
    (settings,) = repository.glob("*/1/model.yaml")
    return int(settings.read_text(encoding="utf-8").split("tensor_parallel_size:")[1].split()[0])


def test_the_cpu_never_builds_again(store: Store, tmp_path: Path, imported: ModelRepository) -> None:
    served = inspect_repository(imported)
    on_cpu = replace(served, engine=EngineConfig.of({**served.engine.content, "trtserve": {"runtime": "openvino"}}))
    assert wants_rebuild(served, ServerSpec(world_size=4))
    assert not wants_rebuild(on_cpu, ServerSpec(world_size=4))
    with pytest.raises(UsageError):
        repository_for(imported, ServerSpec(world_size=4), rebuild=False)
