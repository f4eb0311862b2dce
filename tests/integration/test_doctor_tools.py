"""Programs that launches use, and the hub's token: what doctor reports, and that it never prints a token."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tests.support.doubles import Doubles
from tests.support.hub import Hub, running_hub
from trtserve.server.doctor import GPU, NONE, CheckResult, examination, system

SECRET = "hf_" + "Geheim" * 6

Program = Callable[[str, str], Path]


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """A PATH on which there are only the programs that a test makes, as shell scripts."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def make(name: str, script: str) -> Path:
        path = folder / name
        path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        path.chmod(0o755)
        return path

    return make


DOCKER = """\
case "$*" in
  --version) echo 'Docker version 28.2.2, build e6534b4';;
  'version --format {{.Server.Version}}') %s;;
  'info --format {{json .Runtimes}}') echo '%s';;
  *) echo "unknown: $*" >&2; exit 1;;
esac"""
RUNC = '{"runc":{"path":"runc"}}'
NVIDIA = '{"nvidia":{"path":"nvidia-container-runtime"},"runc":{"path":"runc"}}'
NO_DAEMON = "echo; echo 'Cannot connect to the Docker daemon.' >&2; exit 1"


@pytest.mark.parametrize(
    ("server", "runtimes", "gpus", "state", "evidence"),
    [
        ("echo 28.2.1", RUNC, 0, "ok", "client 28.2.2, daemon 28.2.1"),
        ("echo 28.2.1", NVIDIA, 2, "ok", "client 28.2.2, daemon 28.2.1, runtime nvidia"),
        ("echo 28.2.1", RUNC, 2, "warning", "client 28.2.2, daemon 28.2.1, no runtime nvidia"),
        (NO_DAEMON, RUNC, 0, "failed", "client 28.2.2, but no daemon: Cannot connect to the Docker daemon"),
    ],
)
def test_docker(server: str, runtimes: str, gpus: int, state: str, evidence: str, program: Program) -> None:
    program("docker", DOCKER % (server, runtimes))
    finding = system.check_docker(gpus)
    assert (finding.state, finding.evidence, finding.needed_by) == (state, evidence, NONE)
    assert bool(finding.fix) == (state != "ok")


@pytest.mark.parametrize(
    ("sinfo", "state", "evidence"),
    [
        ("echo 'gpu* up 4'; echo 'cpu up 2'", "ok", "23.11.4, 2 partitions"),
        (
            "echo 'slurm_load_partitions: Unable to contact slurm controller' >&2; exit 1",
            "warning",
            "23.11.4, but its controller does not answer: slurm_load_partitions: Unable to contact slurm controller",
        ),
    ],
)
def test_slurm(sinfo: str, state: str, evidence: str, program: Program) -> None:
    program("sbatch", "echo 'slurm 23.11.4'")
    program("sinfo", sinfo)
    finding = system.check_slurm()
    assert (finding.state, finding.evidence) == (state, evidence)


def test_versions_of_other_programs(program: Program) -> None:
    program("podman", "echo 'podman version 4.9.3'")
    program("kubectl", "echo 'Client Version: v1.32.4'; echo 'Kustomize Version: v5.5.0'")
    found = [system.check_version(name) for name in system.VERSIONS]
    assert [finding.evidence for finding in found] == ["4.9.3", "1.32.4"]
    assert {finding.state for finding in found} == {"ok"}
    program("podman", "echo 'cannot open shared object file' >&2; exit 127")
    assert system.check_version("podman").state == "warning"


@pytest.mark.usefixtures("program")
@pytest.mark.parametrize(
    "check",
    [
        lambda: system.check_docker(1),
        system.check_slurm,
        *(partial(system.check_version, name) for name in system.VERSIONS),
    ],
)
def test_tools_that_are_absent(check: Callable[[], CheckResult]) -> None:
    finding = check()
    assert (finding.state, finding.evidence) == ("failed", "not installed")
    assert finding.judged("tensorrt_llm").state == "unneeded"
    assert finding.fix


@pytest.fixture
def mpirun(program: Program, monkeypatch: pytest.MonkeyPatch) -> Program:
    """A stand-in for mpirun whose ranks print what the test sets; the stub's PATH is that of `program`."""
    from trtserve.server.triton import tritonserver

    path = program("python3", "exit 1").parent
    monkeypatch.setattr(tritonserver, "stub_environment", lambda: {"PATH": str(path)})
    monkeypatch.setattr(system, "stub_environment", lambda: {"PATH": str(path)})

    def make(name: str, script: str) -> Path:
        return program(name, f'if [ "$1" = --version ]; then echo "mpirun (Open MPI) 5.0.11"; exit 0; fi\n{script}')

    return make


def hello(rank: int, received: int, mpi4py: str | None, problem: str | None = None) -> str:
    message = {"rank": rank, "received": received, "mpi4py": mpi4py, "problem": problem}
    return f"echo 'found {json.dumps(message)}'"


@pytest.mark.parametrize(
    ("script", "state", "evidence"),
    [
        (
            f"{hello(0, 2, '4.1.2')}; {hello(1, 2, '4.1.2')}",
            "ok",
            "two ranks exchanged messages (mpi4py 4.1.2), Open MPI 5.0.11",
        ),
        (
            f"{hello(0, 2, None, 'is not installed')}; {hello(1, 2, None, 'is not installed')}",
            "ok",
            "two ranks started, but exchanged no messages: mpi4py is not installed, Open MPI 5.0.11",
        ),
        # mpi4py built for another MPI than mpirun's: each rank is its own world.
        (f"{hello(0, 1, '4.0')}; {hello(0, 1, '4.0')}", "failed", "Open MPI 5.0.11: exit code 0: found"),
        ("echo 'There are not enough slots available'; exit 1", "failed", "exit code 1: There are not enough slots"),
        ("exit 1", "failed", "Open MPI 5.0.11: exit code 1: it printed nothing"),
    ],
)
def test_two_ranks(script: str, state: str, evidence: str, mpirun: Program) -> None:
    mpirun("mpirun", script)
    finding = system.check_mpirun(needed=True)
    assert (finding.state, finding.needed_by) == (state, GPU)
    assert evidence in finding.evidence
    assert ("--oversubscribe" in finding.fix) == ("slots" in script)


def test_ranks_that_hang_are_ended(mpirun: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "_MPI_TIMEOUT", 0.3)
    mpirun("mpirun", "echo 'waiting for the other'; exec /bin/sleep 600")
    finding = system.check_mpirun(needed=False)
    assert (finding.state, finding.needed_by) == ("failed", NONE)
    assert finding.evidence == "Open MPI 5.0.11: did not end in time: waiting for the other"


def test_an_interrupt_ends_the_ranks(mpirun: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mpirun("mpirun", f"echo $$ > {tmp_path}/pid; exec /bin/sleep 600")
    began: list[int] = []

    def interrupted(seconds: float) -> None:
        time.sleep(seconds)
        if (tmp_path / "pid").exists() and (text := (tmp_path / "pid").read_text().strip()):
            began.append(int(text))
            raise KeyboardInterrupt

    monkeypatch.setattr(system, "time", SimpleNamespace(monotonic=time.monotonic, sleep=interrupted))
    with pytest.raises(KeyboardInterrupt):
        system.check_mpirun(needed=True)
    assert not psutil.pid_exists(began[0])


@pytest.mark.usefixtures("program")
def test_no_mpirun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    finding = system.check_mpirun(needed=True)
    assert (finding.state, finding.evidence) == ("failed", "no mpirun on PATH")


def one_token(**options: bool) -> CheckResult:
    (finding,) = system.check_token(**options)
    return finding


def test_no_token(tmp_path: Path) -> None:
    finding = one_token()
    assert (finding.state, finding.judged("openvino").state) == ("failed", "unneeded")
    assert str(tmp_path / "hf" / "token") in finding.evidence


@pytest.mark.parametrize("name", ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"])
def test_token_of_a_variable(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, SECRET)
    finding = one_token()
    assert (finding.state, finding.evidence) == ("ok", f"variable {name}")


@pytest.mark.parametrize(("mode", "state"), [(0o600, "ok"), (0o400, "ok"), (0o644, "warning"), (0o640, "warning")])
@pytest.mark.parametrize("variable", ["HF_HOME", "HF_TOKEN_PATH"])
def test_token_of_a_file(mode: int, state: str, variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "elsewhere" / "token"
    file.parent.mkdir()
    file.write_text(f"{SECRET}\n", encoding="utf-8")
    file.chmod(mode)
    monkeypatch.setenv(variable, str(file.parent if variable == "HF_HOME" else file))
    finding = one_token()
    assert finding.state == state
    assert finding.evidence.startswith(f"file {file}, mode {mode:04o}")
    assert finding.fix == (f"chmod 600 {file}" if state == "warning" else "")


@pytest.mark.parametrize("text", ["api_org_123456789012", "hf_two words here", "'hf_Quoted0123456789'"])
def test_malformed_tokens_are_reported(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", text)
    finding = one_token()
    assert (finding.state, finding.evidence) == ("warning", "variable HF_TOKEN: does not look like a token")
    assert text not in repr(finding)


def test_offline_mode_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_TOKEN", SECRET)
    found = list(system.check_token(online=True))
    assert [finding.name for finding in found] == ["network", "token"]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running_hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        yield server


def test_the_hub_is_asked_only_with_online(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    assert one_token().state == "ok"
    assert hub.requests == []
    _, accepted = system.check_token(online=True)
    assert (accepted.state, accepted.evidence) == ("ok", f"{hub.endpoint} accepts the token")
    assert [(request.path, request.token) for request in hub.requests] == [("/api/whoami-v2", SECRET)]


def test_a_rejected_token_is_reported(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "revoked")
    _, refused = system.check_token(online=True)
    assert refused.state == "warning"
    assert "(HTTP 401)" in refused.evidence
    assert f"{hub.endpoint}/settings/tokens" in refused.fix


def test_an_unreachable_hub_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_TOKEN", SECRET)
    _, silent = system.check_token(online=True)
    assert silent.state == "warning"
    assert "cannot be reached" in silent.evidence
    assert SECRET not in silent.evidence + silent.fix


@pytest.mark.usefixtures("program")
def test_a_token_is_never_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from trtserve.cli import run

    for part in ("_host", "_python", "_triton", "_gpus", "_tensorrt_llm", "_tools"):
        monkeypatch.setattr(examination, part, lambda *_arguments: [])
    file = tmp_path / "token"
    file.write_text(SECRET, encoding="utf-8")
    file.chmod(0o666)
    monkeypatch.setenv("HF_TOKEN_PATH", str(file))
    for arguments in (["--json"], []):
        assert run(["doctor", *arguments]) == 0
        captured = capsys.readouterr()
        assert str(file) in captured.out
        assert SECRET not in captured.out + captured.err
    assert SECRET not in repr(system._Token(place="here", text=SECRET))


def test_doubles_of_docker_are_understood(doubles: Doubles) -> None:
    """doctor accepts the double of docker that `start --container` is tested with."""
    finding = system.check_docker(0)
    assert "daemon 27.5.1" in finding.evidence
    assert {call.arguments[0] for call in doubles.calls("docker")} <= {"--version", "version", "info"}
