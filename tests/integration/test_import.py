"""Import in one go, from a hub on loopback to a model repository: everything real but the server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.hub import Hub, running_hub
from tests.support.planning_calls import ONCE, count_planning_calls
from tests.support.tiny_models import write_tiny_model
from trtserve.artifacts import Manifest
from trtserve.checkpoint.memory import kv_bytes_per_token
from trtserve.cli.app import run
from trtserve.errors import MemoryLimitError, UsageError
from trtserve.repository.engines import read_engine
from trtserve.store import Store

ID = "acme/tiny-llama"
TEMPLATE = "additional_chat_templates/tool_use.jinja"
FLOAT32 = ("--dtype", "float32", "--max-seq-len", "128", "--max-batch-size", "2")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama")
    (folder / "additional_chat_templates").mkdir()
    (folder / TEMPLATE).write_text("{{ tools }}")
    return folder


@pytest.fixture
def hub(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running_hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        server.add(ID, tiny)
        yield server


def _import(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """Import with --json; returns the result of the envelope."""
    capsys.readouterr()
    assert run(["import", *arguments, "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)["result"]
    return result


def test_from_hub_to_repository_in_a_process_of_its_own(hub: Hub) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "trtserve", "import", ID, *FLOAT32],
        env=os.environ.copy(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    (first,) = ran.stdout.splitlines()
    assert Path(first).parent == Store().root / "repositories"
    assert any(line.split()[:2] == ["├──", "tiny-llama/"] for line in ran.stderr.splitlines())
    assert ran.stderr.splitlines()[-1] == "Next: trtserve start tiny-llama"
    for model in ("preprocessing", "tensorrt_llm", "postprocessing", "ensemble", "tensorrt_llm_bls", "tiny-llama"):
        assert (Path(first) / model / "config.pbtxt").is_file()
    assert (Path(first) / "tensorrt_llm" / "1" / "rank0.bin").is_file()
    assert (Path(first) / "preprocessing" / "1" / "tokenizer" / TEMPLATE).is_file()
    # Progress bars of the hub's client would show as carriage returns or per cent signs.
    assert "\r" not in ran.stderr
    assert "%" not in ran.stderr


def test_each_stage_of_a_hub_model_is_planned_once(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_planning_calls(monkeypatch)
    for _ in range(2):
        assert run(["import", ID, *FLOAT32]) == 0
        assert calls == ONCE
        calls.clear()


def test_second_run_reuses_everything(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    first = _import(capsys, ID, *FLOAT32)
    before = _manifests()
    hub.requests.clear()
    capsys.readouterr()
    assert run(["import", ID, *FLOAT32]) == 0
    talk = capsys.readouterr()
    assert talk.err.count("is reused") == 4
    assert talk.out.splitlines()[0] == first["repository"]
    assert _manifests() == before
    assert not hub.asked_for("model.safetensors")


def test_another_dtype_builds_again_and_keeps_the_pull(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    first = _import(capsys, ID, *FLOAT32)
    hub.requests.clear()
    second = _import(capsys, ID, "--dtype", "bfloat16", *FLOAT32[2:])
    assert second["model"] == first["model"]
    made = ("checkpoint", "engine", "repository")
    assert not {first[key] for key in made} & {second[key] for key in made}
    assert not hub.asked_for("model.safetensors")
    assert [record.repository for record in Store().recorded()] == [second["repository"]]


def test_options_reach_their_stages(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--tp-size", "2", "--quantize", "int8", "--kv-precision", "u8", "--max-input-len", "64")
    more = ("--max-num-tokens", "96", "--no-streaming", "--max-tokens-in-paged-kv-cache", "512", "--name", "mine")
    result = _import(capsys, ID, *FLOAT32, *options, *more, "--set", "batching_strategy=inflight_fused_batching")
    assert result["name"] == "mine"
    engine = json.loads((Path(result["engine"]) / "config.json").read_text())
    limits = {"max_batch_size": 2, "max_input_len": 64, "max_seq_len": 128, "max_num_tokens": 96}
    assert limits.items() <= engine["build_config"].items()
    assert engine["pretrained_config"]["quantization"]["quant_algo"] == "W8A16"
    assert engine["trtserve"]["kv_precision"] == "u8"
    assert (Path(result["checkpoint"]) / "rank1.safetensors").is_file()
    facts = Manifest.read(Path(result["repository"])).facts
    assert facts["alias"] == "mine"
    assert facts["streaming"] is False
    assert facts["max_tokens_in_paged_kv_cache"] == "512"


def test_engine_dest_path(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ENGINE_DEST_PATH", str(tmp_path / "engines"))
    engine = tmp_path / "engines" / "tiny-llama"
    assert _import(capsys, ID, *FLOAT32)["engine"] == str(engine)
    first = Manifest.read(engine)
    # A new store has no checkpoint: the engine alone is enough.
    monkeypatch.setenv("TRTSERVE_HOME", str(tmp_path / "another home"))
    result = _import(capsys, ID, *FLOAT32)
    assert Manifest.read(engine) == first
    assert not Path(result["checkpoint"]).exists()
    _import(capsys, ID, "--dtype", "bfloat16", *FLOAT32[2:])
    assert Manifest.read(engine).fingerprint != first.fingerprint


def test_out_and_local_folder(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = _import(capsys, str(tiny), *FLOAT32, "--out", str(tmp_path / "served"))
    assert result["path"] == str(tmp_path / "served")
    assert result["source"] == str(tiny)
    assert (tmp_path / "served" / "tiny-llama" / "config.pbtxt").is_file()


def test_discarded_checkpoint_is_not_made_again(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    first = _import(capsys, ID, *FLOAT32, "--discard-intermediate")
    assert not Path(first["checkpoint"]).exists()
    second = _import(capsys, ID, *FLOAT32)
    assert second["repository"] == first["repository"]
    assert not Path(first["checkpoint"]).exists()


def test_download_only(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    result = _import(capsys, ID, "--download-only")
    assert (Path(result["path"]) / "model.safetensors").is_file()
    assert not (Store().root / "checkpoints").exists()
    assert Store().recorded() == []


def test_another_name_pulls_and_builds_nothing_again(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    first = _import(capsys, ID, *FLOAT32)
    hub.requests.clear()
    second = _import(capsys, ID, *FLOAT32, "--name", "second")
    assert hub.asked_for("model.safetensors") == []
    for stage, file in (("model", "model.safetensors"), ("checkpoint", "rank0.safetensors"), ("engine", "rank0.bin")):
        assert first[stage] != second[stage]
        assert (Path(first[stage]) / file).samefile(Path(second[stage]) / file)
    assert run(["remove", "tiny-llama"]) == 0
    assert (Path(second["model"]) / "model.safetensors").is_file()
    assert [record.name for record in Store().recorded()] == ["second"]


def test_a_name_that_moves_to_another_engine_is_reported(
    hub: Hub, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _import(capsys, ID, *FLOAT32)
    capsys.readouterr()
    assert run(["import", str(tiny), *FLOAT32, "--name", "tiny-llama", "--quiet"]) == 0
    captured = capsys.readouterr()
    assert f"The name tiny-llama meant {ID} before" in captured.err
    assert captured.out == f"{Store().recorded()[0].repository}\n"  # quiet: the path, and not what lies in it


def test_names_of_single_stages(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What one stage made under a name, the next takes by that name; no folder has to be copied from the output."""
    assert run(["import", str(tiny), "--download-only", "--name", "mine", "-q"]) == 0
    assert run(["convert", "mine", "-q"]) == 0
    assert run(["build", "mine", "-q", "--max-seq-len", "64"]) == 0
    capsys.readouterr()
    assert run(["repo", "mine", "--tokenizer", "mine", "-q"]) == 0
    assert Path(capsys.readouterr().out.strip()).name.startswith("mine-")


@pytest.mark.parametrize("fault", ["tokenizer", "out"])
def test_options_of_late_stages_are_checked_first(tmp_path: Path, fault: str) -> None:
    folder = write_tiny_model(tmp_path / "model")
    out = tmp_path / "out"
    out.mkdir()
    broken = folder / "tokenizer.json" if fault == "tokenizer" else out / "thesis.tex"
    broken.write_text("")
    arguments = ["--out", str(out)] if fault == "out" else []
    assert run(["import", str(folder), *arguments]) == (22 if fault == "tokenizer" else 23)
    assert not list(Store().root.glob("checkpoints/*"))


def test_dry_run_pulls_no_weights(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    plan = _import(capsys, ID, "--dry-run")
    assert [(stage["stage"], stage["action"]) for stage in plan["stages"]] == [
        ("model", "make"),
        ("convert", "make"),
        ("build", "make"),
        ("repo", "make"),
    ]
    assert all(stage["bytes"] > 0 for stage in plan["stages"][:3])
    assert not hub.asked_for("model.safetensors")
    done = _import(capsys, ID)
    again = _import(capsys, ID, "--dry-run")
    assert {stage["action"] for stage in again["stages"]} == {"reuse"}
    assert [stage["path"] for stage in again["stages"]] == [
        done[key] for key in ("model", "checkpoint", "engine", "repository")
    ]


@pytest.mark.parametrize(("dtype", "precision"), [("float32", "f32"), ("bfloat16", "u8"), ("bfloat16", "f16")])
def test_the_kv_cache_is_as_large_as_planned(
    tiny: Path, capsys: pytest.CaptureFixture[str], dtype: str, precision: str
) -> None:
    result = _import(capsys, str(tiny), "--dtype", dtype, "--kv-precision", precision)
    config = read_engine(Path(result["engine"])).model
    measured = Manifest.read(Path(result["engine"])).facts["kv_bytes_per_token"]
    assert kv_bytes_per_token(config, precision) == measured


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--tp-size", "3"), UsageError.code),
        (("--max-seq-len", "100000"), UsageError.code),
        (("--dtype", "float8"), UsageError.code),
        (("--set", "absent_parameter=1"), UsageError.code),
        (("--name", "ensemble"), UsageError.code),
        (("--release", "9.9"), UsageError.code),
    ],
)
def test_impossible_options_are_reported_before_the_download(hub: Hub, arguments: tuple[str, ...], code: int) -> None:
    assert run(["import", ID, *arguments]) == code
    assert not hub.asked_for("model.safetensors")


def test_too_large_for_this_machine(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("trtserve.host.machine.free_memory", lambda: 2**30)
    arguments = ("--max-tokens-in-paged-kv-cache", "10000000")
    assert run(["import", ID, *arguments]) == MemoryLimitError.code
    refused = capsys.readouterr().err
    assert "--max-tokens-in-paged-kv-cache" in refused
    assert run(["import", ID, *arguments, "--dry-run"]) == 0, "it may be for another machine"
    assert "10000000 tokens" in capsys.readouterr().err, "it warns with what the import raises"
    assert not hub.asked_for("model.safetensors")


def _manifests() -> dict[str, str]:
    return {str(path): path.read_text() for path in Store().root.rglob("manifest.json")}
