"""Gemma 3 that sees images, from a hub on loopback to a plan and a repository of its text model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.hub import Hub, running_hub
from tests.support.tiny_models import write_tiny_model
from tests.support.tiny_vision import write_tiny_vision_model
from trtserve.cli.app import run
from trtserve.store import Store

ID = "org/tiny-vision"
SCALED = "scales the rotary embedding (linear) only in layers without a window"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running_hub() as server:
        server.add(ID, write_tiny_vision_model(tmp_path / "vision", dtype="bfloat16"))
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        yield server


def _plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    capsys.readouterr()
    assert run(["plan", *arguments, "--json", "--quiet"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)["result"]
    return result


def test_a_plan_counts_the_text_model_only(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = write_tiny_model(tmp_path / "text", "gemma3", dtype="bfloat16")
    seen, alone = _plan(capsys, ID), _plan(capsys, str(text))
    for key in ("parameters", "source_bytes", "engine_bytes", "kv_bytes_per_token", "dtype"):
        assert seen[key] == alone[key]
    assert seen["architecture"] == "Gemma3ForConditionalGeneration"


def test_a_plan_for_gpus_names_what_engines_leave_out(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert SCALED in _plan(capsys, ID, "--gpu", "h100")["gpu"]["note"]
    plain = write_tiny_model(tmp_path / "plain", "gemma3", dtype="bfloat16", rope_scaling=None)
    assert _plan(capsys, str(plain), "--gpu", "h100")["gpu"]["note"] is None


def test_an_import_names_what_it_leaves_out(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["import", ID, "--max-seq-len", "128"]) == 0
    assert "The model's vision tensors are left out (25 KiB)" in capsys.readouterr().err
    (record,) = Store().recorded()
    config = json.loads((Path(record.engine) / "config.json").read_text())["pretrained_config"]
    assert config["architecture"] == "Gemma3ForCausalLM"
    assert config["full_attention_rotary_scaling"] == {"rope_type": "linear", "factor": 8.0}
