"""Symbolic links in folders that come from others: their files stay where they are, unless they are weights."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.engine_folders import write_engine
from tests.support.tiny_models import write_tiny_model
from trtserve.cli import run

SECRET = "content of a file elsewhere"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model")


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    return write_engine(tmp_path / "engine").path


@pytest.fixture
def templates(tmp_path: Path) -> Path:
    (tmp_path / "templates" / "bls").mkdir(parents=True)
    (tmp_path / "templates" / "bls" / "config.pbtxt").write_text('name: "bls"\nbackend: "${triton_backend}"\n')
    return tmp_path / "templates"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_text(SECRET)
    return tmp_path / "secret"


def of_tokenizer(folder: Path) -> list[str]:
    model, engine = folder / "model", folder / "engine"
    return ["repo", str(engine), "--tokenizer", str(model), "--out", str(folder / "out")]


def of_llm(folder: Path) -> list[str]:
    return ["repo", str(folder / "model"), "--runtime", "llmapi", "--out", str(folder / "out")]


def of_templates(folder: Path) -> list[str]:
    return ["repo", "triton_backend:python", "--from-template", f"{folder}/templates", "--out", str(folder / "out")]


@pytest.mark.usefixtures("model", "engine", "templates")
@pytest.mark.parametrize("place", ["secret", "../secret", "loop"])
@pytest.mark.parametrize(
    ("command", "link"),
    [
        (of_tokenizer, "model/tokenizer_extra.json"),
        (of_tokenizer, "engine/notes.txt"),
        (of_llm, "model/notes.txt"),
        (of_templates, "templates/bls/notes.txt"),
        (of_templates, "templates/notes"),
    ],
)
def test_a_link_out_of_the_folder_is_refused(
    command: Callable[[Path], list[str]],
    link: str,
    place: str,
    secret: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target = {"secret": secret, "../secret": Path("../" * link.count("/") + "secret"), "loop": tmp_path / "loop"}[place]
    (tmp_path / "loop").symlink_to(secret)
    (tmp_path / link).symlink_to(target)
    assert run(command(tmp_path)) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"{tmp_path / link} is a link to {secret}, which is outside of" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("engine", "templates")
@pytest.mark.parametrize("command", [of_tokenizer, of_llm, of_templates])
def test_links_within_the_folder_are_followed(
    command: Callable[[Path], list[str]], model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in (model, tmp_path / "engine", tmp_path / "templates" / "bls"):
        (folder / "tokenizer_notes.txt").write_text("own")
        (folder / "tokenizer_more.txt").symlink_to("tokenizer_notes.txt")
    assert run(command(tmp_path)) == 0, capsys.readouterr().err
    found = list((tmp_path / "out").rglob("tokenizer_more.txt"))
    assert found
    assert all(path.read_text() == "own" and not path.is_symlink() for path in found)


@pytest.mark.parametrize("command", [of_tokenizer, of_llm])
def test_a_snapshot_of_the_hubs_cache_links_to_its_blobs(
    command: Callable[[Path], list[str]], engine: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path / "models--a--b"
    (cache / "blobs").mkdir(parents=True)
    (cache / "snapshots").mkdir()
    for path in sorted(model.iterdir()):
        path.rename(cache / "blobs" / path.name)
        path.symlink_to(f"../../blobs/{path.name}")
    model.rename(cache / "snapshots" / "0")
    call = [text.replace(str(model), str(cache / "snapshots" / "0")) for text in command(tmp_path)]
    assert run(call) == 0, capsys.readouterr().err
    copied = [path for path in (tmp_path / "out").rglob("*") if path.name == "tokenizer.json"]
    assert copied
    assert copied[0].read_bytes() == (cache / "blobs" / "tokenizer.json").read_bytes()
    assert not any(path.is_symlink() for path in (tmp_path / "out").rglob("*"))


@pytest.mark.parametrize(
    ("command", "weights"), [(of_tokenizer, "engine/rank0.engine"), (of_llm, "model/model.safetensors")]
)
def test_weights_may_be_on_another_disk(
    command: Callable[[Path], list[str]],
    weights: str,
    engine: Path,
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    elsewhere = tmp_path / "disk" / "weights"
    elsewhere.parent.mkdir()
    (tmp_path / weights).rename(elsewhere)
    (tmp_path / weights).symlink_to("../disk/weights")
    assert run(command(tmp_path)) == 0, capsys.readouterr().err
    linked = next((tmp_path / "out").rglob(Path(weights).name))
    assert linked.samefile(elsewhere)
    assert not linked.is_symlink()


def test_links_of_a_repository_stay_links_when_models_are_added(
    engine: Path, model: Path, secret: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run(of_tokenizer(tmp_path)) == 0, capsys.readouterr().err
    (out / "notes").symlink_to("../secret")
    shutil.copytree(out, tmp_path / "before", symlinks=True)
    added = ["repo", str(engine), "--tokenizer", str(model), "--name", "second", "--suffix", "_b", "--into", str(out)]
    assert run(added) == 0, capsys.readouterr().err
    assert (out / "second").is_dir()
    assert (out / "notes").readlink() == Path("../secret")
