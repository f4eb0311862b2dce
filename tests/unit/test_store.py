"""Artefacts appear whole or not at all, and are reused by fingerprint only."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.recorded_progress import Lines
from trtserve.artifacts import (
    KINDS,
    MANIFEST,
    Artifact,
    Checkpoint,
    Engine,
    Manifest,
    Model,
    fingerprint,
    load_artifact,
)
from trtserve.bench.records import limits_of_repository
from trtserve.errors import ArtifactError, DiskSpaceError, LockedError, ModelNotFoundError, RepositoryError, UsageError
from trtserve.files import locked, read_json_object
from trtserve.pipeline.parity import find_artifact
from trtserve.store import NameRecord, Store, link_or_copy, publish, reusable


def _manifest(number: int = 1) -> Manifest:
    return Manifest(kind="engine", name="tiny", fingerprint=fingerprint(number=number), spec={"number": number})


def _publish(destination: Path, number: int, content: str, **changes: Any) -> Engine:
    def produce(folder: Path) -> None:
        (folder / "rank0.engine").write_text(content)

    return publish(Engine, destination, replace(_manifest(number), **changes), produce)


def test_published_artefact_is_complete(tmp_path: Path) -> None:
    engine = _publish(tmp_path / "engine", 1, "one")
    assert (engine.path / "rank0.engine").read_text() == "one"
    assert Manifest.read(engine.path).fingerprint == engine.fingerprint


def test_equal_fingerprint_is_reused(tmp_path: Path) -> None:
    _publish(tmp_path / "engine", 1, "one")
    again = _publish(tmp_path / "engine", 1, "not written")
    assert (again.path / "rank0.engine").read_text() == "one"


def test_an_artefact_that_appears_during_the_look_is_not_taken_for_the_users_files(tmp_path: Path) -> None:
    for number in range(60):
        place, found = tmp_path / f"engine-{number}", None
        thread = threading.Thread(target=_publish, args=(place, number, "one"))
        thread.start()
        while found is None:
            found = reusable(Engine, place, fingerprint(number=number))
        thread.join()
        assert found.path == place


def test_another_fingerprint_replaces_the_artefact(tmp_path: Path) -> None:
    _publish(tmp_path / "engine", 1, "one")
    other = _publish(tmp_path / "engine", 2, "two")
    assert (other.path / "rank0.engine").read_text() == "two"
    assert reusable(Engine, other.path, fingerprint(number=1)) is None


def test_failure_leaves_the_old_artefact(tmp_path: Path) -> None:
    _publish(tmp_path / "engine", 1, "one")

    def fail(folder: Path) -> None:
        (folder / "half").write_text("")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        publish(Engine, tmp_path / "engine", _manifest(2), fail)
    assert (tmp_path / "engine" / "rank0.engine").read_text() == "one"
    assert {path.name for path in tmp_path.iterdir()} == {"engine", "home"}


def test_other_files_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("work of years")
    with pytest.raises(ArtifactError, match="was not made by trtserve"):
        _publish(tmp_path / "thesis", 1, "one")
    assert (tmp_path / "thesis" / "chapter.tex").exists()


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_a_link_and_its_target_is_replaced(tmp_path: Path, there: bool) -> None:
    link, place = tmp_path / "engine", tmp_path / "elsewhere" / "engine"
    place.parent.mkdir()
    if there:
        place.mkdir()
    link.symlink_to(place)
    for number, text in enumerate(("one", "two")):
        _publish(link, number, text)
        assert (place / "rank0.engine").read_text() == text
    assert link.is_symlink()
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")} - {"home", "home/checksums.json"} == {
        "elsewhere",
        "elsewhere/engine",
        "elsewhere/engine/manifest.json",
        "elsewhere/engine/rank0.engine",
        "engine",
    }


def test_artefact_of_another_kind_is_refused(tmp_path: Path) -> None:
    _publish(tmp_path / "engine", 1, "one")
    with pytest.raises(ArtifactError, match="is of kind engine; expected checkpoint"):
        load_artifact(Checkpoint, tmp_path / "engine")


def test_folder_without_manifest_is_accepted_by_path(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    first = load_artifact(Checkpoint, tmp_path).fingerprint
    (tmp_path / "config.json").write_text("{ }")
    assert load_artifact(Checkpoint, tmp_path).fingerprint != first


def test_files_in_the_way_are_reported_before_the_work(tmp_path: Path) -> None:
    engine = _publish(tmp_path / "engine", 1, "one")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ArtifactError, match="refusing to replace it with a checkpoint"):
        reusable(Checkpoint, engine.path, "0" * 64)
    with pytest.raises(ArtifactError, match="was not made by trtserve"):
        reusable(Engine, tmp_path / "file", "0" * 64)


def test_same_content_under_another_name_is_hard_linked(tmp_path: Path) -> None:
    store = Store(tmp_path)
    digest = _manifest().fingerprint
    first = _publish(store.destination(Engine, "first", digest), 1, "one")
    second = _publish(store.destination(Engine, "second", digest), 1, "not written")
    assert (second.path / "rank0.engine").samefile(first.path / "rank0.engine")
    assert not (second.path / "manifest.json").samefile(first.path / "manifest.json")


@pytest.mark.parametrize("place", ["file/engine", "x" * 300, "/proc/engine"])
def test_unwritable_folders_are_explained(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises((ArtifactError, UsageError), match=r"cannot be written|not a valid path") as caught:
        _publish(tmp_path / place, 1, "one")
    assert "another place" in str(caught.value.hint)


@pytest.mark.parametrize(("code", "message"), [(errno.ENOSPC, "the disk is full"), (errno.EFBIG, "ulimit -f")])
def test_a_full_disk_has_its_own_error(tmp_path: Path, code: int, message: str) -> None:
    def fill(folder: Path) -> None:
        raise OSError(code, os.strerror(code))

    with pytest.raises(DiskSpaceError, match=message):
        publish(Engine, tmp_path / "engine", _manifest(), fill)
    assert list(tmp_path.iterdir()) == []


def test_finds_the_newest_of_a_name_and_suggests_others(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for number in (1, 2):
        _publish(store.destination(Engine, "tiny", _manifest(number).fingerprint), number, str(number))
    assert (store.find(Engine, "tiny").path / "rank0.engine").read_text() == "2"
    with pytest.raises(ModelNotFoundError) as caught:
        store.find(Engine, "tinny")
    assert caught.value.hint == "Did you mean tiny? To make one: trtserve build CHECKPOINT"


def test_the_newest_counts_although_the_clock_was_set_back(tmp_path: Path) -> None:
    store, days = Store(tmp_path), ("2026-03-01T00:00:00+00:00", "2025-01-01T00:00:00+00:00")
    for number, day in enumerate(days):
        place = store.destination(Engine, "tiny", _manifest(number).fingerprint)
        _publish(place, number, str(number), created=day)
        paths: dict[str, Any] = dict.fromkeys(("model", "checkpoint", "engine", "repository"), "/x")
        store.record(NameRecord(name=f"import{number}", source="demo", imported=day, **paths))
    assert (store.by_name(Engine)["tiny"].path / "rank0.engine").read_text() == "1"
    assert [record.name for record in store.recorded()] == ["import1", "import0"]


@pytest.mark.parametrize(
    ("kind", "config"),
    [(Model, {"model_type": "llama"}), (Checkpoint, {"architecture": "X"}), (Engine, {"build_config": {}})],
)
def test_a_folder_of_another_kind_does_not_hide_a_name(
    kind: type[Artifact], config: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, told = Store(tmp_path / "home"), Lines()
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny" / "config.json").write_text('{"something": "else"}')
    assert store.find(kind, "tiny", progress=told).path == tmp_path / "tiny"
    manifest = Manifest(kind=KINDS[kind], name="tiny", fingerprint="1" * 64)
    made = publish(kind, store.destination(kind, "tiny", "1" * 64), manifest, lambda folder: None)
    assert store.find(kind, "tiny", progress=told).path == made.path
    (warning,) = told.warnings
    assert warning.startswith(f"The folder {tmp_path / 'tiny'} is not a")
    assert warning.endswith(f" {KINDS[kind]}; {made.path} is used for tiny.")
    # A path is always a folder, and a folder of the kind comes first.
    assert store.find(kind, "./tiny").path == tmp_path / "tiny"
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(config))
    assert store.find(kind, "tiny", progress=told).path == tmp_path / "tiny"
    assert told.warnings[1:] == [f"The folder {tmp_path / 'tiny'} is used for tiny; {made.path} has that name too."]


def test_a_missing_path_is_not_treated_as_a_name(tmp_path: Path) -> None:
    store = Store(tmp_path / "home")
    with pytest.raises(ModelNotFoundError, match=r"\./nosuch is not a folder on this machine") as caught:
        store.find(Model, "./nosuch")
    assert caught.value.hint == "Give the folder of a model, or one of these names: none yet."
    with pytest.raises(ModelNotFoundError) as caught:
        find_artifact("./nosuch", store)
    assert "the folder of a checkpoint, a repository or an engine" in str(caught.value.hint)
    with pytest.raises(ModelNotFoundError, match="of a checkpoint, a repository or an engine in the store") as caught:
        find_artifact("nosuch", store)
    assert "trtserve convert MODEL, trtserve import MODEL" in str(caught.value.hint)


def test_folder_name_becomes_a_valid_artefact_name(tmp_path: Path) -> None:
    folder = tmp_path / "mödel (v2)"
    folder.mkdir()
    assert load_artifact(Checkpoint, folder).name == "m-del-v2"


def test_lock_excludes_threads_and_is_removed_afterwards(tmp_path: Path) -> None:
    turns: list[int] = []

    def take(number: int) -> None:
        with locked(tmp_path / "a.lock"):
            turns.append(number)
            assert len(turns) == 1
            turns.clear()

    threads = [threading.Thread(target=take, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not (tmp_path / "a.lock").exists()


def test_lock_is_exclusive(tmp_path: Path) -> None:
    with (
        locked(tmp_path / "a.lock"),
        pytest.raises(LockedError, match="Another trtserve process"),
        locked(tmp_path / "a.lock", wait=False),
    ):
        pass


def _remains(store: Store, folder: str, name: str) -> list[Path]:
    """Make what a process that is killed in the middle of its work leaves of one artefact."""
    home = store.root / folder
    left = [home / f".{name}.partial", home / f".{name}.lock"]
    left[0].mkdir(parents=True)
    (left[0] / "rank0.engine").write_text("half")
    left[1].touch()
    return left


def test_the_next_command_removes_what_killed_processes_left_and_nothing_that_is_being_made() -> None:
    store = Store()
    made = store.destination(Engine, "alive", "a" * 12)
    left = [path for folder in ("models", "engines") for path in _remains(store, folder, "dead-bbbbbbbbbbbb")]
    record, state = store.names / ".dead.json", store.servers / ".dead.json"
    for each in (record, state):
        each.parent.mkdir(exist_ok=True)
        left += [each.with_name(f"{each.name}{suffix}") for suffix in (".partial", ".lock")]
    left += [store.root / "locks" / name for name in ("server-dead.lock", "names/dead.lock")]
    for path in left:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch() if not path.exists() else None
    download = store.download("org/dead", "c" * 40)
    download.mkdir(parents=True)

    def produce(folder: Path) -> None:
        (folder / "rank0.engine").write_text("whole")
        with store.in_use("alive"), store.in_use("other"):
            assert (folder / "rank0.engine").exists()
        assert not [path for path in left if path.exists()]

    engine = publish(Engine, made, _manifest(), produce)
    assert (engine.path / "rank0.engine").read_text() == "whole"
    assert download.is_dir()  # the next pull continues it
    assert [path.name for path in store.root.rglob("*.lock")] == []


def test_what_a_killed_process_was_replacing_comes_back_and_what_it_was_removing_goes() -> None:
    store = Store()
    kept = _publish(store.destination(Engine, "kept", "a" * 12), 1, "one").path
    going = _publish(store.destination(Engine, "going", "b" * 12), 2, "two").path
    for path in (kept, going):
        path.rename(path.with_name(f".{path.name}.old"))
    (going.with_name(f".{going.name}.old") / MANIFEST).unlink()
    store.sweep()
    assert [path.name for path in store.folder(Engine).iterdir()] == [kept.name]
    assert (_publish(going, 2, "again").path / "rank0.engine").read_text() == "again"


@pytest.mark.parametrize("shared", [True, False])
def test_locks_are_of_files_that_may_be_read_and_written_as_nfs_wants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    modes = []
    monkeypatch.setattr(
        "trtserve.files.fcntl.flock", lambda file, _: modes.append(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE)
    )
    with locked(tmp_path / "a.lock", shared=shared):
        pass
    assert {*modes} == {os.O_RDWR}


def test_what_another_user_left_stays_and_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    made = _publish(store.destination(Engine, "theirs", "a" * 12), 1, "one").path
    old = made.rename(made.with_name(f".{made.name}.old"))
    lock = store.name_lock("theirs")
    lock.parent.mkdir(parents=True)
    lock.touch()

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")  # as in a folder with the sticky bit

    with monkeypatch.context() as patched:
        for name in ("rename", "unlink"):
            patched.setattr(Path, name, refuse)
        with store.in_use("theirs"):
            pass
    assert (old / MANIFEST).exists()
    assert lock.exists()


def test_a_lock_that_is_held_for_a_moment_only_is_no_reason_to_give_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = ExitStack()
    with other:
        other.enter_context(locked(tmp_path / "a.lock"))
        monkeypatch.setattr("trtserve.files.time.sleep", lambda _: other.close())
        with locked(tmp_path / "a.lock", wait=False):
            pass


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "a b"])
def test_invalid_artefact_names_are_rejected(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="cannot name an artefact"):
        Store(tmp_path).destination(Engine, name, "0" * 64)


def test_newest_record_first(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for day in (1, 2, 3):
        paths: dict[str, Any] = dict.fromkeys(("model", "checkpoint", "engine", "repository"), "/x")
        store.record(NameRecord(name=f"day{day}", source="demo", imported=f"2026-01-0{day}", **paths))
    assert [record.name for record in store.recorded()] == ["day3", "day2", "day1"]


def test_link_or_copy(tmp_path: Path) -> None:
    source = tmp_path / "weights"
    source.write_text("w")
    link_or_copy(source, tmp_path / "linked" / "weights")
    link_or_copy(source, tmp_path / "copied" / "weights", copy=True)
    assert (tmp_path / "linked" / "weights").samefile(source)
    assert not (tmp_path / "copied" / "weights").samefile(source)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "is not JSON"),
        (b"[]", "is not a JSON object"),
        (b'{"a": "\xff"}', "is not UTF-8 text: .* at byte 7"),
        (b"[" * 100_000, "is not JSON"),
    ],
)
def test_files_without_a_json_object_are_refused(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(RepositoryError, match=words):
        read_json_object(tmp_path / "config.json", RepositoryError)
    (tmp_path / MANIFEST).write_bytes(content)
    with pytest.raises(ArtifactError, match=words) as caught:
        Manifest.read(tmp_path)
    assert "remove it" in str(caught.value.hint)
    folder = tmp_path / "tensorrt_llm" / "1"
    folder.mkdir(parents=True)
    (folder / "config.json").write_bytes(content)
    with pytest.raises(RepositoryError, match=words):
        limits_of_repository(tmp_path, "tensorrt_llm")


def test_a_manifest_of_another_schema_is_refused(tmp_path: Path) -> None:
    Manifest(kind="model", name="m", fingerprint="f", schema=2).write(tmp_path)
    with pytest.raises(ArtifactError, match="has schema 2; this trtserve reads schema 1"):
        Manifest.read(tmp_path)


@pytest.mark.parametrize("place", ["/dev/null", "/dev/null/store", "/proc/nope"])
def test_a_home_that_can_never_be_a_folder_is_refused(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTSERVE_HOME", place)
    with pytest.raises(UsageError, match=f"TRTSERVE_HOME is {place}, where no folder can be made"):
        Store()
