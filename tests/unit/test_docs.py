"""The generated documentation is current, and the README keeps its promises."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_generated_documents_are_current() -> None:
    result = subprocess.run(
        [sys.executable, "docs/generate.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_links_between_documents_resolve() -> None:
    documents = sorted(ROOT.glob("docs/**/*.md"))
    assert documents
    for document in [ROOT / "README.md", *documents]:
        for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", document.read_text(encoding="utf-8")):
            assert (document.parent / target).exists(), f"{document.relative_to(ROOT)} links to {target}"


def test_top_level_is_fixed() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout: what else lies here is not known")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    top = {line.split("/")[0] for line in tracked.splitlines()}
    expected = {"trtserve", "tests", "examples", "docs", "pyproject.toml", "README.md", "LICENSE", "Makefile"}
    assert {name for name in top if not name.startswith(".")} == expected
