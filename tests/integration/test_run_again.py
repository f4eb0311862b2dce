"""What fails beside other tests runs once more, alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import run_again

# Fails the first time in each folder, and for ever where a file says so.
ONCE = """
from pathlib import Path

def test_it():
    here = Path(__file__).with_suffix(".ran")
    first = not here.exists()
    here.touch()
    assert not first and not Path(__file__).with_suffix(".broken").exists()
"""


ARGUMENTS = ["-q"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # most of the time of a start
    return tmp_path


def _tests(folder: Path, *names: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / f"test_{name}.py").write_text(ONCE)


def test_what_passes_alone_passes(folder: Path) -> None:
    _tests(folder, "a", "b", "c")
    assert run_again.main(ARGUMENTS) == pytest.ExitCode.OK


def test_what_fails_twice_fails(folder: Path) -> None:
    _tests(folder, "a", "b")
    (folder / "test_b.broken").touch()
    assert run_again.main(ARGUMENTS) == pytest.ExitCode.TESTS_FAILED


def test_many_files_have_one_run(folder: Path) -> None:
    _tests(folder, "a", "b", "c", "d")
    assert run_again.main(ARGUMENTS) == pytest.ExitCode.TESTS_FAILED


def test_unit_tests_have_one_run(folder: Path) -> None:
    _tests(folder / "tests" / "unit", "a")
    assert run_again.main(ARGUMENTS) == pytest.ExitCode.TESTS_FAILED


def test_an_error_of_collection_has_one_run(folder: Path) -> None:
    _tests(folder, "a")
    (folder / "test_b.py").write_text("import nothing_of_this_name")
    assert run_again.main(ARGUMENTS) == pytest.ExitCode.INTERRUPTED


def test_a_fault_outside_of_all_tests_does_not_run_all_of_them_again(folder: Path) -> None:
    """Such as a warning that is an error when pytest ends: the process fails, and no test has."""
    (folder / "test_a.py").write_text("def test_it() -> None: pass")
    end = "open('runs', 'a').write('x')\n    raise RuntimeError"
    (folder / "conftest.py").write_text(f"def pytest_unconfigure():\n    {end}\n")
    assert run_again.main(ARGUMENTS) == 1
    assert (folder / "runs").read_text() == "x"
