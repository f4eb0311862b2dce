"""What the README shows of `make demo` is what happens."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import environment
from trtserve.ports import free_ports

pytestmark = pytest.mark.triton

ROOT = Path(__file__).parents[2]
TIMEOUT = 180.0


def _shown() -> list[str]:
    """The lines under `$ make demo` in the README."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.search(r"```console\n\$ make demo\n(.*?)```", text, re.DOTALL)
    assert block is not None
    return [line for line in block[1].splitlines() if line.strip(" …")]


def _shape(line: str) -> str:
    """A line without what differs from run to run: numbers, hashes, folders, tree branches, spaces and the CPU."""
    line = re.sub(r"\S*/repositories/demo-\w+", "REPOSITORY", line)
    line = re.sub(r"\b(bf16|f32) arithmetic", "arithmetic", line)
    return re.sub(r"[\d.,]+|[│├└─\s]+", " ", line).strip()


def test_demo_of_the_readme(tmp_path: Path) -> None:
    ports = free_ports("127.0.0.1", 3)
    names = ("TRTSERVE_START_HTTP_PORT", "TRTSERVE_START_GRPC_PORT", "TRTSERVE_START_METRICS_PORT")
    variables = {**dict(zip(names, map(str, ports), strict=True)), "PATH": _path()}
    result = subprocess.run(
        ["bash", str(ROOT / "examples" / "demo.sh")],
        env=environment(tmp_path, **variables),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert result.returncode == 0, result.stdout
    happened = {_shape(line) for line in result.stdout.splitlines()}
    assert [line for line in _shown() if _shape(line) not in happened] == []


def _path() -> str:
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
