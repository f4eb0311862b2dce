"""The generated documentation is current, and the README keeps its promises."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_generated_parts_are_current(capsys: pytest.CaptureFixture[str]) -> None:
    generate = runpy.run_path(str(ROOT / "docs" / "generate.py"))
    assert generate["main"](["--check"]) == 0, capsys.readouterr().err


def test_the_commands_of_the_readme_leave_the_ports_free_for_the_next_server() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    servers = re.findall(r"^\$ trtserve (run|start|stop)\b", text, re.MULTILINE)
    assert servers == ["run", "stop", "start", "stop"]


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def test_links_between_documents_resolve() -> None:
    documents = sorted(ROOT.glob("docs/**/*.md"))
    assert documents
    for document in [ROOT / "README.md", *documents]:
        for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", document.read_text(encoding="utf-8")):
            assert (document.parent / target).exists(), f"{document.relative_to(ROOT)} links to {target}"


def test_files_that_documents_name_exist() -> None:
    for document in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]:
        for path in re.findall(r"`((?:trtserve|tests|docs|examples)/[\w./-]+)`", document.read_text(encoding="utf-8")):
            assert (ROOT / path).exists(), f"{document.relative_to(ROOT)} names {path}"


def test_short_paths_that_texts_name_exist() -> None:
    """`server/start.py` in a page, a docstring or a comment leaves out the first folders of a path."""
    ours = [path.relative_to(ROOT) for folder in ("trtserve", "tests") for path in ROOT.glob(f"{folder}/**/*")]
    ends = {"/".join(path.parts[at:]) for path in ours for at in range(len(path.parts))}
    known = {path.name for path in ours}
    texts = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *(ROOT / path for path in ours if path.suffix == ".py")]
    missing = [
        f"{text.relative_to(ROOT)}: {path}"
        for text in texts
        for path in re.findall(r"`([\w-]+/(?:[\w.-]+/)*[\w-]+\.(?:py|yaml|j2))`", text.read_text(encoding="utf-8"))
        if {path.partition("/")[0], path.rpartition("/")[2]} & known and path not in ends
    ]
    assert missing == []


def test_architecture_names_every_package() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    packages = {path.parent.name for path in ROOT.glob("trtserve/*/__init__.py")}
    assert [package for package in sorted(packages) if f"`{package}`" not in text] == []
