"""Streaming of weights: each source is read once, memory is a chunk, neither chunks nor processes show in the files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.stages import convert_model
from tests.support.tiny_models import write_tiny_model
from trtserve.artifacts import Checkpoint, Model
from trtserve.checkpoint import streaming
from trtserve.pipeline.convert_own import plan_own_conversion
from trtserve.specs import ConvertSpec


def convert(folder: Path, out: Path, **spec: Any) -> Checkpoint:
    return convert_model(Model(path=folder), ConvertSpec(**spec), out=out)


def test_every_source_is_read_once_in_file_order(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "hf", "llama3", shards=2)
    plan = plan_own_conversion(Model(path=folder), ConvertSpec(tp_size=4))
    places = [(move.source.file.path, move.source.entry.begin) for move in plan.moves]
    assert places == sorted(places)
    assert len(set(places)) == len(places)


def test_blocks_fill_every_rank_file_exactly(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "hf", vocab_size=321, num_key_value_heads=1)
    plan = plan_own_conversion(Model(path=folder), ConvertSpec(tp_size=4, dtype="float32"))
    spans: list[list[tuple[int, int]]] = [[] for _ in plan.sizes]
    for block in (block for move in plan.moves for block in move.blocks):
        spans[block.rank].append((block.offset, block.offset + block.rows * block.columns * 4))
    for rank, (header, size) in enumerate(zip(plan.headers, plan.sizes, strict=True)):
        end = len(header)
        for start, stop in sorted(spans[rank]):
            assert start == end
            end = stop
        assert end == size - (3 * 64 * 4 if rank == 3 else 0)  # three padding rows of the vocabulary


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_result_is_independent_of_chunk_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    folder = write_tiny_model(tmp_path / "hf", family, vocab_size=321)
    expected = convert(folder, tmp_path / "one", tp_size=2, dtype="bfloat16").path
    monkeypatch.setattr(streaming, "CHUNK", 1000)
    actual = convert(folder, tmp_path / "two", tp_size=2, dtype="bfloat16").path
    for name in ("rank0.safetensors", "rank1.safetensors"):
        assert (actual / name).read_bytes() == (expected / name).read_bytes()


def test_short_reads_and_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_tiny_model(tmp_path / "hf")
    expected = convert(folder, tmp_path / "one", dtype="float32", tp_size=2).path
    preadv, pwrite = os.preadv, os.pwrite
    monkeypatch.setattr(os, "preadv", lambda file, buffers, offset: preadv(file, [buffers[0][:777]], offset))
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: pwrite(file, data[:999], offset))
    actual = convert(folder, tmp_path / "two", dtype="float32", tp_size=2).path
    for name in ("rank0.safetensors", "rank1.safetensors"):
        assert (actual / name).read_bytes() == (expected / name).read_bytes()


def test_a_small_model_is_converted_by_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    plan = plan_own_conversion(Model(path=write_tiny_model(tmp_path / "hf")), ConvertSpec())
    assert streaming.process_count(plan.moves) == 1
    monkeypatch.setattr(streaming, "WORTH", plan.source_bytes)
    assert streaming.process_count(plan.moves) == 2
    monkeypatch.setattr(streaming, "WORTH", 1)
    assert streaming.process_count(plan.moves) == 4
