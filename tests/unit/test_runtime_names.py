"""A runtime is one class: it answers what differs between runtimes, and no other code asks for a name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from trtserve.executor.embedded import EmbeddedRuntime
from trtserve.executor.loaders import MODELS
from trtserve.executor.runtimes import RUNTIMES
from trtserve.specs import RuntimeName

PACKAGE = Path(__file__).parents[2] / "trtserve"
HOME = (
    "executor/runtimes.py",
    "executor/openvino/",
    "executor/torch/",
    "executor/vllm/",
    "nvidia/",
    "specs/",
    "executor/loaders.py",
)

# Comparisons with a word that is also a runtime's name, and the reason.
ALLOWED = {
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


def test_the_option_lists_the_registry() -> None:
    assert set(get_args(RuntimeName)) == {"auto", *RUNTIMES}


def test_each_runtime_is_registered_under_its_name() -> None:
    assert {runtime.name: runtime for runtime in RUNTIMES.values()} == RUNTIMES


def test_the_executor_loads_the_engines_of_embedded_runtimes() -> None:
    assert set(MODELS) == {
        name for name, runtime in RUNTIMES.items() if isinstance(runtime, EmbeddedRuntime) or runtime.folder_as_engine
    }


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
        for path in sorted(PACKAGE.rglob("*.py"))
        if not (relative := str(path.relative_to(PACKAGE))).startswith(HOME)
        for line, word in _compared(ast.parse(path.read_text(encoding="utf-8")))
        if word in RUNTIMES and (relative, word) not in ALLOWED
    ]
    assert not found, "ask the runtime (specs/runtime.py)"
