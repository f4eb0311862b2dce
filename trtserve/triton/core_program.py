"""The modules of the core model's program, for code that runs outside of Triton."""

from __future__ import annotations

import sys
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from trtserve.triton.profiles import CORE

_MODELS = Path(__file__).parent / "models"
# Each module comes after those that it imports by their bare names, as it will in the repository.
_SOURCES = (
    _MODELS / "shared" / "model_parameters.py",
    _MODELS / "shared" / "parameter_classes.py",
    _MODELS / CORE / "1" / "dlpack_bfloat16.py",
    _MODELS / CORE / "1" / "executor_module.py",
    _MODELS / CORE / "1" / "core_settings.py",
    _MODELS / CORE / "1" / "core_row.py",
    _MODELS / CORE / "1" / "core_request.py",
    _MODELS / CORE / "1" / "core_response.py",
)


@cache
def core_modules() -> dict[str, ModuleType]:
    """The modules with which the core model reads parameters and requests and writes responses, by name.

    `sys.modules` is left as it was.
    """
    before = {path.stem: sys.modules.get(path.stem) for path in _SOURCES}
    loaded: dict[str, ModuleType] = {}
    try:
        for path in _SOURCES:
            spec = spec_from_file_location(path.stem, path)
            assert spec is not None  # a path that ends in .py has a loader
            assert spec.loader is not None
            loaded[path.stem] = sys.modules[path.stem] = module_from_spec(spec)
            spec.loader.exec_module(loaded[path.stem])
    finally:
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module
    return loaded
