"""Every name of vLLM that trtserve uses was compared with the sources of the releases that it promises."""

from __future__ import annotations

import ast
import json
from pathlib import Path

from tests.real_vllm.names import ARGUMENTS, NAMES, RECORD, asked
from trtserve.executor.vllm import adapter, arguments, engine_side
from trtserve.executor.vllm.installation import read_releases

FOUND = json.loads(RECORD.read_text(encoding="utf-8"))
FIRST, LAST = "0.19.1", "0.33.0"


def functions(module: object, *names: str) -> list[ast.FunctionDef]:
    tree = ast.parse(Path(str(getattr(module, "__file__", ""))).read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in names]


def keys(function: ast.FunctionDef, *inner: str) -> set[str]:
    """Return the constant keys of a function's dictionaries, and of assignments to their items."""
    found: list[ast.expr | None] = []
    for node in ast.walk(function):
        found += node.keys if isinstance(node, ast.Dict) else [node.slice] if isinstance(node, ast.Subscript) else []
    return {each.value for each in found if isinstance(each, ast.Constant) and isinstance(each.value, str)} - {*inner}


def test_the_names_were_compared_with_every_promised_release() -> None:
    assert FOUND["asked"] == asked(), (
        "compare the new names with the releases: python -m tests.real_vllm.names FOLDER …"
    )
    releases = list(FOUND["releases"])
    assert (releases[0], releases[-1]) == (FIRST, LAST)
    assert read_releases().releases[-1] == LAST
    assert {release: each["missing"] for release, each in FOUND["releases"].items() if each["missing"]} == {}
    assert all(len(each["parameters"]) == 7 for each in FOUND["releases"].values())


def test_the_names_are_all_that_the_code_uses() -> None:
    tree = ast.parse(Path(engine_side.__file__).read_text(encoding="utf-8"))
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("vllm")
        for alias in node.names
    }
    assert imported - {"AsyncEngineArgs"} <= {cls for _, cls in NAMES}
    made, sizes = functions(arguments, "engine_arguments", "_cache_size")
    assert keys(made, "backend", "disable_any_whitespace") | keys(sizes) <= set(ARGUMENTS.split())
    (sampling,) = functions(adapter, "_sampling")
    assert {*keys(sampling), *adapter._SAME, *adapter._DRAWN} <= set(
        NAMES["sampling_params.py", "SamplingParams"].split()
    )
