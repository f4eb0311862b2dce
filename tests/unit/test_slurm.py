"""Jobs of Slurm: scripts that pass shellcheck and the strict parsers of sbatch and srun, and what is refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.doubles.slurm_options import SBATCH, SRUN, parse, script_options
from tests.support.double_engines import core_config, write_core_model, write_engine_folder
from tests.support.told import Lines
from tests.support.upstream_repositories import write_upstream_llmapi
from trtserve.artifacts import ModelRepository
from trtserve.cli import run
from trtserve.errors import ArtifactError, MachineError, MissingDependencyError, RepositoryError, UsageError
from trtserve.launch import Setup, leader
from trtserve.launch.container import image_of
from trtserve.launch.slurm import SHM_PLACEHOLDER, Image, Job, SlurmSpec, submit
from trtserve.specs import ServerSpec
from trtserve.start.jobs import plan_job, write_job
from trtserve.triton.server import Address

TAG = "25.04"


def repository_of(tmp_path: Path, tp: int = 4, gpus_per_node: int = 8, **parameters: str) -> ModelRepository:
    engine = write_engine_folder(tmp_path / "engine", tp=tp, gpus_per_node=gpus_per_node)
    write_core_model(tmp_path / "repository", "tensorrt_llm", str(engine), **parameters)
    return ModelRepository(path=tmp_path / "repository")


def planned(tmp_path: Path, *, slurm: SlurmSpec | None = None, per_node: int = 8, **spec: object) -> Job:
    wanted = ServerSpec(**{"container": TAG, "host": "0.0.0.0", **spec})  # type: ignore[arg-type]
    repository = repository_of(tmp_path, gpus_per_node=per_node)
    return plan_job(repository, wanted, slurm or SlurmSpec(), tmp_path / "job")


def shellcheck(*files: Path) -> None:
    tool = Path(sys.executable).parent / "shellcheck"
    done = subprocess.run([tool, *files], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


def srun_lines(text: str) -> list[list[str]]:
    """Arguments of each srun in a script."""
    joined = text.replace("\\\n", " ").replace("|| code=$?", "").replace("|| true", "")
    return [line.replace("'", "").split()[1:] for line in joined.splitlines() if line.startswith("srun ")]


def test_the_scripts_pass_shellcheck_and_slurms_parsers(tmp_path: Path) -> None:
    wishes = SlurmSpec(
        nodes=2,
        account="mine",
        partition="gpu",
        time="00:30:00",
        job_name="llama",
        gpu_clock=1410,
        flags=("--exclusive",),
    )
    job = planned(tmp_path, slurm=wishes, per_node=2, extra_arguments=("--log-verbose=1", "--trace-config=a,b c='d'"))
    write_job(job)
    shellcheck(*(job.folder / name for name in job.files))
    options = parse(script_options(job.script.read_text()), SBATCH, "sbatch").values
    assert options["output"] == f"{job.logs}/%x-%j.out"
    expected = {"account": "mine", "partition": "gpu", "time": "00:30:00", "job-name": "llama", "nodes": "2"}
    assert expected.items() <= options.items()
    assert (options["ntasks-per-node"], options["exclusive"]) == ("2", "1")
    look, clock, step, sweep = (parse(line, SRUN, "srun") for line in srun_lines(job.script.read_text()))
    assert look.rest == ["bash", str(job.folder / "node.sh")]
    assert (look.values["ntasks"], look.values["ntasks-per-node"]) == ("2", "1")
    assert sweep.rest == ["bash", str(job.folder / "node.sh"), "sweep"]
    assert clock.rest == ["sudo", "nvidia-smi", "-lgc", "1410,1410"]
    assert (step.values["mpi"], step.values["kill-on-bad-exit"]) == ("pmix", "1")
    assert step.values["container-image"] == f"nvcr.io#nvidia/tritonserver:{TAG}-trtllm-python-py3"
    assert step.values["container-workdir"] == str(tmp_path / "repository")
    mounts = step.values["container-mounts"].split(",")
    assert set(mounts) == {
        f"{path}:{path}" for path in (tmp_path / "repository", tmp_path / "engine", tmp_path / "job")
    }


def test_an_orchestrator_needs_no_gpu_of_its_own(tmp_path: Path) -> None:
    repository = repository_of(tmp_path, gpu_device_ids="0,1,2,3", participant_ids="1,2,3,4")
    spec = ServerSpec(container=TAG, host="0.0.0.0", multi_model=True, spawn_processes=False)
    job = plan_job(repository, spec, SlurmSpec(), tmp_path / "job")
    options = parse(script_options(job.files["server.sbatch"]), SBATCH, "sbatch").values
    assert (options["ntasks-per-node"], options["gpus-per-node"]) == ("5", "4")
    assert 'if [ "${gpus}" -lt 4 ]' in job.files["node.sh"]
    assert "export TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES=0" in job.files["task.sh"]


@pytest.mark.parametrize(("container", "version"), [("24.08", "0.12.0"), ("25.04", "0.18.2"), ("26.07", "1.2.1")])
def test_every_task_has_the_arguments_that_mpirun_would_give_it(container: str, version: str, tmp_path: Path) -> None:
    engine = write_engine_folder(tmp_path / "engine", tp=3, container=container)
    write_core_model(tmp_path / "repository", "tensorrt_llm", str(engine))
    repository = ModelRepository(path=tmp_path / "repository")
    spec = ServerSpec(trtllm_version=version, extra_arguments=("--log-info=true", "--id=a,'b c'"))
    job = plan_job(repository, spec, SlurmSpec(), tmp_path / "job")
    address = Address(host="127.0.0.1", http_port=8000, grpc_port=8001, metrics_port=8002)
    prefix = "trtserve_repository_77_"
    setup = Setup(
        repository=repository.path, address=address, release=version.rpartition(".")[0], shm_prefix=prefix,
        arguments=spec.extra_arguments,
    )  # fmt: skip
    wanted = [group[1:] for group in leader(setup, 3).groups]
    # The arrays, as bash understands them.
    script = job.files["task.sh"].partition("stopped=0")[0] + "printf '%s\\n' \"${command[@]:1}\"\n"
    for rank in range(3):
        environment = {"SLURM_JOB_ID": "77", "SLURM_PROCID": str(rank)}
        done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=True)
        assert tuple(done.stdout.splitlines()) == wanted[rank]
    assert SHM_PLACEHOLDER not in "".join(job.files.values())


@pytest.mark.parametrize(
    ("flags", "asked"),
    [
        ((), "4"),
        (("--cpus-per-task=16",), "4"),
        (("--gres=gpu:h100:4",), None),
        (("--gpus-per-node=8",), "8"),
        (("--exclusive",), None),
        (("--gpus-per-task=1",), None),
    ],
)
def test_a_job_asks_for_the_gpus_of_its_ranks_unless_flags_do(
    flags: tuple[str, ...], asked: str | None, tmp_path: Path
) -> None:
    job = planned(tmp_path, slurm=SlurmSpec(flags=flags))
    given = script_options(job.files["server.sbatch"])
    assert parse(given, SBATCH, "sbatch").values.get("gpus-per-node") == asked
    assert sum(word.startswith("--gpus-per-node") for word in given) == (asked is not None)


def test_no_step_binds_a_task_to_the_core_that_slurm_gives_by_itself(tmp_path: Path) -> None:
    steps = [parse(line, SRUN, "srun").values for line in srun_lines(planned(tmp_path).files["server.sbatch"])]
    assert {step["cpu-bind"] for step in steps} == {"none"}
    # Another name of PMIx, as srun --mpi=list may have it alone.
    job = plan_job(repository_of(tmp_path / "again"), ServerSpec(), SlurmSpec(mpi="pmix_v4"), tmp_path / "job")
    (launch,) = [
        step for line in srun_lines(job.files["server.sbatch"]) if "mpi" in (step := parse(line, SRUN, "srun").values)
    ]
    assert launch["mpi"] == "pmix_v4"


def test_an_engine_is_told_how_many_gpus_the_nodes_have(tmp_path: Path) -> None:
    engine = write_engine_folder(tmp_path / "repository" / "tensorrt_llm" / "1", tp=4)
    (engine.parent / "config.pbtxt").write_text(core_config("tensorrt_llm", "tensorrt_llm/1"), encoding="utf-8")
    original = tmp_path / "built.json"
    original.hardlink_to(engine / "config.json")
    repository, told = ModelRepository(path=tmp_path / "repository"), Lines()
    job = plan_job(repository, ServerSpec(), SlurmSpec(nodes=2), tmp_path / "job", progress=told)
    assert gpus_said(engine) == gpus_said(original) == 8  # a plan writes nothing
    assert "says gpus_per_node 8" in told.lines[-1]
    write_job(job)
    assert gpus_said(engine) == 2
    assert gpus_said(original) == 8  # the engine that it is a link of may serve elsewhere
    again = plan_job(repository, ServerSpec(), SlurmSpec(nodes=2), tmp_path / "job")
    assert not again.engines
    # One node again: 2 would give two ranks the same GPU.
    write_job(plan_job(repository, ServerSpec(), SlurmSpec(), tmp_path / "other"))
    assert gpus_said(engine) == 4


def gpus_said(path: Path) -> int:
    file = path / "config.json" if path.is_dir() else path
    return int(json.loads(file.read_text())["pretrained_config"]["mapping"]["gpus_per_node"])


def test_an_engine_of_others_is_not_changed(tmp_path: Path) -> None:
    with pytest.raises(RepositoryError, match="says gpus_per_node 8") as caught:
        planned(tmp_path, slurm=SlurmSpec(nodes=2))
    assert "Write 2 for pretrained_config.mapping.gpus_per_node" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("nodes", "given", "words"),
    [
        (2, "0,1", ""),
        (2, "1,0", ""),
        (1, "0,1,2,3", ""),
        (2, "0,1,2,3", "wants GPU 2; each node has 2"),
        (2, "0", "has 1 number; its engine has 4 ranks on 2 nodes"),
        (2, "0,0", "GPU 0 is twice"),
        (1, "4,5,6,7", "wants GPU 4; the job has 4"),
    ],
)
def test_gpu_device_ids_are_those_of_a_node(nodes: int, given: str, words: str, tmp_path: Path) -> None:
    more: dict[str, Any] = {"num_nodes": str(nodes)} if nodes > 1 else {}
    repository = repository_of(tmp_path, 4, 2 if nodes == 2 else 8, gpu_device_ids=given, **more)
    if words:
        with pytest.raises(RepositoryError, match=words):
            plan_job(repository, ServerSpec(), SlurmSpec(nodes=nodes), tmp_path / "job")
    else:
        assert plan_job(repository, ServerSpec(), SlurmSpec(nodes=nodes), tmp_path / "job").files


def test_models_of_an_orchestrator_on_a_node_each(tmp_path: Path) -> None:
    for name, ranks in (("first", "1,2"), ("second", "3,4,5")):
        size = ranks.count(",") + 1
        engine = write_engine_folder(tmp_path / name, tp=size, gpus_per_node=3)
        devices = ",".join(map(str, range(size)))
        write_core_model(tmp_path / "repository", name, str(engine), gpu_device_ids=devices, participant_ids=ranks)
    spec = ServerSpec(multi_model=True, spawn_processes=False)
    job = plan_job(ModelRepository(path=tmp_path / "repository"), spec, SlurmSpec(nodes=2), tmp_path / "job")
    assert parse(script_options(job.files["server.sbatch"]), SBATCH, "sbatch").values["gpus-per-node"] == "3"


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("nvcr.io/nvidia/tensorrt-llm/release:1.1.0", "nvcr.io#nvidia/tensorrt-llm/release:1.1.0"),
        ("registry.example.com:5000/team/img:1", "registry.example.com:5000#team/img:1"),
        ("localhost/img", "localhost#img"),
        ("team/img:1", "team/img:1"),
        ("nvcr.io#nvidia/x:1", "nvcr.io#nvidia/x:1"),
        ("/lustre/triton.sqsh", "/lustre/triton.sqsh"),
    ],
)
def test_images_as_enroot_takes_them(name: str, argument: str) -> None:
    assert Image(name=name).argument == argument


def test_a_squashfs_file_is_an_image_of_slurm_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    told = Lines()
    spec = ServerSpec(container="triton.sqsh", trtllm_version="0.18.2")
    job = plan_job(repository_of(tmp_path), spec, SlurmSpec(), tmp_path / "job", progress=told)
    assert f"--container-image={tmp_path}/triton.sqsh" in job.files["server.sbatch"]
    assert any("is not on this machine" in text for text in told.warnings)
    with pytest.raises(UsageError, match="neither a tag") as caught:
        image_of("/lustre/triton.sqsh")
    assert "--slurm" in str(caught.value.hint)


@pytest.mark.parametrize(
    "cluster", [["--slurm"], ["--container", TAG], ["--kubernetes", "--claim", "c", "--mount-path", "/MOUNT"]]
)
@pytest.mark.parametrize("fault", ["rank", "steps", "config"])
def test_faults_that_stop_a_start_stop_a_job(
    fault: str, cluster: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repository = repository_of(tmp_path).path
    if fault == "config":
        file = tmp_path / "engine" / "config.json"
        file.write_text(file.read_text().replace('"build_config"', '"other"'))
    if fault == "rank":
        (tmp_path / "engine" / "rank1.engine").unlink()
    if fault == "steps":
        (repository / "ensemble" / "1").mkdir(parents=True)
        (repository / "ensemble" / "config.pbtxt").write_text(
            'name: "ensemble"\nplatform: "ensemble"\nensemble_scheduling { step [ { model_name: "gone" } ] }\n'
        )
    line = ["start", "--model-repository", str(repository), "--dry-run"]
    assert run([*line, *(word.replace("/MOUNT", str(tmp_path)) for word in cluster)]) not in (0, 2)
    assert {"rank": "rank1.engine", "steps": "gone", "config": "build_config"}[fault] in capsys.readouterr().err


def test_the_llm_api_without_a_limit_of_time_is_warned_of(tmp_path: Path) -> None:
    path = write_upstream_llmapi(tmp_path / "llm", "1.2", "acme/llama")
    for time, warned in ((None, True), ("30", False)):
        told = Lines()
        spec = ServerSpec(container="26.07", host="0.0.0.0")
        plan_job(ModelRepository(path=path), spec, SlurmSpec(time=time), tmp_path / "job", progress=told)
        assert any("Without --time" in text for text in told.warnings) == warned


@pytest.mark.parametrize("container", ["26.07", None])
def test_every_task_of_the_llm_api_has_its_own_prefix(container: str | None, tmp_path: Path) -> None:
    path = write_upstream_llmapi(tmp_path / "llm", "1.2", "acme/llama")
    file = path / "tensorrt_llm" / "1" / "model.yaml"
    file.write_text("model: acme/llama\ntensor_parallel_size: 2\n")
    spec = ServerSpec(container=container, host="0.0.0.0")
    job = plan_job(ModelRepository(path=path), spec, SlurmSpec(nodes=2), tmp_path / "job")
    text = "".join(job.files.values())
    assert not re.search(r"@\w+@", text)
    task = job.files["task.sh"]
    assert task.count('shm-region-prefix-name=\'"${prefix}"') == task.count("/opt/tritonserver/bin/tritonserver") == 2
    assert "pytriton" not in text


@pytest.mark.parametrize(
    ("slurm", "spec", "words"),
    [
        (SlurmSpec(nodes=3), {}, r"--nodes 3 × --ntasks-per-node 1 are 3 tasks; the server has 4 rank"),
        (SlurmSpec(nodes=2, ntasks_per_node=8), {}, "are 16 tasks"),
        (SlurmSpec(), {"instances": 2}, "one job is one server"),
        (SlurmSpec(), {"multi_model": True}, "cannot spawn its workers"),
        (SlurmSpec(), {"world_size": 8}, "was built for 4 rank"),
    ],
)
def test_what_does_not_fit_is_told(slurm: SlurmSpec, spec: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        planned(tmp_path, slurm=slurm, **spec)


def test_the_containers_version_is_compared_with_the_engine(tmp_path: Path) -> None:
    with pytest.raises(RepositoryError, match=r"1\.2\.1"):
        planned(tmp_path, container="26.07")


@pytest.mark.parametrize(
    "wrong",
    [
        {"account": "two words"},
        {"partition": "a\n#SBATCH --uid=0"},
        {"time": "soon"},
        {"nodes": 0},
        {"gpu_clock": 0},
        {"flags": ("-N4",)},
        {"mpi": "pmi2"},
    ],
)
def test_values_that_slurm_would_misread(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        SlurmSpec(**wrong)  # type: ignore[arg-type]


def test_paths_with_blanks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot have the path"):
        plan_job(repository_of(tmp_path), ServerSpec(), SlurmSpec(), tmp_path / "a job")


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    job = planned(tmp_path)
    write_job(job)
    write_job(job)
    job.script.write_text("#!/bin/bash\n")
    with pytest.raises(ArtifactError, match="not written by trtserve"):
        write_job(job)


def test_without_slurm_and_when_it_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = planned(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingDependencyError, match="sbatch"):
        submit(job)
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: invalid partition specified: x' >&2\nexit 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    with pytest.raises(MachineError, match="invalid partition"):
        submit(job)


def test_dry_run_prints_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    repository = repository_of(tmp_path)
    line = ["start", "--model-repository", str(repository.path), "--slurm", "--out", str(tmp_path / "job"), "--dry-run"]
    assert run(line) == 0
    assert f"# --- {tmp_path / 'job' / 'server.sbatch'}\n#!/bin/bash" in capsys.readouterr().out
    assert not (tmp_path / "job").exists()
    assert run([*line, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["result"]["files"]) == 3


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--account", "a"], "--account belongs to --slurm"),
        (["--sbatch-flag=--exclusive"], "--sbatch-flag belongs to --slurm"),
        (["--slurm", "--claim", "c"], "--claim belongs to --kubernetes"),
        (["--slurm", "--kubernetes"], "contradict each other"),
        (["--nodes", "2"], "--nodes belongs to --slurm and --kubernetes"),
        (["--slurm", "--detach"], "--detach is for a server on this machine"),
    ],
)
def test_options_that_belong_elsewhere(
    flags: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["start", "--model-repository", str(tmp_path), *flags]) == 2
    assert words in capsys.readouterr().err
