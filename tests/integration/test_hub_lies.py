"""A hub that lies: nothing is written or removed outside of the store, and every lie ends with an error of its own."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextvars import copy_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.http_pages import ENDLESS, endless, sending
from tests.support.hub import Hub, running_hub
from tests.support.lies import lie
from tests.support.peft_adapters import write_adapter
from tests.support.stages import pull_model
from tests.support.tiny_models import write_tiny_model
from trtserve.artifacts import MANIFEST, Model
from trtserve.cli import run
from trtserve.errors import ArtifactError, CorruptFileError, NetworkError
from trtserve.pipeline.model import download_folder
from trtserve.store import Store
from trtserve.store.hub import RemoteFile, Revision, calls

ID = "acme/tiny"
Lie = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running_hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        monkeypatch.setattr("trtserve.store.hub.calls._DELAYS", (0.0,))
        yield server


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as a user's `~/.cache`: the store, and what belongs to others."""
    folder = tmp_path / "home" / "cache"
    (folder / "other").mkdir(parents=True)
    (folder / "other" / "precious").write_text("mine")
    (folder.parent / "precious").write_text("mine")
    monkeypatch.setenv("TRTSERVE_HOME", str(folder / "trtserve"))
    return folder


def _outside(home: Path) -> dict[str, str]:
    """Return the files around the store."""
    store = home / "trtserve"
    files = (path for path in home.parent.rglob("*") if path.is_file() and not path.is_relative_to(store))
    return {str(path.relative_to(home.parent)): path.read_text() for path in files}


def _whole(**changes: object) -> Lie:
    return lambda listing: listing | changes


def _without(key: str) -> Lie:
    return lambda listing: {k: value for k, value in listing.items() if k != key}


def _file(**changes: object) -> Lie:
    """Change what is said about a small file."""
    return lambda listing: listing | {"siblings": [*listing["siblings"], _named("extra.json") | changes]}


def _weights(**changes: object) -> Lie:
    """Change what is said about the weights, whose hash is LFS's."""

    def lie(listing: dict[str, Any]) -> dict[str, Any]:
        for entry in listing["siblings"]:
            if "lfs" in entry:
                entry["lfs"] |= changes
        return listing

    return lie


def _named(name: object) -> dict[str, Any]:
    return {"rfilename": name, "size": 2, "blobId": "0" * 40}


NAMES = [
    "../../../evil.json",
    "/tmp/evil.json",
    "a/../../../../evil.json",
    "./evil.json",
    "a//evil.json",
    "a/",
    "",
    "..",
    ".",
    "a\\..\\evil.json",
    "evil\0.json",
    "evil\n.json",
    "evil\x1b[2J.json",
    "evil\ud800.json",
    "e" * 241 + ".json",
    "/".join(["deep"] * 300),
    None,
    3,
    ["evil.json"],
    {"name": "evil.json"},
]
COMMITS = [
    "../../../../",
    "../../../..",
    "..",
    "/",
    "/etc/passwd",
    "main",
    "a" * 39,
    "a" * 41,
    "A" * 40,
    "g" * 40,
    "a" * 40 + "\n",
    "",
    None,
    0,
    ["a" * 40],
    {"sha": "a" * 40},
    True,
]
LIES: dict[str, Lie] = {
    **{f"sha {commit!r}": _whole(sha=commit) for commit in COMMITS},
    **{f"name {str(name)[:30]!a}": _file(rfilename=name) for name in NAMES},
    "no sha": _without("sha"),
    "no id": _without("id"),
    "id": _whole(id="../.."),
    "id null": _whole(id=None),
    "siblings a number": _whole(siblings=3),
    "siblings a text": _whole(siblings="abc"),
    "siblings null entries": _whole(siblings=[None]),
    "siblings too many": lambda listing: listing | {"siblings": [_named(f"{i}.md") for i in range(100_001)]},
    "sibling without name": _whole(siblings=[{"size": 1}]),
    "size negative": _file(size=-1),
    "size text": _file(size="2"),
    "size fraction": _file(size=2.5),
    "size true": _file(size=True),
    "size huge": _file(size=10**30),
    "blob": _file(blobId="../../x"),
    "blob number": _file(blobId=7),
    "lfs text": _file(lfs="abc"),
    "lfs list": _file(lfs=[1]),
    "lfs size null": _weights(size=None),
    "lfs hash short": _weights(sha256="0" * 40),
    "lfs hash null": _weights(sha256=None),
    "lfs hash path": _weights(sha256="../" * 21 + "a"),
    "a list": lambda _: [],
    "null": lambda _: None,
    "a text": lambda _: "hello",
    "no JSON": lambda _: b"<html>a hotel</html>",
    "deep": lambda _: b"[" * 200_000,
    "not UTF-8": lambda _: b'{"id": "\xff\xfe"}',
    "card": _whole(cardData={"eval_results": 3, "model-index": 7}, lastModified="yesterday"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_has_an_error_of_its_own_and_touches_nothing(
    hub: Hub, tiny: Path, home: Path, capsys: pytest.CaptureFixture[str], lie: str
) -> None:
    before = _outside(home)
    hub.add(ID, tiny, lie=LIES[lie])
    code = run(["import", ID, "--download-only"])
    told = capsys.readouterr().err
    assert _outside(home) == before
    assert code == NetworkError.code, told
    assert "bug in trtserve" not in told
    assert "HF_ENDPOINT" in told
    assert not list((home / "trtserve").glob("downloads/*"))
    assert not list((home / "trtserve").glob("models/*"))


@pytest.mark.parametrize("seed", range(int(os.environ.get("TRTSERVE_HUB_LIES", "12"))))
def test_generated_lies_of_a_hub_touch_nothing_and_are_forgotten(
    hub: Hub, tiny: Path, home: Path, capsys: pytest.CaptureFixture[str], seed: int
) -> None:
    """The list of files lies, or the headers of each file; the next answers are honest."""
    chance, before = random.Random(seed), _outside(home)
    lying: dict[str, Any] = {}
    if seed % 3:
        lying["lie"] = lambda listing: lie(json.dumps(listing), chance).encode("utf-8", "surrogatepass")
    else:
        words = ("-1", "9" * 30, "x", "", "bytes */*", "../../x", "0" * 64, '"' + "a" * 64 + '"', "http://127.0.0.1:9/")
        names = ("Content-Length", "Content-Range", "ETag", "X-Linked-Size", "X-Linked-Etag", "X-Repo-Commit")
        lying["lying_headers"] = {name: chance.choice(words) for name in chance.sample(names, 2)}
    hub.add(ID, tiny, **lying)
    code = run(["import", ID, "--download-only"])
    told = capsys.readouterr().err
    assert _outside(home) == before
    assert "bug in trtserve" not in told
    if code == 0:  # files that a list leaves out are none of the model's
        return
    assert not list((home / "trtserve").glob("models/*")), told
    hub.add(ID, tiny)
    assert run(["import", ID, "--download-only"]) == 0
    model = Path(capsys.readouterr().out.strip())
    assert all((model / path.name).read_bytes() == path.read_bytes() for path in tiny.iterdir())


def test_an_adapter_from_a_lying_hub(hub: Hub, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = _outside(home)
    hub.add(ID, write_adapter(tmp_path / "adapter", modules={"self_attn.q_proj": (16, 16)}), lie=LIES["sha '..'"])
    assert run(["lora", ID]) == NetworkError.code
    assert "40 or 64 digits" in capsys.readouterr().err
    assert _outside(home) == before


def test_a_commit_of_sha256_is_one(hub: Hub, tiny: Path) -> None:
    served = hub.add(ID, tiny)
    served.commit = "b" * 64
    assert pull_model(ID).manifest.spec["commit"] == "b" * 64  # type: ignore[union-attr]
    hub.requests.clear()
    assert pull_model(f"{ID}@{'b' * 64}").name == "tiny"
    assert not hub.requests


@pytest.mark.parametrize(
    "headers",
    [
        {"X-Linked-Etag": '"../../../../evil"', "ETag": '"../evil"'},
        {"X-Linked-Size": "-5"},
        {"X-Linked-Size": "many"},
        {"X-Linked-Size": "9" * 40},
        {"ETag": ""},
    ],
)
def test_headers_that_lie(hub: Hub, tiny: Path, home: Path, headers: dict[str, str]) -> None:
    before = _outside(home)
    hub.add(ID, tiny, lists_sizes=False, lying_headers=headers)
    with pytest.raises(NetworkError) as caught:
        pull_model(ID)
    assert "HF_ENDPOINT" in str(caught.value.hint)
    assert _outside(home) == before


def test_a_content_range_that_is_no_number(hub: Hub, tiny: Path) -> None:
    hub.add(ID, tiny, lying_headers={"Content-Range": "bytes 0-1/many"})
    with pytest.raises(NetworkError, match="cannot read"):
        pull_model(ID)


@pytest.mark.parametrize("shard", ["../../../evil.safetensors", "/tmp/evil.safetensors", "a/./b.safetensors", "", 3])
def test_shards_that_lie_elsewhere(hub: Hub, tiny: Path, home: Path, tmp_path: Path, shard: object) -> None:
    before = _outside(home)
    folder = tmp_path / "sharded"
    shutil.copytree(tiny, folder, ignore=shutil.ignore_patterns("model.safetensors"))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    hub.add(ID, folder)
    with pytest.raises(CorruptFileError, match="not a valid weight index"):
        pull_model(ID)
    assert _outside(home) == before


def test_a_body_without_end_is_left_at_the_announced_size(hub: Hub, tiny: Path) -> None:
    hub.add(ID, tiny, endless={"model.safetensors"})
    with pytest.raises(CorruptFileError, match="longer than the") as caught:
        pull_model(ID)
    assert "HF_ENDPOINT" in str(caught.value.hint)
    assert hub.sent_bytes < 64 << 20
    assert not list(Store().downloads.rglob("model.safetensors*"))


def test_a_list_of_files_without_end_is_left(hub: Hub, tiny: Path) -> None:
    hub.add(ID, tiny, endless={""})
    with pytest.raises(NetworkError, match="more than 32 MiB") as caught:
        pull_model(ID)
    assert "HF_ENDPOINT" in str(caught.value.hint)
    assert hub.sent_bytes < 64 << 20


@pytest.mark.parametrize("what", ENDLESS)
def test_an_answer_of_a_hub_that_never_ends_is_left(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_LONGEST_ANSWER", 0.2)
    with sending(lambda _: endless(what)) as (port, _):
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
        with pytest.raises(NetworkError, match="no whole answer within"):
            pull_model(ID)


def test_a_file_of_which_only_headers_come_is_left(hub: Hub, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(ID, tiny, trickling={"model.safetensors"})
    monkeypatch.setattr(calls, "_LONGEST_HEADERS", 0.5)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 0.25)
    with pytest.raises(NetworkError, match=r"began to send no file of acme/tiny within 0\.5 s"):
        pull_model(ID)


@pytest.mark.parametrize(
    ("status", "timeout", "expected"),
    [(200, 10, (60, True)), (302, 10, (60, False)), (429, 10, (60, True)), (302, 600, (1200, False))],
)
def test_a_download_may_begin_late_after_a_busy_hub_or_with_a_long_timeout(
    status: int, timeout: int, expected: tuple[float, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []

    def within(seconds: float, call: Callable[[], None], *, begun: Callable[[], bool]) -> None:
        copy_context().run(call)
        found.append((seconds, begun()))

    monkeypatch.setattr(calls, "within", within)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", timeout)
    answer = SimpleNamespace(
        status_code=status, url=f"{calls.endpoint()}/acme/tiny", headers={}, iter_bytes=lambda _: ()
    )
    calls.downloaded(ID, lambda: calls._read_bounded(answer))
    assert found == [expected]


def test_the_api_leads_to_no_place_outside_of_it(hub: Hub, tiny: Path) -> None:
    hub.add(ID, tiny, elsewhere=f"{hub.endpoint}/elsewhere")
    with pytest.raises(NetworkError, match="leads from its API to '/elsewhere/api/models/acme/tiny"):
        pull_model(ID)


def test_a_file_called_as_our_manifest_is_not_taken(hub: Hub, tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "with_manifest"
    shutil.copytree(tiny, folder)
    (folder / "config.json").write_text(
        json.dumps(json.loads((tiny / "config.json").read_text()) | {"architectures": ["OurOwnForCausalLM"]})
    )
    (folder / MANIFEST).write_text('{"kind": "theirs"}')
    hub.add(ID, folder)
    model = pull_model(ID, any_architecture=True)
    assert MANIFEST not in {file["name"] for file in model.manifest.facts["files"]}  # type: ignore[union-attr]


def test_a_repository_that_cannot_be_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["import", "acme/ti--ny"]) == 10
    assert "cannot be the name of a repository" in capsys.readouterr().err


@pytest.mark.parametrize("commit", ["../../../../", "/etc", "a/b", "\0", "../x"])
def test_the_store_refuses_folders_that_are_not_its_own(home: Path, commit: str) -> None:
    before = _outside(home)
    with pytest.raises(ArtifactError, match="not the name of an entry"):
        Store().download("acme/tiny", commit)
    with (
        pytest.raises(ArtifactError),
        download_folder(Store(), Revision(repository="acme/tiny", commit=commit, files=())),
    ):
        pass
    assert _outside(home) == before
    assert not (home / "trtserve").exists()


def test_a_download_folder_that_is_a_link_is_not_followed(hub: Hub, tiny: Path, home: Path) -> None:
    served, before = hub.add(ID, tiny), _outside(home)
    folder = Store().download(ID, served.commit)
    folder.parent.mkdir(parents=True)
    folder.symlink_to(home / "other")
    with pytest.raises(ArtifactError, match="hidden or a link"):
        pull_model(ID)
    with pytest.raises(ArtifactError, match="hidden or a link"):
        Store().download(".hidden/x", served.commit)
    assert _outside(home) == before


@pytest.mark.parametrize("name", ["../x", "/x", "a/../x", "a//x", "", ".", "\0", None, 5])
def test_a_file_of_a_model_is_below_its_folder(name: Any) -> None:
    with pytest.raises(ArtifactError, match="leads out of"):
        RemoteFile(name=name, size=1, digest="")


def test_a_stored_manifest_that_leads_elsewhere(hub: Hub, tiny: Path, home: Path) -> None:
    served = hub.add(ID, tiny)
    model, before = pull_model(ID), _outside(home)
    for files in ([{"name": "../../../other/precious", "size": 4, "digest": ""}], [{"size": 1}], None):
        text = json.loads((model.path / MANIFEST).read_text())
        text["facts"]["files"] = files
        (model.path / MANIFEST).write_text(json.dumps(text))
        with pytest.raises(ArtifactError, match=r"files? of a model"):
            pull_model(f"{ID}@{served.commit}", name="again")
    assert _outside(home) == before
    assert [path.name for path in Store().folder(Model).glob("[!.]*")] == [model.path.name]


@pytest.mark.parametrize("name", ["a.json", "a/b.json", "ünï/ço dé.txt", ".gitattributes", "…", "a..b", "x" * 240])
def test_names_of_real_repositories_are_taken(name: str) -> None:
    assert calls.file_name(ID, name) == name


def test_the_limits_on_a_hubs_answers_end_with_the_call(hub: Hub, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client's session belongs to the whole program, which may ask for more."""
    from huggingface_hub import get_session

    monkeypatch.setattr(calls, "_LARGEST_ANSWER", 10)
    hub.add(ID, tiny)
    with pytest.raises(NetworkError, match="sent an answer of more than"):
        pull_model(ID)
    answer = get_session().get(f"{hub.endpoint}/api/models/{ID}")
    assert answer.status_code == 200
    assert len(answer.content) > 10
