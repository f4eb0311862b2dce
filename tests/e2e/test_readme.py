"""The picture in the README shows what `make demo` prints."""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import environment
from trtserve.host.ports import free_ports

pytestmark = pytest.mark.triton

ROOT = Path(__file__).parents[2]
TIMEOUT = 180.0


def _shown() -> list[str]:
    """Return the lines of the picture in the README (`make recording`), with single spaces."""
    picture = (ROOT / "docs" / "assets" / "demo.svg").read_text(encoding="utf-8")
    lines: dict[int, str] = {}
    for number, text in re.findall(r'<text[^>]*clip-path="url\(#[\w-]+-line-(\d+)\)">(.*?)</text>', picture):
        lines[int(number)] = f"{lines.get(int(number), '')} {html.unescape(text)}"
    return [" ".join(line.split()) for _number, line in sorted(lines.items())]


def _answers(lines: list[str]) -> dict[str, str]:
    """Return each command and its output as one text: a terminal breaks long lines."""
    answers: dict[str, str] = {}
    command = ""
    for line in lines:
        if line.startswith("$ "):
            command = line
            answers[command] = ""
        elif command:
            answers[command] += line.strip() + " "
    return answers


def test_demo_prints_what_the_picture_shows(tmp_path: Path) -> None:
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
    happened = _answers(result.stdout.splitlines())
    shown = _answers(_shown())
    assert list(shown) == list(happened)
    # Make the picture again (`make recording`) when these commands print something else.
    printed = {_shape(line) for line in result.stdout.splitlines()}
    commands = ("$ trtserve import demo", "$ trtserve start --detach --auto-ports")
    assert [line for command in commands for line in _below(command) if _shape(line) not in printed] == []
    questions = [command for command in shown if " query " in command]
    assert questions
    for question in questions:
        assert shown[question].split() == happened[question].split()


def _below(command: str) -> list[str]:
    """Return the lines that the picture shows of a command's output."""
    lines = _shown()
    rest = lines[lines.index(command) + 1 :]
    end = next((at for at, line in enumerate(rest) if line.startswith("$ ")), len(rest))
    return [line for line in rest[:end] if line]


def _shape(line: str) -> str:
    """Return a line without what differs between runs: numbers, fingerprints and the folder of the store."""
    return re.sub(r"\S*/repositories/\S+", "PATH", re.sub(r"\d+", "0", " ".join(line.split())))


def _path() -> str:
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
