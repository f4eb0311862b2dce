"""The scripts of pods, run by bash and read by shellcheck."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from jinja2 import Environment, PackageLoader

from tests.support.double_engines import write_core_model, write_engine_folder
from trtserve.artifacts import ModelRepository
from trtserve.server.launch.cluster import ClusterJob
from trtserve.server.launch.kubernetes import KubernetesSpec, plan_job
from trtserve.specs import ServerSpec


def repository_of(tmp_path: Path, tp: int = 4) -> ModelRepository:
    """A relocatable repository: its engine is inside, and its paths are relative."""
    engine = write_engine_folder(tmp_path / "engine", tp=tp)
    write_core_model(tmp_path / "My_Model", "tensorrt_llm", "tensorrt_llm/1")
    for file in engine.iterdir():
        file.rename(tmp_path / "My_Model" / "tensorrt_llm" / "1" / file.name)
    return ModelRepository(path=tmp_path / "My_Model")


def planned(repository: ModelRepository, spec: ServerSpec | None = None, **given: Any) -> ClusterJob:
    cluster = KubernetesSpec(claim="models", **given)
    return plan_job(repository, spec or ServerSpec(), cluster, repository.path.parent / "server.yaml")


def documents(manifest: ClusterJob) -> dict[str, dict[str, Any]]:
    """Objects of the file by kind, as a cluster would read them."""
    return {document["kind"]: document for document in yaml.safe_load_all(manifest.files[manifest.script])}


def test_several_ranks_are_ended_through_rank_0(tmp_path: Path) -> None:
    found = documents(planned(repository_of(tmp_path)))
    (container,) = found["Deployment"]["spec"]["template"]["spec"]["containers"]
    bash, flag, script = container["lifecycle"]["preStop"]["exec"]["command"]
    assert (bash, flag) == ("bash", "-c")
    shellchecked(tmp_path, {"end.sh": f"#!/bin/bash\n{script}"})
    single = documents(planned(repository_of(tmp_path / "single", 1)))
    assert "lifecycle" not in single["Deployment"]["spec"]["template"]["spec"]["containers"][0]


def test_a_worker_that_ends_waits_for_its_ranks(tmp_path: Path) -> None:
    found = documents(planned(repository_of(tmp_path), nodes=2, ssh_secret="keys"))
    worker = found["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"][0]
    bash, flag, script = worker["lifecycle"]["preStop"]["exec"]["command"]
    assert (bash, flag) == ("bash", "-c")
    shellchecked(tmp_path, {"end.sh": f"#!/bin/bash\n{script}"})


def shellchecked(tmp_path: Path, scripts: Mapping[str, str]) -> None:
    for name, text in scripts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    tool = Path(sys.executable).parent / "shellcheck"
    files = [str(tmp_path / name) for name in scripts]
    done = subprocess.run([tool, *files], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


def test_the_scripts_pass_shellcheck(tmp_path: Path) -> None:
    shellchecked(tmp_path, documents(planned(repository_of(tmp_path), nodes=2, ssh_secret="keys"))["ConfigMap"]["data"])


@pytest.mark.parametrize(("status", "healthy"), [("200 OK", True), ("503 Service Unavailable", False)])
def test_the_probe_passes_when_triton_is_ready(tmp_path: Path, status: str, healthy: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        spec = ServerSpec(http_port=port, grpc_port=1, metrics_port=2)
        found = documents(planned(repository_of(tmp_path, 1), spec))
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
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=False)
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
