"""import, start, query and bench in sequence, with the demo model on four ranks, while the environment names proxies.

Nobody listens where the proxies should be: whatever took one to this machine would fail.
"""

from __future__ import annotations

import re
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.support.commands import command_line, environment, trtserve
from trtserve.host.ports import free_ports
from trtserve.server.triton.tritonserver import shared_memory_regions

pytestmark = pytest.mark.triton

READY_WITHIN = 90.0
STOPPED_WITHIN = 60.0
PROXIES = dict.fromkeys(
    ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "GRPC_PROXY", "ALL_PROXY"),
    "http://127.0.0.1:1",
) | {"no_proxy": "", "NO_PROXY": ""}


def _ports() -> dict[str, str]:
    """Free ports for `start`, by environment variables, so that the command itself stays as it is written."""
    names = ("TRTSERVE_START_HTTP_PORT", "TRTSERVE_START_GRPC_PORT", "TRTSERVE_START_METRICS_PORT")
    return dict(zip(names, map(str, free_ports("127.0.0.1", 3)), strict=True))


def _wait_until_ready(server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + READY_WITHIN
    while "trtserve query" not in log.read_text(encoding="utf-8"):
        assert server.poll() is None, log.read_text(encoding="utf-8")
        assert time.monotonic() < deadline, log.read_text(encoding="utf-8")
        time.sleep(0.1)


def test_the_four_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, proxy in PROXIES.items():
        monkeypatch.setenv(name, proxy)
    home, log = tmp_path / "store", tmp_path / "start.log"
    ports = _ports()
    imported = trtserve("import", "demo", home=home)
    assert "config.pbtxt" in imported.stderr
    assert "tensorrt_llm_bls" in imported.stderr

    with log.open("w", encoding="utf-8") as output:
        server = subprocess.Popen(
            command_line("start", "--world-size", "4"), env=environment(home, **ports), stdout=output, stderr=output
        )
    try:
        _wait_until_ready(server, log)
        tree = psutil.Process(server.pid).children(recursive=True)
        # Not all of the tree: Triton forks for a moment, under its own name, to start a stub.
        own = psutil.Process(server.pid).children()
        (triton,) = (process for process in own if process.name() == "tritonserver")
        assert len(own) == 2  # the other one is the gateway
        # Other tests have regions of shared memory with other prefixes.
        (prefix,) = re.findall(r"shm-region-prefix-name=(\S+)", "\n".join(triton.cmdline()))
        assert shared_memory_regions(prefix)
        assert "merges the shards" in log.read_text(encoding="utf-8")

        answer = trtserve("query", "What is ML?", home=home).stdout
        assert answer.startswith("Machine learning is ")
        assert "What is ML?" not in answer

        http = trtserve("query", "What is ML?", "--protocol", "http", home=home).stdout
        assert http == answer
        url = f"http://127.0.0.1:{ports['TRTSERVE_START_HTTP_PORT']}/v1"
        few = ("--num-requests", "4", "--output-mean", "8")
        for asked in ((), ("--openai", url, "--no-calibrate")):  # the tokenizer is that of the server
            table = trtserve("bench", "token-norm-dist", *asked, *few, home=home).stdout
            assert re.search(r"Total requests\D+4", table)
        assert "nv_inference" in trtserve("metrics", "--raw", home=home).stdout
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(STOPPED_WITHIN)
    # One that has ended but whose new parent, process 1, has not looked yet still counts as running.
    assert not [process for process in tree if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    assert not shared_memory_regions(prefix)
