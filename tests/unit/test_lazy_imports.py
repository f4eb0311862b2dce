"""Help and completion stay quick: the command line imports nothing heavy before a command runs."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
)

PROBE = """
import sys
from trtserve.cli import run
code = run({arguments!r})
loaded = [name for name in {heavy!r} if name in sys.modules]
sys.stderr.write("loaded: " + ",".join(loaded))
sys.exit(code or bool(loaded))
"""


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["import", "--help"], ["bench", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    probe = PROBE.format(arguments=arguments, heavy=HEAVY)
    result = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout
