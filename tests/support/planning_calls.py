"""Counting how often an import plans each of its stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from trtserve.pipeline import import_plan
from trtserve.pipeline import importing as pipeline

# The planning function of each stage, in every module that calls it.
_PLANNERS = {
    "model": [(import_plan, "plan_model")],
    "conversion": [(import_plan, "plan_conversion")],
    "build": [(import_plan, "plan_build"), (pipeline, "plan_build")],
    "repository": [(import_plan, "plan_repository")],
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

    for stage, places in _PLANNERS.items():
        for module, name in places:
            monkeypatch.setattr(module, name, counting(stage, getattr(module, name)))
    return counted
