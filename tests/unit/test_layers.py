"""Imports point down only; Typer and Rich stay in the command line; subprocess stays behind one door."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "trtserve"

# From top to bottom; a module may import its own layer and those below.
LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"cli", "__main__"}),
    frozenset({"pipeline"}),
    frozenset(
        {
            "import_",
            "hub",
            "convert",
            "upstream",
            "build",
            "repo",
            "lora",
            "check",
            "plan",
            "capacity",
            "start",
            "servers",
            "status",
            "metrics",
            "query",
            "doctor",
            "inventory",
            "inspect",
            "bench",
        }
    ),
    frozenset({"architectures", "runtimes", "triton", "executor", "launch"}),
    frozenset({"releases", "artifacts", "store", "files", "process", "ports", "interrupts"}),
    frozenset({"specs", "wording", "progress", "errors", "machine", "orphans", "__init__"}),
)

# Third-party modules and the only parts of the package that may import them.
CONFINED = {
    "typer": ("cli",),
    "rich": ("cli",),
    "subprocess": ("process",),
    "openvino": ("executor", "runtimes/openvino.py", "doctor"),
    "tritonclient": ("triton", "query", "bench"),
    "huggingface_hub": ("import_", "hub"),
    "torch": ("check/original.py", "check/constants.py", "check/rows.py", "architectures/pickled_files.py"),
    "pynvml": ("doctor/nvidia.py",),
}

MODULES = sorted(path for path in PACKAGE.rglob("*.py") if "models" not in path.relative_to(PACKAGE).parts)


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module
            if node.module == "trtserve":
                yield from (f"trtserve.{alias.name}" for alias in node.names)


def _part(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _layer(part: str) -> int:
    found = [number for number, parts in enumerate(LAYERS) if part in parts]
    assert found, f"trtserve/{part} has no layer: add it to LAYERS and to the design"
    return found[0]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    own = _layer(_part(path))
    for name in _imports(path):
        if name.startswith("trtserve."):
            part = name.split(".")[1]
            exists = (PACKAGE / part).exists() or (PACKAGE / f"{part}.py").exists()
            assert not exists or _layer(part) >= own, f"{path.name} imports {name} from a layer above it"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_confined_modules(path: Path) -> None:
    relative = str(path.relative_to(PACKAGE))
    for name in _imports(path):
        allowed = CONFINED.get(name.split(".")[0])
        if allowed is not None:
            assert relative.startswith(allowed), f"{relative} imports {name}, which belongs to {allowed}"


def test_contributing_shows_the_layers() -> None:
    document = (PACKAGE.parent / "docs" / "contributing.md").read_text(encoding="utf-8")
    block = document.split("tests/unit/test_layers.py` says so:\n\n```\n")[1].split("```")[0]
    shown = [set(line.split("   ")[0].split()) for line in block.splitlines()]
    assert shown == [{part for part in layer if not part.startswith("__")} for layer in LAYERS]
