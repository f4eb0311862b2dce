"""The doubles of trtllm-llmapi-launch, docker, Slurm and nvidia-smi against launch.md, sections 2, 5 and 6."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.doubles import docker, slurm, tritonserver
from tests.doubles.mounts import MountError, parse_mount, translate
from tests.doubles.ranks import SHARED_MEMORY
from tests.doubles.slurm_options import OptionError, script_options
from tests.support.double_engines import write_checkpoint, write_core_model, write_engine_folder
from tests.support.doubles import Doubles
from trtserve.ports import free_ports

IMAGE = "nvcr.io/nvidia/tritonserver:25.04-trtllm-python-py3"


def _run(*words: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=False, **options)  # type: ignore[call-overload, no-any-return]


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _llmapi_repository(folder: Path, tp: int, front: str = "") -> Path:
    model = folder / "tensorrt_llm"
    (model / "1").mkdir(parents=True)
    (model / "config.pbtxt").write_text(
        'name: "tensorrt_llm"\nbackend: "python"\n'
        'input [ { name: "text_input" data_type: TYPE_STRING dims: [ -1 ] } ]\n'
        'output [ { name: "text_output" data_type: TYPE_STRING dims: [ -1 ] } ]\n'
        "instance_group [ { count: 1 kind: KIND_CPU } ]\n",
        encoding="utf-8",
    )
    for name in ("model.py", "helpers.py"):
        (model / "1" / name).touch()
    text = f"model: tiny\nbackend: pytorch\ntensor_parallel_size: {tp}\npipeline_parallel_size: 1\n{front}"
    (model / "1" / "model.yaml").write_text(text, encoding="utf-8")
    return folder


def _server(repository: Path) -> list[str]:
    http, grpc, metrics = free_ports("127.0.0.1", 3)
    return [
        "tritonserver",
        f"--model-repository={repository}",
        *(f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}"),
        f"--backend-config=python,shm-region-prefix-name=double{secrets.token_hex(4)}_",
    ]


def test_llmapi_launch_runs_the_command_on_rank_0_alone(doubles: Doubles, tmp_path: Path) -> None:
    doubles.configure(container="25.12")
    words = ["trtllm-llmapi-launch", *_server(_llmapi_repository(tmp_path / "repository", 2))]
    mpirun = str(Path(sys.executable).parent / "mpirun")
    process = subprocess.Popen([mpirun, "--allow-run-as-root", "--oversubscribe", "-n", "2", *words])
    _until(lambda: bool(doubles.calls("tritonserver")) and bool(doubles.calls("mgmn_worker_node")))
    (server,) = doubles.calls("tritonserver")
    assert server.environment["tllm_mpi_size"] == "2"
    assert not [name for name in server.environment if name.startswith(("OMPI_", "PMIX_"))]
    assert [call.rank for call in doubles.calls("mgmn_worker_node")] == [1]
    _until(lambda: any((doubles.folder / "scratch").glob("single-*/ready-0")))
    os.kill(server.pid, signal.SIGTERM)
    assert process.wait(120) == 0


def test_llmapi_launch_hangs_when_its_command_fails(doubles: Doubles) -> None:
    process = subprocess.Popen(["trtllm-llmapi-launch", "false"])
    _until(lambda: bool(doubles.calls("mgmn_leader_node")))
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    process.kill()
    process.wait(120)


@pytest.mark.parametrize("words", [(), ("tritonserver", "--model-repository=/a b")])
def test_llmapi_launch_splits_at_blanks(doubles: Doubles, words: tuple[str, ...]) -> None:
    assert _run("trtllm-llmapi-launch", *words).returncode == 2


@pytest.mark.parametrize(
    ("container", "tp", "front", "flags", "text"),
    [
        ("25.04", 1, "", (), "the llmapi model is not in TensorRT-LLM 0.18.2"),
        ("25.12", 8, "", (), "world size 8 is larger than the number of GPUs 4"),
        ("25.12", 1, "triton_config: {decoupled: True}", ("--disable-auto-complete-config",), "does not reach Triton"),
        ("25.12", 1, "triton_config: {max_batch_size: 4}", (), "batching is not supported"),
    ],
)
def test_llmapi_models(
    doubles: Doubles,
    tmp_path: Path,
    container: str,
    tp: int,
    front: str,
    flags: tuple[str, ...],
    text: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    doubles.configure(container=container)
    words = [*_server(_llmapi_repository(tmp_path / "repository", tp, front))[1:], *flags]
    assert tritonserver.main(words, doubles.folder) == 1
    assert text in capsys.readouterr().err


def test_docker_runs_a_build_with_mounted_folders(doubles: Doubles, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    (tmp_path / "out").mkdir()
    flags = ["--rm", "-i", "--net", "host", "--shm-size=2g", "--ulimit", "memlock=-1", "--ulimit", "stack=67108864"]
    flags += [
        "--gpus",
        "all",
        "-v",
        f"{tmp_path / 'checkpoint'}:/checkpoint:ro",
        "-v",
        f"{tmp_path / 'out'}:/out",
        "-w",
        "/out",
    ]
    command = ["trtllm-build", "--checkpoint_dir", "/checkpoint", "--output_dir", "/out/engine"]
    done = _run("docker", "run", *flags, IMAGE, *command)
    assert done.returncode == 0, done.stderr
    assert "TensorRT-LLM version: 0.18.2" in done.stdout
    assert (tmp_path / "out" / "engine" / "rank0.engine").exists()
    outside = ["trtllm-build", "--checkpoint_dir", str(tmp_path / "checkpoint")]
    if not str(tmp_path).startswith("/tmp/"):  # every image has a /tmp
        assert "neither mounted nor image" in _run("docker", "run", *flags, IMAGE, *outside).stderr


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("run", "--rm", "--gpu", "all", IMAGE, "true"), "unknown flag: --gpu"),
        (("run", "--shm-size=much", IMAGE, "true"), 'for "--shm-size" flag'),
        (("run", "-v", "models:/models", IMAGE, "true"), "would name a volume"),
        (("run", "-v", "/nowhere:/models", IMAGE, "true"), "does not exist"),
        (("run", "--net", "host", "-p", "8000:8000", IMAGE, "true"), "published ports"),
        (("run", "nvcr.io/nvidia/tritonserver:24.13-trtllm-python-py3", "true"), "manifest unknown"),
        (("run", "nvcr.io/nvidia/tritonserver:25.04-py3", "true"), "manifest unknown"),
        (("run", IMAGE), "no command"),
        (("compose", "up"), "unknown command"),
    ],
)
def test_docker_refuses(
    doubles: Doubles, words: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert docker.main(list(words), doubles.folder) == 125
    assert text in capsys.readouterr().err


def test_paths_of_a_container(tmp_path: Path) -> None:
    mounts = [parse_mount(f"{tmp_path}:/models")]
    assert translate("--model-repository=/models/a", mounts) == f"--model-repository={tmp_path}/a"
    assert translate("python,shm-region-prefix-name=a/b", mounts) == "python,shm-region-prefix-name=a/b"
    assert translate("/opt/tritonserver/bin/tritonserver", mounts) == "/opt/tritonserver/bin/tritonserver"
    with pytest.raises(MountError, match="No such file"):
        translate("--model-repository=/engines", mounts)


_JOB = """#!/bin/bash
#SBATCH --nodes=1 --ntasks-per-node=2
#SBATCH --time 00:30:00
#SBATCH --job-name=test
#SBATCH --gpus-per-node=2
#SBATCH -o out.log
srun --mpi=pmix bash task.sh
"""


def test_slurm_runs_a_server_of_two_ranks(doubles: Doubles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_engine_folder(tmp_path / "engine", tp=2)
    repository = write_core_model(tmp_path / "repository", "tensorrt_llm", "engine")
    server = " ".join(_server(repository)).removesuffix("_")
    prefix = server.rpartition("=")[2]
    server += "${SLURM_PROCID}_"
    (tmp_path / "task.sh").write_text(f"exec {server} --disable-auto-complete-config\n", encoding="utf-8")
    (tmp_path / "job.sub").write_text(_JOB, encoding="utf-8")
    done = _run("sbatch", "job.sub")
    assert done.stdout == "Submitted batch job 1000\n", done.stderr
    log = tmp_path / "out.log"
    _until(lambda: "Started Metrics Service" in log.read_text(encoding="utf-8"))
    assert _run("squeue", "-h", "-j", "1000", "-o", "%T").stdout == "RUNNING\n"
    assert sorted(call.environment["SLURM_PROCID"] for call in doubles.calls("tritonserver")) == ["0", "1"]
    assert _run("scancel", "1000").returncode == 0
    _until(lambda: not _alive([call.pid for call in doubles.calls("tritonserver")]))
    assert _run("squeue", "-h", "-j", "1000").stdout == ""
    for region in SHARED_MEMORY.glob(f"{prefix}*"):  # rank 1 was loading and had no handler: its region stays
        region.unlink()


def _alive(pids: list[int]) -> bool:
    return any(b"tritonserver" in _command(pid) for pid in pids)


def _command(pid: int) -> bytes:
    try:
        return Path("/proc", str(pid), "cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ("#SBATCH --nodes=1\n", "first line must start with #!"),
        ("#!/bin/bash\n# SBATCH --nodes=1\n", "takes this line for a comment"),
        ("#!/bin/bash\necho\n#SBATCH --nodes=1\n", "stands behind a command"),
        ("#!/bin/bash\n#SBATCH\n", "without an option"),
    ],
)
def test_job_scripts(script: str, text: str) -> None:
    with pytest.raises(OptionError, match=text):
        script_options(script)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--mpi=openmpi", "true"), "Invalid value 'openmpi' for --mpi"),
        (("-N", "9", "true"), "Node count specification invalid"),
        (("--container-mounts=/a:/b", "true"), "container options without --container-image"),
        (("--container-image", IMAGE, "true"), "'#' is between registry and image"),
        (("--container-image", "missing", "true"), "failed to import docker image"),
        (("--gpus", "4", "true"), "unrecognized option '--gpus'"),
        ((), "No command given"),
    ],
)
def test_srun_refuses(doubles: Doubles, words: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert slurm.srun(list(words), doubles.folder) == 1
    assert text in capsys.readouterr().err


def test_srun_in_a_container_and_its_worst_code(doubles: Doubles, tmp_path: Path) -> None:
    image = IMAGE.replace("nvcr.io/", "nvcr.io#")
    script = tmp_path / "step.sh"
    script.write_text(
        "echo $SLURM_PROCID $NVIDIA_TRITON_SERVER_VERSION; exit $((SLURM_PROCID * 3))\n", encoding="utf-8"
    )
    words = ["--container-image", image, f"--container-mounts={tmp_path}:/work", "--container-workdir=/work"]
    done = _run("srun", "-N", "2", "--ntasks-per-node=1", "--mpi=pmix", *words, "bash", "/work/step.sh")
    assert sorted(done.stdout.splitlines()) == ["0 25.04", "1 25.04"], done.stderr
    assert done.returncode == 3


def test_nvidia_smi(doubles: Doubles) -> None:
    doubles.configure(gpus=2)
    assert len(_run("nvidia-smi", "--list-gpus").stdout.splitlines()) == 2
    query = _run("nvidia-smi", "--query-gpu=index,name,compute_cap,memory.total", "--format=csv,noheader").stdout
    assert query.splitlines()[1] == "1, NVIDIA H100 80GB HBM3, 9.0, 81559 MiB"
    assert _run("nvidia-smi", "--query-gpu=nonsense", "--format=csv").returncode == 2
    doubles.configure(gpus=0)
    assert _run("nvidia-smi", "-L").returncode == 9
