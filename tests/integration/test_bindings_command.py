"""`trtserve bindings -- COMMAND` runs a program with TensorRT-LLM's Python names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.commands import TIMEOUT, trtserve

PROGRAM = """
import os, sys
import tensorrt_llm
import tensorrt_llm.bindings.executor as trtllm
import tensorrt_llm.logger as logger
from tensorrt_llm.llmapi.tokenizer import _xgrammar_tokenizer_info

logger.set_level("error")
config = trtllm.KvCacheConfig(enable_block_reuse=True, max_tokens=64)
print(tensorrt_llm.__version__, config.max_tokens, trtllm.Executor.__module__, os.environ["TRTSERVE_START_BINDINGS"])
sys.exit(7)
"""


def test_a_program_finds_the_names_of_the_release(tmp_path: Path) -> None:
    done = trtserve("bindings", "--release", "0.16", "--", "python3", "-c", PROGRAM, home=tmp_path, check=False)
    assert (done.returncode, done.stdout.split()) == (
        7,
        ["0.16.0", "64", "trtserve.executor.interface.executor", "0.16"],
    ), done


def test_the_printed_folder_serves_as_pythonpath(tmp_path: Path) -> None:
    folder = trtserve("bindings", "--release", "0.12", home=tmp_path).stdout.strip()
    asked = "import tensorrt_llm.bindings.executor as e; print(e.__version__)"
    done = subprocess.run(
        [sys.executable, "-c", asked],
        env={**os.environ, "PYTHONPATH": folder},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=True,
    )
    assert done.stdout.strip() == "0.12.0"
