"""How fast stages were is remembered, and said only of runs that a measured one speaks for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trtserve.store import Store, expected_seconds, read_rates, timed


def test_durations_are_predicted_only_from_measurements(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert expected_seconds(read_rates(store), "convert", 100) is None
    with timed(store, "convert", 100):
        pass
    with pytest.raises(ValueError, match="stopped"), timed(store, "build", 100):
        raise ValueError("stopped")
    for size in (120, 127, 5000):
        with timed(store, "convert", size):
            pass
    assert [run["bytes"] for run in read_rates(store)["convert"]] == [127, 5000], "the newest of each power of two"
    assert list(read_rates(store)) == ["convert"]
    runs = {"convert": [{"bytes": 100, "seconds": 2.0}, {"bytes": 10_000, "seconds": 50.0}]}
    assert expected_seconds(runs, "convert", 200) == 4.0
    assert expected_seconds(runs, "convert", 20_000) == 100.0
    assert expected_seconds(runs, "start", 200) is None
    assert expected_seconds(runs, "convert", 100_000) is None, "a small run is mostly the start of its process"
    assert expected_seconds({"convert": [{"bytes": 2**30, "seconds": 2.0}]}, "convert", 140 * 2**30) == 280.0
    (tmp_path / "rates.json").write_text("{")
    assert read_rates(store) == {}


_HUGE = [{"bytes": 1 << 30, "seconds": 10**400}, {"bytes": 10**400, "seconds": 1}]
_STRANGE = [{}, {"bytes": 1}, 7, {"bytes": "1", "seconds": 2}]


@pytest.mark.parametrize("content", [{"build": _STRANGE}, {"build": _HUGE}, {"build": 3}, []])
def test_invalid_rate_files_are_ignored(content: object, tmp_path: Path) -> None:
    (tmp_path / "rates.json").write_text(json.dumps(content))
    store = Store(tmp_path)
    with timed(store, "build", 100):
        pass
    assert [run["bytes"] for run in read_rates(store)["build"]] == [100]
