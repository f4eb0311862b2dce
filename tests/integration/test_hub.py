"""The real client of the hub against a hub on loopback: found, cut and resumed, refused, wrong."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.gguf_files import write_gguf_model
from tests.support.hub import Hub, running_hub
from tests.support.stages import convert_model, pull_model
from tests.support.tiny_models import write_tiny_model
from trtserve.artifacts import Model, load_artifact
from trtserve.checkpoint import tensor_files
from trtserve.cli import run
from trtserve.errors import (
    AccessDeniedError,
    CorruptFileError,
    DiskSpaceError,
    MissingDependencyError,
    ModelNotFoundError,
    NetworkError,
    TrtserveError,
    UnsupportedModelError,
    UsageError,
)
from trtserve.pipeline.model import plan_model
from trtserve.progress import Task, Unit
from trtserve.specs import ConvertSpec
from trtserve.store import Store
from trtserve.store.hub import RemoteFile

ID = "acme/tiny"


@dataclass
class _Recorder:
    """A Progress that remembers."""

    steps: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    done: int = 0
    total: int = 0

    def step(self, text: str) -> None:
        self.steps.append(text)

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    def advance(self, amount: int) -> None:
        self.done += amount

    def describe(self, text: str) -> None:
        pass

    @contextmanager
    def task(self, text: str, *, total: int, unit: Unit = "items", done: int = 0) -> Iterator[Task]:
        assert unit == "bytes"
        self.total, self.done = total, done
        yield self


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with extra files that are not needed."""
    folder = write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    (folder / "pytorch_model.bin").write_bytes(b"pickled")
    (folder / "consolidated.safetensors").write_bytes(b"the weights once more")
    (folder / "README.md").write_text("a model")
    return folder


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub; what waits before it asks again waits for no time."""
    with running_hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        monkeypatch.setattr("trtserve.store.hub.calls._DELAYS", (0.0, 0.0, 0.0, 0.0))
        yield server


def test_pulls_only_needed_files_of_a_pinned_commit(hub: Hub, tiny: Path) -> None:
    served = hub.add(ID, tiny)
    progress = _Recorder()
    model = pull_model(ID, progress=progress)
    names = {path.name for path in model.path.iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "model.safetensors", "manifest.json"} <= names
    assert not names & {"pytorch_model.bin", "consolidated.safetensors", "README.md"}
    assert (model.path / "model.safetensors").read_bytes() == (tiny / "model.safetensors").read_bytes()
    manifest = load_artifact(Model, model.path).manifest
    assert manifest is not None
    assert manifest.spec["commit"] == served.commit
    assert progress.done == progress.total > 0
    assert all(f"/{served.commit}/" in request.path for request in hub.asked_for("model.safetensors"))


def test_alias_names_the_model(hub: Hub, tiny: Path) -> None:
    hub.add("meta-llama/Llama-2-7b-hf", tiny)
    assert pull_model("llama-2-7b").name == "llama-2-7b"


def test_second_import_asks_for_no_weights(hub: Hub, tiny: Path) -> None:
    hub.add(ID, tiny)
    first = pull_model(ID)
    hub.requests.clear()
    progress = _Recorder()
    assert pull_model(ID, progress=progress) == first
    assert not hub.asked_for("model.safetensors")
    assert any("reused" in step for step in progress.steps)


def test_a_downloaded_commit_needs_no_network(hub: Hub, tiny: Path) -> None:
    served = hub.add(ID, tiny)
    first = pull_model(ID)
    hub.requests.clear()
    again = pull_model(f"{ID}@{served.commit}", name="pinned")
    assert again.fingerprint == first.fingerprint
    assert again.name == "pinned"
    assert not hub.requests


def test_cut_connection_is_resumed_within_one_call(hub: Hub, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(ID, tiny, cut={"model.safetensors": 40_960})
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 4096)
    progress = _Recorder()
    model = pull_model(ID, progress=progress)
    first, second = hub.asked_for("model.safetensors")
    assert first.byte_range is None
    assert second.byte_range == "bytes=40960-"
    assert progress.done == progress.total
    assert (model.path / "model.safetensors").read_bytes() == (tiny / "model.safetensors").read_bytes()


def test_a_server_without_ranges_sends_the_whole_file_again(hub: Hub, tiny: Path) -> None:
    hub.add(ID, tiny, cut={"model.safetensors": 40_000}, ranges=False)
    progress = _Recorder()
    model = pull_model(ID, progress=progress)
    assert (model.path / "model.safetensors").read_bytes() == (tiny / "model.safetensors").read_bytes()
    assert progress.done == progress.total


def test_mirror_that_lists_names_only(hub: Hub, tiny: Path) -> None:
    hub.add(ID, tiny, lists_sizes=False)
    model = pull_model(ID)
    assert (model.path / "model.safetensors").read_bytes() == (tiny / "model.safetensors").read_bytes()
    assert hub.asked_for("model.safetensors", "HEAD")


def test_gated_model_needs_its_token(hub: Hub, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(ID, tiny, gated=True, token="hf_good")
    with pytest.raises(AccessDeniedError, match="401") as caught:
        pull_model(ID)
    assert "HF_TOKEN" in str(caught.value.hint)
    with pytest.raises(AccessDeniedError, match="403"):
        pull_model(ID, token="hf_other")
    assert not hub.asked_for("model.safetensors")
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    assert pull_model(ID).name == "tiny"
    assert hub.asked_for("model.safetensors")[0].token == "hf_good"


def test_token_stays_with_the_hub(hub: Hub, tiny: Path) -> None:
    hub.add(ID, tiny, redirects=True, cut={"model.safetensors": 1000})
    model = pull_model(ID, token="hf_secret")
    assert (model.path / "model.safetensors").read_bytes() == (tiny / "model.safetensors").read_bytes()
    tokens = {request.path.split("/")[1]: request.token for request in hub.asked_for("model.safetensors")}
    assert tokens == {"acme": "hf_secret", "cdn": None}
    places = (Store().root, Path(os.environ["HF_HOME"]))
    files = [path for place in places for path in place.rglob("*") if path.is_file()]
    assert files
    assert not any(b"hf_secret" in path.read_bytes() for path in files)


def test_two_at_once_pull_once(hub: Hub, tiny: Path) -> None:
    hub.add(ID, tiny, bytes_per_second=400_000)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: pull_model(ID), range(2))
    assert first == second
    assert len(hub.asked_for("model.safetensors")) == 1


@pytest.mark.parametrize(
    ("source", "faults", "token", "expected", "words"),
    [
        ("acme/absent", {}, None, ModelNotFoundError, "acme/absent"),
        ("acme/absent", {}, "hf_any", ModelNotFoundError, "404"),
        (f"{ID}@absent", {}, None, ModelNotFoundError, "revision"),
        (ID, {"forbidden": True}, "hf_any", AccessDeniedError, "403"),
        (ID, {}, "revoked", AccessDeniedError, "401"),
        (ID, {"failing": 500}, None, NetworkError, "500"),
        (ID, {"wrong_hash": {"model.safetensors"}}, None, CorruptFileError, "model.safetensors"),
        (ID, {"wrong_hash": {"tokenizer.json"}}, None, CorruptFileError, "tokenizer.json"),
        (ID, {"wrong_size": {"model.safetensors": 10}}, None, CorruptFileError, "shorter"),
        (ID, {"wrong_size": {"model.safetensors": -10}}, None, CorruptFileError, "longer"),
    ],
)
def test_refusals(
    hub: Hub,
    tiny: Path,
    source: str,
    faults: dict[str, object],
    token: str | None,
    expected: type[TrtserveError],
    words: str,
) -> None:
    hub.add(ID, tiny, **faults)
    with pytest.raises(expected, match=words) as caught:
        pull_model(source, token=token)
    assert token is None or token not in caught.value.message
    assert not list(Store().folder(Model).glob("*"))


def test_wrong_file_is_removed_and_pulled_again(hub: Hub, tiny: Path) -> None:
    served = hub.add(ID, tiny, wrong_hash={"model.safetensors"})
    with pytest.raises(CorruptFileError):
        pull_model(ID)
    served.wrong_hash.clear()
    assert pull_model(ID).path.is_dir()
    assert [request.byte_range for request in hub.asked_for("model.safetensors")] == [None, None]


@pytest.mark.parametrize("statuses", [[429, 500, 503], [502, 504]])
def test_a_busy_hub_is_asked_again(hub: Hub, tiny: Path, statuses: list[int]) -> None:
    busy = {"": [*statuses], "config.json": [*statuses], "model.safetensors": [*statuses]}
    served = hub.add(ID, tiny, busy=busy, retry_after="0")
    model = pull_model(ID)
    assert not any(served.busy.values())
    assert (model.path / "model.safetensors").read_bytes() == (tiny / "model.safetensors").read_bytes()


@pytest.mark.parametrize("name", ["", "model.safetensors"])
def test_a_hub_that_stays_busy_is_given_up(hub: Hub, tiny: Path, name: str) -> None:
    served = hub.add(ID, tiny, busy={name: [503] * 50})
    with pytest.raises(NetworkError, match="503"):
        pull_model(ID)
    assert len(served.busy[name]) == 45  # five attempts
    assert not list(Store().folder(Model).glob("*"))


def test_a_hub_that_asks_for_an_hour_is_not_waited_for(hub: Hub, tiny: Path) -> None:
    hub.add(ID, tiny, busy={"": [503]}, retry_after="3600")
    with pytest.raises(NetworkError, match="503") as caught:
        pull_model(ID)
    assert "3600" in str(caught.value.hint)


@pytest.mark.parametrize("lists_sizes", [True, False])
def test_a_redirect_to_another_host_carries_no_token(hub: Hub, tiny: Path, lists_sizes: bool) -> None:
    other = hub.endpoint.replace("127.0.0.1", "localhost")
    hub.add(ID, tiny, elsewhere=other, lists_sizes=lists_sizes, cut={"model.safetensors": 1000})
    if lists_sizes:
        model = pull_model(ID, token="hf_secret")
        assert (model.path / "model.safetensors").read_bytes() == (tiny / "model.safetensors").read_bytes()
    else:  # the client believes only the hub itself what a file's hash is
        with pytest.raises(NetworkError, match="neither size nor hash"):
            pull_model(ID, token="hf_secret")
    tokens = {(request.host.partition(":")[0], request.token) for request in hub.requests}
    assert tokens == {("127.0.0.1", "hf_secret"), ("localhost", None)}


def test_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(NetworkError, match="cannot be reached") as caught:
        pull_model(ID)
    assert caught.value.code == 12


@pytest.mark.parametrize(
    "address", ["ftp://x", "localhost:8000", "http://", "http://x:99999", "http://x:y", "https://a\nb"]
)
def test_an_address_that_is_none_is_refused_at_once(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", address)
    with pytest.raises(UsageError, match="begins with https:// or http://"):
        pull_model(ID)


def test_a_full_disk_is_reported_before_the_download(hub: Hub, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(ID, tiny)
    monkeypatch.setattr("trtserve.host.machine.free_disk", lambda path: 1000)
    with pytest.raises(DiskSpaceError, match="MiB"):
        pull_model(ID)
    assert not hub.asked_for("model.safetensors")


def test_file_above_the_limit_of_the_hub_is_refused_first(hub: Hub, tiny: Path) -> None:
    hub.add(ID, tiny, wrong_size={"model.safetensors": 60_000_000_000})
    with pytest.raises(UnsupportedModelError, match="50 GB"):
        pull_model(ID)
    assert not hub.asked_for("model.safetensors")


def test_an_unsupported_architecture_is_reported_before_the_weights(hub: Hub, tiny: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for path in tiny.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    config = json.loads((tiny / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"architectures": ["MambaForCausalLM"]}))
    hub.add("acme/mamba", other)
    with pytest.raises(UnsupportedModelError, match="MambaForCausalLM"):
        pull_model("acme/mamba")
    assert not hub.asked_for("model.safetensors")


def test_only_pickled_weights_are_refused_without_pytorch(
    hub: Hub, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_files, "find_spec", lambda name: None)
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    for name in ("config.json", "tokenizer.json", "pytorch_model.bin"):
        (pickled / name).write_bytes((tiny / name).read_bytes())
    hub.add("acme/pickled", pickled)
    with pytest.raises(MissingDependencyError, match="only PyTorch can read"):
        pull_model("acme/pickled")
    assert not hub.asked_for("pytorch_model.bin")


def test_sharded_weights(hub: Hub, tiny: Path, tmp_path: Path) -> None:
    sharded = tmp_path / "sharded"
    sharded.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (sharded / name).write_bytes((tiny / name).read_bytes())
    for shard in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        (sharded / shard).write_bytes((tiny / "model.safetensors").read_bytes())
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    hub.add("acme/sharded", sharded)
    assert {path.name for path in pull_model("acme/sharded").path.glob("*.safetensors")} == set(weight_map.values())
    (sharded / "model-00002-of-00002.safetensors").unlink()
    hub.add("acme/incomplete", sharded)
    with pytest.raises(CorruptFileError, match="00002-of-00002"):
        plan_model("acme/incomplete")


def test_offline_uses_downloaded_files(hub: Hub, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(ID, tiny)
    first = pull_model(ID)
    hub.requests.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert pull_model(ID) == first
    with pytest.raises(NetworkError, match="HF_HUB_OFFLINE"):
        pull_model("acme/absent")
    assert not hub.requests


def test_cache_of_the_client_is_used(hub: Hub, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants, hf_hub_download

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    hub.add(ID, tiny)
    for path in tiny.iterdir():
        hf_hub_download(ID, path.name, endpoint=hub.endpoint)
    hub.requests.clear()
    model = pull_model(ID)
    assert (model.path / "model.safetensors").read_bytes() == (tiny / "model.safetensors").read_bytes()
    assert not hub.asked_for("model.safetensors")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert pull_model(ID, store=Store(tmp_path / "other")).fingerprint == model.fingerprint


def test_a_half_written_cache_is_not_trusted(
    hub: Hub, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants, hf_hub_download

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    hub.add(ID, tiny)
    blob = Path(hf_hub_download(ID, "model.safetensors", endpoint=hub.endpoint)).resolve()
    damaged = bytearray(blob.read_bytes())
    damaged[-1] ^= 1
    blob.write_bytes(damaged)

    def interrupted(path: Path, file: RemoteFile) -> None:
        del path
        if file.name == "model.safetensors":
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("trtserve.store.hub.verify", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pull_model(ID)
    progress = _Recorder()
    model = pull_model(ID, progress=progress)
    assert (model.path / "model.safetensors").read_bytes() == (tiny / "model.safetensors").read_bytes()
    assert any("damaged" in warning for warning in progress.warnings)
    assert blob.read_bytes() == damaged


@pytest.mark.parametrize("lists_sizes", [True, False])
def test_an_empty_file_is_pulled(hub: Hub, tiny: Path, tmp_path: Path, lists_sizes: bool) -> None:
    folder = tmp_path / "remote_code"
    shutil.copytree(tiny, folder)
    config = json.loads((tiny / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["OurOwnForCausalLM"]}))
    (folder / "__init__.py").touch()
    hub.add(ID, folder, lists_sizes=lists_sizes)
    model = pull_model(ID, any_architecture=True)
    assert (model.path / "__init__.py").read_bytes() == b""


def test_a_file_size_limit_is_not_reported_as_a_network_error(
    hub: Hub, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(ID, tiny)

    def limited(path: Path, file: RemoteFile) -> None:
        raise OSError(errno.EFBIG, "File too large")

    monkeypatch.setattr("trtserve.store.hub.verify", limited)
    with pytest.raises(DiskSpaceError, match="ulimit -f"):
        pull_model(ID)


def test_killed_pull_is_resumed(hub: Hub, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "wide", hidden_size=128, intermediate_size=512)
    served = hub.add("acme/wide", folder, bytes_per_second=200_000)
    part = _start_and_kill("acme/wide", at_bytes=40_000)
    kept = part.stat().st_size
    served.bytes_per_second = None
    model = pull_model("acme/wide")
    assert (model.path / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert hub.asked_for("model.safetensors")[-1].byte_range == f"bytes={kept}-"
    assert not part.parent.exists()


def _start_and_kill(source: str, *, at_bytes: int) -> Path:
    """Kill a process that imports when `at_bytes` of the weights are on disk; returns the part that it left."""
    # Small blocks, so that a part is on disk long before the end.
    small_blocks = "import huggingface_hub.constants as constants; constants.DOWNLOAD_CHUNK_SIZE = 4096"
    code = f"{small_blocks}; from tests.support.stages import convert_model, pull_model; pull_model({source!r})"
    with subprocess.Popen([sys.executable, "-c", code], env=os.environ.copy()) as process:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and process.poll() is None:
            parts = list((Store().root / "downloads").glob("*/model.safetensors.part"))
            if parts and parts[0].stat().st_size >= at_bytes:
                process.send_signal(signal.SIGKILL)
                return parts[0]
            time.sleep(0.02)
        process.kill()
    raise AssertionError("the pull did not begin")


@pytest.fixture
def quantised(hub: Hub, tmp_path: Path) -> Path:
    """A repository of one model in two precisions, and the part for images of another."""
    folder = tmp_path / "quantised"
    folder.mkdir()
    for kind in ("Q4_0", "Q8_0"):
        (tmp_path / kind).mkdir()
        file, _ = write_gguf_model(tmp_path / kind, "llama", "llama", kind)
        # Only a file of more than one beginning shows that the rest is not pulled before it is wanted.
        file.write_bytes(file.read_bytes() + bytes(100_000))
        file.rename(folder / f"tiny-{kind}.gguf")
    (folder / "mmproj-tiny-Q8_0.gguf").write_bytes(b"GGUF of images")
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    hub.add("acme/tiny-GGUF", folder)
    return folder


@pytest.mark.parametrize("choice", ["q8_0", "Q8_0.gguf", "tiny-Q8_0.gguf"])
def test_a_gguf_file_of_the_hub_is_chosen_and_pulled_once(
    choice: str, hub: Hub, quantised: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trtserve.store.hub.LARGEST_TEXT", 50_000)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 10_000)
    assert run(["plan", f"acme/tiny-GGUF:{choice}", "--runtime", "openvino"]) == 0
    plan = plan_model(f"acme/tiny-GGUF:{choice}")
    size = (quantised / "tiny-Q8_0.gguf").stat().st_size
    assert plan.missing_bytes == size - 50_000
    model = plan.run()
    assert [request.byte_range for request in hub.asked_for("tiny-Q8_0.gguf")] == [None, "bytes=50000-"]
    assert not hub.asked_for("tiny-Q4_0.gguf")
    assert (model.path / "model.gguf").read_bytes() == (quantised / "tiny-Q8_0.gguf").read_bytes()
    local = pull_model(str(quantised / "tiny-Q8_0.gguf"), name="local")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (model.path / name).read_bytes() == (local.path / name).read_bytes()
    assert convert_model(model, ConvertSpec(), out=tmp_path / "checkpoint").path.is_dir()
    hub.requests.clear()
    commit = hub.models["acme/tiny-GGUF"].commit
    assert pull_model(f"acme/tiny-GGUF@{commit}:{choice}", name="again").fingerprint == model.fingerprint
    assert not hub.requests
    assert pull_model("acme/tiny-GGUF:Q4_0").fingerprint != model.fingerprint


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("acme/tiny-GGUF", r"several GGUF files: tiny-Q4_0\.gguf \(.*\), tiny-Q8_0\.gguf"),
        ("acme/tiny-GGUF:0", "no GGUF file '0'"),
        ("acme/tiny-GGUF:Q5_K_M", "no GGUF file 'Q5_K_M'"),
        ("acme/tiny-GGUF:../Q8", "not the name of a model"),
    ],
)
def test_gguf_files_of_the_hub_that_are_not_meant(source: str, words: str, hub: Hub, quantised: Path) -> None:
    with pytest.raises((ModelNotFoundError, UnsupportedModelError), match=words):
        plan_model(source)
    assert not hub.asked_for("tiny-Q4_0.gguf")


def test_a_gguf_file_that_is_another_than_announced_is_removed(hub: Hub, quantised: Path) -> None:
    hub.models["acme/tiny-GGUF"].wrong_hash.add("tiny-Q8_0.gguf")
    with pytest.raises(CorruptFileError, match=r"tiny-Q8_0\.gguf"):
        pull_model("acme/tiny-GGUF:Q8_0")
    hub.models["acme/tiny-GGUF"].wrong_hash.clear()
    assert (pull_model("acme/tiny-GGUF:Q8_0").path / "model.gguf").is_file()
