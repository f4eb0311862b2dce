"""Placement of tensors that are fused from several sources, down to the byte."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.tiny_models import read_safetensors, write_safetensors
from trtserve.checkpoint.architectures.base import Target
from trtserve.checkpoint.placement import Placement, match, moves, runs
from trtserve.checkpoint.sharding import stage_layers
from trtserve.checkpoint.source import SourceTensor
from trtserve.checkpoint.streaming import carry_out, created
from trtserve.checkpoint.tensor_files import TensorFile
from trtserve.errors import ConversionError, UnsupportedModelError

Rows = npt.NDArray[Any]

ROWS = np.arange(24, dtype=np.float32).reshape(6, 4)


def target(name: str = "fused", **changes: object) -> Target:
    fields: dict[str, object] = {"sources": ("a", "b"), "shape": (6, 4), "split": "column", "parts": (2, 4)}
    return Target(name=name, **(fields | changes))  # type: ignore[arg-type]


def sources(path: Path) -> dict[str, SourceTensor]:
    write_safetensors(path, {"a": ROWS[:2], "b": ROWS[2:]})
    file = TensorFile(path)
    return {name: SourceTensor(name=name, file=file, entry=entry) for name, entry in file.entries.items()}


@pytest.mark.parametrize("tp_size", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_sources_are_joined_within_a_rank(tmp_path: Path, tp_size: int, dtype: str) -> None:
    found = sources(tmp_path / "source.safetensors")
    placement = Placement([target()], layers=1, tp_size=tp_size, pp_size=1, dtype=dtype)
    with created(tmp_path, placement.headers, placement.sizes) as files:
        carry_out(moves(match([target()], found, ()), placement, found), files, dtype)
    for rank, expected in enumerate(np.split(ROWS, tp_size)):
        actual = read_safetensors(tmp_path / f"rank{rank}.safetensors")["fused"]
        np.testing.assert_array_equal(actual, expected.astype(dtype))


def test_duplicate_targets_are_listed(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match=r"produces checkpoint tensors twice \(1\): fused"):
        match([target(), target()], sources(tmp_path / "x.safetensors"), ())


def test_non_float_sources_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    header = b'{"a":{"dtype":"I8","shape":[2,4],"data_offsets":[0,8]}}'
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    file = TensorFile(path)
    found = {"a": SourceTensor(name="a", file=file, entry=file.entries["a"])}
    with pytest.raises(UnsupportedModelError, match="a has type I8"):
        match([target(sources=("a",), shape=(2, 4), parts=())], found, ())


def test_first_stages_get_the_remaining_layers() -> None:
    assert stage_layers(7, 3) == [range(3), range(3, 5), range(5, 7)]
    assert stage_layers(4, 2) == [range(2), range(2, 4)]


def one_source(folder: Path, values: Rows) -> dict[str, SourceTensor]:
    write_safetensors(folder / "source.safetensors", {"a": values})
    file = TensorFile(folder / "source.safetensors")
    return {"a": SourceTensor(name="a", file=file, entry=file.entries["a"])}


def placed(folder: Path, wanted: Target, values: Rows, tp_size: int) -> list[Rows]:
    """The target's tensor on each rank."""
    found = one_source(folder, values)
    placement = Placement([wanted], layers=1, tp_size=tp_size, pp_size=1, dtype="float32")
    with created(folder, placement.headers, placement.sizes) as files:
        carry_out(moves(match([wanted], found, ()), placement, found), files, "float32")
    return [read_safetensors(folder / f"rank{rank}.safetensors")["fused"] for rank in range(tp_size)]


@pytest.mark.parametrize("tp_size", [1, 2, 3])
def test_reordered_rows_are_sorted_before_splitting(tmp_path: Path, tp_size: int) -> None:
    wanted = target(sources=("a",), parts=(), order=((4, 2), (1, 1), (0, 1), (2, 2)))
    ranks = placed(tmp_path, wanted, ROWS, tp_size)
    np.testing.assert_array_equal(np.concatenate(ranks), ROWS[[4, 5, 1, 0, 2, 3]])


def test_rows_before_the_first_run_are_skipped(tmp_path: Path) -> None:
    wanted = target(sources=("a",), shape=(4, 4), parts=(), split="replicated", order=((2, 4),))
    np.testing.assert_array_equal(placed(tmp_path, wanted, ROWS, 1)[0], ROWS[2:])
    with pytest.raises(ConversionError, match=r"a is \[6, 4\], expected \[5, 4\]"):
        match([target(sources=("a",), shape=(4, 4), parts=(), order=((1, 4),))], one_source(tmp_path, ROWS), ())


def test_shapes_are_compared_once_for_each_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def counted(each: Target) -> Iterator[tuple[str, int, int]]:
        asked.append(each.name)
        return runs(each)

    monkeypatch.setattr("trtserve.checkpoint.placement.runs", counted)
    reordered = target(sources=("a",), parts=(), order=tuple((row, 1) for row in (5, 3, 1, 0, 2, 4)))
    match([reordered], one_source(tmp_path, ROWS), ())
    assert asked == ["fused", "fused"], "for the uses, and for the shapes: not for each of its runs"


def test_fused_halves_are_split_separately(tmp_path: Path) -> None:
    ranks = placed(tmp_path, target(sources=("a",), split="fused", parts=(2, 4)), ROWS, 2)
    np.testing.assert_array_equal(ranks[0], ROWS[[0, 2, 3]])
    np.testing.assert_array_equal(ranks[1], ROWS[[1, 4, 5]])


def test_all_reduced_bias_is_on_the_first_rank_only(tmp_path: Path) -> None:
    wanted = target(sources=("a",), shape=(4,), parts=(), split="first_rank")
    first, second = placed(tmp_path, wanted, ROWS[0], 2)
    np.testing.assert_array_equal(first, ROWS[0])
    np.testing.assert_array_equal(second, np.zeros(4))
