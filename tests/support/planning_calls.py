"""Counting how often an import plans each of its stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from trtserve.pipeline import importing

_PLANNERS = {
    "model": "plan_model",
    "conversion": "plan_conversion",
    "build": "plan_build",
    "repository": "plan_repository",
}
ONCE = dict.fromkeys(_PLANNERS, 1)


def count_planning_calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Return a counter of planning calls by stage."""
    counted: Counter[str] = Counter()

    def counting(stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            counted[stage] += 1
            return function(*arguments, **options)

        return call

    for stage, name in _PLANNERS.items():
        monkeypatch.setattr(importing, name, counting(stage, getattr(importing, name)))
    return counted
