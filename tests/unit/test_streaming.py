"""Streaming of weights: each source is read once, memory is a chunk, neither chunks nor processes show in the files."""

from __future__ import annotations

import os
import re
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_models import read_safetensors, write_safetensors, write_tiny_model
from trtserve.architectures import streaming
from trtserve.architectures.tensor_files import TensorFile
from trtserve.artifacts import Checkpoint, Model
from trtserve.convert import convert_model, plan_conversion
from trtserve.errors import (
    ConversionError,
)
from trtserve.specs import ConvertSpec


def convert(folder: Path, out: Path, **spec: Any) -> Checkpoint:
    return convert_model(Model(path=folder), ConvertSpec(**spec), out=out)


def test_every_source_is_read_once_and_in_file_order(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "hf", "llama3", shards=2)
    plan = plan_conversion(Model(path=folder), ConvertSpec(tp_size=4))
    places = [(move.source.file.path, move.source.entry.begin) for move in plan.moves]
    assert places == sorted(places)
    assert len(set(places)) == len(places)


def test_blocks_fill_every_rank_file_exactly(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "hf", vocab_size=321, num_key_value_heads=1)
    plan = plan_conversion(Model(path=folder), ConvertSpec(tp_size=4, dtype="float32"))
    spans: list[list[tuple[int, int]]] = [[] for _ in plan.sizes]
    for block in (block for move in plan.moves for block in move.blocks):
        spans[block.rank].append((block.offset, block.offset + block.rows * block.columns * 4))
    for rank, (header, size) in enumerate(zip(plan.headers, plan.sizes, strict=True)):
        end = len(header)
        for start, stop in sorted(spans[rank]):
            assert start == end
            end = stop
        assert end == size - (3 * 64 * 4 if rank == 3 else 0)  # three padding rows of the vocabulary


def test_memory_is_bounded_by_the_chunk_not_by_the_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_size_of_a_chunk_does_not_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    folder = write_tiny_model(tmp_path / "hf", family, vocab_size=321)
    expected = convert(folder, tmp_path / "one", tp_size=2, dtype="bfloat16").path
    monkeypatch.setattr(streaming, "CHUNK", 1000)
    actual = convert(folder, tmp_path / "two", tp_size=2, dtype="bfloat16").path
    for name in ("rank0.safetensors", "rank1.safetensors"):
        assert (actual / name).read_bytes() == (expected / name).read_bytes()


def test_reads_and_writes_that_stop_short_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_tiny_model(tmp_path / "hf")
    expected = convert(folder, tmp_path / "one", dtype="float32", tp_size=2).path
    preadv, pwrite = os.preadv, os.pwrite
    monkeypatch.setattr(os, "preadv", lambda file, buffers, offset: preadv(file, [buffers[0][:777]], offset))
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: pwrite(file, data[:999], offset))
    actual = convert(folder, tmp_path / "two", dtype="float32", tp_size=2).path
    for name in ("rank0.safetensors", "rank1.safetensors"):
        assert (actual / name).read_bytes() == (expected / name).read_bytes()


@pytest.mark.parametrize(("family", "dtype"), [("llama", "float16"), ("llama", "bfloat16"), ("gpt2", "bfloat16")])
@pytest.mark.parametrize("source", ["float16", "bfloat16"])
def test_the_number_of_processes_does_not_show(
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


def test_a_small_model_is_converted_by_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    plan = plan_conversion(Model(path=write_tiny_model(tmp_path / "hf")), ConvertSpec())
    assert streaming.process_count(plan.moves) == 1
    monkeypatch.setattr(streaming, "WORTH", plan.source_bytes)
    assert streaming.process_count(plan.moves) == 2
    monkeypatch.setattr(streaming, "WORTH", 1)
    assert streaming.process_count(plan.moves) == 4


@pytest.mark.parametrize("cores", [1, 4])
def test_of_several_values_that_do_not_fit_the_first_of_the_file_is_named(
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
