"""Every error class owns an exit code, and the documentation lists them all."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trtserve import errors
from trtserve.errors import TrtserveError, counted

DOCUMENT = Path(__file__).parents[2] / "docs" / "exit-codes.md"


def _classes() -> dict[str, int]:
    values = [value for value in vars(errors).values() if isinstance(value, type)]
    return {value.__name__: value.code for value in values if issubclass(value, TrtserveError)}


def test_codes_are_unique() -> None:
    codes = list(_classes().values())
    assert len(codes) == len(set(codes))


def test_codes_leave_the_shell_its_own() -> None:
    assert all(0 < code < 126 for code in _classes().values())


def test_tree_in_the_docstring_is_the_tree() -> None:
    drawn = dict(re.findall(r"[├└]── (\w+) +(\d+)", errors.__doc__ or ""))
    actual = {name: str(code) for name, code in _classes().items() if name != TrtserveError.__name__}
    assert drawn == actual


def test_documented_exit_codes() -> None:
    rows = re.findall(r"^\| (\d+) \| `(\w+)`", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    assert {name: int(code) for code, name in rows} == _classes()


@pytest.mark.parametrize(("number", "said"), [(0, "0 ranks"), (1, "1 rank"), (2, "2 ranks")])
def test_things_are_counted(number: int, said: str) -> None:
    assert counted(number, "rank") == said


def test_no_message_leaves_a_plural_open() -> None:
    package = Path(__file__).parents[2] / "trtserve"
    open_plurals = [path for path in package.rglob("*.py") if "(s)" in path.read_text(encoding="utf-8")]
    assert open_plurals == []
