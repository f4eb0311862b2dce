"""Units of systemd, and the messages that it gets."""

from __future__ import annotations

import shlex
import socket
from pathlib import Path

import pytest

from trtserve.artifacts import ModelRepository
from trtserve.cli.app import run
from trtserve.errors import UsageError
from trtserve.server.detach import notify, plan_unit, start_arguments
from trtserve.server.doctor.stub import write_probe_repository
from trtserve.specs import ServerSpec
from trtserve.store import Store


@pytest.fixture
def repository(tmp_path: Path) -> ModelRepository:
    return ModelRepository(path=write_probe_repository(tmp_path / "a 100% $HOME model"))


def entries(unit: str) -> dict[str, str]:
    lines = (line.partition("=") for line in unit.splitlines() if not line.startswith(("#", "[")))
    return {key: value.strip() for key, _, value in lines if key}


def test_the_unit_starts_and_stops_the_server(repository: ModelRepository, tmp_path: Path) -> None:
    spec = ServerSpec(name="demo", http_port=9000, ready_timeout=100.0, extra_arguments=("--log-verbose=1",))
    path, text = plan_unit(repository, spec, out=tmp_path / "demo.service", store=Store(tmp_path / "home"))
    assert path == tmp_path / "demo.service"
    found = entries(text)
    assert (found["Type"], found["NotifyAccess"], found["TimeoutStartSec"]) == ("notify", "main", "160")
    assert found["Environment"] == f"TRTSERVE_HOME={tmp_path / 'home'}"
    # systemd turns %% and $$ into % and $.
    words = shlex.split(found["ExecStart"].replace("%%", "%").replace("$$", "$"))
    assert words[1:] == ["-m", "trtserve", *start_arguments(repository, spec)]
    assert str(repository.path) in words
    assert words[-2:] == ["--", "--log-verbose=1"]
    assert shlex.split(found["ExecStop"])[1:] == ["-m", "trtserve", "stop", "demo", "--drain", "30"]
    assert int(found["WatchdogSec"]) > 10


def test_the_arguments_give_every_option(repository: ModelRepository) -> None:
    spec = ServerSpec(gpus=(0, 1), restart="always", verify=False, container_flags=("--shm-size=8g", "--ipc=host"))
    words = start_arguments(repository, spec, report_to=7)
    assert words[:4] == ["start", "--model-repository", str(repository.path), "--no-rebuild"]
    text = " ".join(words)
    for expected in ("--gpus 0,1", "--restart always", "--no-verify", "--container-flag=--ipc=host", "--report-to 7"):
        assert expected in text


def test_a_unit_needs_its_suffix(repository: ModelRepository, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is not a unit file"):
        plan_unit(repository, ServerSpec(), out=tmp_path / "demo.unit", store=Store())


def test_a_dry_run_prints_the_unit_and_writes_nothing(
    repository: ModelRepository, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unit = tmp_path / "demo.service"
    words = ["start", "--model-repository", str(repository.path), "--systemd", "--out", str(unit)]
    assert run([*words, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert not unit.exists()
    assert run(words) == 0
    assert printed == unit.read_text()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--systemd", "--detach"], "--systemd starts nothing"),
        (["--systemd", "--slurm"], "--systemd is for a server on this machine"),
        (["--systemd", "--nodes", "2"], "--nodes belongs to --slurm and --kubernetes"),
        (["--systemd", "--claim", "models"], "--claim belongs to --kubernetes"),
        (["--out", "x.service"], "--out belongs to --slurm and --kubernetes and --systemd"),
    ],
)
def test_options_that_do_not_fit_a_unit_are_refused(
    flags: list[str], message: str, repository: ModelRepository, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["start", "--model-repository", str(repository.path), *flags]) == UsageError.code
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("abstract", [False, True])
def test_messages_reach_the_socket(abstract: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"\0{tmp_path.name}-trtserve" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(address)
        monkeypatch.setenv("NOTIFY_SOCKET", address.replace("\0", "@"))
        notify("READY=1")
        assert systemd.recv(100) == b"READY=1"


def test_without_systemd_nothing_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notify("READY=1")
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    notify("READY=1")


def test_a_systemd_that_does_not_read_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        for _ in range(2000):
            notify("WATCHDOG=1")
        assert systemd.recv(100) == b"WATCHDOG=1"
