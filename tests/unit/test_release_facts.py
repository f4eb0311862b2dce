"""The tables of releases that are out do not change by mistake."""

from __future__ import annotations

import json

import pytest

from tests.golden.release_facts import FILE, digests, facts_of
from trtserve.nvidia.releases import RELEASES

RECORDED: dict[str, dict[str, str]] = json.loads(FILE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("release", RELEASES)
def test_what_the_tables_say_of_a_release_has_not_changed(release: str) -> None:
    found = digests(facts_of(release))
    changed = [table for table in found if found[table] != RECORDED[release].get(table)]
    assert not changed, f"{FILE.with_suffix('.py').name} says what to do when these rows were wrong: {changed}"
    assert found.keys() == RECORDED[release].keys()


def test_every_release_is_recorded() -> None:
    assert list(RECORDED) == list(RELEASES)
