"""The scripts of a LeaderWorkerSet with the real OpenSSH and the real mpirun: two pods that are this machine.

One variable and a HOME for each pod keep their processes and files apart. As in the manifest, pods run as user
1000 without root's rights: each in a user namespace that gives this number to the user who runs the tests.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.cluster_jobs import documents, manifest_of, relocatable
from tests.support.doubles import Doubles
from tests.support.waiting import wait_until
from trtserve.host.ports import free_ports
from trtserve.server.launch.cluster import write_job
from trtserve.server.triton.tritonserver import Address, is_ready, shared_memory_regions, sweep_shared_memory
from trtserve.specs import ServerSpec

pytestmark = pytest.mark.needs("sshd")

HOST = "127.0.0.1"
POD = "NVIDIA_TEST_POD"  # the doubles record variables of NVIDIA's
USER = 1000
IN_A_POD = f"""
mount --bind "$0" /etc/passwd
exec unshare --user --map-user={USER} --map-group={USER} -- "$@"
"""


def answers(port: int) -> bool:
    """Return whether the port of a worker accepts connections, as its readiness probe asks."""
    with socket.socket() as asking:
        return asking.connect_ex((HOST, port)) == 0


class Group:
    """A leader and a worker of one manifest, each started by the test that needs it."""

    def __init__(self, doubles: Doubles, folder: Path, worker_timeout: float = 60.0) -> None:
        self.doubles, self.folder = doubles, folder
        self.ssh_port, http, grpc, metrics = free_ports(HOST, 4)
        self.address = Address(host=HOST, http_port=http, grpc_port=grpc, metrics_port=metrics)
        # A unique name: each pod has its own shared memory, but here all tests share this machine's.
        repository = relocatable(folder / f"pods{self.ssh_port}")
        self.prefix = f"trtserve_{repository.path.name}_"
        spec = ServerSpec(http_port=http, grpc_port=grpc, metrics_port=metrics)
        given: dict[str, Any] = {"mount_path": str(folder), "nodes": 2, "ssh_secret": "keys"}
        job = manifest_of(repository, spec, worker_timeout=worker_timeout, **given)
        write_job(job)
        objects = documents(job)
        self.scripts, workers = objects["ConfigMap"]["data"], objects["LeaderWorkerSet"]
        pods = workers["spec"]["leaderWorkerTemplate"]
        self.containers = {pod: pods[f"{pod}Template"]["spec"]["containers"][0] for pod in ("leader", "worker")}
        self.started: dict[str, subprocess.Popen[bytes]] = {}

    def secret(self, name: str = "keys") -> Path:
        key = self.folder / name / "ssh-privatekey"
        if not key.exists():
            key.parent.mkdir()
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True, timeout=60)
        return key.parent

    def worker(self) -> subprocess.Popen[bytes]:
        # A free port on the loopback interface.
        listening = {"sshd -D -e -p 2222 ": f"sshd -D -e -p {self.ssh_port} -o ListenAddress={HOST} "}
        worker = self._start("worker", self.secret(), listening)
        wait_until(lambda: answers(self.ssh_port) or worker.poll() is not None)
        assert worker.poll() is None, self.log("worker")
        return worker

    def leader(self, secret: Path) -> subprocess.Popen[bytes]:
        # Every name is this machine's: it is ssh that looks names up, mpirun only compares them.
        network = {"'Host *' 'Port 2222'": f"'Host *' 'Hostname {HOST}' 'Port {self.ssh_port}'"}
        # The image's own server, which this machine does not have at that place.
        server = {"/opt/tritonserver/bin/tritonserver": str(self.doubles.bin / "tritonserver")}
        return self._start("leader", secret, {**network, **server})

    def _start(self, pod: str, secret: Path, replaced: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start a pod's script in its own home, with the replacements for running all pods on this machine."""
        script = self.scripts[f"{pod}.sh"]
        for there, here in {"/trtserve/ssh/": f"{secret}/", **replaced}.items():
            assert there in script
            script = script.replace(there, here)
        (self.folder / f"{pod}.sh").write_text(script, encoding="utf-8")
        home = self.folder / f"home-{pod}"
        home.mkdir()
        home.chmod(0o777)  # as an emptyDir
        paths = [str(self.doubles.bin), str(Path(sys.prefix) / "bin"), os.environ["PATH"]]
        given = {"PATH": os.pathsep.join(paths), "HOME": str(home), "TMPDIR": str(home)}
        given |= {"LWS_LEADER_ADDRESS": "repository-0.repository.default", "LWS_GROUP_SIZE": "2"}
        users = self.folder / "passwd"
        users.write_text(f"triton-server:x:{USER}:{USER}::/home/triton-server:/bin/sh\n", encoding="utf-8")
        as_root = ["unshare", "--user", "--map-root-user", "--mount", "bash", "-ec", IN_A_POD, str(users)]
        with (self.folder / f"{pod}.log").open("wb") as log:
            self.started[pod] = subprocess.Popen(
                [*as_root, "bash", str(self.folder / f"{pod}.sh")],
                env={**os.environ, **given, POD: f"{self.folder}\n{pod}"},
                cwd=self.containers[pod]["workingDir"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        return self.started[pod]

    def log(self, pod: str) -> str:
        return (self.folder / f"{pod}.log").read_text(encoding="utf-8")

    def processes(self, pod: str) -> list[psutil.Process]:
        """Return the processes of a pod, except sshd of the logins, which overwrites its environment."""
        seen = psutil.process_iter(["environ"])  # None for another user's
        return [each for each in seen if (each.info["environ"] or {}).get(POD) == f"{self.folder}\n{pod}"]

    def hook(self, pod: str) -> subprocess.Popen[bytes]:
        """What the cluster runs before it asks a pod's first process to end: it sees this pod alone."""
        *bash, script = self.containers[pod]["lifecycle"]["preStop"]["exec"]["command"]
        assert "/proc/[0-9]*" in script
        own = ",".join(str(process.pid) for process in self.processes(pod))
        self.started[f"end-{pod}"] = subprocess.Popen([*bash, script.replace("/proc/[0-9]*", f"/proc/{{{own}}}")])
        return self.started[f"end-{pod}"]

    def nothing_is_left(self) -> bool:
        return not (self.processes("leader") or self.processes("worker") or shared_memory_regions(self.prefix))


@pytest.fixture
def group_of(doubles: Doubles, tmp_path: Path) -> Iterator[Callable[..., Group]]:
    groups = []

    def make(**given: float) -> Group:
        groups.append(Group(doubles, tmp_path, **given))
        return groups[-1]

    doubles.configure(container="25.04", gpus=2)
    yield make
    for group in groups:
        for process in group.started.values():
            process.kill()
            process.wait(60)
        for left in (*group.processes("leader"), *group.processes("worker")):
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()
        sweep_shared_memory(group.prefix)


def test_two_pods_start_answer_and_end_together(group_of: Callable[..., Group]) -> None:
    group = group_of()
    leader = group.leader(group.secret())
    wait_until(lambda: "Connection refused" in group.log("leader"))  # it waits for pods that come later
    worker = group.worker()
    wait_until(lambda: is_ready(group.address))
    ranks = sorted(group.doubles.calls("tritonserver"), key=lambda call: call.rank)
    assert [call.rank for call in ranks] == [0, 1, 2, 3]
    assert [call.environment["OMPI_COMM_WORLD_LOCAL_RANK"] for call in ranks] == ["0", "1", "0", "1"]
    # Each has what its own pod has set, through ssh too.
    pods = [call.environment[POD].rpartition("\n")[2] for call in ranks]
    assert pods == ["leader", "leader", "worker", "worker"]
    assert "Accepted publickey for triton-server" in group.log("worker")
    assert len(shared_memory_regions(group.prefix)) == 4
    waiting = group.hook("worker")  # the cluster asks all pods at once
    with pytest.raises(subprocess.TimeoutExpired):
        waiting.wait(2)
    assert is_ready(group.address)
    assert group.hook("leader").wait(60) == 0
    assert leader.wait(60) == 0
    assert "Waiting for in-flight requests to complete." in group.log("leader")
    assert waiting.wait(60) == 0
    worker.terminate()
    assert worker.wait(60) == 0
    assert not answers(group.ssh_port)
    wait_until(group.nothing_is_left)


def test_a_worker_accepts_only_its_own_key(group_of: Callable[..., Group]) -> None:
    group = group_of(worker_timeout=1.0)
    worker = group.worker()
    leader = group.leader(group.secret("others"))
    assert leader.wait(60) == 1
    assert "Permission denied (publickey)." in group.log("leader")
    assert "repository-0-1.repository.default does not answer" in group.log("leader")
    assert "Accepted" not in group.log("worker")
    assert worker.poll() is None
    assert not group.doubles.calls("tritonserver")


def test_a_lost_worker_ends_the_leader(group_of: Callable[..., Group]) -> None:
    """Open MPI 5 calls that a success and leaves its own ranks: a pod begins again after any code, and without them."""
    group = group_of()
    worker = group.worker()
    leader = group.leader(group.secret())
    wait_until(lambda: is_ready(group.address))
    for process in (*group.processes("worker"), psutil.Process(worker.pid)):
        process.kill()
    leader.wait(60)
    # Which of the two mpirun says depends on what it hears of first: the connection's end, or that of ssh.
    said = ("lost communication with a remote daemon", "A daemon failed to report back")
    assert any(words in group.log("leader") for words in said)
