"""The input of each stage: frozen values that declare their options, checked when they are made.

A spec is imported on first use: making a dataclass of thirty fields takes milliseconds, and a command needs few of
them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trtserve.specs.bench import BenchRuns, BenchSpec
    from trtserve.specs.build import BUILDER_FIELDS, BuildSpec, KvPrecision, RuntimeName
    from trtserve.specs.convert import CALIBRATED, Converter, ConvertSpec, DType, Quantization
    from trtserve.specs.repository import CheckSpec, RepositorySpec
    from trtserve.specs.server import ServerSpec

__all__ = [
    "BUILDER_FIELDS",
    "CALIBRATED",
    "BenchRuns",
    "BenchSpec",
    "BuildSpec",
    "CheckSpec",
    "ConvertSpec",
    "Converter",
    "DType",
    "KvPrecision",
    "Quantization",
    "RepositorySpec",
    "RuntimeName",
    "ServerSpec",
]

_MODULES = {
    name: module
    for module, names in {
        "bench": ("BenchRuns", "BenchSpec"),
        "build": ("BUILDER_FIELDS", "BuildSpec", "KvPrecision", "RuntimeName"),
        "convert": ("CALIBRATED", "ConvertSpec", "Converter", "DType", "Quantization"),
        "repository": ("CheckSpec", "RepositorySpec"),
        "server": ("ServerSpec",),
    }.items()
    for name in names
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    return found
