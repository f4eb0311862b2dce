"""Fixtures that several unit tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.executors import Start, executors


@pytest.fixture
def start() -> Iterator[Start]:
    """Start executors over fake models; they are shut down at the end."""
    with executors() as make:
        yield make
