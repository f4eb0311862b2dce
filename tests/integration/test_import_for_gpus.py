"""`import` for GPUs in one go: an engine by a double of trtllm-build, and the LLM API without an engine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.doubles import Doubles
from tests.support.servers import HOST
from tests.support.tiny_models import write_tiny_model
from tests.support.unsupported_release import ENGINELESS
from trtserve.artifacts import Manifest, ModelRepository
from trtserve.cli import run
from trtserve.errors import MemoryLimitError
from trtserve.executor import runtimes
from trtserve.host.ports import free_ports
from trtserve.store import Store


@pytest.fixture
def model(doubles: Doubles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model, on a machine with TensorRT-LLM 1.2.1 and two GPUs."""
    doubles.configure(container="26.07", version="1.2.1", gpus=2)
    monkeypatch.syspath_prepend(str(doubles.packages("1.2.1")))
    return write_tiny_model(tmp_path / "tiny")


def _result(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)["result"]


def test_an_engine_of_two_ranks_up_to_the_repository(
    model: Path, doubles: Doubles, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE_DEST_PATH", str(tmp_path / "engines"))
    flags = ("--runtime", "tensorrt_llm", "--tp-size", "2", "--max-batch-size", "4", "--builder-flag=--moe_plugin=auto")
    assert run(["import", str(model), *flags, "--json"]) == 0
    record = _result(capsys)
    repository = Path(record["repository"])
    facts = ModelRepository(path=repository, manifest=Store().find(ModelRepository, "tiny").manifest).manifest
    assert facts is not None
    assert facts.facts["runtime"] == "tensorrt_llm"
    assert facts.facts["world_size"] == 2
    assert facts.facts["core_models"]["tensorrt_llm"]["origin"] == {
        "tensorrt_llm": "1.2.1",
        "tensorrt": "10.14.1.48",
        "cuda": "13.1.0.036",
        "driver": "575.57.08",
        "gpu": "NVIDIA H100 80GB HBM3",
        "sm": "90",
    }
    assert record["engine"] == str(tmp_path / "engines" / "tiny")
    assert (repository / "tensorrt_llm" / "1" / "rank1.engine").is_file()
    (call,) = doubles.calls("trtllm-build")
    assert "--moe_plugin=auto" in call.arguments
    assert run(["import", str(model), *flags]) == 0
    assert len(doubles.calls("trtllm-build")) == 1


def test_weights_too_large_for_the_gpus_are_refused_before_the_conversion(
    doubles: Doubles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    doubles.configure(container="26.07", version="1.2.1", gpus=2, gpu_memory_mib=5)
    monkeypatch.syspath_prepend(str(doubles.packages("1.2.1")))
    model = write_tiny_model(tmp_path / "tiny", vocab_size=20_000)
    assert run(["import", str(model), "--runtime", "tensorrt_llm"]) == MemoryLimitError.code
    printed = capsys.readouterr().err
    assert "the largest GPU of this machine has 5 MiB of memory" in printed
    assert not doubles.calls("trtllm-build")
    assert not (Store().root / "checkpoints").exists()
    assert run(["convert", str(model), "--out", str(tmp_path / "c"), "--quiet"]) == 0
    build = ("build", str(tmp_path / "c"), "--runtime", "tensorrt_llm")
    assert run([*build]) == MemoryLimitError.code
    assert run([*build, "--", "--weight_streaming"]) == 0


def test_a_dry_run_prints_the_external_command(
    model: Path, doubles: Doubles, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["import", str(model), "--runtime", "tensorrt_llm", "--build-workers", "1", "--dry-run"]) == 0
    planned = capsys.readouterr().out
    assert "command   trtllm-build --checkpoint_dir " in planned
    assert "no external command" not in planned
    assert not doubles.calls("trtllm-build")


def test_the_llm_api_needs_the_model_alone(
    model: Path, doubles: Doubles, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--runtime", "llmapi", "--tp-size", "2", "--max-seq-len", "256")
    assert run(["import", str(model), *flags, "--dry-run", "--json"]) == 0
    assert [stage["stage"] for stage in _result(capsys)["stages"]] == ["model", "repo"]
    assert run(["import", str(model), *flags, "--json"]) == 0
    record = _result(capsys)
    assert (record["checkpoint"], record["engine"]) == ("", "")
    content = yaml.safe_load((Path(record["repository"]) / "tensorrt_llm" / "1" / "model.yaml").read_text())
    assert (content["tensor_parallel_size"], content["max_seq_len"]) == (2, 256)
    assert run(["import", str(model), *flags]) == 0
    assert "is reused" in capsys.readouterr().err
    assert not doubles.calls("trtllm-build")
    monkeypatch.chdir(Path(record["repository"]))  # an empty path of the record would mean this folder
    assert run(["list"]) == 0
    assert str(model) in capsys.readouterr().out
    assert run(["remove", "tiny"]) == 0
    assert not Path(record["repository"]).exists()


def _renamed(model: Path, architecture: str, model_type: str) -> Path:
    """Return the model under the name of another architecture, with its own program and processor."""
    file = model / "config.json"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"architectures": [architecture], "model_type": model_type})
    )
    (model / "modeling_other.py").write_text("")
    (model / "preprocessor_config.json").write_text("{}")
    return model


def test_a_name_taken_over_by_the_llm_api_is_reported(
    model: Path, tmp_path: Path, doubles: Doubles, capsys: pytest.CaptureFixture[str]
) -> None:
    other = shutil.copytree(model, tmp_path / "elsewhere" / model.name)
    flags = ("--runtime", "llmapi", "--name", "mine")
    assert run(["import", str(model), *flags]) == 0
    assert "The name mine meant" not in capsys.readouterr().err
    assert run(["import", str(other), *flags]) == 0
    assert f"The name mine meant {model} before" in capsys.readouterr().err
    assert not doubles.calls("trtllm-build")


def test_the_llm_api_takes_architectures_that_nothing_converts(
    model: Path, capsys: pytest.CaptureFixture[str], doubles: Doubles
) -> None:
    _renamed(model, "DeepseekV3ForCausalLM", "deepseek_v3")
    assert run(["import", str(model), "--runtime", "tensorrt_llm"]) == 15
    assert run(["import", str(model), "--runtime", "tensorrt_llm", "--converter", "upstream"]) == 15
    assert "Without an engine: --runtime llmapi" in capsys.readouterr().err
    assert run(["import", str(model), "--runtime", "llmapi", "--download-only"]) == 0
    capsys.readouterr()
    assert run(["import", str(model), "--runtime", "llmapi", "--json"]) == 0
    repository = Path(_result(capsys)["repository"])
    inside = {path.name for path in (repository / "tensorrt_llm" / "1" / "model").iterdir()}
    assert {"modeling_other.py", "preprocessor_config.json", "model.safetensors", "tokenizer.json"} <= inside
    ports = [
        f"--{name}-port={port}" for name, port in zip(("http", "grpc", "metrics"), free_ports(HOST, 3), strict=True)
    ]
    assert run(["start", "tiny", "--detach", *ports]) == 0
    assert run(["stop", "tiny"]) == 0


def test_nvidias_converter_imports_other_architectures(
    doubles: Doubles, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    doubles.configure(container="26.07", version="1.2.1", gpus=2)
    monkeypatch.syspath_prepend(str(doubles.packages("1.2.1")))
    model = _renamed(write_tiny_model(tmp_path / "tiny", "gpt2"), "GPTBigCodeForCausalLM", "gpt_bigcode")
    flags = ("--converter", "upstream", "--trtllm-examples", str(doubles.examples("1.2")), "--tp-size", "2")
    assert run(["import", str(model), "--runtime", "openvino", *flags]) == 15
    assert "GPTBigCodeForCausalLM is not supported" in capsys.readouterr().err
    assert run(["import", str(model), "--runtime", "tensorrt_llm", *flags, "--quiet"]) == 0
    assert run(["import", str(model), "--runtime", "tensorrt_llm", *flags, "--dry-run"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in shown[-4:]][:2] == [["model", "reuse"], ["convert", "reuse"]]
    assert run(["import", str(model), "--runtime", "tensorrt_llm", *flags, "--quiet"]) == 0
    assert len(doubles.calls("convert_checkpoint.py")) == len(doubles.calls("trtllm-build")) == 1
    flags = (*flags[:-1], "1")
    assert run(["import", str(model), "--runtime", "tensorrt_llm", *flags, "--dry-run"]) == 0
    assert "gpt/convert_checkpoint.py --model_dir" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags",
    [
        ("--quantize", "int8"),
        ("--gemm-plugin", "auto"),
        ("--max-beam-width", "2"),
        ("--verify",),
        ("--tokenizer", "demo"),
    ],
    ids=" ".join,
)
def test_options_the_llm_api_lacks_are_refused(
    flags: tuple[str, ...], model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if flags == ("--tokenizer", "demo"):
        flags = ("--tokenizer", str(model))
    assert run(["import", str(model), "--runtime", "llmapi", *flags]) == 2
    assert f"{flags[0]} has no meaning with --runtime llmapi" in capsys.readouterr().err


def test_auto_takes_the_llm_api_for_releases_without_engines(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gpus" / "0").mkdir(parents=True)
    monkeypatch.setattr(runtimes, "_NVIDIA_GPUS", tmp_path / "gpus")
    packages = tmp_path / "packages" / f"tensorrt_llm-{ENGINELESS}.dist-info"
    packages.mkdir(parents=True)
    (packages / "METADATA").write_text(f"Metadata-Version: 2.1\nName: tensorrt-llm\nVersion: {ENGINELESS}\n")
    monkeypatch.syspath_prepend(str(packages.parent))
    assert run(["import", str(model), "--dry-run"]) == 0
    shown = capsys.readouterr()
    assert (
        f"Runtime: llmapi (an NVIDIA GPU and TensorRT-LLM {ENGINELESS} on this machine, which has no engines"
        in shown.err
    )
    assert "convert" not in shown.out


def test_a_plan_for_gpus_needs_a_gpu(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run(["plan", str(model), "--runtime", "tensorrt_llm"]) == 2
    assert "no GPU is named, and nvidia-smi finds none here" in capsys.readouterr().err
    # The driver lists one, so that import would build for it, but nothing tells its memory.
    (tmp_path / "gpus" / "0").mkdir(parents=True)
    monkeypatch.setattr(runtimes, "_NVIDIA_GPUS", tmp_path / "gpus")
    assert run(["plan", str(model)]) == 2
    assert "--runtime openvino is for CPUs" in " ".join(capsys.readouterr().err.split())
    assert run(["plan", str(model), "--runtime", "openvino", "--json"]) == 0
    assert _result(capsys)["machine"]["fits"] is True


@pytest.mark.parametrize("runtime", ["llmapi", "tensorrt_llm"])
def test_a_second_model_in_the_same_repository(
    runtime: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = ["import", str(model), "--runtime", runtime, "--max-seq-len", "64"]
    assert run([*start, "--quiet"]) == 0
    repository = Store().find(ModelRepository, "tiny").path
    models = {path.parent.name for path in repository.glob("*/config.pbtxt")}
    capsys.readouterr()
    # Taken names are reported before any work.
    assert run([*start, "--name", "second", "--into", str(repository), "--dry-run"]) == 22
    assert "--suffix _b --name OTHER" in capsys.readouterr().err
    assert run([*start, "--into", str(repository), "--out", str(tmp_path / "out")]) == 2
    assert "--out and --into contradict each other" in capsys.readouterr().err
    more = [*start, "--name", "second", "--suffix", "_b", "--into", str(repository)]
    assert run([*more, "--dry-run", "--json"]) == 0
    assert not (repository / "second").exists()
    capsys.readouterr()
    assert run([*more, "--json"]) == 0
    assert _result(capsys)["repository"] == str(repository)
    added = {path.parent.name for path in repository.glob("*/config.pbtxt")}
    assert added - models == {f"{name}_b" for name in models - {"tiny"}} | {"second"}
    assert set(Manifest.read(repository).facts["members"]) == {"tiny", "second"}
    assert run(["check", str(repository), "--quiet"]) == 0
    # Both names mean this repository; again is nothing new, and removing one leaves it to the other.
    assert [record.repository for record in Store().recorded()] == [str(repository)] * 2
    assert run([*more, "--quiet"]) == 0
    assert run(["remove", "second"]) == 0
    assert (repository / "second" / "config.pbtxt").is_file()


def test_a_plan_uses_the_gpus_of_this_machine(
    model: Path, doubles: Doubles, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    doubles.configure(gpus=2, gpu_name="NVIDIA H200", gpu_memory_mib=143771, container="26.02")
    monkeypatch.syspath_prepend(str(doubles.packages("1.1.0")))
    assert run(["plan", str(model), "--json"]) == 0
    shown = _result(capsys)
    assert (shown["machine"], shown["gpu"]["note"]) == (None, None)
    gpu = shown["gpu"]["asked"]["gpu"]
    assert gpu == {"name": "this machine's NVIDIA H200", "memory_bytes": 143767 * 2**20, "sm": 90, "here": 2}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert run(["plan", str(model), "--runtime", "tensorrt_llm", "--tp-size", "2"]) == 0
    printed = capsys.readouterr().out
    assert "GPU         this machine's NVIDIA H200, 140.4 GiB free (estimated" in printed
    assert "note        2 ranks; 1 GPU can be seen" in printed
    # What only CPUs have decides for them.
    assert run(["plan", str(model), "--kv-precision", "u8", "--json"]) == 0
    assert _result(capsys)["gpu"] is None
