"""Shell completion offers names and choices, and files only where a path is meant."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from trtserve.cli import run
from trtserve.store import NameRecord, Store


def completed(line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return what bash gets for a command line whose last word is being typed."""
    words = line.split(" ")
    monkeypatch.setenv("_TRTSERVE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "\n".join(words))
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    assert run([]) == 0
    return capsys.readouterr().out.split()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder with a file and a folder the current one."""
    here = tmp_path / "here"
    (here / "models").mkdir(parents=True)
    (here / "notes.txt").write_text("")
    monkeypatch.chdir(here)
    return here


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("trtserve conv", ["convert"]),
        ("trtserve convert --quantize int8", ["int8", "int8_sq"]),
        ("trtserve convert --tp", ["--tp-size"]),
        ("trtserve import dem", ["demo"]),
        ("trtserve import llama-2-7", ["llama-2-7b", "llama-2-7b-chat"]),
        ("trtserve plan demo --gpu h100-80", ["h100-80gb"]),
        ("trtserve convert ./", ["./models/", "./notes.txt"]),
        ("trtserve convert m --out no", ["notes.txt"]),
        ("trtserve stop ", []),
        ("trtserve query --server ", []),
        ("trtserve convert m --calib-dataset ", []),
    ],
)
def test_words_that_fit(
    line: str,
    expected: list[str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = completed(line, monkeypatch, capsys)
    assert found == expected or (line.endswith("llama-2-7") and expected[0] in found)


def test_the_shell_adds_no_files_of_its_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHELL", "/bin/bash")
    assert run(["--show-completion"]) == 0
    script = capsys.readouterr().out
    assert "complete -F _trtserve_completion trtserve" in script
    assert "-o default" not in script
    monkeypatch.setenv("SHELL", "/bin/zsh")
    assert run(["--show-completion"]) == 0
    assert "grep -vx _files" in capsys.readouterr().out


def test_names_of_imports_and_servers(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store()
    nowhere = str(folder)
    store.record(
        NameRecord(
            name="mine",
            source="demo",
            model=nowhere,
            checkpoint=nowhere,
            engine=nowhere,
            repository=nowhere,
            imported="2026-11-22T00:00:00+00:00",
        )
    )
    monkeypatch.setattr("trtserve.server.state.recorded_servers", lambda store: [SimpleNamespace(name="two")])
    for line in ("start m", "remove m", "build m", "inspect m", "import min"):
        assert completed(f"trtserve {line}", monkeypatch, capsys) == ["mine"]
    for line in ("stop t", "logs ", "metrics --server ", "status t", "query --server t", "bench dataset --server "):
        assert completed(f"trtserve {line}", monkeypatch, capsys) == ["two"]
