"""Imports point down only; Typer and Rich stay in the command line; subprocess stays behind one door."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trtserve.checkpoint.architectures import FAMILIES

PACKAGE = Path(__file__).parents[2] / "trtserve"

# From top to bottom: a package imports itself and the packages below it, nothing else.
FLOORS = (
    "__main__",
    "cli",
    "library",
    "pipeline",
    "bench",
    "server",
    "gateway",
    "repository",
    "client",
    "executor",
    "programs",
    "releases",
    "nvidia",
    "checkpoint",
    "specs",
    "store",
    "artifacts",
    "host",
    "files",
    "process",
    "progress",
    "errors",
    "__init__",
)

# Imports that still go up, as (importing module, imported package). This list only shrinks.
STILL_UP = {
    ("checkpoint/config.py", "nvidia"),
    ("checkpoint/unified.py", "nvidia"),
    ("checkpoint/architectures/__init__.py", "nvidia"),
    ("checkpoint/rank_weights.py", "executor"),
    ("server/start.py", "pipeline"),
    ("server/checks.py", "pipeline"),
    ("repository/check/machine.py", "server"),
    ("repository/llmapi.py", "pipeline"),
    ("host/nvidia.py", "nvidia"),
    ("executor/torch/runtime.py", "repository"),
}

# Third-party modules and the only parts of the package that may import them.
CONFINED = {
    "typer": ("cli",),
    "rich": ("cli",),
    "prompt_toolkit": ("cli",),
    "subprocess": ("process",),
    "openvino": ("executor", "server/doctor"),
    "aiohttp": ("gateway",),
    "fastapi": ("gateway",),
    "uvicorn": ("gateway",),
    "tritonclient": ("repository", "client", "server", "bench"),
    "huggingface_hub": ("pipeline/import_", "store/hub"),
    "torch": (
        "executor/torch/",
        "pipeline/parity/original.py",
        "pipeline/parity/constants.py",
        "pipeline/parity/rows.py",
        "checkpoint/pickled_files.py",
    ),
    "pynvml": ("host/nvidia.py",),
}

MODULES = sorted(PACKAGE.rglob("*.py"))
# The only modules that a Triton container without trtserve is sure to have.
IN_EVERY_CONTAINER = {"numpy", "transformers", "triton_python_backend_utils", "yaml", *sys.stdlib_module_names}


@functools.cache
def _imports(path: Path) -> list[str]:
    return list(_imported_names(path))


def _imported_names(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module
            if node.module == "trtserve":
                yield from (f"trtserve.{alias.name}" for alias in node.names)


def _part(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_every_package_has_a_floor_of_its_own() -> None:
    packages = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    modules = {path.stem for path in PACKAGE.glob("*.py")}
    assert sorted(FLOORS) == sorted(packages | modules)


@pytest.mark.parametrize("part", [part for part in FLOORS if part != "__init__"])
def test_imports_go_down(part: str) -> None:
    # `import trtserve` offers the library by names that it loads later (test_lazy_imports.py).
    above = FLOORS[: FLOORS.index(part)]
    found = [
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path in MODULES
        if _part(path) == part
        for name in _imports(path)
        if name.startswith("trtserve.")
        and name.split(".")[1] in above
        and (str(path.relative_to(PACKAGE)), name.split(".")[1]) not in STILL_UP
    ]
    assert not found, "on a floor above"


@pytest.mark.parametrize("module", CONFINED)
def test_confined_modules(module: str) -> None:
    found = {
        relative
        for path in MODULES
        if not (relative := str(path.relative_to(PACKAGE))).startswith(CONFINED[module])
        and module in {name.split(".")[0] for name in _imports(path)}
    }
    assert not found, f"{module} belongs to {CONFINED[module]}"


def test_architectures_holds_nothing_but_families() -> None:
    """What families share is in `checkpoint/architectures/parts`, which imports no family."""
    folder = PACKAGE / "checkpoint" / "architectures"
    assert {path.stem for path in folder.glob("*.py")} == {"__init__", "base", *FAMILIES.values()}
    for path in folder.glob("parts/*.py"):
        for name in _imports(path):
            if name.startswith("trtserve.checkpoint.architectures."):
                assert name.split(".")[3] in ("base", "parts"), f"{path.name} imports {name}"


def test_models_run_without_trtserve() -> None:
    """Repositories hold copies of `programs`, which stock containers run."""
    for path in (PACKAGE / "programs").rglob("*.py"):
        for name in _imports(path):
            assert name.split(".")[0] in IN_EVERY_CONTAINER, f"{path.relative_to(PACKAGE)} imports {name}"
