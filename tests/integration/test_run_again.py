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


def _tests(folder: Path, *names: str) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / f"test_{name}.py").write_text(ONCE)
    return ["-q", "-p", "no:xdist", str(folder)]


def test_what_passes_alone_passes(tmp_path: Path) -> None:
    assert run_again.main(_tests(tmp_path, "a", "b", "c")) == pytest.ExitCode.OK


def test_what_fails_twice_fails(tmp_path: Path) -> None:
    (tmp_path / "test_b.broken").touch()
    assert run_again.main(_tests(tmp_path, "a", "b")) == pytest.ExitCode.TESTS_FAILED


@pytest.mark.parametrize("names", [("a", "b", "c", "d"), ("a",)])
def test_many_files_and_unit_tests_have_one_run(tmp_path: Path, names: tuple[str, ...]) -> None:
    folder = tmp_path / ("tests/unit" if len(names) == 1 else "tests/e2e")
    assert run_again.main(_tests(folder, *names)) == pytest.ExitCode.TESTS_FAILED


def test_an_error_of_collection_has_one_run(tmp_path: Path) -> None:
    arguments = _tests(tmp_path, "a")
    (tmp_path / "test_b.py").write_text("import nothing_of_this_name")
    assert run_again.main(arguments) == pytest.ExitCode.INTERRUPTED
