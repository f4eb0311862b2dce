"""`push`, `pull` and `import` with real services on this machine: Debian's registry, and moto's S3."""

from __future__ import annotations

import base64
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.tiny_models import write_tiny_model
from tests.support.waiting import wait_until
from trtserve.artifacts import Model
from trtserve.errors import AccessDeniedError, CorruptFileError, ModelNotFoundError, NetworkError
from trtserve.host.ports import free_ports
from trtserve.pipeline import travel
from trtserve.pipeline.model import plan_model
from trtserve.pipeline.travel import pull, push
from trtserve.store import Store, remote
from trtserve.store.remote import reaching

# htpasswd -Bbn me secret
_PASSWORDS = "me:$2b$04$/SmvurVpFjKkk0YF..nlLuEXscCqjRf/UC.d1Y3HPQK9eY58zCNKO"


def test_a_refusal_of_a_store_says_to_what() -> None:
    with pytest.raises(AccessDeniedError, match=r"^Access to s3://b/m is denied: no\."), reaching("s3://b/m"):
        raise PermissionError("no")


def _answers(port: int) -> bool:
    import socket

    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def model(tmp_path: Path) -> Model:
    source = write_tiny_model(tmp_path / "source")
    return plan_model(str(source), name="tiny", store=Store(tmp_path / "store")).run()


def _registry(folder: Path, extra: str = "") -> Iterator[str]:
    (port,) = free_ports("127.0.0.1", 1)
    config = folder / "registry.yml"
    config.write_text(
        f"version: 0.1\nstorage: {{filesystem: {{rootdirectory: {folder / 'data'}}}}}\n"
        f"http: {{addr: '127.0.0.1:{port}'}}\n{extra}"
    )
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen(["docker-registry", "serve", str(config)], stdout=log, stderr=log) as process,
    ):
        try:
            wait_until(lambda: _answers(port))
            yield f"oci://127.0.0.1:{port}/models/tiny"
        finally:
            process.terminate()


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "registry").mkdir()
    yield from _registry(tmp_path / "registry")


@pytest.mark.needs("registry")
def test_a_registry_keeps_an_artefact(
    model: Model, registry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(travel, "PIECE", 20_000)
    sent = push(str(model.path), f"{registry}:v1")
    assert sent.missing > travel.PIECE
    assert push(str(model.path), f"{registry}:v2").missing == 0
    for reference in (":v1", ":v2", f"@{sent.digest}"):
        got = pull(registry + reference, store=Store(tmp_path / reference.strip(":@")[:10]))
        weights = "model.safetensors"
        assert (got.artifact.path / weights).read_bytes() == (model.path / weights).read_bytes()
    with pytest.raises(ModelNotFoundError, match="v3"):
        pull(f"{registry}:v3", store=Store(tmp_path / "other"))


@pytest.mark.needs("registry")
def test_a_registry_asks_for_the_login_that_docker_keeps(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "registry"
    folder.mkdir()
    (folder / "passwords").write_text(_PASSWORDS + "\n")
    monkeypatch.setenv("DOCKER_CONFIG", str(folder))
    for target in _registry(folder, f"auth: {{htpasswd: {{realm: x, path: {folder / 'passwords'}}}}}\n"):
        with pytest.raises(AccessDeniedError, match=r"^Access to .* is denied"):
            push(str(model.path), target)
        login = base64.b64encode(b"me:secret").decode()
        (folder / "config.json").write_text(json.dumps({"auths": {target.split("/")[2]: {"auth": login}}}))
        push(str(model.path), target)
        assert pull(target, store=Store(tmp_path / "other")).missing > 0


def test_a_registry_that_is_not_there_is_named(model: Model) -> None:
    (port,) = free_ports("127.0.0.1", 1)
    with pytest.raises(NetworkError, match=f"oci://127.0.0.1:{port}/x cannot be reached"):
        push(str(model.path), f"oci://127.0.0.1:{port}/x")


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    import boto3
    import s3fs
    from moto.server import ThreadedMotoServer

    (port,) = free_ports("127.0.0.1", 1)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
    server.start()
    values = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_DEFAULT_REGION": "us-east-1"}
    for name, value in {**values, "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}.items():
        monkeypatch.setenv(name, value)
    boto3.client("s3").create_bucket(Bucket="shelf")
    s3fs.S3FileSystem.clear_instance_cache()
    yield "s3://shelf"
    s3fs.S3FileSystem.clear_instance_cache()
    server.stop()


@pytest.mark.needs("s3")
def test_an_object_store_keeps_artefacts_and_models(model: Model, bucket: str, tmp_path: Path) -> None:
    push(str(model.path), f"{bucket}/built:v1")
    assert push(str(model.path), f"{bucket}/built:v1").missing == 0
    got = pull(f"{bucket}/built:v1", store=Store(tmp_path / "other"))
    assert (got.artifact.path / "config.json").read_bytes() == (model.path / "config.json").read_bytes()

    import s3fs

    s3fs.S3FileSystem().put(f"{tmp_path / 'source'}/", "shelf/models/mine/", recursive=True)
    imported = plan_model(f"{bucket}/models/mine", store=Store(tmp_path / "third")).run()
    assert imported.name == "mine"
    weights = "model.safetensors"
    assert (imported.path / weights).read_bytes() == (tmp_path / "source" / weights).read_bytes()
    with pytest.raises(ModelNotFoundError, match="has no files"):
        plan_model(f"{bucket}/nothing", store=Store(tmp_path / "third")).run()


def test_a_folder_by_url_is_listed_pinned_and_continued(tmp_path: Path) -> None:
    source, store = write_tiny_model(tmp_path / "mine"), Store(tmp_path / "store")
    plan = plan_model(f"file://{source}", store=store)
    assert plan.revision is not None
    downloads = store.download(plan.revision.repository, plan.revision.commit)
    content = (source / "model.safetensors").read_bytes()
    (downloads / "model.safetensors.part").write_bytes(content[:1000])
    again = plan_model(f"file://{source}", store=store)
    assert again.missing_bytes == plan.missing_bytes - 1000
    assert (again.run().path / "model.safetensors").read_bytes() == content
    assert plan_model(f"file://{source}", store=store).reused


def test_a_file_that_changes_while_it_is_pulled_is_refused(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "mine")
    revision = remote.resolve(f"file://{source}")
    (config,) = (file for file in revision.files if file.name == "config.json")
    os.utime(source / "config.json", (1, 1))
    with pytest.raises(CorruptFileError, match=r"config\.json of .* has changed while it was pulled"):
        remote.pull(revision, config, tmp_path)
    assert not (tmp_path / "config.json").exists()


@pytest.mark.needs("s3")
def test_an_object_store_without_credentials_asks_for_a_login(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(AccessDeniedError, match=r"^Access to .* is denied") as caught:
        plan_model(f"{bucket}/models/mine", store=Store(tmp_path / "store")).run()
    assert "Log in" in (caught.value.hint or "")
