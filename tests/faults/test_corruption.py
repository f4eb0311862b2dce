"""Damaged artefacts: every file truncated, bit-flipped or removed is found before it is served."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.stages import tiny_repository
from tests.support.supervised import ALL, measured
from tests.support.tiny_models import write_tiny_model
from trtserve.artifacts import Checksums, ModelRepository, load_artifact
from trtserve.cli import run
from trtserve.errors import CorruptFileError
from trtserve.progress import SILENT
from trtserve.repository.check import check_repository
from trtserve.repository.check.files import require_intact
from trtserve.specs import BuildSpec


def flip(path: Path) -> None:
    """Turn over one bit, and keep the time of change, as a failing disk does."""
    content, times = bytearray(path.read_bytes()), path.stat()
    content[random.Random(path.name).randrange(len(content))] ^= 1
    path.unlink()
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def truncate(path: Path) -> None:
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[: len(content) // 2])


DAMAGES: dict[str, Callable[[Path], object]] = {"truncated": truncate, "bit-flipped": flip, "removed": Path.unlink}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_repository(tmp_path_factory.mktemp("corruption"), BuildSpec(max_batch_size=2, runtime="openvino"))


@pytest.mark.parametrize("damage", DAMAGES)
def test_every_damaged_file_is_found(damage: str, repository: Path, tmp_path: Path) -> None:
    names = [name for name in load_manifest_files(repository) if not name.endswith("config.pbtxt")]
    assert {"tensorrt_llm/1/rank0.bin", "tensorrt_llm/1/model.py", "tensorrt_llm/1/config.json"} <= set(names)
    chosen = names if ALL else ["tensorrt_llm/1/rank0.bin", *random.Random(damage).sample(names, 8)]
    for number, name in enumerate(chosen):
        copy = tmp_path / str(number)
        shutil.copytree(repository, copy, copy_function=os.link)
        if (copy / name).stat().st_size == 0 and damage != "removed":
            continue
        DAMAGES[damage](copy / name)
        with pytest.raises(CorruptFileError) as caught:
            require_intact(copy, [], SILENT)
        assert name in caught.value.message
        shutil.rmtree(copy)
    measured("corruption", damage=damage, files=len(chosen))


def load_manifest_files(repository: Path) -> list[str]:
    manifest = load_artifact(ModelRepository, repository).manifest
    assert manifest is not None
    return list(manifest.files)


def test_check_finds_a_flipped_bit(repository: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(repository, copy, copy_function=os.link)
    flip(copy / "tensorrt_llm" / "1" / "rank0.bin")
    artifact = load_artifact(ModelRepository, copy)
    report = check_repository(ModelRepository(path=copy, manifest=artifact.manifest), load_tokenizers=False)
    assert [(each.rule, each.file) for each in report.errors] == [
        ("file-content", copy / "tensorrt_llm" / "1" / "rank0.bin")
    ]


def test_an_import_repairs_what_start_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_tiny_model(tmp_path / "model")
    words = ["import", f"local:{model}", "--name", "tiny", "--runtime", "openvino", "--quiet"]
    assert run(words) == 0
    (weights,) = (tmp_path / "home" / "engines").glob("*/rank0.bin")
    with weights.open("r+b") as handle:  # the repository has a hard link to it
        handle.seek(1000)
        handle.write(b"damaged")
    assert run(["start", "tiny", "--auto-ports", "--quiet"]) == CorruptFileError.code
    errors = capsys.readouterr().err
    assert "rank0.bin" in errors
    assert "trtserve import" in errors
    assert run(words) == 0
    (repaired,) = (tmp_path / "home" / "repositories").glob("*")
    require_intact(repaired, [], SILENT)


@pytest.mark.parametrize("size", [2**30] if ALL else [2**24])
def test_a_file_is_read_once(size: int, tmp_path: Path) -> None:
    file = tmp_path / "rank0.bin"
    file.write_bytes(random.Random(0).randbytes(2**20) * (size // 2**20))
    begin, worked = time.perf_counter(), time.process_time()
    checksums = Checksums(tmp_path / "memory.json").of([file])
    first, worked = time.perf_counter() - begin, time.process_time() - worked
    begin = time.perf_counter()
    assert Checksums(tmp_path / "memory.json").of([file]) == checksums
    again = time.perf_counter() - begin
    measured("checksum", gib=size / 2**30, seconds=first, cpu_seconds=worked, remembered_seconds=again)
