"""Artefacts that are pushed to a folder and pulled into another store: whole, resumed, or not at all."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.support.engine_folders import built_here, write_engine
from tests.support.http_pages import ENDLESS, endless, sending
from tests.support.lies import lie
from tests.support.tiny_models import write_tiny_model
from trtserve.__main__ import prepare_streams
from trtserve.artifacts import Engine, Manifest, ModelRepository
from trtserve.cli.app import run
from trtserve.errors import (
    AccessDeniedError,
    ArtifactError,
    CorruptFileError,
    DiskSpaceError,
    MachineError,
    ModelNotFoundError,
    NetworkError,
    TrtserveError,
    UsageError,
)
from trtserve.pipeline import travel
from trtserve.pipeline.travel import pull, push
from trtserve.repository.assembling import plan_repository
from trtserve.repository.publishing import assemble_repository
from trtserve.specs import RepositorySpec
from trtserve.store import NameRecord, Store, remote
from trtserve.store.remote import Blob, Layout, open_file_system, parse_target


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Engine, ModelRepository]:
    """An engine of TensorRT-LLM and its repository, both in a store of their own."""
    root = tmp_path_factory.mktemp("built")
    tokenizer = write_tiny_model(root / "hf")
    engine = built_here(write_engine(root / "engine"))
    (engine.path / "rank0.engine").write_bytes(bytes(range(256)) * 400)
    plan = plan_repository(engine, tokenizer, RepositorySpec(name="tiny"), store=Store(root / "store"))
    return engine, assemble_repository(plan)


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(travel, "PIECE", 30_000)


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_place_without_artefacts_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="nowhere holds nothing that `trtserve push` has stored"):
        pull(str(tmp_path / "nowhere"), store=Store(tmp_path / "store"))


def test_a_place_with_one_slash_is_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        pull("s3:/models/demo:v1", store=Store(tmp_path / "store"))
    assert caught.value.hint == "Did you mean s3://models/demo?"


@pytest.mark.usefixtures("pieces")
def test_a_repository_arrives_as_it_was(built: tuple[Engine, ModelRepository], tmp_path: Path) -> None:
    repository, target, store = built[1], str(tmp_path / "shelf"), Store(tmp_path / "other")
    sent = push(str(repository.path), f"{target}:v1")
    assert 0 < sent.missing <= sent.total  # equal files are sent once
    assert push(str(repository.path), f"{target}:v1").missing == 0
    got = pull(f"{target}:v1", any_machine=True, store=store)
    assert (got.missing, got.digest) == (sent.total, sent.digest)
    before, after = _files(repository.path), _files(got.artifact.path)
    assert before.keys() == after.keys()
    assert [name for name in before if before[name] != after[name] and name != "manifest.json"] == []
    assert Manifest.read(got.artifact.path).fingerprint == repository.fingerprint
    assert [(record.name, record.source) for record in store.recorded()] == [("tiny", f"{target}:v1")]
    assert list(store.downloads.iterdir()) == []
    assert pull(f"{target}:v1", any_machine=True, store=store).missing == 0
    assert pull(f"{target}@{sent.digest}", any_machine=True, store=store).missing == 0


def test_a_pull_into_the_store_that_made_it_keeps_its_record(
    built: tuple[Engine, ModelRepository], tmp_path: Path
) -> None:
    target, store = str(tmp_path / "shelf"), Store(tmp_path / "other")
    push(str(built[1].path), target)
    path = str(pull(target, any_machine=True, store=store).artifact.path)
    made = NameRecord(
        name="tiny",
        source="org/tiny",
        model="/model",
        checkpoint="/checkpoint",
        engine="/engine",
        repository=path,
        imported="2026-01-01T00:00:00+00:00",
        spec={"max_batch_size": 2},
    )
    store.record(made)
    assert pull(target, any_machine=True, store=store).missing == 0
    (record,) = store.recorded()
    assert replace(record, imported=made.imported) == made
    assert record.imported > made.imported  # `start` serves what was asked for last


def test_no_weights_move_to_a_machine_that_cannot_serve_them(
    built: tuple[Engine, ModelRepository], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, store = str(tmp_path / "shelf"), Store(tmp_path / "other")
    push(str(built[1].path), target)
    monkeypatch.setattr(travel, "count_gpus", lambda: 0)
    with pytest.raises(MachineError, match="GPU"):
        pull(target, store=store)
    assert list(store.root.rglob("*.engine")) == []
    assert list(store.root.rglob("config.pbtxt")) != []  # what the check read; the next pull begins there
    assert not store.folder(ModelRepository).exists()
    assert pull(target, any_machine=True, store=store).missing < push(str(built[1].path), target).total


@pytest.mark.usefixtures("pieces")
def test_an_interrupted_pull_continues_with_the_next_piece(
    built: tuple[Engine, ModelRepository], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, store = str(tmp_path / "shelf"), Store(tmp_path / "other")
    total = push(str(built[1].path), target).total
    received = Layout.receive
    taken: list[Blob] = []

    def two_large_ones(place: Layout, blob: Blob) -> Iterator[bytes]:
        taken.append(blob)
        if sum(each.size == travel.PIECE for each in taken) > 2:
            raise KeyboardInterrupt
        yield from received(place, blob)

    monkeypatch.setattr(Layout, "receive", two_large_ones)
    with pytest.raises(KeyboardInterrupt):
        pull(target, any_machine=True, store=store)
    monkeypatch.setattr(Layout, "receive", received)
    rest = pull(target, any_machine=True, store=store)
    assert 0 < rest.missing <= total - 2 * travel.PIECE
    assert _files(rest.artifact.path)["tensorrt_llm/1/rank0.engine"] == bytes(range(256)) * 400


def test_an_interrupted_push_names_nothing(
    built: tuple[Engine, ModelRepository], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, sent, calls = str(tmp_path / "shelf"), Layout.send, 0

    def three(place: Layout, blob: Blob, content: Callable[[], Iterator[bytes]]) -> None:
        nonlocal calls
        calls += 1
        if calls > 3:
            raise KeyboardInterrupt
        sent(place, blob, content)

    monkeypatch.setattr(Layout, "send", three)
    with pytest.raises(KeyboardInterrupt):
        push(str(built[1].path), target)
    with pytest.raises(ModelNotFoundError, match="holds nothing that"):
        pull(target, store=Store(tmp_path / "other"))
    monkeypatch.setattr(Layout, "send", sent)
    assert push(str(built[1].path), target).missing < push(str(built[1].path), str(tmp_path / "new")).missing


def test_an_engine_travels_too(built: tuple[Engine, ModelRepository], tmp_path: Path) -> None:
    store = Store(tmp_path / "other")
    push(str(built[0].path), str(tmp_path / "shelf"))
    got = pull(str(tmp_path / "shelf"), store=store)
    assert isinstance(got.artifact, Engine)
    assert store.recorded() == []
    assert list(store.by_name(Engine)) == [built[0].name]


def _changed(shelf: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the OCI manifest of a layout, and its name with it."""
    place, reference = parse_target(str(shelf))
    manifest = json.loads(place.manifest(reference))
    change(manifest)
    place.publish(reference, json.dumps(manifest).encode())


def _layer(manifest: dict[str, Any], end: str) -> dict[str, Any]:
    return next(
        each for each in manifest["layers"] if each["annotations"]["org.opencontainers.image.title"].endswith(end)
    )


def _lead_out(manifest: dict[str, Any]) -> None:
    _layer(manifest, "rank0.engine")["annotations"]["org.opencontainers.image.title"] = "../../outside"


def _swap_files(manifest: dict[str, Any]) -> None:
    first, second = _layer(manifest, "postprocessing/1/model.py"), _layer(manifest, "preprocessing/1/model.py")
    names = first["annotations"], second["annotations"]
    first["annotations"], second["annotations"] = names[1], names[0]


def _named(*names: Any) -> Callable[[dict[str, Any]], None]:
    """Give the last files of a manifest these names."""

    def change(manifest: dict[str, Any]) -> None:
        for name, layer in zip(names, reversed(manifest["layers"]), strict=False):
            layer["annotations"]["org.opencontainers.image.title"] = name

    return change


WRONG: tuple[Any, ...] = (3, None, {}, ".done", ".done/x", "a\nb", "\x1b]0;x", "manifest.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *((_named(name), "wrongly") for name in WRONG),
        (lambda m: _layer(m, "rank0.engine").update(size=10**400), "is not the size of a blob"),
        (_lead_out, "lists '../../outside' wrongly"),
        (_swap_files, "is not the file that tiny was made with"),
        (lambda m: m["layers"].pop(), "has other files than"),
        (lambda m: _layer(m, "rank0.engine").update(digest="sha256:../../x"), "is not a SHA-256 digest"),
        (lambda m: _layer(m, "rank0.engine").update(size=-1), "is not the size of a blob"),
        (lambda m: m.update(layers=[{}]), "a manifest that trtserve did not write"),
        (lambda m: m["config"].update(digest=f"sha256:{'0' * 64}"), "does not exist"),
    ],
)
def test_a_place_that_lies_is_not_believed(
    change: Callable[[dict[str, Any]], None], message: str, built: tuple[Engine, ModelRepository], tmp_path: Path
) -> None:
    push(str(built[1].path), str(tmp_path / "shelf"))
    _changed(tmp_path / "shelf", change)
    store = Store(tmp_path / "home" / "other")
    with pytest.raises(TrtserveError, match=message):
        pull(str(tmp_path / "shelf"), any_machine=True, store=store)
    assert not (tmp_path / "home" / "outside").exists()
    assert store.recorded() == []
    assert list(store.complete(ModelRepository)) == []


def test_generated_lies_of_a_place_end_with_an_error(
    built: tuple[Engine, ModelRepository], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, shelf, chance = tmp_path / "good", tmp_path / "shelf", random.Random(27)
    push(str(built[1].path), str(good))
    manifest = parse_target(str(good))[0].manifest("latest").decode()
    prepare_streams()
    for _ in range(60):
        shutil.copytree(good, shelf)
        if chance.random() < 0.5:
            (shelf / "index.json").write_bytes(_encoded(lie((good / "index.json").read_text(), chance)))
        else:
            parse_target(str(shelf))[0].publish("latest", _encoded(lie(manifest, chance)))
        run(["pull", "--any-machine", str(shelf)])
        written = capsys.readouterr().err
        assert "bug in trtserve" not in written, written
        shutil.rmtree(shelf)
    assert not list(tmp_path.glob("outside*"))


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


@pytest.mark.parametrize("names", [("folder", "folder/file"), ("folder/file", "folder")])
def test_a_file_that_is_a_folder_too_is_refused(
    names: tuple[str, str], built: tuple[Engine, ModelRepository], tmp_path: Path
) -> None:
    shelf = tmp_path / "shelf"
    push(str(built[1].path), str(shelf))
    _changed(shelf, _named(*names))
    place, reference = parse_target(str(shelf))
    found = json.loads(place.manifest(reference))
    blob = Blob(found["config"]["digest"], found["config"]["size"])
    own = json.dumps({**json.loads(b"".join(place.receive(blob))), "files": {}}).encode()
    blob = Blob(f"sha256:{hashlib.sha256(own).hexdigest()}", len(own))
    place.send(blob, lambda: iter([own]))
    found["config"].update(vars(blob))
    place.publish(reference, json.dumps(found).encode())
    with pytest.raises(TrtserveError, match="folder"):
        pull(str(shelf), any_machine=True, store=Store(tmp_path / "other"))


def test_a_damaged_blob_is_fetched_again(built: tuple[Engine, ModelRepository], tmp_path: Path) -> None:
    shelf, store = tmp_path / "shelf", Store(tmp_path / "other")
    push(str(built[1].path), str(shelf))
    engine = max((shelf / "blobs").rglob("*"), key=lambda path: path.stat().st_size)
    content = engine.read_bytes()
    engine.write_bytes(b"\0" * len(content))
    with pytest.raises(CorruptFileError, match="differs from its digest, from byte 0 on"):
        pull(str(shelf), any_machine=True, store=store)
    engine.write_bytes(content)
    assert pull(str(shelf), any_machine=True, store=store).missing == len(content)


def test_what_was_changed_since_it_was_built_is_not_pushed(
    built: tuple[Engine, ModelRepository], tmp_path: Path
) -> None:
    push(str(built[1].path), str(tmp_path / "shelf"))
    got = pull(str(tmp_path / "shelf"), any_machine=True, store=Store(tmp_path / "other"))
    (got.artifact.path / "preprocessing" / "1" / "model.py").write_text("import os\n")
    with pytest.raises(CorruptFileError, match="has another content than when it was made"):
        push(str(got.artifact.path), str(tmp_path / "shelf"))


def test_a_place_below_a_file_is_no_network(built: tuple[Engine, ModelRepository], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"is not a folder|is a file, not a folder") as caught:
        push(str(built[1].path), str(tmp_path / "file" / "shelf"))
    assert caught.value.hint == "Choose another place."


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("oci://registry.example/Name", "does not name a repository"),
        ("oci://registry.example", "does not name a repository"),
        ("oci://registry.example/name:bad!tag", "is neither a tag nor a digest"),
        ("nothing://x/y", "nothing:// is not a place for models"),
    ],
)
def test_wrong_targets_are_refused(target: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_target(target)


def test_the_commands_say_what_they_moved(
    built: tuple[Engine, ModelRepository], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shelf = str(tmp_path / "shelf")
    assert run(["push", str(built[1].path), shelf, "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["result"]["dry_run"] is True
    assert not (tmp_path / "shelf").exists()
    assert run(["push", str(built[1].path), shelf, "--quiet"]) == 0
    assert capsys.readouterr().out.startswith("sha256:")
    assert run(["pull", shelf, "--any-machine"]) == 0
    out, err = capsys.readouterr()
    assert Path(out.strip()).is_dir()
    assert "Next: trtserve start tiny" in err
    assert run(["plan", "tiny"]) == ModelNotFoundError.code
    assert f"tiny was pulled from {shelf}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("number", "refused"), [(errno.ENOSPC, DiskSpaceError), (errno.EROFS, ArtifactError), (errno.EPIPE, NetworkError)]
)
def test_a_folder_that_takes_nothing_more_says_why(number: int, refused: type[Exception], tmp_path: Path) -> None:
    with pytest.raises(refused, match=str(tmp_path)), remote.reaching(str(tmp_path)):
        raise OSError(number, os.strerror(number), str(tmp_path))


@pytest.mark.parametrize("place", ["ftp://127.0.0.1/x", "http://127.0.0.1/x", "simplecache::s3://b/x"])
def test_other_schemes_are_refused_before_anything_is_opened(place: str) -> None:
    with pytest.raises(UsageError, match="is not a place for models"):
        open_file_system(place)


@contextmanager
def _raw_registry(answer: Callable[[str], Iterator[bytes]]) -> Iterator[tuple[str, list[str]]]:
    """Yield the target of a registry, and the requests that it got."""
    with sending(answer) as (port, asked):
        yield f"oci://127.0.0.1:{port}/x", asked


def _refused(realm: str) -> bytes:
    return f'HTTP/1.0 401 No\r\nWWW-Authenticate: Bearer realm="{realm}"\r\n\r\n'.encode()


@pytest.mark.parametrize("realm", ["file://localhost{}#", "file:{}#", "ftp://localhost{}#"])
def test_a_registry_reads_no_files_of_this_machine(realm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_LONGEST_WAIT", 0)
    (tmp_path / "mine.json").write_text('{"token": "secret-of-mine"}')
    lie = _refused(realm.format(tmp_path / "mine.json"))
    with (
        _raw_registry(lambda _: iter([lie])) as (target, asked),
        pytest.raises(NetworkError, match="unknown url type"),
    ):
        pull(target, store=Store(tmp_path / "store"))
    assert asked
    assert "secret-of-mine" not in "".join(asked)


@pytest.mark.parametrize("what", ENDLESS)
def test_an_answer_of_a_registry_that_never_ends_is_left(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_LONGEST_WAIT", 0)
    monkeypatch.setattr(remote, "_LONGEST_ANSWER", 0.2)
    with (
        _raw_registry(lambda _: endless(what)) as (target, _),
        pytest.raises(NetworkError, match="no whole answer within"),
    ):
        pull(target, store=Store(tmp_path / "store"))


def test_a_blob_that_comes_byte_by_byte_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_LONGEST_READ", 0.2)
    with _raw_registry(lambda _: endless("body")) as (target, _), pytest.raises(NetworkError, match=r"within 0\.2 s"):
        b"".join(parse_target(target)[0].receive(Blob(f"sha256:{'0' * 64}", 1_000_000)))


def test_a_folder_of_a_store_that_does_not_answer_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    over, file_system = Event(), MemoryFileSystem()
    file_system.info = lambda _: over.wait(60)
    monkeypatch.setattr(remote, "_LONGEST_ANSWER", 0.2)
    shelf = Layout("s3://b/x", file_system, "b/x")
    try:
        with pytest.raises(NetworkError, match=r"s3://b/x cannot be reached: TimeoutError: .* within 0\.2 s"):
            shelf.has(Blob(f"sha256:{'0' * 64}", 1))
        with pytest.raises(NetworkError, match=r"within 0\.2 s"):
            shelf.manifest("latest")
    finally:
        over.set()


def test_a_listing_of_too_many_files_names_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_MOST_FILES", 2)
    for name in "abc":
        (tmp_path / name).touch()
    with pytest.raises(ModelNotFoundError, match="has 3 files; at most 2 are read"):
        remote.resolve(f"file://{tmp_path}")


@pytest.mark.parametrize(
    "answer",
    [
        b"hello\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 1000 + b"\r\n",
        b"HTTP/1.1 200 OK\r\nA: " + b"b" * 100_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\n{}",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n{}",
        b"HTTP/1.1 302 Found\r\nLocation: file:///etc/passwd\r\n\r\n",
        _refused(""),
        _refused("http://127.0.0.1:1/a b"),
        _refused("http://[bad/"),
    ],
)
def test_an_answer_that_no_registry_gives_is_an_error(
    answer: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_LONGEST_WAIT", 0)
    with _raw_registry(lambda _: iter([answer])) as (target, _), pytest.raises(TrtserveError, match="oci://127"):
        pull(target, store=Store(tmp_path / "store"))


@pytest.mark.parametrize("token", ["a\r\nX-Evil: 1", "\u20ac"])
def test_a_token_becomes_one_header_or_none(token: str, tmp_path: Path) -> None:
    places: list[str] = []

    def answer(path: str) -> Iterator[bytes]:
        whole = b"HTTP/1.0 200 OK\r\n\r\n" + json.dumps({"token": token}).encode()
        yield whole if path.startswith("/token") else _refused(f"http://{places[0]}/token")

    with _raw_registry(answer) as (target, asked):
        places.append(target.split("/")[2])
        with pytest.raises(AccessDeniedError, match="a token that no header can carry"):
            pull(target, store=Store(tmp_path / "store"))
    assert len(asked) == 2


@pytest.mark.parametrize("name", ["index.json", "the largest blob"])
def test_a_pipe_or_a_link_in_a_place_is_not_opened(
    name: str, built: tuple[Engine, ModelRepository], tmp_path: Path
) -> None:
    shelf = tmp_path / "shelf"
    push(str(built[1].path), str(shelf))
    blobs = (path for path in (shelf / "blobs").rglob("*") if path.is_file())
    file = shelf / name if name == "index.json" else max(blobs, key=lambda path: path.stat().st_size)
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        file.unlink()
        make(file)
        with pytest.raises(CorruptFileError, match="is a link, a pipe or a device, not a file"):
            pull(str(shelf), any_machine=True, store=Store(tmp_path / "other"))


def test_a_folder_by_url_leads_nowhere_else(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "mine")
    for make in (os.mkfifo, lambda path: path.symlink_to("/etc/passwd")):
        make(source / "vocab.json")
        with pytest.raises(ArtifactError, match="is a link, a pipe or a device"):
            remote.resolve(f"file://{source}")
        (source / "vocab.json").unlink()
