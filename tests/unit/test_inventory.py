"""Names, their disk, and removal that spares what others use."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.server_records import server_record
from trtserve.artifacts import MANIFEST, Artifact, Checkpoint, Engine, Manifest, Model, ModelRepository
from trtserve.cli.app import run
from trtserve.errors import ArtifactError, LockedError, ModelNotFoundError
from trtserve.files import locked, write_json
from trtserve.pipeline.inventory import disk_usage, freed_bytes, list_imported, plan_prune, plan_removal, remove
from trtserve.pipeline.model import download_folder
from trtserve.server import repositories
from trtserve.server.state import write_state
from trtserve.store import NameRecord, Store, publish, withdraw
from trtserve.store.hub import Revision

_KINDS: dict[type[Artifact], str] = {
    Model: "model",
    Checkpoint: "checkpoint",
    Engine: "engine",
    ModelRepository: "repository",
}


def _artifact(kind: type[Artifact], name: str, mark: str, size: int = 1000, path: Path | None = None) -> Path:
    manifest = Manifest(kind=_KINDS[kind], name=name, fingerprint=mark * 64)  # type: ignore[arg-type]

    def produce(folder: Path) -> None:
        (folder / "data").write_bytes(b"x" * size)

    return publish(kind, path or Store().destination(kind, name, mark * 64), manifest, produce).path


def _imported(name: str, *, mark: str, model: Path | None = None, at: str = "2026-01-01") -> NameRecord:
    paths = {kind: _artifact(kind, name, mark) for kind in (Checkpoint, Engine, ModelRepository)}
    (paths[Engine] / "config.json").write_text(
        json.dumps(
            {
                "pretrained_config": {"dtype": "float16", "quantization": {"quant_algo": None}},
                "trtserve": {"compute_precision": "bf16", "kv_precision": "u8"},
            }
        )
    )
    record = NameRecord(
        name=name,
        source=f"org/{name}",
        model=str(model or _artifact(Model, name, mark)),
        checkpoint=str(paths[Checkpoint]),
        engine=str(paths[Engine]),
        repository=str(paths[ModelRepository]),
        imported=at,
    )
    Store().record(record)
    return record


def test_lists_newest_first_with_precision() -> None:
    _imported("old", mark="1")
    new = _imported("new", mark="2", at="2026-02-01")
    _artifact(Model, "pulled", "3")
    entries = list_imported()
    assert [entry.name for entry in entries] == ["new", "old", "pulled"]
    assert entries[0].precision == "float16, compute bf16, KV u8"
    assert entries[0].repository == new.repository
    assert entries[0].size > 4000
    assert entries[2].repository == ""


def _serving(name: str, repository: Path) -> None:
    server = server_record(name, repository=repository)
    write_state(server, Store())


def test_a_repository_without_an_import_is_listed_with_its_server() -> None:
    made = _artifact(ModelRepository, "made", "1")
    _serving("elsewhere", made)
    assert [(e.name, e.repository, e.server, e.imported) for e in list_imported()] == [
        ("made", str(made), "elsewhere", "")
    ]


def test_a_server_of_another_build_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    older = _imported("mine", mark="1")
    _imported("other", mark="3")
    newer = _imported("mine", mark="2", at="2026-02-01")
    _serving("elsewhere", Path(older.repository))
    assert [(e.name, e.server, e.other_build) for e in list_imported()] == [
        ("mine", "elsewhere", True),
        ("other", None, False),
    ]
    assert run(["list"]) == 0
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [row[-1] for row in rows] == ["server", "elsewhere (another build)", "-"]
    _serving("mine", Path(newer.repository))
    assert (list_imported()[0].server, list_imported()[0].other_build) == ("mine", False)


def test_removes_a_name_and_its_other_builds() -> None:
    record = _imported("mine", mark="1")
    older = _artifact(Engine, "mine", "0")
    other = _imported("other", mark="2")
    removal = plan_removal(["mine"])
    assert older in removal.folders
    assert removal.size >= 5000
    remove(removal)
    assert not older.exists()
    assert not Path(record.repository).exists()
    assert [entry.name for entry in list_imported()] == ["other"]
    assert Path(other.model).is_dir()


def test_keeps_artefacts_that_another_name_uses() -> None:
    first = _imported("first", mark="1")
    _imported("second", mark="2", model=Path(first.model))
    removal = plan_removal(["first"])
    assert removal.kept == (Path(first.model),)
    remove(removal)
    assert Path(first.model).is_dir()
    assert not Path(first.engine).exists()
    both = plan_removal(["second"])
    assert Path(first.model) in both.folders


def test_keeps_folders_outside_the_store(tmp_path: Path) -> None:
    outside = _artifact(Model, "mine", "9", path=tmp_path / "outside")
    _imported("mine", mark="1", model=outside)
    removal = plan_removal(["mine"])
    assert removal.kept == (outside,)
    remove(removal)
    assert outside.is_dir()


def test_everything_includes_unfinished_work() -> None:
    _imported("mine", mark="1")
    leftovers = [Store().root / "downloads" / "org--x", Store().folder(Engine) / ".x.partial"]
    for leftover in leftovers:
        leftover.mkdir(parents=True)
        (leftover / "part").write_bytes(b"12345")
    removal = plan_removal((), everything=True)
    assert set(leftovers) <= set(removal.folders)
    remove(removal)
    assert list_imported() == []
    assert disk_usage([Store().root / "downloads", Store().folder(Engine)]) == 0


def test_everything_includes_folders_of_servers_once_none_is_recorded() -> None:
    store = Store()
    left = {store.servers, store.root / "backends", store.root / "doctor"}
    for folder in left:
        (folder / "below").mkdir(parents=True)
    _serving("running", Path("elsewhere"))
    assert not left & set(plan_removal((), everything=True).folders)
    (store.servers / "running.json").unlink()
    assert not left & set(plan_removal([]).folders)
    removal = plan_removal((), everything=True)
    assert left <= set(removal.folders)
    remove(removal)
    assert not any(folder.exists() for folder in left)


def test_hard_links_count_once_and_free_only_with_the_last(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "a" / "data").write_bytes(b"x" * 500)
    os.link(tmp_path / "a" / "data", tmp_path / "b" / "data")
    (tmp_path / "b" / "symbolic").symlink_to(tmp_path / "a" / "data")
    assert disk_usage([tmp_path / "a", tmp_path / "b"]) == 500
    assert freed_bytes([tmp_path / "a"]) == 0
    assert freed_bytes([tmp_path / "a", tmp_path / "b"]) == 500


def test_unknown_name_suggests_close_ones() -> None:
    _imported("llama-2-7b", mark="1")
    with pytest.raises(ModelNotFoundError) as caught:
        plan_removal(["lama-2-7b"])
    assert "llama-2-7b" in str(caught.value.hint)


def test_refuses_an_artefact_that_another_process_works_on() -> None:
    record = _imported("mine", mark="1")
    engine = Path(record.engine)
    removal = plan_removal(["mine"])
    with locked(engine.parent / f".{engine.name}.lock"), pytest.raises(LockedError):
        remove(removal)
    remove(plan_removal(["mine"]))
    assert not engine.exists()


def test_a_folder_that_is_in_use_is_named(tmp_path: Path) -> None:
    """Two `tune` with one folder: the lock lies in it."""
    lock, words = tmp_path / ".lock", f"working on {tmp_path}"
    with locked(lock), pytest.raises(LockedError, match=words), locked(lock, wait=False):
        pass


@pytest.mark.parametrize("by", ["name", "folder"])
def test_refuses_what_other_commands_use(by: str) -> None:
    record = _imported("my-model", mark="1")
    text = record.checkpoint if by == "folder" else "my-model"
    removal, store = plan_removal(["my-model"]), Store()
    with store.in_use(text), store.in_use(text, None):
        with pytest.raises(LockedError, match="working on my-model"):
            remove(removal)
        with store.in_use("another"):
            pass
    assert [entry.name for entry in list_imported()] == ["my-model"]
    remove(removal)
    assert not list_imported()
    assert not list(store.name_lock("x").parent.iterdir())


def test_refuses_the_folder_of_a_running_build_and_leaves_every_name() -> None:
    record = _imported("mine", mark="1")
    refused: list[str] = []

    def produce(folder: Path) -> None:
        (folder / "half").write_bytes(b"x")
        with pytest.raises(LockedError) as caught:
            remove(plan_removal((), everything=True))
        refused.append(caught.value.message)
        assert (folder / "half").exists()

    place = Store().destination(Engine, "other", "2" * 64)
    publish(Engine, place, Manifest(kind="engine", name="other", fingerprint="2" * 64), produce)
    assert refused
    assert (place / "half").exists()
    assert [entry.name for entry in list_imported()] == ["mine", "other"]
    assert Path(record.repository).is_dir()


def test_refuses_the_folder_of_a_running_pull() -> None:
    revision = Revision(repository="org/x", commit="3" * 40, files=())
    with download_folder(Store(), revision) as folder:
        (folder / "model.safetensors.part").write_bytes(b"x")
        with pytest.raises(LockedError):
            remove(plan_removal((), everything=True))
        assert (folder / "model.safetensors.part").exists()
    remove(plan_removal((), everything=True))
    assert not folder.exists()


def test_a_hidden_folder_counts_as_unfinished_work() -> None:
    engine = _artifact(Engine, "mine", "1")
    hidden = engine.rename(engine.with_name(f".{engine.name}.old"))
    assert list_imported() == []
    assert plan_removal((), everything=True).folders == (hidden,)


def test_a_name_can_disappear_while_names_are_listed() -> None:
    _imported("mine", mark="1")
    (Store().names / "gone.json").symlink_to("nowhere")
    assert [record.name for record in Store().recorded()] == ["mine"]
    (Store().names / "gone.json").unlink()
    (Store().names / "damaged.json").write_bytes(b'{"name": "\xff"}')
    with pytest.raises(ArtifactError, match=r"damaged\.json"):
        Store().recorded()


def test_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["list"]) == 0
    assert capsys.readouterr().out == ""
    record = _imported("mine", mark="1")
    assert run(["list"]) == 0
    columns, row = (line.split("\t") for line in capsys.readouterr().out.splitlines())
    assert columns == ["name", "source", "size", "engine", "repository", "server"]
    assert row[:2] == ["mine", "org/mine"]
    assert run(["list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["result"][0]["name"] == "mine"
    assert run(["remove", "mine", "--dry-run"]) == 0
    assert record.engine in capsys.readouterr().out
    assert Path(record.engine).is_dir()
    assert run(["remove"]) == 2
    assert run(["remove", "absent"]) == ModelNotFoundError.code
    capsys.readouterr()
    assert run(["remove", "mine", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["result"]["removed"] is True
    assert not Path(record.engine).exists()


def test_unreadable_record_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    write_json(Store().names / "broken.json", {"name": "broken"})
    assert run(["list"]) == ArtifactError.code
    assert "broken.json" in capsys.readouterr().err


def _around() -> Path:
    """Put a file next to the store, and return it."""
    other = Store().root.parent / "other" / "precious"
    other.parent.mkdir(parents=True, exist_ok=True)
    other.write_text("mine")
    return other


@pytest.mark.parametrize("place", ["../other", "models/../../other", "models", "downloads", "", "models/..", "a/b"])
def test_what_is_not_an_artefact_of_the_store_is_not_removed(place: str) -> None:
    other, store = _around(), Store()
    _imported("mine", mark="1", model=store.root / place)
    (store.root / "a" / "b").mkdir(parents=True)
    store.downloads.mkdir()
    store.folder(Model).mkdir()
    remove(plan_removal(["mine"]))
    assert other.read_text() == "mine"
    assert (store.root / place).is_dir()
    with pytest.raises(ArtifactError, match="is not removed"):
        store.remove_folder(store.root / place)
    assert (store.root / place).is_dir()


def test_a_name_that_leads_elsewhere_removes_nothing() -> None:
    other, store = _around(), Store()
    victim = other.with_name("victim.json")
    victim.write_text("{}")
    made = _artifact(Model, "mine", "1")
    text = json.loads((made / MANIFEST).read_text())
    (made / MANIFEST).write_text(json.dumps(text | {"name": "../../other/victim"}))
    with pytest.raises(ArtifactError, match="not the name of an entry"):
        remove(plan_removal([], everything=True))
    assert victim.read_text() == "{}"
    assert made.is_dir()
    with pytest.raises(ArtifactError, match="not the name of an entry"):
        store.record_file("../../other/victim")


def test_of_a_link_the_link_is_removed() -> None:
    other, store = _around(), Store()
    (other.parent / MANIFEST).write_text("{}")
    store.downloads.mkdir(parents=True)
    link = store.downloads / "acme--tiny-111111111111"
    link.symlink_to(other.parent)
    store.remove_folder(link)
    assert not link.is_symlink()
    assert other.read_text() == "mine"
    assert (other.parent / MANIFEST).exists()


def test_only_what_was_made_here_is_withdrawn() -> None:
    made = _artifact(Model, "mine", "1")
    manifest = Manifest.read(made)
    with pytest.raises(ArtifactError, match="not the artefact"):
        withdraw(Model(path=made, manifest=replace(manifest, fingerprint="2" * 64)))
    assert made.is_dir()
    withdraw(Model(path=made, manifest=manifest))
    assert not made.exists()


@pytest.mark.parametrize("line", [["start", "name", "--dry-run"], ["start", "name", "--detach"], ["start", "name"]])
def test_start_holds_what_it_reads(line: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    record = _imported("name", mark="a")
    refused = []

    def read(repository: ModelRepository, *_: object, **__: object) -> ModelRepository:
        with pytest.raises(LockedError):
            remove(plan_removal(["name"]))
        refused.append(repository.path)
        raise ArtifactError("read enough")

    monkeypatch.setattr("trtserve.cli.start._dry_run", read)
    monkeypatch.setattr("trtserve.pipeline.world_size.repository_for", read)
    assert run(line) == ArtifactError.code
    assert refused == [Path(record.repository)]
    remove(plan_removal(["name"]))


def test_start_says_what_was_removed_meanwhile(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _imported("name", mark="a")
    found = repositories.find_repository

    def slow(*given: Any, **named: Any) -> ModelRepository:
        repository = found(*given, **named)
        monkeypatch.setattr(repositories, "find_repository", found)
        remove(plan_removal(["name"]))
        return repository

    monkeypatch.setattr(repositories, "find_repository", slow)
    assert run(["start", "name", "--dry-run"]) == ModelNotFoundError.code
    assert "Unexpected" not in capsys.readouterr().err


def test_prune_removes_what_no_name_reaches(capsys: pytest.CaptureFixture[str]) -> None:
    store = Store()
    old = _imported("llama", mark="a")
    new = _imported("llama", mark="b", at="2026-02-01")
    loose, older = _artifact(Engine, "loose", "d"), _artifact(Engine, "loose", "c")
    manifest = Manifest.read(older)
    replace(manifest, created="2020-01-01").write(older)
    left = store.folder(Engine) / ".x-123.partial"
    left.mkdir()
    gone = {Path(old.checkpoint), Path(old.engine), Path(old.repository), Path(old.model), older, left}
    linked = Path(new.repository) / "weights"
    linked.symlink_to(Path(old.model) / "data")  # a repository that serves a model's files as they are
    gone.remove(Path(old.model))
    assert run(["prune", "--dry-run"]) == 0
    assert {Path(line) for line in capsys.readouterr().out.splitlines()} == gone
    assert all(path.exists() for path in gone)
    assert run(["prune"]) == 0
    assert not any(path.exists() for path in gone)
    kept = {Path(new.model), Path(new.checkpoint), Path(new.engine), Path(new.repository), loose, Path(old.model)}
    assert all(path.exists() for path in kept)
    assert plan_prune().folders == ()


def test_prune_works_beside_a_port_for_many_models() -> None:
    old = _imported("llama", mark="a")
    _imported("llama", mark="b", at="2026-02-01")
    store = Store()
    (store.folder(Engine) / "link").symlink_to(Path(old.engine))
    write_state(server_record("many", mode="many", repository=store.root), store)
    assert Path(old.repository) in plan_prune(store).folders
    assert Path(old.engine) in plan_prune(store).folders


def test_prune_removes_no_build_that_a_command_uses() -> None:
    _imported("llama", mark="a")
    _imported("llama", mark="b", at="2026-02-01")
    store = Store()
    with store.in_use("llama"), pytest.raises(LockedError):
        remove(plan_prune(store), store=store)


@pytest.mark.parametrize("name", ["bad\x1b]0;x\x07\nname-abc", "my notes", "-abc\n"])
def test_a_folder_with_a_name_that_no_command_makes_stays_and_stops_no_prune(name: str) -> None:
    store = Store()
    foreign, unfinished = (store.folder(ModelRepository) / each for each in (name, "demo-0123456789ab"))
    foreign.mkdir(parents=True)
    unfinished.mkdir()
    assert run(["prune"]) == 0
    assert foreign.is_dir()
    assert not unfinished.exists()
