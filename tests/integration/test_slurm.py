"""Job scripts: shellcheck, the strict parsers of sbatch and srun, and what their tasks run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.doubles.slurm_options import SBATCH, SRUN, parse, script_options
from tests.support.double_engines import write_core_model, write_engine_folder
from tests.support.slurm_jobs import TAG, planned, srun_lines
from trtserve.artifacts import ModelRepository
from trtserve.errors import MachineError, MissingDependencyError
from trtserve.server.launch.cluster import write_job
from trtserve.server.launch.commands import LaunchSetup
from trtserve.server.launch.modes import leader
from trtserve.server.launch.slurm import SlurmSpec, plan_job, submit
from trtserve.server.triton.tritonserver import Address, protection_arguments
from trtserve.specs import ServerSpec


def shellcheck(*files: Path) -> None:
    tool = Path(sys.executable).parent / "shellcheck"
    done = subprocess.run([tool, *files], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


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
