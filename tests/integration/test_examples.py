"""Examples without arguments: whoever tries one learns what it needs, and sees no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("[!t]*.py"))  # test_… is for pytest


@pytest.mark.parametrize("example", EXAMPLES, ids=[path.name for path in EXAMPLES])
def test_an_example_without_arguments_explains_itself(example: Path, tmp_path: Path) -> None:
    assert example.is_file()
    found = subprocess.run(
        [sys.executable, str(example)],
        env={**os.environ, "TRTSERVE_HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert found.returncode in (0, 1, 2)  # 0 if a server of this machine answers at the usual port
    assert "Traceback" not in found.stderr
    assert found.returncode == 0 or found.stderr.strip()
