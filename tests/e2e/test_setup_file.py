"""`up`, `query`, `diff` and `down` with a setup file, on a real Triton server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.commands import trtserve
from trtserve.errors import MissedLimitError
from trtserve.host.ports import free_ports

pytestmark = pytest.mark.triton


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One store: the second test serves the repository that the first has made."""
    return tmp_path_factory.mktemp("home")


def test_one_file_from_model_to_answer_and_back(home: Path, tmp_path: Path) -> None:
    file = tmp_path / "setup.yaml"
    http_port, grpc_port, metrics_port = free_ports("127.0.0.1", 3)
    text = (
        "models:\n  demo:\n    source: demo\n    runtime: openvino\n    max_batch_size: 4\n"
        f"servers:\n  front:\n    model: demo\n    auto_ports: true\n    http_port: {http_port}\n"
        f"    grpc_port: {grpc_port}\n    metrics_port: {metrics_port}\n"
    )
    file.write_text(text, encoding="utf-8")
    try:
        first = json.loads(trtserve("up", str(file), "--json", home=home).stdout)["result"]["servers"]
        assert [server["name"] for server in first] == ["front"]
        assert "learning" in trtserve("query", "What is ML?", "--server", "front", home=home).stdout
        assert trtserve("diff", str(file), home=home).stdout == ""
        again = trtserve("up", str(file), "--json", home=home)
        assert json.loads(again.stdout)["result"]["servers"] == first
        assert "front is running already" in again.stderr
        measured = (
            "benchmarks:\n  core:\n    server: front\n    model: tensorrt_llm\n    num_requests: 4\n"
            "    output_mean: 4\n    warmup_requests: 0\n    calibrate: false\n    timeout: 3600\n    out: core\n"
            "    limits: "
        )
        file.write_text(text + measured + "{latency_p99: 3600s, requests_per_second: 0.0001}\n", encoding="utf-8")
        within = json.loads(trtserve("up", str(file), "--json", home=home).stdout)["result"]
        assert [(each["name"], each["missed"]) for each in within["benchmarks"]] == [("core", [])]
        assert (tmp_path / "core" / "report.json").is_file()
        file.write_text(text + measured + "{latency_p50: 0.001us}\n", encoding="utf-8")
        missed = trtserve("up", str(file), home=home, check=False)
        assert missed.returncode == MissedLimitError.code
        assert "core: latency_p50 is " in missed.stderr
        assert "Value" in missed.stdout
        file.write_text(text + "    max_requests: 7\n", encoding="utf-8")
        assert trtserve("diff", str(file), home=home).stdout == "server front: restart (--max-requests 7 is added)\n"
    finally:
        stopped = trtserve("down", str(file), home=home)
    assert stopped.stdout == "front\n"
    assert trtserve("down", str(file), home=home).stdout == ""


def test_a_search_measures_real_servers_and_leaves_none(home: Path, tmp_path: Path) -> None:
    file = tmp_path / "setup.yaml"
    file.write_text(
        "models:\n  demo:\n    source: demo\n    runtime: openvino\n    max_batch_size: 4\n"
        "servers:\n  front:\n    model: demo\n    auto_ports: true\n"
        "tune:\n  core:\n    server: front\n    model: tensorrt_llm\n    num_requests: 8\n    output_mean: 2\n"
        "    warmup_requests: 0\n    calibrate: false\n    timeout: 3600\n    ranges: {concurrency: [1, 4]}\n",
        encoding="utf-8",
    )
    line = ("tune", str(file), "--goal", "ttft p99 < 3600 s", "--budget", "60", "--json")
    first = json.loads(trtserve(*line, home=home).stdout)["result"]
    assert (first["values"], first["failed"]) == ({}, {})
    assert first["rate"] > 0
    trials = sorted((tmp_path / "core.tune" / "trials").iterdir())
    assert all((trial / "report.json").is_file() for trial in trials)
    assert "models:" in (tmp_path / "setup.tuned.yaml").read_text(encoding="utf-8")
    states = json.loads(trtserve("status", "--json", home=home, check=False).stdout)["result"]
    assert {state["state"] for state in states} <= {"stopped"}
    again = json.loads(trtserve(*line, home=home).stdout)["result"]
    assert (again["rate"], again["trials"]) == (first["rate"], first["trials"])  # everything was measured before
    assert sorted((tmp_path / "core.tune" / "trials").iterdir()) == trials
