"""A repository from someone else is a program that runs as you, and `check` and `start --dry-run` say so."""

from __future__ import annotations

from pathlib import Path

import pytest

from trtserve.cli.app import run
from trtserve.repository.programs import foreign_programs, write_program
from trtserve.server.doctor.stub import write_probe_repository


def own_model(repository: Path) -> Path:
    """A model with a program of trtserve."""
    write_program(repository / "preprocessing" / "1", "preprocessing")
    (repository / "preprocessing" / "config.pbtxt").write_text('name: "preprocessing"\n')
    return repository / "preprocessing" / "1"


def test_programs_of_trtserve_are_known(tmp_path: Path) -> None:
    own_model(tmp_path)
    assert foreign_programs(tmp_path) == []


@pytest.mark.parametrize(
    "name", ["model.py", "other.py", "trtserve_models/shared/arrays.py", "run.sh", "libtriton_own.so", "lib.so.1"]
)
def test_any_other_program_is_named(name: str, tmp_path: Path) -> None:
    own_model(tmp_path).joinpath(name).write_text("import os\n")
    assert foreign_programs(tmp_path) == [f"preprocessing/1/{name}"]


def test_libraries_beside_the_versions_and_large_programs(tmp_path: Path) -> None:
    version = own_model(tmp_path)
    (version.parent / "libtriton_x.so").touch()
    (version / "model.py").write_text("#" * (2 << 20))
    assert foreign_programs(tmp_path) == ["preprocessing/1/model.py", "preprocessing/libtriton_x.so"]


@pytest.mark.parametrize("line", [["check"], ["start", "--dry-run", "--model-repository"]])
def test_commands_say_so(line: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    repository = write_probe_repository(tmp_path / "probe")
    assert run([*line, str(repository)]) == 0
    printed = " ".join(capsys.readouterr().err.split())
    assert "A repository is a program that runs as you" in printed
    assert "probe/1/model.py" in printed
