"""The real things of this machine: Triton with its stub, mpirun with two ranks, packages, a terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from trtserve.cli import run
from trtserve.server.doctor import examination, failed, system
from trtserve.server.triton import tritonserver


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """Findings of one complete examination for the CPU runtime, by name."""
    home = tmp_path_factory.mktemp("doctor")
    environment = {**os.environ, "TRTSERVE_HOME": str(home / "store"), "HF_HOME": str(home / "hf")}
    argv = [sys.executable, "-m", "trtserve", "doctor", "--json", "--runtime", "openvino"]
    ended = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 0, ended.stderr + ended.stdout
    result = json.loads(ended.stdout)["result"]
    assert (result["runtime"], result["works"]) == ("openvino", True)
    return {finding["name"]: finding for finding in result["findings"]}


def test_this_machine_runs_the_cpu_runtime(whole: dict[str, dict[str, str]]) -> None:
    needed = [name for name, finding in whole.items() if "openvino" in finding["needed_by"]]
    assert {"numpy", "stub", "round trip", "libpython", "shared memory", "disk"} <= set(needed)
    assert {whole[name]["state"] for name in needed} <= {"ok", "warning"}
    assert whole["round trip"]["evidence"] == "strings and integers came back through Triton"


def test_every_problem_comes_with_a_fix(whole: dict[str, dict[str, str]]) -> None:
    for finding in whole.values():
        assert finding["evidence"]
        assert bool(finding["fix"]) == (finding["state"] != "ok"), finding


def test_two_ranks_of_the_real_mpirun_communicate(whole: dict[str, dict[str, str]]) -> None:
    assert whole["mpirun"]["evidence"].startswith("two ranks exchanged messages (mpi4py")


def test_an_mpirun_whose_ranks_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "_PROGRAM", "raise SystemExit('no MPI here')")
    finding = system.check_mpirun(needed=True)
    assert (finding.state, bool(finding.fix)) == ("failed", True)
    assert "exit code 1" in finding.evidence


def test_packages_of_this_environment() -> None:
    assert system.check_packages("cpu").state == "ok"


def _on_a_terminal(arguments: list[str], columns: int, environment: dict[str, str]) -> list[str]:
    """Lines that a command writes to a terminal of a width."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    argv = [sys.executable, "-m", "trtserve", *arguments]
    child = subprocess.Popen(argv, env=environment, stdin=follower, stdout=follower, stderr=subprocess.DEVNULL)
    os.close(follower)
    written = b""
    while True:
        try:
            block = os.read(leader, 4096)
        except OSError:  # the last writer has closed its side
            break
        if not block:
            break
        written += block
    child.wait(timeout=60)
    os.close(leader)
    return written.decode().replace("\r", "").splitlines()


def test_on_a_terminal(tmp_path: Path) -> None:
    columns = 80
    environment = {
        **{name: text for name, text in os.environ.items() if name not in ("COLUMNS", "LINES")},
        "TERM": "xterm",
        "NO_COLOR": "1",
        "TRTSERVE_HOME": str(tmp_path / "s"),
        "HF_HOME": str(tmp_path / "h"),
    }
    written = _on_a_terminal(["doctor", "-q", "--runtime", "llmapi"], columns, environment)
    lines = [re.sub(r"\x1b\[[\d;]*m", "", line) for line in written]
    assert lines[0] == "Machine"
    assert any(line.startswith("  ok        glibc") for line in lines)
    assert any("→ " in line for line in lines)
    assert lines[-1].startswith("Runtime llmapi (asked for)")
    broken = [line for line in lines if len(line) > columns and len(max(line.split(), key=len)) < 40]
    assert broken == []


def test_quiet_output_is_a_table_for_scripts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for part in ("_python", "_triton", "_gpus", "_tools"):
        monkeypatch.setattr(examination, part, lambda *_arguments: [])
    assert run(["doctor", "-q", "--runtime", "openvino"]) == 0
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert {len(row) for row in rows} == {5}
    assert rows[:2] == [["group", "name", "state", "evidence", "fix"], ["machine", "system", "ok", *rows[1][3:]]]


def test_the_first_python3_on_path_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "python3"
    fake.write_text('#!/bin/sh\necho \'{"version": [3, 8], "prefix": "/elsewhere", "numpy": "2.0.0"}\'\n')
    fake.chmod(0o755)
    environment = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    monkeypatch.setattr(tritonserver, "stub_environment", lambda: environment)
    wrong = {finding.name for finding in failed(examination.quick_checks())}
    assert wrong == {"python3", "numpy"}
