"""Benchmark a served model: plan the traffic, send it, report the figures.

traffic (what is sent) × arrivals (when) × protocols (how) × processes (who sends) → records → statistics → reports.
The functions are imported on first use, because `query` needs the limits of an engine from this package and no more.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trtserve.bench.plan import BenchPlan, plan_benchmark
    from trtserve.bench.report import Report
    from trtserve.bench.run import run_benchmark

__all__ = ["BenchPlan", "Report", "plan_benchmark", "run_benchmark"]

_MODULES = {
    "BenchPlan": "plan",
    "plan_benchmark": "plan",
    "Report": "report",
    "run_benchmark": "run",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
