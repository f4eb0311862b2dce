"""Commands start quickly: each imports only what it needs, and help nothing heavy.

What is counted are modules, which every machine counts alike; `make bench ARGS="--only cli"` measures the time.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import trtserve
from tests.support.tiny_models import write_tiny_model

HEAVY = (
    "numpy",
    "transformers",
    "openvino",
    "tritonclient",
    "huggingface_hub",
    "safetensors",
    "torch",
    "grpc",
    "psutil",
    "pydantic",
)

PROBE = """
import sys
from trtserve.cli import run
code = run({arguments!r})
sys.stderr.write("\\n" + " ".join(sys.modules))
sys.exit(code)
"""


def loaded_by(arguments: Sequence[str]) -> tuple[int, set[str]]:
    """The exit code of a command line, and the modules that it had loaded at its end."""
    probe = PROBE.format(arguments=list(arguments))
    result = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)
    return result.returncode, set(result.stderr.splitlines()[-1].split())


def commands(loaded: set[str]) -> set[str]:
    """The modules of single commands among these."""
    names = {"import_", "convert", "repo", "start", "query", "bench", "check", "plan", "models", "doctor", "status"}
    return {name for name in names if f"trtserve.cli.{name}" in loaded}


def test_the_library_is_loaded_when_it_is_used() -> None:
    probe = "import sys, trtserve; print(' '.join(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True).stdout.split()
    assert [name for name in loaded if name.partition(".")[0] in ("trtserve", *HEAVY)] == [
        "trtserve._version",
        "trtserve",
    ]


@pytest.mark.parametrize("name", trtserve.__all__)
def test_every_name_of_the_library_exists(name: str) -> None:
    assert getattr(trtserve, name).__doc__


def test_an_unknown_name_of_the_library_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'trtserve' has no attribute 'Clients'"):
        _ = trtserve.Clients


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["import", "--help"], ["bench", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code, loaded = loaded_by(arguments)
    assert code == 0
    assert not loaded & set(HEAVY)


@pytest.mark.parametrize(("command", "module"), [("build", "convert"), ("query", "query"), ("plan", "plan")])
def test_a_command_imports_no_other_module_of_commands(command: str, module: str) -> None:
    _, loaded = loaded_by([command, "--help"])
    assert commands(loaded) == {module}


@pytest.mark.parametrize("command", ["start", "status", "stop", "import"])
def test_commands_of_servers_begin_without_numpy(command: str) -> None:
    code, loaded = loaded_by([command, *(["./nowhere"] if command in ("start", "import") else [])])
    assert code != 1
    assert "trtserve.store" in loaded
    assert not loaded & {"numpy", "openvino", "transformers", "torch"}
    assert command != "stop" or not loaded & {"trtserve.executor", "trtserve.repository.check"}


def test_query_loads_neither_engines_nor_servers() -> None:
    """Nothing listens at port 9, so that it ends where a question would be sent."""
    code, loaded = loaded_by(["query", "What is ML?", "--model", "echo", "--url", "127.0.0.1:9", "--timeout", "5"])
    assert code != 0
    assert "grpc" in loaded
    parts = {name.split(".")[1] for name in loaded if name.startswith("trtserve.")}
    assert not parts & {"bench", "checkpoint", "executor", "gateway", "pipeline"}
    assert not loaded & {"trtserve.server.start", "trtserve.server.launch", "trtserve.repository.check"}
    assert not loaded & {"pydantic", "openvino", "transformers", "torch", "huggingface_hub"}


def test_a_gateway_loads_no_runtime() -> None:
    """Only loading an adapter needs them."""
    probe = "import sys, trtserve.gateway.app; print(' '.join(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True).stdout.split()
    assert "trtserve.gateway.openai.router" in loaded
    assert not {"trtserve.executor.runtimes", "trtserve.checkpoint", "trtserve.repository.served"} & set(loaded)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_convert_loads_numpy_only_for_numbers_that_change(tmp_path: Path, dtype: str) -> None:
    arguments = ["convert", str(write_tiny_model(tmp_path / "model", dtype="float16")), "--out", str(tmp_path / "made")]
    code, loaded = loaded_by([*arguments, "--dtype", dtype, "--quiet"])
    assert code == 0
    assert ("numpy" in loaded) == (dtype == "bfloat16")
    assert not loaded & {"pydantic", "openvino", "transformers", "torch", "safetensors", "importlib.metadata"}
    assert not {name for name in loaded if name.startswith(("trtserve.executor", "trtserve.pipeline.parity"))}
