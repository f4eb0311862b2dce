"""The picture in the README and the tutorial for laptops show what their commands print."""

from __future__ import annotations

import html
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.support.commands import environment
from trtserve.host.ports import free_ports

pytestmark = pytest.mark.triton

ROOT = Path(__file__).parents[2]
TIMEOUT = 180.0
VARYING = ("Result", "Verdict", "First start", "…", "┃", "│", "requests  1", "tokens ")
"""How lines begin that depend on the machine's other programs, and on what ran here before."""


def _shown() -> list[str]:
    """Return the lines of the picture in the README (`make recording`), with single spaces."""
    picture = (ROOT / "docs" / "assets" / "demo.svg").read_text(encoding="utf-8")
    lines: dict[int, str] = {}
    for number, text in re.findall(r'<text[^>]*clip-path="url\(#[\w-]+-line-(\d+)\)">(.*?)</text>', picture):
        lines[int(number)] = f"{lines.get(int(number), '')} {html.unescape(text)}"
    return [" ".join(line.split()) for _number, line in sorted(lines.items())]


def _answers(lines: list[str], between: str = " ") -> dict[str, str]:
    """Return each command and its output as one text: a terminal breaks long lines."""
    answers: dict[str, str] = {}
    command = ""
    for line in lines:
        if line.startswith("$ "):
            command = line
            answers[command] = ""
        elif command:
            answers[command] += line.strip() + between
    return answers


def _environment(folder: Path, ports: Iterable[int]) -> dict[str, str]:
    """Return an environment with a store of its own; servers listen at these ports of HTTP, gRPC and metrics."""
    names = ("TRTSERVE_START_HTTP_PORT", "TRTSERVE_START_GRPC_PORT", "TRTSERVE_START_METRICS_PORT")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return environment(folder, **dict(zip(names, map(str, ports), strict=True)), PATH=path)


def test_the_tutorial_for_laptops_shows_what_its_commands_print(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "tutorials" / "laptop.md").read_text(encoding="utf-8")
    _install, *blocks = re.findall(r"^```console\n(.+?)^```", text, re.MULTILINE | re.DOTALL)
    terminal = runpy.run_path(str(ROOT / "examples" / "record_demo.py"))
    variables = {**_environment(tmp_path, free_ports("127.0.0.1", 3)), "TERM": "xterm-256color", "NO_COLOR": "1"}
    commands = _answers("".join(blocks).splitlines(), "\n")
    assert list(commands)[-1] == "$ trtserve stop"
    try:
        for command, shown in commands.items():
            # The server takes another port where a program has taken its own meanwhile.
            port = "$(trtserve status --json | grep -om1 '\"http_port\": [0-9]*' | grep -o '[0-9]*')"
            called = command.removeprefix("$ ").replace("localhost:8000", f"localhost:{port}")
            called = called.replace("--num-requests 100", "--num-requests 8")  # which prints as much
            printed = terminal["screen"](terminal["record"](["bash", "-c", called], variables).decode())
            assert '"error"' not in "".join(printed), command
            expected = {_shape(line) for line in shown.splitlines() if not line.startswith(VARYING)}
            assert expected - set(map(_shape, printed)) == set(), command
    finally:
        subprocess.run(["trtserve", "stop"], env=variables, capture_output=True, timeout=TIMEOUT, check=False)


def test_demo_prints_what_the_picture_shows(tmp_path: Path) -> None:
    result = subprocess.run(
        ["bash", str(ROOT / "examples" / "demo.sh")],
        env={**_environment(tmp_path, free_ports("127.0.0.1", 3)), "TRTSERVE_BENCH_TOKEN_NORM_DIST_NUM_REQUESTS": "8"},
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
