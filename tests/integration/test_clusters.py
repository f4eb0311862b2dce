"""Servers on clusters: jobs through the doubles of Slurm, the leader of a LeaderWorkerSet with the real mpirun."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.cluster_jobs import documents, manifest_of, relocatable
from tests.support.doubles import Doubles
from tests.support.launches import llmapi_repository
from tests.support.waiting import wait_until
from trtserve.artifacts import ModelRepository
from trtserve.cli import run
from trtserve.host.ports import free_ports
from trtserve.server.launch.cluster import write_job
from trtserve.server.triton.tritonserver import Address, is_ready, shared_memory_regions, sweep_shared_memory
from trtserve.specs import ServerSpec

HOST = "127.0.0.1"


@pytest.fixture(autouse=True)
def jobs(doubles: Doubles) -> Iterator[None]:
    """Every submitted job has ended when the test ends."""
    yield
    for pid in doubles.folder.glob("scratch/jobs/*/pid"):
        subprocess.run(["scancel", pid.parent.name], check=True, timeout=60)


def repository_of(tmp_path: Path, tp: int = 4, container: str = "25.04", **parameters: str) -> ModelRepository:
    return relocatable(tmp_path / "repository", tp, container, **parameters)


def submit(repository: Path, folder: Path, *flags: str) -> tuple[str, Address]:
    """Submit a job with our own command; its number and where rank 0 will listen."""
    http, grpc, metrics = free_ports(HOST, 3)
    ports = [f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}"]
    line = ["start", "--model-repository", str(repository), "--slurm", "--submit", "--out", str(folder), "--json"]
    with redirect_stdout(io.StringIO()) as printed:
        assert run([*line, *ports, *flags]) == 0
    address = Address(host=HOST, http_port=http, grpc_port=grpc, metrics_port=metrics)
    return json.loads(printed.getvalue())["result"]["number"], address


def code_of(doubles: Doubles, number: str) -> int:
    code = doubles.folder / "scratch" / "jobs" / number / "code"
    wait_until(lambda: code.exists() and code.read_text())
    return int(code.read_text())


def test_a_job_on_two_nodes_from_sbatch_to_scancel(doubles: Doubles, tmp_path: Path) -> None:
    doubles.configure(container="25.04", gpus=2)
    folder = tmp_path / "job"
    number, address = submit(repository_of(tmp_path).path, folder, "--nodes", "2", "--job-name", "llama")
    wait_until(lambda: is_ready(address))
    ranks = sorted(doubles.calls("tritonserver"), key=lambda call: call.rank)
    assert [call.rank for call in ranks] == [0, 1, 2, 3]
    assert "--load-model=tensorrt_llm" not in ranks[0].arguments
    for call in ranks[1:]:
        assert "--load-model=tensorrt_llm" in call.arguments
    # More than the one core that srun gives a task by default.
    assert {call.environment["SLURM_CPU_BIND"] for call in ranks} == {"quiet,none"}
    prefixes = {
        argument.rpartition("=")[2] for call in ranks for argument in call.arguments if "shm-region" in argument
    }
    # The part that nobody can guess is the same for all ranks.
    (made,) = {prefix.removesuffix(f"_{number}_r{rank}_") for rank, prefix in enumerate(sorted(prefixes))}
    assert re.fullmatch(r"trtserve_repository_[0-9a-f]{8}", made)
    assert sum(len(shared_memory_regions(prefix)) for prefix in prefixes) == 4
    subprocess.run(["scancel", number], check=True, timeout=60)
    wait_until(lambda: not any(shared_memory_regions(prefix) for prefix in prefixes))
    logs = {path.name for path in (folder / "logs").iterdir()}
    assert logs == {f"llama-{number}.out", *(f"llama-{number}-rank{rank}.out" for rank in range(4))}


def test_a_rank_that_dies_ends_the_job(doubles: Doubles, tmp_path: Path) -> None:
    doubles.configure(container="25.04", gpus=2, die_rank=1, die_when="ready", die_after=0.2)
    number, _ = submit(repository_of(tmp_path, tp=2).path, tmp_path / "job")
    assert code_of(doubles, number) != 0
    assert not shared_memory_regions(f"trtserve_repository_*_{number}_")
    assert "out of memory" in (tmp_path / "job" / "logs" / f"repository-{number}-rank1.out").read_text()


def test_gpus_of_a_node_can_be_chosen(doubles: Doubles, tmp_path: Path) -> None:
    """gpu_device_ids over two nodes: the same two GPUs on each."""
    doubles.configure(container="25.05", gpus=2)
    repository = repository_of(tmp_path, container="25.05", gpu_device_ids="1,0", num_nodes="2")
    number, address = submit(repository.path, tmp_path / "job", "--nodes", "2")
    wait_until(lambda: is_ready(address))
    assert sorted(call.rank for call in doubles.calls("tritonserver")) == [0, 1, 2, 3]
    subprocess.run(["scancel", number], check=True, timeout=60)


def test_an_engine_for_more_nodes_fails(doubles: Doubles, tmp_path: Path) -> None:
    """What the double says where a job is run with an engine that nobody told about the nodes."""
    doubles.configure(container="25.04", gpus=2)
    repository = repository_of(tmp_path).path
    config = repository / "tensorrt_llm" / "1" / "config.json"
    untold = config.read_text()
    line = ["start", "--model-repository", str(repository), "--slurm", "--nodes", "2", "--out", str(tmp_path / "job")]
    assert run(line) == 0
    assert untold != config.read_text()
    config.write_text(untold)
    done = subprocess.run(
        ["sbatch", "--parsable", str(tmp_path / "job" / "server.sbatch")], capture_output=True, text=True, check=True
    )
    number = done.stdout.strip()
    assert code_of(doubles, number) != 0
    # Ranks 2 and 3 both fail, and whichever is first ends the other.
    logs = [(tmp_path / "job" / "logs" / f"repository-{number}-rank{rank}.out").read_text() for rank in (2, 3)]
    assert any("invalid device ordinal (2 GPUs on this node)" in log for log in logs)


def test_a_node_without_enough_gpus_ends_the_job_before_any_model_is_loaded(doubles: Doubles, tmp_path: Path) -> None:
    doubles.configure(container="25.04", gpus=2)
    command = ["start", "--model-repository", str(repository_of(tmp_path, tp=2).path), "--slurm"]
    assert run([*command, "--out", str(tmp_path / "job")]) == 0
    script = tmp_path / "job" / "server.sbatch"
    lines = script.read_text().splitlines(keepends=True)
    script.write_text("".join(line for line in lines if "gpus-per-node" not in line))
    done = subprocess.run(["sbatch", "--parsable", str(script)], capture_output=True, text=True, check=True)
    number = done.stdout.strip()
    assert code_of(doubles, number) == 1
    log = (tmp_path / "job" / "logs" / f"repository-{number}.out").read_text()
    assert "one for each task: 2; GPUs found: 0" in log
    assert "--gres=gpu:2 or --exclusive" in log
    assert not doubles.calls("tritonserver")


def test_tasks_in_a_container(doubles: Doubles, tmp_path: Path) -> None:
    """pyxis: image, mounts and folder; the double refuses every path that is not mounted."""
    doubles.configure(container="25.04", gpus=2)
    line = ["start", "--model-repository", str(repository_of(tmp_path, tp=2).path), "--slurm", "--container", "25.04"]
    http, grpc, metrics = free_ports(HOST, 3)
    ports = [f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}"]
    assert run([*line, "--out", str(tmp_path / "job"), *ports]) == 0
    task = tmp_path / "job" / "task.sh"
    # The image's own server, which the double of a container does not have at that place.
    task.write_text(task.read_text().replace("/opt/tritonserver/bin/tritonserver", str(doubles.bin / "tritonserver")))
    done = subprocess.run(
        ["sbatch", "--parsable", str(tmp_path / "job" / "server.sbatch")], capture_output=True, text=True, check=True
    )
    wait_until(lambda: is_ready(Address(host=HOST, http_port=http, grpc_port=grpc, metrics_port=metrics)))
    assert all(call.environment["NVIDIA_TRITON_SERVER_VERSION"] == "25.04" for call in doubles.calls("tritonserver"))
    subprocess.run(["scancel", done.stdout.strip()], check=True, timeout=60)
    wait_until(lambda: not shared_memory_regions(f"trtserve_repository_*_{done.stdout.strip()}_"))


def test_the_llm_api_on_two_nodes(doubles: Doubles, tmp_path: Path) -> None:
    doubles.configure(container="25.12", gpus=2)
    number, address = submit(
        llmapi_repository(tmp_path, 2).path, tmp_path / "job", "--nodes", "2", "--trtllm-version=1.1.0"
    )
    wait_until(lambda: is_ready(address))
    (server,) = doubles.calls("tritonserver")
    assert not [name for name in server.environment if name.startswith("SLURM_")]
    assert any(argument.endswith(f"_{number}_r0_") for argument in server.arguments)
    wait_until(lambda: [call.rank for call in doubles.calls("mgmn_worker_node")] == [1])
    os.kill(server.pid, signal.SIGTERM)  # the launcher tells the leader, and that the workers
    assert code_of(doubles, number) == 0


SSH = """\
#!/bin/bash
# A network of one machine: the command after the host runs here.
while [[ "$1" == -* ]]; do shift; done
host="$1"; shift
echo "${host}" >> "${SSH_LOG}"
exec bash -c "$*"
"""


def test_the_leader_of_a_leader_worker_set_starts_all_ranks(
    doubles: Doubles, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    doubles.configure(container="25.04", gpus=2)
    repository = repository_of(tmp_path)
    http, grpc, metrics = free_ports(HOST, 3)
    spec = ServerSpec(http_port=http, grpc_port=grpc, metrics_port=metrics)
    job = manifest_of(repository, spec, mount_path=str(tmp_path), nodes=2, ssh_secret="keys")
    write_job(job)
    objects = documents(job)
    script = objects["ConfigMap"]["data"]["leader.sh"]
    for name, text in {"ssh": SSH, "ssh-keygen": "#!/bin/sh\necho key\n"}.items():
        (doubles.bin / name).write_text(text, encoding="utf-8")
        (doubles.bin / name).chmod(0o755)
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "ssh-privatekey").touch()
    script = script.replace("/trtserve/ssh", str(tmp_path / "secret"))
    script = script.replace("/opt/tritonserver/bin/tritonserver", str(doubles.bin / "tritonserver"))
    (tmp_path / "leader.sh").write_text(script, encoding="utf-8")
    environment = {
        **os.environ,
        "PATH": f"{doubles.bin}{os.pathsep}{Path(sys.prefix) / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(tmp_path / "home"),
        "SSH_LOG": str(tmp_path / "ssh.log"),
        "LWS_LEADER_ADDRESS": "repository-0.repository.default",
        "LWS_GROUP_SIZE": "2",
    }
    log = tmp_path / "leader.log"
    with log.open("wb") as file:
        leader = subprocess.Popen(
            ["bash", str(tmp_path / "leader.sh")], env=environment, cwd=repository.path, stdout=file, stderr=file
        )
    request.addfinalizer(leader.terminate)  # nothing where it has ended
    wait_until(lambda: is_ready(Address(host=HOST, http_port=http, grpc_port=grpc, metrics_port=metrics)))
    ranks = {call.rank: call for call in doubles.calls("tritonserver")}
    assert sorted(ranks) == [0, 1, 2, 3]
    local = [ranks[rank].environment["OMPI_COMM_WORLD_LOCAL_RANK"] for rank in range(4)]
    assert local == ["0", "1", "0", "1"]  # two on each node, in their order
    assert set((tmp_path / "ssh.log").read_text().split()) == {"repository-0-1.repository.default"}
    assert {rank.environment["OMPI_MCA_orte_keep_fqdn_hostnames"] for rank in ranks.values()} == {"1"}
    workers = objects["LeaderWorkerSet"]["spec"]
    (container,) = workers["leaderWorkerTemplate"]["leaderTemplate"]["spec"]["containers"]
    stop_first(container, leader.pid)
    assert not psutil.pid_exists(ranks[0].pid)
    assert leader.wait(60) == 0
    assert "Waiting for in-flight requests to complete." in log.read_text()
    assert oct((tmp_path / "home" / ".ssh" / "id").stat().st_mode)[-3:] == "600"


def stop_first(container: Mapping[str, Any], launcher: int) -> None:
    """What Kubernetes runs before it asks a pod's first process to end: here it sees this launch alone."""
    inside = [launcher, *(each.pid for each in psutil.Process(launcher).children(recursive=True))]
    seen = " ".join(f"/proc/{pid}" for pid in inside)
    words = container["lifecycle"]["preStop"]["exec"]["command"]
    subprocess.run([word.replace("/proc/[0-9]*", seen) for word in words], check=True, timeout=60)


class Pod:
    """The one container of a Deployment on this machine: its command, folder and variables with the real mpirun."""

    def __init__(self, doubles: Doubles, repository: ModelRepository, log: Path) -> None:
        http, grpc, metrics = free_ports(HOST, 3)
        self.address = Address(host=HOST, http_port=http, grpc_port=grpc, metrics_port=metrics)
        # This machine may have fewer cores than the pod has ranks.
        spec = ServerSpec(http_port=http, grpc_port=grpc, metrics_port=metrics, oversubscribe=True)
        job = manifest_of(repository, spec, mount_path=str(repository.path.parent))
        write_job(job)
        (self.container,) = documents(job)["Deployment"]["spec"]["template"]["spec"]["containers"]
        # The image's own server, which this machine does not have at that place.
        there, here = "/opt/tritonserver/bin/tritonserver", str(doubles.bin / "tritonserver")
        command = [here if word == there else word for word in self.container["command"]]
        assert here in command
        paths = [str(doubles.bin), str(Path(sys.prefix) / "bin"), os.environ["PATH"]]
        given = {each["name"]: each["value"] for each in self.container.get("env", [])}
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, "PATH": os.pathsep.join(paths), **given},
                cwd=self.container["workingDir"],
                stdout=file,
                stderr=file,
            )


@pytest.fixture
def start_pod(doubles: Doubles, tmp_path: Path) -> Iterator[Callable[[ModelRepository], Pod]]:
    started = []

    def start(repository: ModelRepository) -> Pod:
        started.append(Pod(doubles, repository, tmp_path / "pod.log"))
        return started[-1]

    yield start
    for pod in started:
        pod.process.terminate()  # nothing where it has ended
        pod.process.wait(60)
    # A pod has its own shared memory, which ends with it.
    sweep_shared_memory("trtserve_repository_*_r")


def test_the_pod_of_a_deployment_starts_all_ranks(
    doubles: Doubles, tmp_path: Path, start_pod: Callable[[ModelRepository], Pod]
) -> None:
    doubles.configure(container="25.04", gpus=4)
    pod = start_pod(repository_of(tmp_path))
    wait_until(lambda: is_ready(pod.address))
    ranks = sorted(doubles.calls("tritonserver"), key=lambda call: call.rank)
    assert [call.rank for call in ranks] == [0, 1, 2, 3]
    assert {call.environment["OMPI_COMM_WORLD_SIZE"] for call in ranks} == {"4"}
    given = [argument for call in ranks for argument in call.arguments if "shm-region" in argument]
    prefixes = {argument.rpartition("=")[2] for argument in given}
    assert sum(len(shared_memory_regions(prefix)) for prefix in prefixes) == 4
    stop_first(pod.container, pod.process.pid)
    assert pod.process.wait(60) == 0
    wait_until(lambda: not any(psutil.pid_exists(call.pid) for call in ranks))
    log = (tmp_path / "pod.log").read_text()
    assert [region for prefix in prefixes for region in shared_memory_regions(prefix)] == [], log
    assert "Waiting for in-flight requests to complete." in log


def test_a_rank_of_a_pod_that_dies_ends_the_pod(
    doubles: Doubles, tmp_path: Path, start_pod: Callable[[ModelRepository], Pod]
) -> None:
    """With a code other than 0 and the rank's last lines, and the cluster starts it anew."""
    doubles.configure(container="25.04", gpus=2, die_rank=1, die_when="ready", die_after=0.2)
    pod = start_pod(repository_of(tmp_path, tp=2))
    assert pod.process.wait(60) != 0
    wait_until(lambda: not any(psutil.pid_exists(call.pid) for call in doubles.calls("tritonserver")))
    assert "out of memory" in (tmp_path / "pod.log").read_text()
