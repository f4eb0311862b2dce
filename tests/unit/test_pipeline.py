"""Where an import puts its engine."""

from __future__ import annotations

import pytest

from trtserve.pipeline import engine_destination


def test_engine_destination(monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine_destination("demo") is None
    monkeypatch.setenv("ENGINE_DEST_PATH", "/engines")
    assert str(engine_destination("demo")) == "/engines/demo"
