"""How `start` plans an engine of the torch runtime: one process for each rank, with this Python's Triton."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.double_engines import write_core_model, write_engine_folder
from tests.support.recorded_progress import Lines
from trtserve.artifacts import ModelRepository
from trtserve.errors import MachineError, RepositoryError, UsageError
from trtserve.host import gpus
from trtserve.repository.served import inspect_repository
from trtserve.server.checks import require_devices
from trtserve.server.engine_fit import wants_rebuild
from trtserve.server.launch import kubernetes, slurm
from trtserve.server.launch.cluster import inspect_for_cluster
from trtserve.server.plan import ServerPlan, plan_server
from trtserve.server.triton.tritonserver import stub_environment
from trtserve.specs import ServerSpec
from trtserve.store import Store


def repository_of(folder: Path, *, tp: int = 1, pp: int = 1, device: str = "cuda", copies: int = 1) -> ModelRepository:
    engine = write_engine_folder(folder / "engine", tp=tp, pp=pp)
    config = json.loads((engine / "config.json").read_text())
    config["trtserve"] = {"runtime": "torch", "torch": "2.13.0", "device": device}
    (engine / "config.json").write_text(json.dumps(config))
    for file in engine.glob("rank*.engine"):
        file.rename(file.with_suffix(".safetensors"))
    for number in range(copies):
        write_core_model(folder / "repository", f"tensorrt_llm{number or ''}", str(engine))
    for path in (folder / "repository").glob("*/config.pbtxt"):
        path.write_text(path.read_text().replace('backend: "tensorrtllm"', 'backend: "python"'))
        (path.parent / "1" / "model.py").write_text("")
    return ModelRepository(path=folder / "repository")


def plan_of(tmp_path: Path, repository: ModelRepository, spec: ServerSpec | None = None) -> ServerPlan:
    return plan_server(repository, spec or ServerSpec(), store=Store(tmp_path / "home"))


def test_each_rank_is_a_process_that_mpirun_does_not_bind_to_a_core(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, repository_of(tmp_path, tp=2, pp=2, device="cpu"), ServerSpec(oversubscribe=True))
    launch = plan.instances[0].launch
    assert (plan.mode, launch.ranks, plan.served.needs_gpus, plan.uses_mpirun) == ("leader", 4, False, True)
    words = launch.command.argv[: launch.command.argv.index("-n")]
    assert words[1:] == ("--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "--tag-output")
    assert all(any(word.startswith("--backend-directory=") for word in group) for group in launch.groups)
    assert ["--load-model=tensorrt_llm" in group for group in launch.groups] == [False, True, True, True]
    assert launch.command.env == stub_environment()


def test_one_rank_is_a_plain_process(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, repository_of(tmp_path, device="cuda"), ServerSpec(gpus=(3,)))
    assert (plan.mode, plan.uses_mpirun, plan.served.needs_gpus) == ("single", False, True)
    assert plan.instances[0].launch.command.env["CUDA_VISIBLE_DEVICES"] == "3"


@pytest.mark.parametrize(("device", "gpu_count", "starts"), [("cuda", 1, False), ("cuda", 2, True), ("cpu", 0, True)])
def test_more_ranks_than_gpus_are_refused_unless_they_run_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, gpu_count: int, starts: bool
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpu_count))))
    monkeypatch.setattr(gpus, "list_gpus", tuple)
    plan = plan_of(tmp_path, repository_of(tmp_path, tp=2, device=device))
    if starts:
        require_devices(plan)
    else:
        with pytest.raises(MachineError, match="2 ranks need a GPU each"):
            require_devices(plan)


def test_another_world_size_needs_another_engine(tmp_path: Path) -> None:
    repository = repository_of(tmp_path, device="cpu")
    served, spec = inspect_repository(repository), ServerSpec(world_size=2)
    assert wants_rebuild(served, spec)
    with pytest.raises(UsageError, match="--world-size is 2; the engine was built for 1 rank"):
        plan_of(tmp_path, repository, spec)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (ServerSpec(multi_model=True), "--multi-model is for engines of TensorRT-LLM"),
        (ServerSpec(container="25.12"), "--container runs NVIDIA's images"),
        (ServerSpec(gpus=(0, 1)), "--gpus does not apply"),
    ],
)
def test_options_that_this_runtime_does_not_have(tmp_path: Path, spec: ServerSpec, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan_of(tmp_path, repository_of(tmp_path, tp=2, device="cpu"), spec)


def test_a_rank_serves_one_model(tmp_path: Path) -> None:
    plan_of(tmp_path / "one", repository_of(tmp_path / "one", copies=2))
    with pytest.raises(RepositoryError, match="2 instances of models with 2 ranks"):
        plan_of(tmp_path / "two", repository_of(tmp_path / "two", copies=2, tp=2))


def test_slurm_tasks_run_in_this_python_or_in_an_image_with_trtserve(tmp_path: Path) -> None:
    repository, lines = repository_of(tmp_path, tp=2), Lines()
    job = slurm.plan_job(repository, ServerSpec(), slurm.SlurmSpec(), tmp_path / "job", progress=lines)
    task = next(text for path, text in job.files.items() if path.name == slurm.TASK)
    assert f"export PATH={stub_environment()['PATH'].split(':')[0]}" in task
    assert "--backend-directory=" in task
    assert any(str(sys.prefix) in line for line in lines.lines)
    inside = slurm.plan_job(repository, ServerSpec(container="mine:1"), slurm.SlurmSpec(), tmp_path / "job")
    task = next(text for path, text in inside.files.items() if path.name == slurm.TASK)
    assert "/opt/tritonserver/bin/tritonserver" in task
    assert "--backend-directory=" not in task


def test_kubernetes_needs_an_image_with_trtserve(tmp_path: Path) -> None:
    engine = tmp_path / "engine"
    repository = repository_of(tmp_path, tp=2)
    core = repository.path / "tensorrt_llm"
    for file in engine.iterdir():
        shutil.move(file, core / "1" / file.name)
    config = core / "config.pbtxt"
    config.write_text(config.read_text().replace(str(engine), "tensorrt_llm/1"))
    cluster, place = kubernetes.KubernetesSpec(claim="models"), tmp_path / "server.yaml"
    with pytest.raises(UsageError, match="needs an image that has trtserve"):
        kubernetes.plan_job(repository, ServerSpec(), cluster, place, progress=Lines())
    job = kubernetes.plan_job(repository, ServerSpec(container="mine:1"), cluster, place, progress=Lines())
    assert "--bind-to" in job.files[place]
    assert "mine:1" in job.files[place]


@pytest.mark.parametrize("kind", ["slurm", "kubernetes"])
def test_clusters_are_for_gpus(tmp_path: Path, kind: str) -> None:
    repository = repository_of(tmp_path, tp=2, device="cpu")
    with pytest.raises(UsageError, match=f"--{kind} is for engines on GPUs"):
        inspect_for_cluster(repository, ServerSpec(), kind, Lines())


def test_instances_divide_the_gpus(tmp_path: Path) -> None:
    spec = replace(ServerSpec(), instances=2, gpus=(0, 1, 2, 3))
    plan = plan_of(tmp_path, repository_of(tmp_path, tp=2), spec)
    shown = [instance.launch.command.env["CUDA_VISIBLE_DEVICES"] for instance in plan.instances]
    assert shown == ["0,1", "2,3"]


def test_instances_of_one_process_each(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, repository_of(tmp_path), replace(ServerSpec(), instances=2))
    assert [instance.launch.mode for instance in plan.instances] == ["single", "single"]
    assert len({str(instance.launch.command) for instance in plan.instances}) == 2
    assert plan.proxy is not None
    second = plan.instances[1].address
    assert plan.proxy.settings.replicas == (f"127.0.0.1:{second.grpc_port}:{second.http_port}",)
