"""Imports point down only, libraries stay in their rooms, and only runtimes compare the names of runtimes."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from trtserve.checkpoint.architectures import LINEAGE
from trtserve.executor.runtimes import RUNTIMES

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "trtserve"

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
    "_version",
    "__init__",
)

# Third-party modules and the only parts of the package that may import them.
CONFINED = {
    "typer": ("cli",),
    "rich": ("cli",),
    "prompt_toolkit": ("cli",),
    "subprocess": ("process", "programs/shared/encoding.py"),
    "openvino": ("executor", "server/doctor"),
    "aiohttp": ("gateway",),
    "fastapi": ("gateway",),
    "uvicorn": ("gateway",),
    "tritonclient": ("repository", "client", "server", "bench"),
    "huggingface_hub": ("store/hub",),
    "torch": (
        "executor/torch/",
        "executor/vllm/engine_side.py",
        "pipeline/parity/original.py",
        "pipeline/parity/constants.py",
        "checkpoint/tensor_files.py",
    ),
    "pynvml": ("host/gpus.py",),
}

# Where a runtime's name may be compared; elsewhere the runtime answers what differs.
NAMING = (
    "executor/runtimes.py",
    "executor/openvino/",
    "executor/torch/",
    "executor/vllm/",
    "nvidia/",
    "specs/",
    "executor/loaders.py",
)

# Comparisons with a word that is also a runtime's name, and the reason.
COMPARED = {
    ("repository/served.py", "llmapi"): "a Triton backend, which a Python model.yaml implies",
    ("server/engine_fit.py", "vllm"): "NVIDIA's Triton backend",
    ("server/launch/modes.py", "vllm"): "NVIDIA's Triton backend",
    ("pipeline/parity/__init__.py", "tensorrt_llm"): "the tool that a manifest records",
    ("store/sources.py", "tensorrt_llm"): "a model of NVIDIA's repositories",
    ("pipeline/parity/converted.py", "openvino"): "the library",
    ("pipeline/convert_own.py", "torch"): "the library",
    ("checkpoint/tensor_files.py", "torch"): "the library",
    ("pipeline/parity/original.py", "torch"): "the library",
    ("server/doctor/nvidia.py", "torch"): "the library",
}

MODULES = sorted(PACKAGE.rglob("*.py"))
# The only modules that a Triton container without trtserve is sure to have.
IN_EVERY_CONTAINER = {
    "numpy",
    "tokenizers",
    "transformers",
    "triton_python_backend_utils",
    "yaml",
    *sys.stdlib_module_names,
}


class _Source(NamedTuple):
    imports: list[str]
    runtime_imports: list[str]
    classes: list[str]
    compared: list[tuple[int, str]]


@functools.cache
def _source(path: Path) -> _Source:
    """What the tests ask of a module, which is parsed once."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return _Source(
        list(_imported_names(tree)),
        list(_runtime_imports(tree, _module_name(path), path.name)),
        [node.name for node in tree.body if isinstance(node, ast.ClassDef)],
        list(_compared(tree)),
    )


def _imports(path: Path) -> list[str]:
    return _source(path).imports


def _imported_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
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
        if name.startswith("trtserve.") and name.split(".")[1] in above
    ]
    assert not found, "on a floor above"


def test_engine_does_not_know_the_interface() -> None:
    """TensorRT-LLM's classes become the engine's own data in `executor/interface`, and models see only those."""
    rooms = ("executor/engine/", "executor/openvino/", "executor/torch/")
    found = [
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path in MODULES
        if str(path.relative_to(PACKAGE)).startswith(rooms)
        for name in _imports(path)
        if name.startswith(("trtserve.executor.interface", "trtserve.executor.api"))
    ]
    assert not found


@pytest.mark.parametrize("module", CONFINED)
def test_confined_modules(module: str) -> None:
    found = {
        relative
        for path in MODULES
        if not (relative := str(path.relative_to(PACKAGE))).startswith(CONFINED[module])
        and module in {name.split(".")[0] for name in _imports(path)}
    }
    assert not found, f"{module} belongs to {CONFINED[module]}"


def test_no_module_imports_itself_in_a_circle() -> None:
    """Imports inside functions count, and so do the packages that an import runs."""
    graphlib.TopologicalSorter(_import_graph()).prepare()  # raises CycleError, which names the circle


def _import_graph() -> dict[str, set[str]]:
    """Return each module's imports, with the packages that they run unless the importing module lies in them."""
    names = {_module_name(path): path for path in MODULES}
    graph = {}
    for module, path in names.items():
        graph[module] = {found for name in _source(path).runtime_imports for found in _runs(name, module, names)}
    return graph


def _module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _runtime_imports(node: ast.AST, module: str, file_name: str) -> Iterator[str]:
    """Yield `a.b.c` for `import a.b.c` and for `from a.b import c`, except under `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            package = module.split(".") if file_name == "__init__.py" else module.split(".")[:-1]
            above = package[: len(package) - child.level + 1] if child.level else []
            origin = ".".join([*above, *([child.module] if child.module else [])])
            yield from (f"{origin}.{alias.name}" for alias in child.names)
        else:
            yield from _runtime_imports(child, module, file_name)


def _runs(name: str, module: str, modules: Mapping[str, Path]) -> Iterator[str]:
    while name not in modules:
        name, _, rest = name.rpartition(".")
        if not rest or not name:
            return
    if name != module:
        yield name
    package = name.rpartition(".")[0]
    while package:
        if not module.startswith(f"{package}.") and module != package:
            yield package
        package = package.rpartition(".")[0]


def test_no_public_class_name_twice() -> None:
    """The copied programs may use what names they like."""
    found: dict[str, list[str]] = {}
    for path in MODULES:
        if _part(path) != "programs":
            for name in _source(path).classes:
                if not name.startswith("_"):
                    found.setdefault(name, []).append(str(path.relative_to(PACKAGE)))
    twice = {name: paths for name, paths in found.items() if len(paths) > 1}
    assert not twice


def test_architectures_holds_nothing_but_families() -> None:
    """What families share is in `checkpoint/architectures/parts`, which imports no family."""
    folder = PACKAGE / "checkpoint" / "architectures"
    assert {path.stem for path in folder.glob("*.py")} == {"__init__", "base", *LINEAGE.values()}
    for path in folder.glob("parts/*.py"):
        for name in _imports(path):
            if name.startswith("trtserve.checkpoint.architectures."):
                assert name.split(".")[3] in ("base", "parts"), f"{path.name} imports {name}"


def test_models_run_without_trtserve() -> None:
    """Repositories hold copies of `programs`, which stock containers run."""
    for path in (PACKAGE / "programs").rglob("*.py"):
        for name in _imports(path):
            assert name.split(".")[0] in IN_EVERY_CONTAINER, f"{path.relative_to(PACKAGE)} imports {name}"


def _compared(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and word of each comparison with a string, and of each constant that is a collection of strings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            parts = [each for side in (node.left, *node.comparators) for each in ast.walk(side)]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "frozenset":
            parts = list(ast.walk(node))
        else:
            continue
        for part in parts:
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                yield node.lineno, part.value


def test_no_code_compares_with_the_name_of_a_runtime() -> None:
    found = [
        f"{relative}:{line} compares with {word!r}"
        for path in MODULES
        if not (relative := str(path.relative_to(PACKAGE))).startswith(NAMING)
        for line, word in _source(path).compared
        if word in RUNTIMES and (relative, word) not in COMPARED
    ]
    assert not found, "ask the runtime (specs/runtime.py)"


# Modules that write a date for people or files, or compare with one.
# Everything else measures with the monotonic clock, or since the boot.
DATED = {
    "executor/engine/recorder.py",
    "executor/vllm/engine.py",
    "gateway/many.py",
    "gateway/openai/answering.py",
    "gateway/openai/answers.py",
    "gateway/openai/responses.py",
    "gateway/openai/served.py",
    "gateway/request_log.py",
    "server/state.py",
    "server/triton/server_log.py",
}


def test_no_duration_depends_on_the_time_of_day() -> None:
    clock = re.compile(r"\btime\.time(_ns)?\b|from time import")
    reading = {path for path in PACKAGE.rglob("*.py") if clock.search(path.read_text(encoding="utf-8"))}
    assert {str(path.relative_to(PACKAGE)) for path in reading} == DATED
