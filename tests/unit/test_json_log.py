"""Logs as JSON lines, and lines about missing GPUs that are left out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.server_records import server_record
from trtserve.cli import run
from trtserve.cli.json_log import JsonLog
from trtserve.errors import ServerStartError
from trtserve.server.state import write_state
from trtserve.server.triton.server_log import described
from trtserve.store import Store

INFO = 'I1123 05:58:46.415350 10708 grpc_server.cc:2558] "Started GRPCInferenceService at 127.0.0.1:10461"'
NOISE = 'W1123 05:58:46.413237 10708 metrics.cc:798] "DCGM unable to start: DCGM initialization error"'


def test_a_line_of_triton_has_its_parts() -> None:
    assert described(INFO) == {
        "level": "info",
        "message": "Started GRPCInferenceService at 127.0.0.1:10461",
        "logged": "1123 05:58:46.415350",
        "pid": 10708,
        "source": "grpc_server.cc:2558",
    }


@pytest.mark.parametrize(
    ("line", "level"),
    [(NOISE, "debug"), ("error: creating server: Internal", "error"), ("E1123 05:58:46.1 1 a.cc:1] x", "error")],
)
def test_levels(line: str, level: str) -> None:
    assert described(line)["level"] == level


def test_the_rank_of_a_line_is_kept() -> None:
    assert described(f"[1,3]<stderr>:{INFO}")["rank"] == 3


def test_progress_errors_and_new_lines_of_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "demo.log"
    log.write_text("of an earlier start\n")
    stream = JsonLog()
    with stream.following([log]):
        with log.open("a") as writer:
            writer.write(f"{INFO}\nnot com")
            writer.write("plete\n")
        stream.step("Loading")
        stream.warn("slow")
        with stream.task("Comparing", total=1) as task:
            task.advance(1)
    stream.error(ServerStartError("it failed", hint="look", log=log))
    records = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert all(record.pop("time") for record in records)
    messages = {record["message"] for record in records}
    assert {"Loading", "slow", "Comparing", "it failed"} < messages
    own = [record for record in records if record.get("server") == "demo"]
    assert [record["message"] for record in own] == ["Started GRPCInferenceService at 127.0.0.1:10461", "not complete"]
    assert records[-1]["exit_code"] == 32


@pytest.fixture
def log() -> Path:
    server = server_record("demo", store=Store())
    write_state(server, Store())
    log = server.instances[0].log
    log.write_text(f"{INFO}\n{NOISE}\n{NOISE}\n")
    return log


def test_lines_about_missing_gpus_are_explained_once(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["logs", "demo"]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{INFO}\n"
    assert "2 lines left out" in captured.err
    assert run(["logs", "demo", "--all"]) == 0
    captured = capsys.readouterr()
    assert captured.out.count("unable") == 2
    assert captured.err == ""


def test_an_existing_log_as_json(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["logs", "demo", "--all", "--log-format", "json"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["level"] for record in records] == ["info", "debug", "debug"]
