"""Scripts for clusters: shellcheck, bash, the strict parsers of sbatch and srun, and what their tasks run."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from jinja2 import Environment, PackageLoader

from tests.doubles.slurm_options import SBATCH, SRUN, parse, script_options
from tests.support.cluster_jobs import TAG, documents, manifest_of, planned, relocatable, srun_lines
from tests.support.double_engines import write_core_model, write_engine_folder
from trtserve.artifacts import ModelRepository
from trtserve.cli import run
from trtserve.errors import MachineError, MissingDependencyError
from trtserve.server.launch.cluster import write_job
from trtserve.server.launch.commands import LaunchSetup
from trtserve.server.launch.modes import leader
from trtserve.server.launch.slurm import SlurmSpec, plan_job, submit
from trtserve.server.triton.tritonserver import Address, protection_arguments
from trtserve.specs import ServerSpec


def manifest(tmp_path: Path, tp: int = 4, spec: ServerSpec | None = None, **given: Any) -> dict[str, dict[str, Any]]:
    return documents(manifest_of(relocatable(tmp_path / "repository", tp), spec, **given))


def shellcheck(*files: Path) -> None:
    tool = Path(sys.executable).parent / "shellcheck"
    done = subprocess.run([tool, *files], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


def shellchecked(tmp_path: Path, scripts: Mapping[str, str]) -> None:
    for name, text in scripts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    shellcheck(*(tmp_path / name for name in scripts))


def test_several_ranks_are_ended_through_rank_0(tmp_path: Path) -> None:
    found = manifest(tmp_path)
    (container,) = found["Deployment"]["spec"]["template"]["spec"]["containers"]
    bash, flag, script = container["lifecycle"]["preStop"]["exec"]["command"]
    assert (bash, flag) == ("bash", "-c")
    shellchecked(tmp_path, {"end.sh": f"#!/bin/bash\n{script}"})
    single = manifest(tmp_path / "single", 1)
    assert "lifecycle" not in single["Deployment"]["spec"]["template"]["spec"]["containers"][0]


def test_a_worker_that_ends_waits_for_its_ranks(tmp_path: Path) -> None:
    found = manifest(tmp_path, nodes=2, ssh_secret="keys")
    worker = found["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"][0]
    bash, flag, script = worker["lifecycle"]["preStop"]["exec"]["command"]
    assert (bash, flag) == ("bash", "-c")
    shellchecked(tmp_path, {"end.sh": f"#!/bin/bash\n{script}"})


def test_the_scripts_of_pods_pass_shellcheck(tmp_path: Path) -> None:
    shellchecked(tmp_path, manifest(tmp_path, nodes=2, ssh_secret="keys")["ConfigMap"]["data"])


@pytest.mark.parametrize(("status", "healthy"), [("200 OK", True), ("503 Service Unavailable", False)])
def test_the_probe_passes_when_triton_is_ready(tmp_path: Path, status: str, healthy: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        spec = ServerSpec(http_port=port, grpc_port=1, metrics_port=2)
        found = manifest(tmp_path, 1, spec)
        (container,) = found["Deployment"]["spec"]["template"]["spec"]["containers"]
        script = container["readinessProbe"]["exec"]["command"][2]
        shellchecked(tmp_path, {"probe.sh": f"#!/bin/bash\n{script}"})

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                assert connection.recv(1000).startswith(b"GET /v2/health/ready")
                connection.sendall(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n".encode())

        thread = threading.Thread(target=answer)
        thread.start()
        asks = script[: script.index("for process")]  # the rest looks at the stubs of all tests
        done = subprocess.run(["bash", "-c", asks], capture_output=True, text=True, timeout=60, check=False)
        thread.join()
    assert (done.returncode == 0) is healthy, done.stderr


def test_the_probe_fails_when_a_stub_has_ended(tmp_path: Path) -> None:
    """A process with the stub's name that has ended, and whose parent does not care, as Triton does not."""
    probe = Environment(loader=PackageLoader("trtserve.server")).get_template("probe.sh.j2").render(port=1, page="/")
    loop = probe[probe.index("for process") :]
    stub = tmp_path / "triton_python_backend_stub"
    stub.symlink_to("/bin/true")
    with subprocess.Popen([stub]) as child:
        assert os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT) is not None
        done = subprocess.run(["bash", "-c", loop], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "stub has ended" in done.stdout


def test_the_scripts_pass_shellcheck_and_slurms_parsers(tmp_path: Path) -> None:
    cluster = SlurmSpec(
        nodes=2,
        account="mine",
        partition="gpu",
        time="00:30:00",
        job_name="llama",
        gpu_clock=1410,
        flags=("--exclusive",),
    )
    job = planned(tmp_path, slurm=cluster, per_node=2, extra_arguments=("--log-verbose=1", "--trace-config=a,b c='d'"))
    write_job(job)
    shellcheck(*job.files)
    options = parse(script_options(job.script.read_text()), SBATCH, "sbatch").values
    assert options["output"] == f"{job.logs}/%x-%j.out"
    expected = {"account": "mine", "partition": "gpu", "time": "00:30:00", "job-name": "llama", "nodes": "2"}
    assert expected.items() <= options.items()
    assert (options["ntasks-per-node"], options["exclusive"]) == ("2", "1")
    look, clock, step, sweep = (parse(line, SRUN, "srun") for line in srun_lines(job.script.read_text()))
    assert look.rest == ["bash", str(job.script.parent / "node.sh")]
    assert (look.values["ntasks"], look.values["ntasks-per-node"]) == ("2", "1")
    assert sweep.rest == ["bash", str(job.script.parent / "node.sh"), "sweep"]
    assert clock.rest == ["sudo", "nvidia-smi", "-lgc", "1410,1410"]
    assert (step.values["mpi"], step.values["kill-on-bad-exit"]) == ("pmix", "1")
    assert step.values["container-image"] == f"nvcr.io#nvidia/tritonserver:{TAG}-trtllm-python-py3"
    assert step.values["container-workdir"] == str(tmp_path / "repository")
    mounts = step.values["container-mounts"].split(",")
    assert set(mounts) == {
        f"{path}:{path}" for path in (tmp_path / "repository", tmp_path / "engine", tmp_path / "job")
    }


@pytest.mark.parametrize(("container", "version"), [("24.08", "0.12.0"), ("25.04", "0.18.2"), ("26.07", "1.2.1")])
def test_every_task_has_the_arguments_that_mpirun_would_give_it(container: str, version: str, tmp_path: Path) -> None:
    engine = write_engine_folder(tmp_path / "engine", tp=3, container=container)
    write_core_model(tmp_path / "repository", "tensorrt_llm", str(engine))
    repository = ModelRepository(path=tmp_path / "repository")
    spec = ServerSpec(trtllm_version=version, extra_arguments=("--log-info=true", "--id=a,'b c'"))
    job = plan_job(repository, spec, SlurmSpec(), tmp_path / "job")
    address = Address(host="127.0.0.1", http_port=8000, grpc_port=8001, metrics_port=8002)
    found = re.search(r"^prefix=(trtserve_repository_\w{8})", job.files[job.script.parent / "task.sh"], re.MULTILINE)
    assert found is not None
    setup = LaunchSetup(
        repository=repository.path,
        address=address,
        release=version.rpartition(".")[0],
        shm_prefix=f"{found[1]}_77_",
        arguments=(*protection_arguments(), *spec.extra_arguments),
    )
    wanted = [group[1:] for group in leader(setup, 3).groups]
    # The arrays, as bash understands them.
    script = job.files[job.script.parent / "task.sh"].partition("stopped=0")[0] + "printf '%s\\n' \"${command[@]:1}\"\n"
    for rank in range(3):
        environment = {"SLURM_JOB_ID": "77", "SLURM_PROCID": str(rank)}
        done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=True)
        assert tuple(done.stdout.splitlines()) == wanted[rank]
    assert "@shm@" not in "".join(job.files.values())


def test_without_slurm_and_when_it_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = planned(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingDependencyError, match="sbatch"):
        submit(job.script, tmp_path)
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: invalid partition specified: x' >&2\nexit 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    with pytest.raises(MachineError, match="invalid partition"):
        submit(job.script, tmp_path)


@pytest.mark.parametrize(("page", "container", "runs"), [("nodes", "25.12", 2), ("nvidia", "26.07", 1)])
def test_the_dry_runs_of_the_tutorials_work(
    page: str,
    container: str,
    runs: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRTSERVE_HOME", str(tmp_path / "home"))
    repository = str(relocatable(tmp_path / "repository", 4, container).path)
    text = (Path(__file__).parents[2] / "docs" / "tutorials" / f"{page}.md").read_text(encoding="utf-8")
    commands = re.findall(r"^\$ trtserve (start --model-repository .*--dry-run)$", text, re.MULTILINE)
    assert len(commands) == runs
    for command in commands:
        words = re.sub(r"/shared/llama|/models/inflight_batcher_llm", repository, command).split()
        assert run(words) == 0, capsys.readouterr().err
        shown = capsys.readouterr().out
        expected = "sbatch" if "--slurm" in words else "LeaderWorkerSet" if "--kubernetes" in words else "docker run"
        assert expected in shown
