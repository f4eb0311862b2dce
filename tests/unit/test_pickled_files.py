"""pytorch_model.bin: the same checkpoint as from safetensors, and no code of a pickle is ever run."""

from __future__ import annotations

import json
import os
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.stages import convert_model, pull_model
from tests.support.tiny_models import write_tiny_model
from trtserve.artifacts import Model
from trtserve.checkpoint.tensor_files import PickledFile
from trtserve.errors import CorruptFileError, MissingDependencyError, UnsupportedModelError
from trtserve.pipeline.convert_own import plan_own_conversion
from trtserve.specs import ConvertSpec


def pickled(folder: Path, *, shards: int = 1, **overrides: Any) -> tuple[Path, Path]:
    """A tiny model, and the same with its weights in files of `torch.save`."""
    import torch
    from safetensors.torch import load_file

    original = write_tiny_model(folder / "original", **overrides)
    copy = shutil.copytree(original, folder / "pickled")
    tensors = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    if shards == 1:
        torch.save(tensors, copy / "pytorch_model.bin")
        return original, copy
    places = {name: f"pytorch_model-{number % shards}.bin" for number, name in enumerate(tensors)}
    for file in set(places.values()):
        torch.save({name: tensors[name] for name in tensors if places[name] == file}, copy / file)
    (copy / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))
    return original, copy


@pytest.mark.needs("torch")
@pytest.mark.parametrize(("shards", "spec"), [(1, ConvertSpec()), (3, ConvertSpec(tp_size=2, dtype="float32"))])
def test_bin_files_give_the_same_checkpoint_as_safetensors(tmp_path: Path, shards: int, spec: ConvertSpec) -> None:
    folders = pickled(tmp_path, shards=shards, dtype="bfloat16")
    made = [convert_model(Model(path=path), spec, out=tmp_path / f"made{n}").path for n, path in enumerate(folders)]
    for path in made[0].glob("rank*.safetensors"):
        assert path.read_bytes() == (made[1] / path.name).read_bytes()


@pytest.mark.needs("torch")
def test_import_refers_to_the_files(tmp_path: Path) -> None:
    _, copy = pickled(tmp_path, shards=2)
    model = pull_model(str(copy), out=tmp_path / "model")
    assert (model.path / "pytorch_model-1.bin").resolve() == (copy / "pytorch_model-1.bin").resolve()
    assert plan_own_conversion(model, ConvertSpec()).moves


@pytest.mark.needs("torch")
def test_views_of_one_storage(tmp_path: Path) -> None:
    """Tied tensors and slices lie where their storage lies."""
    import torch

    whole = torch.arange(12, dtype=torch.float32).reshape(4, 3)
    path = tmp_path / "pytorch_model.bin"
    torch.save({"other": torch.ones(5, dtype=torch.float16), "whole": whole, "tied": whole, "part": whole[1:3]}, path)
    file = PickledFile(path)
    for name, expected in (("whole", whole), ("tied", whole), ("part", whole[1:3])):
        assert (file.tensor(name) == expected.numpy()).all()
    torch.save({"turned": whole.t()}, path)
    with pytest.raises(UnsupportedModelError, match=r"turned .* is not stored row after row"):
        PickledFile(path)


class Evil:
    """Runs code when a pickle of it is loaded without care."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.needs("torch")
def test_code_in_a_pickle_is_not_run(tmp_path: Path) -> None:
    import torch

    path, mark = tmp_path / "pytorch_model.bin", tmp_path / "mark"
    torch.save({"weight": torch.ones(3), "evil": Evil(mark)}, path)
    with pytest.raises(UnsupportedModelError, match="could run code"):
        PickledFile(path)
    assert not mark.exists()


@pytest.mark.needs("torch")
def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    import torch

    path = tmp_path / "pytorch_model.bin"
    for content, message in (
        (b"version https://git-lfs", "Git LFS pointer"),
        (b"", "never wrote"),
        (b"<html>", "never"),
    ):
        path.write_bytes(content)
        with pytest.raises(CorruptFileError, match=message):
            PickledFile(path)
    torch.save({"weight": torch.arange(3000)}, path)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(CorruptFileError, match="PyTorch cannot read"):
        PickledFile(path)
    tables: list[Any] = [
        {"weight": torch.ones(3), "epoch": 3},
        {1: torch.ones(3)},
        {"model": {"a": torch.ones(3)}},
        [1],
    ]
    for table in tables:
        torch.save(table, path)
        with pytest.raises(UnsupportedModelError, match="does not contain a dictionary of tensors"):
            PickledFile(path)


@pytest.mark.needs("torch")
def test_non_contiguous_tensors_are_refused(tmp_path: Path) -> None:
    import torch

    path = tmp_path / "pytorch_model.bin"
    held = {"weight": torch.ones(3), "empty": torch.zeros(0, 4)}
    torch.save(held, path)
    entries = PickledFile(path).entries
    assert (entries["empty"].shape, entries["empty"].size) == ((0, 4), 0)
    for tensor, message in (
        (torch.eye(3).to_sparse(), "sparse"),
        (torch.empty(3, device="meta"), "without numbers"),
        (torch.zeros(3, dtype=torch.complex64), "complex64"),
    ):
        torch.save(held | {"odd": tensor}, path)
        with pytest.raises(UnsupportedModelError, match=rf"odd .* is .*{message}"):
            PickledFile(path)
    torch.save({}, path)
    assert PickledFile(path).entries == {}


def test_missing_torch_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_tiny_model(tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")

    def without(name: str) -> Any:
        return None if name == "torch" else find_spec(name)

    monkeypatch.setattr("trtserve.checkpoint.tensor_files.find_spec", without)
    for use in (lambda: plan_own_conversion(Model(path=folder), ConvertSpec()), lambda: pull_model(str(folder))):
        with pytest.raises(MissingDependencyError, match="only PyTorch can read") as caught:
            use()
        assert "[oracle]" in str(caught.value.hint)
