"""A conversion keeps to a hard limit of memory that is smaller than the model."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.stages import convert_model
from tests.support.tiny_models import write_tiny_model
from trtserve.artifacts import Model
from trtserve.errors import MemoryLimitError
from trtserve.specs import ConvertSpec

# What a conversion says that it needs, in four processes.
ALLOWANCE = 56 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """96 MB of float32; its largest tensor has 8 MB."""
    return write_tiny_model(
        tmp_path_factory.mktemp("model") / "hf",
        dtype="float32",
        hidden_size=512,
        intermediate_size=4096,
        num_hidden_layers=3,
        vocab_size=4000,
    )


def limited(model: Path, out: Path, tp_size: int, dtype: str, allowance: int) -> subprocess.CompletedProcess[str]:
    # One arena for all threads: each sets aside 64 MB of addresses otherwise, though it holds next to nothing.
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1"}
    arguments = [str(model), str(out), str(tp_size), dtype, str(allowance)]
    return subprocess.run(
        [sys.executable, "-m", "tests.support.limited_conversion", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment,
    )


def hashes(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("rank*")}


@pytest.mark.parametrize(("tp_size", "dtype"), [(2, "bfloat16")])
def test_a_model_larger_than_memory_is_converted(model: Path, tmp_path: Path, tp_size: int, dtype: Any) -> None:
    result = limited(model, tmp_path / "limited", tp_size, dtype, ALLOWANCE)
    assert result.returncode == 0, result.stderr
    facts = json.loads(result.stdout)
    assert facts["largest_tensor"] + ALLOWANCE < 0.9 * facts["model_bytes"]
    assert not facts["whole_model_fits"]
    free = convert_model(Model(path=model), ConvertSpec(tp_size=tp_size, dtype=dtype), out=tmp_path / "free").path
    assert hashes(tmp_path / "limited") == hashes(free)
    assert len(hashes(free)) == tp_size


def test_a_memory_limit_gives_the_memory_exit_code(model: Path, tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "trtserve", "convert", str(model), "--out", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (10**8, 10**8)),
    )
    assert result.returncode == MemoryLimitError.code, result.stderr
    assert "memory" in result.stderr
    assert "ulimit -v" in result.stderr
    assert not (tmp_path / "out").exists()


def test_the_memory_limit_of_these_tests_works(model: Path, tmp_path: Path) -> None:
    result = limited(model, tmp_path / "limited", 1, "bfloat16", -(4 << 20))
    assert result.returncode != 0
    assert "MemoryLimitError: This conversion needs" in result.stderr
    assert "ulimit -v allows this process" in result.stderr
    assert not (tmp_path / "limited").exists()
