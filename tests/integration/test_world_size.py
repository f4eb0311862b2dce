"""`start --world-size` on an import of another size: converted, built and assembled again, once."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.tiny_models import write_tiny_model
from trtserve.artifacts import Checkpoint, ModelRepository
from trtserve.cli.app import run
from trtserve.errors import UsageError
from trtserve.pipeline import world_size
from trtserve.pipeline.recorded import recordable, recorded_spec
from trtserve.pipeline.world_size import repository_for, with_world_size
from trtserve.progress import SilentProgress
from trtserve.specs import ServerSpec
from trtserve.start import find_repository, wants_rebuild
from trtserve.store import Store
from trtserve.triton.preflight import inspect_repository

FLAGS = ("--dtype", "float32", "--max-seq-len", "128", "--max-batch-size", "2", "--no-streaming")


class Heard(SilentProgress):
    """Keeps what was said."""

    def __init__(self) -> None:
        self.steps: list[str] = []

    def step(self, text: str) -> None:
        self.steps.append(text)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with one small import."""
    folder = tmp_path_factory.mktemp("world")
    write_tiny_model(folder / "tiny")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRTSERVE_HOME", str(folder / "home"))
        assert run(["import", str(folder / "tiny"), *FLAGS, "--quiet"]) == 0
    return folder / "home"


@pytest.fixture
def imported(home: Path, monkeypatch: pytest.MonkeyPatch) -> ModelRepository:
    """The import, whose engine counts as one for GPUs."""
    monkeypatch.setenv("TRTSERVE_HOME", str(home))
    monkeypatch.setattr(
        world_size, "wants_rebuild", lambda served, spec: spec.world_size not in (None, served.world_size)
    )
    return find_repository("tiny")


def test_another_size_is_built_once(imported: ModelRepository) -> None:
    heard = Heard()
    two = repository_for(imported, ServerSpec(world_size=2), progress=heard)
    assert heard.steps[0] == (
        "World size 2: tiny was imported for 1 rank(s), so it is converted and built again with tp 2; "
        "what exists is reused."
    )
    served = inspect_repository(two)
    assert two.path != imported.path  # the CPU's engine of two shards is one again, but from another checkpoint
    assert not served.streaming
    assert served.engine["build_config"]["max_batch_size"] == 2
    heard = Heard()
    again = repository_for(imported, ServerSpec(world_size=2), progress=heard)
    assert again.path == two.path
    assert any("is reused" in step for step in heard.steps)
    assert find_repository("tiny").path == imported.path
    mappings = [
        json.loads((path / "config.json").read_text())["mapping"]["tp_size"]
        for path in Store().folder(Checkpoint).glob("*-*")
    ]
    assert sorted(mappings) == [1, 2]


def test_without_rebuilding_it_is_refused(imported: ModelRepository) -> None:
    with pytest.raises(UsageError, match=r"needs it converted and built again \(tp 4\)") as caught:
        repository_for(imported, ServerSpec(world_size=4), rebuild=False)
    assert "/tiny --name tiny --tp-size 4" in str(caught.value.hint)
    assert repository_for(imported, ServerSpec(world_size=1), rebuild=False) is imported


def test_what_was_not_imported_is_left_to_start(imported: ModelRepository, tmp_path: Path) -> None:
    elsewhere = replace(imported, path=tmp_path / "copy")
    shutil.copytree(imported.path, elsewhere.path)
    assert repository_for(elsewhere, ServerSpec(world_size=2)) is elsewhere


def test_an_import_of_an_older_version_is_left_to_start(imported: ModelRepository) -> None:
    (record,) = Store().recorded()
    Store().record(replace(record, spec={}))
    try:
        assert repository_for(imported, ServerSpec(world_size=2)) is imported
    finally:
        Store().record(record)


def test_an_import_can_be_read_again(imported: ModelRepository) -> None:
    (record,) = Store().recorded()
    spec = recorded_spec(record)
    assert spec is not None
    assert (spec.convert.dtype, spec.build.max_seq_len, spec.repository.streaming) == ("float32", 128, False)
    assert json.loads(json.dumps(recordable(spec))) == record.spec


def test_stages_stay_where_they_divide_the_size(imported: ModelRepository) -> None:
    spec = recorded_spec(Store().recorded()[0])
    assert spec is not None
    staged = replace(spec, convert=replace(spec.convert, pp_size=2))
    assert (with_world_size(staged, 4).convert.tp_size, with_world_size(staged, 4).convert.pp_size) == (2, 2)
    assert (with_world_size(staged, 3).convert.tp_size, with_world_size(staged, 3).convert.pp_size) == (3, 1)


def test_the_cpu_never_builds_again(imported: ModelRepository) -> None:
    assert not wants_rebuild(inspect_repository(imported), ServerSpec(world_size=4))
