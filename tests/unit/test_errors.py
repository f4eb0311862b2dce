"""Every error class has its own exit code, listed in the docstring (which the documentation is made from)."""

from __future__ import annotations

import re

import pytest

from trtserve import errors
from trtserve.errors import TrtserveError, counted


def _classes() -> dict[str, int]:
    values = [value for value in vars(errors).values() if isinstance(value, type)]
    return {value.__name__: value.code for value in values if issubclass(value, TrtserveError)}


def test_codes_are_unique() -> None:
    codes = list(_classes().values())
    assert len(codes) == len(set(codes))


def test_codes_do_not_collide_with_the_shells() -> None:
    assert all(0 < code < 126 for code in _classes().values())


def test_the_docstring_has_the_whole_tree() -> None:
    drawn = dict(re.findall(r"[├└]── (\w+) +(\d+)", errors.__doc__ or ""))
    actual = {name: str(code) for name, code in _classes().items() if name != TrtserveError.__name__}
    assert drawn == actual


@pytest.mark.parametrize(("number", "said"), [(0, "0 ranks"), (1, "1 rank"), (2, "2 ranks")])
def test_counted_nouns_have_plurals(number: int, said: str) -> None:
    assert counted(number, "rank") == said
