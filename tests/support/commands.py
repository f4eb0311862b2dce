"""The command line as a user runs it: in its own process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from trtserve.files import write_json
from trtserve.server.doctor import stub
from trtserve.store import Store

TIMEOUT = 600.0


def trtserve(
    *arguments: str, home: Path, check: bool = True, stdin: str = "", **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run one `trtserve` command to its end; with `check`, a non-zero exit code fails the test with its stderr."""
    result = subprocess.run(
        command_line(*arguments),
        env=environment(home, **variables),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
        input=stdin,
    )
    assert not check or result.returncode == 0, f"{' '.join(arguments)}: {result.returncode}\n{result.stderr}"
    return result


def command_line(*arguments: str) -> list[str]:
    """`trtserve` of the interpreter that runs the tests."""
    return [sys.executable, "-m", "trtserve", *arguments]


def environment(home: Path, **variables: str) -> dict[str, str]:
    """Return the environment of a command with the store `home`, where Triton counts as tested."""
    spare_round_trip(home)
    return {**os.environ, "TRTSERVE_HOME": str(home), "COLUMNS": "120", "NO_COLOR": "1", **variables}


def spare_round_trip(home: Path) -> None:
    """Let a first start in the store `home` begin at once: it would test Triton for seconds, as tests of doctor do."""
    passed = stub.passed_file(Store(home))
    passed.parent.mkdir(parents=True, exist_ok=True)
    write_json(passed, {"passed": True})
