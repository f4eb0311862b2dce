"""The top level of the checkout is fixed."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_top_level_is_fixed() -> None:
    if not (ROOT / ".git").exists():
        return  # an unpacked archive, which may hold other files
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    top = {line.split("/")[0] for line in tracked.splitlines()}
    expected = {"trtserve", "tests", "examples", "docs", "pyproject.toml", "README.md", "LICENSE", "Makefile", "NOTICE"}
    assert {name for name in top if not name.startswith(".")} == expected
