"""A token of the hub and an API key, planted where commands read them: they turn up in nothing that commands write."""

from __future__ import annotations

import secrets
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster_jobs import repository_of
from tests.support.hub import Hub, running_hub
from tests.support.tiny_models import write_tiny_model
from trtserve.cli.app import run
from trtserve.server.doctor.stub import write_probe_repository
from trtserve.server.doctor.system import check_token

TOKEN = f"hf_{secrets.token_hex(17)}"
KEY = secrets.token_urlsafe(32)
OTHER_KEY = secrets.token_urlsafe(32)


@dataclass
class Witness:
    """Everything that commands have printed, written and given to processes."""

    folder: Path
    capture: pytest.CaptureFixture[str]
    texts: list[str] = field(default_factory=list)

    def run(self, *line: object) -> int:
        code = run([str(word) for word in line])
        printed = self.capture.readouterr()
        self.texts += [printed.out, printed.err]
        return code

    def require_clean(self, *secret: str, private: tuple[Path, ...] = ()) -> None:
        """Fail where a secret is in an output, in an argument of a process, or in a file that is not `private`."""
        for each in secret:
            assert not [text for text in self.texts if each in text]
            holders = [path for path in self.folder.rglob("*") if path.is_file() and each.encode() in path.read_bytes()]
            assert [path for path in holders if path not in private] == []
        assert all(path.stat().st_mode & 0o077 == 0 for path in private)


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
def witness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Witness:
    found = Witness(tmp_path, capsys)

    class Recorded(subprocess.Popen[Any]):
        def __init__(self, args: Any, *more: Any, **options: Any) -> None:
            found.texts.append(repr(args))
            super().__init__(args, *more, **options)

    monkeypatch.setattr(subprocess, "Popen", Recorded)
    monkeypatch.setenv("TRTSERVE_HOME", str(tmp_path / "home"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return found


@pytest.mark.parametrize("place", ["variable", "file", "variable with {}é", "variable with {}\x01"])
def test_the_hubs_token(
    place: str, witness: Witness, hub: Hub, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("acme/tiny", tiny, token=TOKEN, gated=True, redirects=True)
    hub.add("acme/closed", tiny, token="hf_another", gated=True)
    hub.add("acme/forbidden", tiny, token=TOKEN, forbidden=True)
    hub.add("acme/damaged", tiny, token=TOKEN, wrong_hash={"config.json"})
    hub.add("acme/failing", tiny, failing=500)
    file, damaged = tmp_path / "token", "{}" in place
    if place == "file":
        file.write_text(TOKEN)
        file.chmod(0o600)
        monkeypatch.setenv("HF_TOKEN_PATH", str(file))
        monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(file))
    else:
        monkeypatch.setenv("HF_TOKEN", place.removeprefix("variable with ").replace("{}", TOKEN) if damaged else TOKEN)
    for model in ("tiny", "closed", "forbidden", "damaged", "failing", "absent"):
        for more in (["--dry-run", "--json"], ["--download-only"]):
            witness.run("import", f"acme/{model}", *more)
    assert witness.run("list", "--json") == 0
    witness.run("plan", "acme/tiny", "--json")
    witness.run("inspect", "tiny", "--json")
    witness.texts += [repr(finding) for finding in check_token(online=True)]
    sent = {request.token for request in hub.requests}
    assert (TOKEN in sent) != damaged, "otherwise this test shows nothing"
    assert (tmp_path / "home" / "models").is_dir() != damaged
    witness.require_clean(TOKEN, private=(file,) if place == "file" else ())


def test_the_token_and_the_key_when_files_are_written_for_servers(
    witness: Witness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = ["--model-repository", write_probe_repository(tmp_path / "cpu")]
    gpu = ["--model-repository", repository_of(tmp_path).path]
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    key = tmp_path / "key"
    key.write_text(f"{OTHER_KEY}\n")
    key.chmod(0o600)
    with_file = ["--api-key-file", key]
    assert witness.run("start", *cpu, *with_file, "--systemd", "--out", "a.service") == 0
    assert witness.run("start", *cpu, *with_file, "--dry-run") == 0
    assert witness.run("start", *cpu, *with_file, "--dry-run", "--host", "0.0.0.0", "--no-tls", "--json") == 0
    for target in (["--slurm"], ["--kubernetes", "--claim", "c", "--hf-secret", "hub", "--mount-path", tmp_path]):
        assert witness.run("start", *gpu, *target, "--container", "25.04", "--host", "0.0.0.0") == 0
        assert witness.run("start", *gpu, *target, "--container", "25.04", "--dry-run", "--json") == 0
        assert witness.run("start", *gpu, *target, *with_file) != 0
    monkeypatch.setenv("TRTSERVE_API_KEY", KEY)
    assert witness.run("start", *cpu, "--dry-run") == 0
    for refused in (
        [*cpu, "--systemd"],
        [*cpu, *with_file],
        [*cpu, "--host", "0.0.0.0"],
        [*cpu, "--raw-http"],
        [*gpu, "--slurm"],
        [*gpu, "--kubernetes", "--claim", "c"],
    ):
        assert witness.run("start", *refused) != 0
    assert len(list((tmp_path / "here").rglob("*"))) >= 5
    witness.require_clean(TOKEN, KEY, OTHER_KEY, private=(key,))


@pytest.mark.parametrize("damage", ["with a blank {}", "{}é", "short", "{}\n{}"])
def test_keys_that_are_refused(damage: str, witness: Witness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = ["--model-repository", write_probe_repository(tmp_path / "cpu")]
    key = tmp_path / "key"
    key.write_text(damage.replace("{}", KEY))
    for mode in (0o644, 0o600):
        key.chmod(mode)
        witness.run("start", *cpu, "--api-key-file", key, "--dry-run")
    monkeypatch.setenv("TRTSERVE_API_KEY", damage.replace("{}", KEY))
    witness.run("start", *cpu, "--dry-run", "--json")
    for url in ("127.0.0.1:1", "http://127.0.0.1:1"):
        assert witness.run("query", "Hello", "--url", url, "--json") != 0
    monkeypatch.setenv("OPENAI_API_KEY", damage.replace("{}", KEY))
    assert witness.run("bench", "text", "--openai", "http://127.0.0.1:1/v1", "--num-requests", "1") != 0
    witness.require_clean(KEY, private=(key,))
