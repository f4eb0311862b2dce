"""Folders as sources: referred to, never changed, refused when something is wrong with them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.support.stages import pull_model
from tests.support.tiny_models import write_tiny_model
from trtserve.artifacts import Manifest
from trtserve.errors import (
    ArtifactError,
    CorruptFileError,
    DiskSpaceError,
    ModelNotFoundError,
    UnsupportedModelError,
    UsageError,
)
from trtserve.host.machine import free_disk, require_disk
from trtserve.pipeline.model import plan_model
from trtserve.store import Store


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "mine"))


def _content(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.iterdir()}


def test_a_folder_is_linked_and_not_changed(folder: Path) -> None:
    before = _content(folder)
    model = pull_model(str(folder))
    assert _content(folder) == before
    assert model.name == "mine"
    assert (model.path / "model.safetensors").readlink() == folder / "model.safetensors"
    assert not (model.path / "config.json").is_symlink()


def test_only_an_unchanged_folder_is_reused(folder: Path) -> None:
    first = pull_model(str(folder))
    assert pull_model(str(folder)) == first
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 5000.0}))
    second = pull_model(str(folder))
    os.utime(folder / "model.safetensors", ns=(1, 1))
    third = pull_model(str(folder))
    assert len({first.fingerprint, second.fingerprint, third.fingerprint}) == 3


def test_the_spelling_of_a_path_does_not_matter(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(tmp_path / "here")
    plans = [plan_model(spelling) for spelling in (str(folder), "../mine", "../here/../mine/", "../link")]
    assert {(plan.fingerprint, plan.source.location, plan.name) for plan in plans} == {
        (plans[0].fingerprint, str(folder.resolve()), "mine")
    }


def test_out_and_name(folder: Path, tmp_path: Path) -> None:
    model = pull_model(str(folder), name="other", out=tmp_path / "there")
    assert (model.path, model.name) == (tmp_path / "there", "other")
    assert not Store().root.joinpath("models").exists()


def test_out_does_not_replace_other_files(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("mine")
    with pytest.raises(ArtifactError, match="precious"):
        pull_model(str(folder), out=tmp_path / "precious")


def test_the_demo_has_one_fingerprint_everywhere() -> None:
    plan = plan_model("demo")
    assert plan.architecture == "LlamaForCausalLM"
    assert all(file.digest.startswith("sha256:") for file in plan.files)
    model = pull_model("demo")
    assert not any(path.is_symlink() for path in model.path.iterdir())


@pytest.mark.parametrize(
    ("keep", "words"), [(-1, "but the file has"), (5, "its header claims"), (100, "its header claims")]
)
def test_weights_that_are_cut_off_are_refused(folder: Path, keep: int, words: str) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    with pytest.raises(CorruptFileError, match=words):
        pull_model(str(folder))


def test_missing_files_are_named(folder: Path) -> None:
    (folder / "tokenizer.json").rename(folder / "kept.json")
    with pytest.raises(UnsupportedModelError, match="no tokenizer"):
        pull_model(str(folder))
    (folder / "config.json").unlink()
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        pull_model(str(folder))


def test_a_broken_config_is_named(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(CorruptFileError, match=r"config\.json"):
        pull_model(str(folder))


def test_other_weight_formats_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model.gguf")
    with pytest.raises(UnsupportedModelError, match=r"model\.gguf"):
        pull_model(str(folder))


def test_quantised_weights_are_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "quanto"}}))
    with pytest.raises(UnsupportedModelError, match="quanto"):
        pull_model(str(folder))


def test_a_full_disk_is_reported_with_numbers(tmp_path: Path) -> None:
    require_disk(tmp_path, 0, "nothing")
    with pytest.raises(DiskSpaceError, match=r"GiB.*free") as caught:
        require_disk(tmp_path, free_disk(tmp_path) + 1, "weights")
    assert "TRTSERVE_HOME" in str(caught.value.hint)


def test_artefacts_of_other_kinds_are_refused(folder: Path) -> None:
    Manifest(kind="checkpoint", name="x", fingerprint="0" * 64).write(folder)
    with pytest.raises(ArtifactError, match="is of kind checkpoint; expected model") as caught:
        pull_model(str(folder))
    assert "trtserve build" in str(caught.value.hint)


def test_a_manifest_of_another_tool_is_ignored(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"files": 3}')
    assert pull_model(str(folder)).path.is_dir()


def test_a_file_is_neither_a_model_nor_a_hub_id(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    with pytest.raises(ModelNotFoundError, match="is a file; a model is a folder"):
        pull_model(f"{folder.name}/config.json")


def test_a_link_out_of_the_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("{}")
    (folder / "special_tokens_map.json").unlink(missing_ok=True)
    (folder / "special_tokens_map.json").symlink_to(secret)
    with pytest.raises(UsageError, match="which is outside of"):
        pull_model(str(folder), store=Store(tmp_path / "home"))


def test_a_snapshot_of_the_hubs_cache_may_link_to_its_blobs(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "models--a--b"
    (cache / "blobs").mkdir(parents=True)
    snapshot = cache / "snapshots" / "0"
    shutil.copytree(folder, snapshot)
    (snapshot / "config.json").rename(cache / "blobs" / "c")
    (snapshot / "config.json").symlink_to(cache / "blobs" / "c")
    assert pull_model(str(snapshot), store=Store(tmp_path / "home")).path.is_dir()


def test_an_absurd_number_of_layers_is_refused_at_once(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 10**9}))
    with pytest.raises(UnsupportedModelError, match="no model is that large"):
        pull_model(str(folder), store=Store(tmp_path / "home"))


def test_a_folder_of_the_hubs_cache_means_its_snapshot(original: Path, tmp_path: Path) -> None:
    cache = tmp_path / "models--org--tiny-model"
    with pytest.raises(ModelNotFoundError, match="is not a folder"):
        plan_model(str(cache))
    (cache / "snapshots").mkdir(parents=True)
    with pytest.raises(ModelNotFoundError, match="in the cache of huggingface_hub, with 0 snapshots"):
        plan_model(str(cache))
    old, new = (cache / "snapshots" / (letter * 40) for letter in "ab")
    shutil.copytree(original, old)
    assert (plan_model(str(cache)).source.location, plan_model(str(cache)).name) == (str(old), "tiny-model")
    shutil.copytree(original, new)
    with pytest.raises(ModelNotFoundError, match="with 2 snapshots"):
        plan_model(str(cache))
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("b" * 40)
    assert plan_model(str(cache)).source.location == str(new)
