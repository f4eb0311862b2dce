"""A plan needs config and headers alone, is the same for a folder and the hub, and matches what is made later."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.hub import Hub, running_hub
from tests.support.quantised_models import write_quantised_model
from tests.support.tiny_models import write_tiny_model
from trtserve.checkpoint.tensor_files import TensorFile
from trtserve.cli.app import run
from trtserve.errors import (
    ConversionError,
    CorruptFileError,
    MemoryLimitError,
    ModelNotFoundError,
    UnsupportedModelError,
    UsageError,
)
from trtserve.store import Store

ID = "org/tiny"
TOO_LARGE, UNABLE = MemoryLimitError.code, UnsupportedModelError.code


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


def _plan(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    """The plan, which is printed whatever the exit code is."""
    capsys.readouterr()
    assert run(["plan", *arguments, "--json", "--quiet"]) == code
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


def test_options_of_experts_and_embedding_change_the_sizes(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A split embedding makes ranks smaller; how experts are shared out is checked as `convert` checks it."""
    asked = [
        _plan(capsys, str(tiny), "--gpu", "h20", "--tp-size", "2", *wish)["gpu"]["asked"]["weight_bytes"]
        for wish in ([], ["--use-parallel-embedding"], ["--use-parallel-embedding", "--embedding-sharding-dim", "1"])
    ]
    assert asked[0] - asked[1] == 8000 * 256 * 2 // 2
    assert asked[1] == asked[2]
    experts = write_tiny_model(tmp_path / "experts", "qwen3_moe")
    shared = _plan(capsys, str(experts), "--gpu", "gb200", "--tp-size", "2", "--moe-ep-size", "2")["gpu"]
    assert (shared["asked"]["fits"], shared["smallest"]["tp_size"]) == (True, 1)
    assert run(["plan", str(experts), "--tp-size", "2", "--moe-ep-size", "4"]) == UsageError.code
    assert run(["plan", str(tiny), "--tp-size", "2", "--moe-ep-size", "2"]) == UsageError.code


def test_every_command_reports_the_same_error_for_no_model(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in tiny.iterdir():
        if path.suffix != ".safetensors" and "index" not in path.name:
            shutil.copy(path, tmp_path)
    for words in ("has no weights", "has no config.json"):
        for command in (["plan"], ["import"], ["convert", "--out", str(tmp_path / "out")]):
            assert run([*command, str(tmp_path)]) == ModelNotFoundError.code
            assert words in capsys.readouterr().err
        (tmp_path / "config.json").unlink(missing_ok=True)


def test_a_local_folder_is_not_downloaded(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", str(tiny)]) == 0
    assert "to download" not in capsys.readouterr().out


def test_the_import_makes_what_was_planned(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = _plan(capsys, str(tiny), "--max-seq-len", "128")
    assert all(stage["seconds"] is None for stage in before["stages"])
    assert run(["import", str(tiny), "--max-seq-len", "128", "--quiet"]) == 0
    record = next(iter(Store().recorded()))
    disk = {stage["stage"]: stage["disk_bytes"] for stage in before["stages"]}
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
    none = _plan(capsys, str(tiny), "--gpu-memory", "1GB", code=TOO_LARGE)["gpu"]
    assert not none["asked"]["fits"]
    assert none["smallest"] is None
    half = _plan(capsys, str(tiny), "--gpu", "l4", "--tp-size", "2")["gpu"]["asked"]
    assert half["kv_bytes_per_token"] * 2 == one["asked"]["kv_bytes_per_token"]
    narrow = _plan(capsys, str(tiny), "--gpu", "l4", "--kv-precision", "fp8")["gpu"]["asked"]
    assert narrow["kv_bytes_per_token"] * 2 == one["asked"]["kv_bytes_per_token"]
    assert _plan(capsys, str(tiny), "--quantize", "int8")["engine_bytes"] < _plan(capsys, str(tiny))["engine_bytes"]


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Quantised models; Qwen's have biases next to their codes."""
    folder = tmp_path_factory.mktemp("quantised")
    schemes = {"awq": "llama", "gptq_asym": "qwen2", "fp8": "llama"}
    return {scheme: write_quantised_model(folder / scheme, scheme, name).folder for scheme, name in schemes.items()}


@pytest.mark.parametrize("scheme", ["awq", "gptq_asym", "fp8"])
def test_quantised_models_are_planned_from_their_headers(
    quantised: dict[str, Path], scheme: str, hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A GPU holds the size of the rank's file; on the hub, order of groups and biases are unknown."""
    model = quantised[scheme]
    hub.add(f"org/{scheme}", model)
    for tp_size in ("1", "2"):
        local = _plan(capsys, str(model), "--gpu", "h100-80gb", "--tp-size", tp_size)
        remote = _plan(capsys, f"org/{scheme}", "--gpu", "h100-80gb", "--tp-size", tp_size)
        for key in ("parameters", "source_bytes", "quantization", "gpu"):
            assert remote[key] == local[key]
        out = tmp_path / tp_size
        assert run(["convert", str(model), "--tp-size", tp_size, "--out", str(out), "--quiet"]) == 0
        entries = TensorFile(out / "rank0.safetensors").entries.values()
        assert local["gpu"]["asked"]["weight_bytes"] == sum(entry.size for entry in entries)
    assert not list(Store().root.rglob("*.safetensors"))


def test_quantised_models_are_planned_as_they_are_built(
    quantised: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for scheme, model in quantised.items():
        need = _plan(capsys, str(model))
        checkpoint, engine = tmp_path / f"{scheme}-checkpoint", tmp_path / f"{scheme}-engine"
        assert run(["convert", str(model), "--out", str(checkpoint), "--quiet"]) == 0
        assert run(["build", str(checkpoint), "--out", str(engine), "--quiet"]) == 0
        # Beside the weights there is the graph as text.
        weights = (engine / "rank0.bin").stat().st_size
        assert weights <= need["engine_bytes"] < weights + 2 * 100_000


def test_calibrated_quantisation_is_planned_without_nvidias_tools(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    whole = _plan(capsys, str(tiny), "--gpu", "h100")
    for quantize, part in (("fp8", 0.5), ("int8_sq", 0.5), ("int4_awq", 0.26)):
        need = _plan(capsys, str(tiny), "--gpu", "h100", "--quantize", quantize)
        tables = 2 * 8000 * 256 * 2
        weights, all_weights = (each["gpu"]["asked"]["weight_bytes"] for each in (need, whole))
        assert weights - tables == pytest.approx(part * (all_weights - tables), rel=0.05)
        convert = need["stages"][1]
        assert convert["memory_bytes"] is None
        assert convert["disk_bytes"] == pytest.approx(weights, abs=100_000)
    assert "W8A8_SQ" in _plan(capsys, str(tiny), "--quantize", "int8_sq", code=UNABLE)["problem"]
    assert _plan(capsys, str(tiny), "--quantize", "int4_awq")["engine_bytes"] > 0


def test_a_plan_names_what_a_gpu_cannot_run(
    tiny: Path, quantised: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    awq, fp8 = str(quantised["awq"]), str(quantised["fp8"])
    assert "8.9 or later; a100-80gb has 8.0" in _plan(capsys, fp8, "--gpu", "a100-80gb", code=UNABLE)["gpu"]["problem"]
    turing = _plan(capsys, str(tiny), "--gpu", "t4", code=UNABLE)["gpu"]
    assert "bfloat16 need" in turing["problem"]
    assert "until 0.14" in turing["note"]
    assert turing["smallest"] is None
    assert run(["plan", str(tiny), "--gpu", "t4", "--quantize", "fp8"]) == UNABLE
    shown = capsys.readouterr()
    assert "Plan with --dtype float16 --quantize int8." in shown.err
    assert "converter   NVIDIA ModelOpt" in shown.out
    assert "smallest" not in shown.out
    blackwell = _plan(capsys, awq, "--gpu", "b200", code=UNABLE)["gpu"]
    assert "10.0" in blackwell["problem"]
    assert blackwell["note"] == "b200-180gb (Blackwell) is supported by TensorRT-LLM from 0.17 on"
    hopper = _plan(capsys, awq, "--gpu", "h200")["gpu"]
    assert hopper["problem"] is None
    assert "--gpu-sm 90" in hopper["note"]
    assert _plan(capsys, awq, "--gpu", "l4")["gpu"]["note"] is None
    assert _plan(capsys, fp8, "--gpu-memory", "80GB")["gpu"]["problem"] is None


def test_the_plan_says_what_is_needed_and_no_times_that_nobody_measured(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert run(["plan", str(tiny), "--quiet"]) == 0
    text = capsys.readouterr().out
    assert "stage\tdisk\tpeak memory\n" in text
    assert re.search(r"needs +[0-9.]+ [MG]iB of memory and [0-9.]+ [MG]iB of disk, at most\n", text)
    assert run(["plan", str(tiny), "--quantize", "int4_awq", "--quiet"]) == 0
    assert "of disk, at most; what the converter needs of memory is not known\n" in capsys.readouterr().out
    assert "sequences of 512" in text
    assert run(["plan", str(tiny), "--gpu", "t4", "--dtype", "float16", "--quiet"]) == 0
    text = capsys.readouterr().out
    assert "estimated from shapes" in text
    assert "note        t4-16gb (Turing) is supported by TensorRT-LLM until 0.14" in text


def test_a_model_that_does_not_fit_gets_limits_that_would(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trtserve.host.machine.free_memory", lambda: 2**20)
    machine = _plan(capsys, str(tiny), code=TOO_LARGE)["machine"]
    assert not machine["fits"]
    assert machine["tokens"] == 0
    assert "No setting" in machine["hint"]
    assert run(["plan", str(tiny), "--quiet"]) == TOO_LARGE
    assert re.search(r"^here +1 MiB of memory .*\nfits +no$", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--gpu", "h100-80gb", "--gpu-memory", "80GB"), UsageError.code),
        (("--gpu", "abacus"), UsageError.code),
        (("--gpu-memory", "much"), UsageError.code),
        (("--gpu-memory", "80"), UsageError.code),
        (("--max-tokens-in-paged-kv-cache", "0"), UsageError.code),
        (("--max-seq-len", "100000"), UsageError.code),
        (("--gpu", "t4", "--max-seq-len", "100", "--max-input-len", "200"), UsageError.code),
        (("--gpu", "t4", "--runtime", "openvino"), UsageError.code),
        (("--gpu", "t4", "--kv-precision", "u8"), UsageError.code),
        (("--gpu", "l4", "--kv-precision", "fp8", "--runtime", "tensorrt_llm"), UsageError.code),
        (("--gpu", "a100-40gb", "--kv-precision", "fp8"), UnsupportedModelError.code),
        (("--tp-size", "3"), UsageError.code),
    ],
)
def test_wrong_options_are_refused(tiny: Path, arguments: tuple[str, ...], code: int) -> None:
    assert run(["plan", str(tiny), *arguments]) == code


def test_missing_tensors_and_broken_headers_are_reported_before_the_download(
    hub: Hub, tiny: Path, tmp_path: Path
) -> None:
    folder = write_tiny_model(tmp_path / "less", dtype="bfloat16")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    hub.add("org/less", folder)
    assert run(["plan", "org/less"]) == ConversionError.code
    broken = write_tiny_model(tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"\x10" + b"\0" * 7 + b"no json at all..")
    hub.add("org/broken", broken)
    assert run(["plan", "org/broken"]) == CorruptFileError.code
