"""Jobs of Slurm: scripts that pass shellcheck and the strict parsers of sbatch and srun, and what is refused."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.doubles.slurm_options import SBATCH, SRUN, parse, script_options
from tests.support.cluster_jobs import TAG, planned, repository_of, srun_lines
from tests.support.double_engines import core_config, write_core_model, write_engine_folder
from tests.support.recorded_progress import Lines
from tests.support.upstream_repositories import write_upstream_llmapi
from trtserve.artifacts import ModelRepository
from trtserve.cli import run
from trtserve.errors import ArtifactError, RepositoryError, UsageError
from trtserve.nvidia.containers import image_of
from trtserve.server.launch.cluster import ClusterJob, write_job
from trtserve.server.launch.slurm import Image, SlurmSpec, plan_job
from trtserve.specs import ServerSpec


def text_of(job: ClusterJob, name: str) -> str:
    return job.files[job.script.parent / name]


def test_an_orchestrator_needs_no_gpu_of_its_own(tmp_path: Path) -> None:
    repository = repository_of(tmp_path, gpu_device_ids="0,1,2,3", participant_ids="1,2,3,4")
    spec = ServerSpec(container=TAG, host="0.0.0.0", multi_model=True, spawn_processes=False)
    job = plan_job(repository, spec, SlurmSpec(), tmp_path / "job")
    options = parse(script_options(text_of(job, "server.sbatch")), SBATCH, "sbatch").values
    assert (options["ntasks-per-node"], options["gpus-per-node"]) == ("5", "4")
    assert 'if [ "${gpus}" -lt 4 ]' in text_of(job, "node.sh")
    assert "export TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES=0" in text_of(job, "task.sh")


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
    given = script_options(text_of(job, "server.sbatch"))
    assert parse(given, SBATCH, "sbatch").values.get("gpus-per-node") == asked
    assert sum(word.startswith("--gpus-per-node") for word in given) == (asked is not None)


def test_tasks_are_not_bound_to_one_core(tmp_path: Path) -> None:
    steps = [parse(line, SRUN, "srun").values for line in srun_lines(text_of(planned(tmp_path), "server.sbatch"))]
    assert {step["cpu-bind"] for step in steps} == {"none"}
    # Another name of PMIx, as srun --mpi=list may have it alone.
    job = plan_job(repository_of(tmp_path / "again"), ServerSpec(), SlurmSpec(mpi="pmix_v4"), tmp_path / "job")
    (launch,) = [
        step
        for line in srun_lines(text_of(job, "server.sbatch"))
        if "mpi" in (step := parse(line, SRUN, "srun").values)
    ]
    assert launch["mpi"] == "pmix_v4"


def test_an_engine_is_told_how_many_gpus_the_nodes_have(tmp_path: Path) -> None:
    engine = write_engine_folder(tmp_path / "repository" / "tensorrt_llm" / "1", tp=4)
    (engine.parent / "config.pbtxt").write_text(core_config("tensorrt_llm", "tensorrt_llm/1"), encoding="utf-8")
    original = tmp_path / "built.json"
    original.hardlink_to(engine / "config.json")
    repository, told = ModelRepository(path=tmp_path / "repository"), Lines()
    job = plan_job(repository, ServerSpec(), SlurmSpec(nodes=2), tmp_path / "job", progress=told)
    assert stated_gpus(engine) == stated_gpus(original) == 8  # a plan writes nothing
    assert "states gpus_per_node 8" in told.lines[-1]
    write_job(job)
    assert stated_gpus(engine) == 2
    assert stated_gpus(original) == 8  # the engine that it is a link of may serve elsewhere
    again = plan_job(repository, ServerSpec(), SlurmSpec(nodes=2), tmp_path / "job")
    assert not again.engines
    # One node again: 2 would give two ranks the same GPU.
    write_job(plan_job(repository, ServerSpec(), SlurmSpec(), tmp_path / "other"))
    assert stated_gpus(engine) == 4


def stated_gpus(path: Path) -> int:
    file = path / "config.json" if path.is_dir() else path
    return int(json.loads(file.read_text())["pretrained_config"]["mapping"]["gpus_per_node"])


def test_an_engine_outside_the_repository_is_not_changed(tmp_path: Path) -> None:
    with pytest.raises(RepositoryError, match="states gpus_per_node 8") as caught:
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
    assert parse(script_options(text_of(job, "server.sbatch")), SBATCH, "sbatch").values["gpus-per-node"] == "3"


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
    assert f"--container-image={tmp_path}/triton.sqsh" in text_of(job, "server.sbatch")
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


def test_the_llm_api_without_a_time_limit_gives_a_warning(tmp_path: Path) -> None:
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
    task = text_of(job, "task.sh")
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
def test_a_job_that_does_not_fit_the_engine_is_refused(
    slurm: SlurmSpec, spec: dict[str, Any], words: str, tmp_path: Path
) -> None:
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
def test_values_that_slurm_would_misread_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        SlurmSpec(**wrong)  # type: ignore[arg-type]


def key_file(folder: Path, mode: int = 0o600) -> Path:
    path = folder / "key"
    path.write_text("k" * 32)
    path.chmod(mode)
    return path


def test_a_gateway_runs_in_front_of_the_first_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told, key = Lines(), key_file(tmp_path)
    spec = ServerSpec(container=TAG, http_port=8100)  # Triton stays on loopback
    job = plan_job(repository_of(tmp_path), spec, SlurmSpec(gateway=key), tmp_path / "job", progress=told)
    script = text_of(job, "server.sbatch").replace("\\\n", " ")
    (line,) = [each for each in script.splitlines() if " gateway " in each and each.endswith("2>&1 &")]
    program, *words = shlex.split(line.partition(" > ")[0])
    assert (program, words[:3]) == (sys.executable, ["-m", "trtserve", "gateway"])
    assert words[words.index("--url") + 1] == "127.0.0.1:8001"
    assert words[words.index("--http-port") + 1] == "8100"
    assert (
        script.index(line) < script.index("bash " + str(tmp_path / "job" / "task.sh")) < script.index('kill -TERM "${')
    )
    assert not any("only its own node reaches" in text for text in told.warnings)
    assert any("the key file at the same paths" in text for text in told.warnings)
    words[words.index("--repository") + 1] = str(tmp_path / "missing")
    assert run(words[2:]) == 2
    assert "missing, which is not a folder" in capsys.readouterr().err  # nothing else was wrong


def test_a_gateway_that_could_not_start_is_refused_before_the_job_waits(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="can be read by other users"):
        planned(tmp_path, slurm=SlurmSpec(gateway=key_file(tmp_path, 0o644)))
    with pytest.raises(UsageError, match="--grpc-port is 9000"):
        planned(tmp_path / "again", slurm=SlurmSpec(gateway=key_file(tmp_path)), grpc_port=9000)


def test_paths_with_spaces_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot have the path"):
        plan_job(repository_of(tmp_path), ServerSpec(), SlurmSpec(), tmp_path / "a job")


def test_files_that_trtserve_did_not_write_are_kept(tmp_path: Path) -> None:
    job = planned(tmp_path)
    write_job(job)
    write_job(job)
    job.script.write_text("#!/bin/bash\n")
    with pytest.raises(ArtifactError, match="not written by trtserve"):
        write_job(job)


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
        (["--slurm", "--ui"], "--ui is for a server on this machine: --slurm starts Triton without supervisor"),
        (["--slurm", "--auto-ports"], "--auto-ports is for a server on this machine"),
        (["--slurm", "--ready-timeout", "9"], "--ready-timeout is for a server on this machine"),
        (["--slurm", "--restart", "always", "--log-format", "json"], "--restart, --log-format are for servers on"),
        (["--kubernetes", "--claim", "c", "--max-requests", "9"], "--max-requests is for a server on this machine"),
        (["--kubernetes", "--claim", "c", "--request-timeout", "9"], "--request-timeout is for a server on this"),
        (["--kubernetes", "--claim", "c", "--gpus", "0"], "--gpus is for a server on this machine"),
    ],
)
def test_options_of_another_cluster_are_refused(
    flags: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["start", "--model-repository", str(tmp_path), *flags]) == 2
    assert words in " ".join(capsys.readouterr().err.split())
