"""Run pytest, then once more and alone what failed beside other tests: docs/decisions/0016-tests-run-again.md."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

MOST_FILES = 3


def main(arguments: list[str]) -> int:
    """Run the tests that pytest's `arguments` choose and return the exit code of the run that decides.

    Tests that talk to servers and signals run again when at most three files have any that failed. Unit tests start
    nothing, so one that fails decides.
    """
    with tempfile.TemporaryDirectory(prefix="trtserve-tests-") as cache:
        code = _pytest([*arguments, "-o", f"cache_dir={cache}"])
        record = Path(cache, "v", "cache", "lastfailed")
        failed: list[str] = sorted(json.loads(record.read_text())) if record.exists() else []
    files = {test.partition("::")[0] for test in failed}
    few = 0 < len(files) <= MOST_FILES  # none: a fault outside of all tests ends the process with the same code
    if code != pytest.ExitCode.TESTS_FAILED or not few or any("tests/unit/" in file for file in files):
        return code
    sys.stdout.write("\n  ".join(["\nThese failed and run once more, alone:", *failed]) + "\n")
    sys.stdout.flush()
    return _pytest(failed)


def _pytest(arguments: list[str]) -> int:
    return subprocess.run([sys.executable, "-m", "pytest", *arguments], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
