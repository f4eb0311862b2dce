"""A plan comes from config and headers alone, is the same for a folder and the hub, and holds what is made later."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.hub import Hub, running_hub
from tests.support.tiny_models import write_tiny_model
from trtserve.cli.app import run
from trtserve.errors import ConversionError, CorruptFileError, UsageError
from trtserve.store import Store

ID = "org/tiny"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return write_tiny_model(folder, dtype="bfloat16", shards=2, hidden_size=256, intermediate_size=512, vocab_size=8000)


@pytest.fixture
def hub(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running_hub() as server:
        server.add(ID, tiny)
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        yield server


def _plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    capsys.readouterr()
    assert run(["plan", *arguments, "--json", "--quiet"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)["result"]
    return result


def test_the_hub_is_asked_for_headers_only(hub: Hub, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    remote, local = _plan(capsys, ID), _plan(capsys, str(tiny))
    for name in sorted(path.name for path in tiny.glob("*.safetensors")):
        (request,) = hub.asked_for(name)
        assert request.byte_range == "bytes=0-100000"
    assert hub.sent_bytes < remote["source_bytes"] / 4
    assert not list(Store().root.rglob("*.safetensors")) + list(Store().root.rglob("*.part"))
    assert remote["pull_bytes"] > remote["source_bytes"]
    assert local["pull_bytes"] == 0
    for key in ("parameters", "source_bytes", "engine_bytes", "kv_bytes_per_token", "dtype"):
        assert remote[key] == local[key]
    assert [stage["stage"] for stage in local["stages"]] == ["import", "convert", "build", "repo", "start"]


def test_what_is_planned_is_made(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = _plan(capsys, str(tiny), "--max-seq-len", "128")
    assert all(stage["seconds"] is None for stage in before["stages"])
    assert run(["import", str(tiny), "--max-seq-len", "128", "--quiet"]) == 0
    record = next(iter(Store().recorded()))
    disk = {stage["stage"]: stage["disk"] for stage in before["stages"]}
    for stage, folder in (("convert", record.checkpoint), ("build", record.engine)):
        size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
        assert size == pytest.approx(disk[stage], abs=2**20)
    engine = json.loads((Path(record.engine) / "manifest.json").read_text())["facts"]
    assert engine["kv_bytes_per_token"] == before["kv_bytes_per_token"]
    after = _plan(capsys, "tiny", "--max-seq-len", "128")
    assert after["name"] == "tiny"
    seconds = {stage["stage"]: stage["seconds"] for stage in after["stages"]}
    assert seconds["convert"] > 0
    assert seconds["build"] > 0
    assert seconds["start"] is None


def test_gpus_and_settings(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = _plan(capsys, str(tiny), "--gpu", "h100-80gb")["gpu"]
    assert one["asked"]["fits"]
    assert one["smallest"]["tp_size"] * one["smallest"]["pp_size"] == 1
    none = _plan(capsys, str(tiny), "--gpu-memory", "1GB")["gpu"]
    assert not none["asked"]["fits"]
    assert none["smallest"] is None
    half = _plan(capsys, str(tiny), "--gpu", "l4", "--tp-size", "2")["gpu"]["asked"]
    assert half["kv_per_token"] * 2 == one["asked"]["kv_per_token"]
    assert _plan(capsys, str(tiny), "--quantize", "int8")["engine_bytes"] < _plan(capsys, str(tiny))["engine_bytes"]


def test_the_table_says_what_was_not_measured(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert run(["plan", str(tiny), "--quiet"]) == 0
    text = capsys.readouterr().out
    assert text.count("not measured yet") == 4
    assert "sequences of 512" in text
    assert run(["plan", str(tiny), "--gpu", "t4", "--quiet"]) == 0
    assert "estimated from shapes" in capsys.readouterr().out


def test_what_does_not_fit_names_what_would(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trtserve.plan.free_memory", lambda: 2**20)
    machine = _plan(capsys, str(tiny))["machine"]
    assert not machine["fits"]
    assert machine["tokens"] == 0
    assert "No setting" in machine["hint"]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--gpu", "h100-80gb", "--gpu-memory", "80GB"), UsageError.code),
        (("--gpu", "abacus"), UsageError.code),
        (("--gpu-memory", "much"), UsageError.code),
        (("--max-seq-len", "100000"), UsageError.code),
        (("--tp-size", "3"), UsageError.code),
    ],
)
def test_wrong_questions(tiny: Path, arguments: tuple[str, ...], code: int) -> None:
    assert run(["plan", str(tiny), *arguments]) == code


def test_missing_tensors_and_broken_headers_are_told_before_the_pull(hub: Hub, tiny: Path, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "less", dtype="bfloat16")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    hub.add("org/less", folder)
    assert run(["plan", "org/less"]) == ConversionError.code
    broken = write_tiny_model(tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"\x10" + b"\0" * 7 + b"no json at all..")
    hub.add("org/broken", broken)
    assert run(["plan", "org/broken"]) == CorruptFileError.code
