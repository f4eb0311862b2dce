"""What `start --dry-run` and `start --systemd` say before anybody starts the server: the risks, and the refusals."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from trtserve.artifacts import ModelRepository
from trtserve.cli.app import run
from trtserve.errors import UsageError
from trtserve.server.doctor.stub import write_probe_repository

HOST = "127.0.0.1"


@pytest.fixture
def repository(tmp_path: Path) -> ModelRepository:
    return ModelRepository(path=write_probe_repository(tmp_path / "repository"))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], []),
        (["--raw-http"], ["--raw-http: Triton itself answers on --http-port"]),
        (["--host", "0.0.0.0", "--no-auth"], ["can reach 0.0.0.0, and need no API key. Nothing is encrypted. "]),
        (["--host", "0.0.0.0", "--api-key", "k" * 20, "--no-tls"], ["can reach 0.0.0.0. Nothing is encrypted. "]),
        (["--host", "0.0.0.0", "--no-auth", "--raw-http"], ["--raw-http: Triton", "can reach 0.0.0.0, and need no"]),
    ],
)
@pytest.mark.parametrize("instead", [["--dry-run"], ["--systemd", "--out", "x.service"]])
def test_a_dry_run_and_a_unit_warn_as_a_start_does(
    repository: ModelRepository,
    flags: list[str],
    words: list[str],
    instead: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    line = ["start", "--model-repository", str(repository.path), *flags, *instead]
    assert run(line) == (2 if "--systemd" in instead and "--api-key" in flags else 0)
    said = " ".join(capsys.readouterr().err.split())
    assert all(each in said for each in words), said
    assert ("can reach" in said) == any("can reach" in each for each in words)
    assert ("--raw-http" in said) == ("--raw-http" in flags)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--host", "0.0.0.0"], "would answer everyone"),
        (["--host", "0.0.0.0", "--api-key-file", "key"], "the API key and all prompts would be readable"),
        (["--host", "0.0.0.0", "--raw-http"], "lets everyone on the network crash this server"),
        (["--api-key-file", "absent"], "absent"),
    ],
)
@pytest.mark.parametrize("instead", [["--dry-run"], ["--systemd", "--out", "x.service"]])
def test_a_dry_run_and_a_unit_refuse_what_a_start_refuses(
    repository: ModelRepository,
    flags: list[str],
    message: str,
    instead: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["start", "--model-repository", str(repository.path), *flags, *instead]) == UsageError.code
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "x.service").exists()


def test_a_dry_run_warns_of_a_taken_port(repository: ModelRepository, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = str(taken.getsockname()[1])
        assert run(["start", "--model-repository", str(repository.path), "--http-port", port, "--dry-run"]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert f"A start on this machine would be refused: --http-port {port} is taken by" in said
