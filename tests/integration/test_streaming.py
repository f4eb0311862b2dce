"""Conversion by several processes: the same files, bounded memory, the same first error."""

from __future__ import annotations

import os
import re
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from tests.support.stages import convert_model
from tests.support.tiny_models import read_safetensors, write_safetensors, write_tiny_model
from trtserve.artifacts import Checkpoint, Model
from trtserve.checkpoint import streaming
from trtserve.checkpoint.tensor_files import TensorFile
from trtserve.errors import ConversionError
from trtserve.specs import ConvertSpec


def convert(folder: Path, out: Path, **spec: Any) -> Checkpoint:
    return convert_model(Model(path=folder), ConvertSpec(**spec), out=out)


def test_memory_is_bounded_by_the_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "CHUNK", 64 << 10)
    folder = write_tiny_model(tmp_path / "hf", vocab_size=1 << 15)  # 8 MiB in float32
    convert(folder, tmp_path / "warm", dtype="float16")
    tracemalloc.start()
    try:
        convert(folder, tmp_path / "out", tp_size=2, dtype="float16")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 << 20


@pytest.mark.parametrize(("family", "dtype"), [("llama", "float16"), ("llama", "bfloat16"), ("gpt2", "bfloat16")])
@pytest.mark.parametrize("source", ["float16", "bfloat16"])
def test_result_is_independent_of_process_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, dtype: str, source: str
) -> None:
    folder = write_tiny_model(tmp_path / "hf", family, vocab_size=4001, dtype=source)
    monkeypatch.setattr(streaming, "CHUNK", 5000)
    monkeypatch.setattr(streaming, "WORTH", 1)
    contents = []
    for cores in (1, 2, 64):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        made = convert(folder, tmp_path / str(cores), tp_size=2, pp_size=2, dtype=dtype).path
        contents.append([(made / f"rank{rank}.safetensors").read_bytes() for rank in range(4)])
    assert contents[0] == contents[1] == contents[2]


@pytest.mark.parametrize("cores", [1, 4])
def test_first_overflowing_tensor_in_the_file_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int
) -> None:
    folder = write_tiny_model(tmp_path / "hf")
    tensors = {name: values.copy() for name, values in read_safetensors(folder / "model.safetensors").items()}
    for values in tensors.values():
        values.reshape(-1)[-1] = 1e6
    write_safetensors(folder / "model.safetensors", tensors)
    first = min(TensorFile(folder / "model.safetensors").entries.items(), key=lambda item: item[1].begin)[0]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(streaming, "CHUNK", 1000)
    monkeypatch.setattr(streaming, "WORTH", 1)
    with pytest.raises(ConversionError, match=f"^{re.escape(first)} in"):
        convert(folder, tmp_path / "out", dtype="float16")
