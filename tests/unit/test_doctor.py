"""Each check of the machine, on machines that lack what it looks for."""

from __future__ import annotations

import json
import os
import socket
import sys
import sysconfig
from pathlib import Path

import pytest

from trtserve import doctor
from trtserve.cli import run
from trtserve.errors import MachineError
from trtserve.store import Store
from trtserve.triton import server


@pytest.mark.parametrize(
    ("version", "result"),
    [(("glibc", "2.35"), "ok"), (("glibc", "2.40"), "ok"), (("glibc", "2.31"), "failed"), (("", ""), "failed")],
)
def test_glibc(version: tuple[str, str], result: str) -> None:
    assert doctor.check_glibc(version).result == result


def test_numpy() -> None:
    assert doctor.check_numpy({"numpy": "1.26.4"}).result == "ok"
    new = doctor.check_numpy({"numpy": "2.1.0"})
    assert (new.result, new.fix) == ("failed", "pip install 'numpy>=1.26,<2'")
    assert doctor.check_numpy({"numpy": None}).result == "failed"


def test_python_of_another_environment_is_refused() -> None:
    here = {"version": list(sys.version_info[:2]), "prefix": sys.prefix}
    assert doctor.check_python(here).result == "ok"
    assert "of /usr" in doctor.check_python({**here, "prefix": "/usr"}).found
    assert doctor.check_python({**here, "version": [3, 8]}).result == "failed"
    assert doctor.check_python({}).result == "failed"


def test_the_first_python3_on_path_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "python3"
    fake.write_text('#!/bin/sh\necho \'{"version": [3, 8], "prefix": "/elsewhere", "numpy": "2.0.0"}\'\n')
    fake.chmod(0o755)
    environment = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    monkeypatch.setattr(server, "stub_environment", lambda: environment)
    wrong = {check.name for check in doctor.failed(doctor.quick_checks())}
    assert wrong == {"python3", "numpy"}


def test_missing_stub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    no_stub = server.Triton(executable=tmp_path / "tritonserver", backends=tmp_path / "backends")
    monkeypatch.setattr(server, "installed", lambda: [no_stub])
    stub = doctor.check_stub()
    assert (stub.result, stub.fix) == ("failed", "Use Python 3.10, 3.11 or 3.12.")


def test_without_triton_everything_that_it_brings_has_one_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "installed", list)
    for check in (doctor.check_triton(), doctor.check_stub()):
        assert (check.result, check.fix) == ("failed", "Install the package: pip install 'trtserve[cpu]'")


def test_libpython(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    name = f"libpython{sys.version_info.major}.{sys.version_info.minor}.so.1.0"
    monkeypatch.setattr(sysconfig, "get_config_var", lambda _name: str(tmp_path))
    monkeypatch.setattr(doctor, "_linker_cache", lambda: "")
    assert doctor.check_libpython().result == "failed"
    monkeypatch.setattr(doctor, "_linker_cache", lambda: f"\t{name} (libc6,x86-64) => /lib/{name}")
    assert doctor.check_libpython().result == "ok"
    monkeypatch.setattr(doctor, "_linker_cache", lambda: "")
    (tmp_path / name).touch()
    assert doctor.check_libpython().found == str(tmp_path / name)


def test_shared_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert doctor.check_shared_memory(tmp_path).result == "ok"
    assert doctor.check_shared_memory(tmp_path / "absent").result == "failed"
    monkeypatch.setattr(doctor, "MINIMUM_SHARED_MEMORY", 2**62)
    assert doctor.check_shared_memory(tmp_path).fix == "In Docker: --shm-size=1g."


def test_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "free_memory", lambda: 100)
    results = [doctor.check_memory(wanted, least=least).result for wanted, least in ((50, 20), (190, 99), (200, 101))]
    assert results == ["ok", "warning", "failed"]


def test_ports_name_who_holds_them() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        address = server.Address(host="127.0.0.1", http_port=port, grpc_port=port, metrics_port=port)
        check = doctor.check_ports(address)
    assert check.result == "warning"
    assert f"{port} is taken by process {os.getpid()}" in check.found


def test_failures_become_one_error_with_every_fix(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = [
        doctor.Check(name="glibc", result="failed", found="glibc 2.31", fix="Newer system."),
        doctor.Check(name="numpy", result="failed", found="2.1.0", fix="Older NumPy."),
        doctor.Check(name="stub numpy", result="failed", found="2.1.0", fix="Older NumPy."),
        doctor.Check(name="ports", result="warning", found="taken", fix="Other ports."),
    ]
    monkeypatch.setattr(doctor, "quick_checks", lambda: broken)
    with pytest.raises(MachineError, match=r"glibc: glibc 2\.31; numpy: 2\.1\.0") as caught:
        doctor.require_machine(Store(tmp_path))
    assert caught.value.hint == "Newer system.\nOlder NumPy."


def test_command_reports_failures_as_data_and_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = [doctor.Check(name="glibc", result="failed", found="glibc 2.31", fix="Newer system.")]
    monkeypatch.setattr(doctor, "quick_checks", lambda: broken)
    assert run(["doctor", "--json"]) == 30
    captured = capsys.readouterr()
    assert json.loads(captured.out)["result"][0]["fix"] == "Newer system."
    assert "Newer system." in captured.err
    assert run(["doctor", "--quiet"]) == 30
    assert "glibc\tfailed\tglibc 2.31\tNewer system." in capsys.readouterr().out
