"""Checksums of artefacts: what was changed since an artefact was made is found, named, and not reused."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trtserve.artifacts import Checksums, Engine, Manifest, ModelRepository, accept_change, damages, load_artifact
from trtserve.errors import CorruptFileError
from trtserve.progress import SILENT
from trtserve.repository.check.files import require_intact
from trtserve.store import NameRecord, Store, publish, remembered_checksums, reusable

MANIFEST = Manifest(kind="engine", name="demo", fingerprint="1" * 64)


def made(folder: Path) -> Engine:
    """An engine of two files."""

    def produce(staging: Path) -> None:
        (staging / "config.json").write_text("{}")
        (staging / "rank0.bin").write_bytes(bytes(range(256)) * 100)

    return publish(Engine, folder, MANIFEST, produce)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[1000] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": lambda path: os.truncate(path, 500),
    "bit-flipped": flip,
    "removed": lambda path: path.unlink(),
    "grown": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_artefact_is_named_and_made_again(damage: Callable[[Path], object], tmp_path: Path) -> None:
    engine = made(tmp_path / "engine")
    assert not damages(engine, Checksums())
    damage(engine.path / "rank0.bin")
    assert list(damages(engine, remembered_checksums())) == [engine.path / "rank0.bin"]
    assert reusable(Engine, engine.path, MANIFEST.fingerprint) is None
    again = made(engine.path)
    assert not damages(again, Checksums())


def test_an_undamaged_artefact_is_read_once(tmp_path: Path) -> None:
    memory = tmp_path / "memory.json"
    file = tmp_path / "file"
    file.write_bytes(b"1")
    first = Checksums(memory).of([file])
    times = file.stat()
    file.write_bytes(b"2")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert Checksums(memory).of([file]) == first
    assert Checksums().of([file]) != first
    file.touch()
    assert Checksums(memory).of([file]) == Checksums().of([file])


def test_a_damaged_memory_is_read_again(tmp_path: Path) -> None:
    file, memory = tmp_path / "file", tmp_path / "memory.json"
    file.write_bytes(b"1")
    memory.write_text("nonsense")
    assert Checksums(memory).of([file]) == Checksums().of([file])


def test_a_twin_is_not_linked_to_a_damaged_artefact(tmp_path: Path) -> None:
    first = made(tmp_path / f"one-{'1' * 12}")
    flip(first.path / "rank0.bin")
    assert not damages(made(tmp_path / f"two-{'1' * 12}"), Checksums())


def test_a_change_of_our_own_is_accepted(tmp_path: Path) -> None:
    engine = made(tmp_path / "engine")
    (engine.path / "config.json").write_text('{"gpus": 4}')
    accept_change(engine.path / "config.json")
    assert not damages(load_artifact(Engine, engine.path), Checksums())


@pytest.fixture
def repository(tmp_path: Path) -> ModelRepository:
    def produce(staging: Path) -> None:
        (staging / "demo" / "1").mkdir(parents=True)
        (staging / "demo" / "config.pbtxt").write_text('name: "demo"\n')
        (staging / "demo" / "1" / "model.py").write_text("class TritonPythonModel:\n    pass\n")

    manifest = Manifest(kind="repository", name="demo", fingerprint="2" * 64)
    return publish(ModelRepository, tmp_path / "repository", manifest, produce)


def test_a_start_names_the_damaged_file_and_the_repair(repository: ModelRepository, tmp_path: Path) -> None:
    require_intact(repository.path, [], SILENT)
    (repository.path / "demo" / "1" / "model.py").write_text("class TritonPythonModel:\n    pass #\n")
    with pytest.raises(CorruptFileError, match=r"demo/1/model\.py has another content") as caught:
        require_intact(repository.path, [None, tmp_path / "absent"], SILENT)
    assert caught.value.hint is not None
    assert "trtserve repo" in caught.value.hint
    paths: dict[str, Any] = dict.fromkeys(("model", "checkpoint", "engine"), "x")
    Store().record(NameRecord(name="demo", source="demo", repository=str(repository.path), imported="", **paths))
    with pytest.raises(CorruptFileError) as caught:
        require_intact(repository.path, [], SILENT)
    assert "trtserve import demo --name demo" in str(caught.value.hint)


def test_an_engine_outside_the_repository_is_compared_too(repository: ModelRepository, tmp_path: Path) -> None:
    engine = made(tmp_path / "engine")
    flip(engine.path / "rank0.bin")
    with pytest.raises(CorruptFileError, match=r"rank0\.bin"):
        require_intact(repository.path, [engine.path], SILENT)


def test_configurations_may_be_edited(repository: ModelRepository) -> None:
    (repository.path / "demo" / "config.pbtxt").write_text('name: "demo" max_batch_size: 4\n')
    require_intact(repository.path, [], SILENT)


def test_artefacts_of_other_tools_are_not_compared(repository: ModelRepository) -> None:
    (repository.path / "manifest.json").unlink()
    require_intact(repository.path, [], SILENT)
