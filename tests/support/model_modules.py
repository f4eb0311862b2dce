"""Modules of the Triton models, imported as the python backend does: from their own folder, by their bare name."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

SOURCES = Path(__file__).parents[2] / "trtserve" / "triton" / "models"


def load(monkeypatch: pytest.MonkeyPatch, model: str, module: str) -> Any:
    """Import `module` of `model`; what it imports from its folder is imported anew too."""
    folders = [SOURCES / model / "1", SOURCES / "shared"]
    for folder in folders:
        monkeypatch.syspath_prepend(str(folder))
        for path in folder.glob("*.py"):
            monkeypatch.delitem(sys.modules, path.stem, raising=False)
    return importlib.import_module(module)
