"""Build refuses what cannot work, names what is missing, and leaves nothing behind; its command."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.checkpoints import convert_tiny
from tests.support.recorded_progress import Lines
from tests.support.stages import build_engine
from tests.support.tiny_models import write_tiny_model
from tests.support.unsupported_release import ENGINELESS
from trtserve.artifacts import Checkpoint, Engine, Manifest
from trtserve.cli import run
from trtserve.errors import (
    ArtifactError,
    BuildError,
    CorruptFileError,
    DiskSpaceError,
    MemoryLimitError,
    MissingDependencyError,
    ModelNotFoundError,
    TrtserveError,
    UnsupportedModelError,
    UsageError,
)
from trtserve.executor import runtimes
from trtserve.executor.torch import runtime as torch
from trtserve.host.machine import install_command
from trtserve.nvidia.releases.containers import latest_container
from trtserve.nvidia.releases.installed import installed
from trtserve.pipeline.build import plan_build
from trtserve.specs import BUILDER_FIELDS, BuildSpec
from trtserve.store import NameRecord, Store

SPEC = BuildSpec(max_batch_size=4, max_seq_len=128)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A float32 Llama checkpoint of one rank."""
    return convert_tiny(tmp_path_factory.mktemp("llama"))


def _manifest(artifact: Engine) -> Manifest:
    assert artifact.manifest is not None
    return artifact.manifest


def test_insufficient_memory_is_reported_before_writing(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trtserve.host.machine.free_memory", lambda: 10 * 2**20)
    with pytest.raises(MemoryLimitError, match=r"needs \d\d MiB of memory; 10 MiB are free"):
        build_engine(checkpoint, SPEC, out=tmp_path / "engine")
    assert not (tmp_path / "engine").exists()


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (RuntimeError("Exception from allocator.cpp:79:\nstd::bad_alloc"), MemoryLimitError),
        (RuntimeError("Exception from core.cpp:1:\nbad allocation"), MemoryLimitError),
        (RuntimeError("Exception from node.cpp:1:\nno such kernel"), BuildError),
    ],
)
def test_openvino_errors_are_explained(
    checkpoint: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failure: Exception,
    expected: type[TrtserveError],
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise failure

    monkeypatch.setattr("trtserve.executor.openvino.graph.save_graph", fail)
    with pytest.raises(expected):
        build_engine(checkpoint, SPEC, out=tmp_path / "engine")
    assert not (tmp_path / "engine").exists()


def test_insufficient_disk_is_reported(checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtserve.host.machine.free_disk", lambda _: 1024)
    with pytest.raises(DiskSpaceError, match="has 1 KiB free"):
        build_engine(checkpoint, SPEC, out=tmp_path / "engine")


def test_missing_openvino_names_the_command(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    with pytest.raises(MissingDependencyError) as caught:
        plan_build(checkpoint, SPEC)
    assert caught.value.hint == install_command("cpu")


def test_missing_tensorrt_llm_is_reported(checkpoint: Checkpoint) -> None:
    with pytest.raises(MissingDependencyError, match="TensorRT-LLM, which is not installed") as caught:
        plan_build(checkpoint, BuildSpec(runtime="tensorrt_llm"))
    assert "nvcr.io/nvidia/tritonserver:" in str(caught.value.hint)
    assert f"--container {latest_container().tag}," in str(caught.value.hint)


@pytest.mark.parametrize(
    ("gpu", "version", "cuda", "runtime", "reason"),
    [
        (False, "1.2.0", "12.8", "openvino", "no NVIDIA GPU on this machine"),
        (True, None, None, "openvino", "an NVIDIA GPU, but neither TensorRT-LLM nor PyTorch with CUDA"),
        (True, None, "12.8", "torch", "an NVIDIA GPU and PyTorch with CUDA 12.8 on this machine, and no TensorRT-LLM"),
        (True, "1.2.0", "12.8", "tensorrt_llm", "an NVIDIA GPU and TensorRT-LLM 1.2.0"),
        (
            True,
            ENGINELESS,
            "12.8",
            "llmapi",
            f"TensorRT-LLM {ENGINELESS} on this machine, which has no engines any more",
        ),
    ],
)
def test_auto_runtime_reports_its_choice(
    gpu: bool,
    version: str | None,
    cuda: str | None,
    runtime: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    (tmp_path / "0000:01:00.0").mkdir()
    monkeypatch.setattr(runtimes, "_NVIDIA_GPUS", tmp_path if gpu else tmp_path / "absent")
    monkeypatch.setattr(runtimes, "installed", lambda: installed(version) if version else None)
    monkeypatch.setattr(torch, "cuda_version", lambda: cuda)
    lines = Lines()
    assert runtimes.choose_runtime("auto", lines) is runtimes.RUNTIMES[runtime]
    assert lines.lines[0].startswith(f"Runtime: {runtime} (")
    assert reason in lines.lines[0]


@pytest.mark.parametrize("name", BUILDER_FIELDS)
def test_options_of_trtllm_build_are_refused_for_cpus(name: str, checkpoint: Checkpoint) -> None:
    values = {"gemm_plugin": "auto", "gpt_attention_plugin": "auto", "kv_cache_type": "paged", "builder_flags": ("-x",)}
    values |= {"logits_dtype": "float16", "profiling_verbosity": "none"}
    values |= dict.fromkeys(("tokens_per_block", "opt_num_tokens", "build_workers"), 1)  # type: ignore[arg-type]
    spec = BuildSpec(**{name: values.get(name, "enable")})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="is for trtllm-build, which does not build this engine"):
        plan_build(checkpoint, spec)


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_algo": "W4A8_AWQ"},
        {"quant_algo": "W8A8_SQ_PER_CHANNEL"},
        {"quant_algo": None, "kv_cache_quant_algo": "INT8"},
    ],
    ids=str,
)
def test_unsupported_quantisation_is_refused(quantization: dict[str, Any], tmp_path: Path) -> None:
    source = convert_tiny(tmp_path)
    _edit(source.path / "config.json", quantization=quantization)
    wanted = quantization["quant_algo"] or quantization["kv_cache_quant_algo"]
    with pytest.raises(UnsupportedModelError, match=wanted):
        plan_build(source, SPEC)


def _edit(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(content | changes), encoding="utf-8")


def test_quantised_tensors_are_not_read_as_floats(tmp_path: Path) -> None:
    """A W8A16 checkpoint of NVIDIA's own converter holds int8 tensors in the layout of its kernels."""
    from safetensors.numpy import load_file, save_file

    source = convert_tiny(tmp_path, quantize="int8")
    path = source.path / "rank0.safetensors"
    tensors = load_file(path)
    name = "transformer.layers.0.mlp.fc.weight"
    save_file(tensors | {name: tensors[name].astype(np.int8)}, path)
    with pytest.raises(UnsupportedModelError, match="type I8 cannot be read"):
        build_engine(source, SPEC, out=tmp_path / "engine")


def test_damaged_weights_leave_no_engine_behind(tmp_path: Path) -> None:
    source = convert_tiny(tmp_path)
    path = source.path / "rank0.safetensors"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1000)
    with pytest.raises(CorruptFileError, match=r"rank0\.safetensors"):
        build_engine(source, SPEC, out=tmp_path / "engine")
    assert [entry.name for entry in tmp_path.iterdir() if "engine" in entry.name] == []


@pytest.mark.parametrize("flags", [["--dry-run"], []])
def test_rank_files_are_checked_first(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = convert_tiny(tmp_path, tp_size=2)
    command = ["build", str(source.path), "--max-seq-len", "64", "--out", str(tmp_path / "engine"), *flags]
    monkeypatch.setattr("trtserve.pipeline.build.BuildPlan._require_memory_and_disk", None)  # never reached
    last = source.path / "rank1.safetensors"
    with last.open("r+b") as file:
        file.truncate(last.stat().st_size - 1000)
    assert run(command) == CorruptFileError.code
    assert "rank1.safetensors is damaged" in capsys.readouterr().err
    last.unlink()
    assert run(command) == ArtifactError.code
    assert "rank1.safetensors is missing; the checkpoint has 2 ranks" in capsys.readouterr().err


def test_overflowing_weights_are_refused(tmp_path: Path) -> None:
    source = convert_tiny(tmp_path)
    path = source.path / "rank0.safetensors"
    from safetensors.numpy import load_file, save_file

    tensors = load_file(path)
    save_file(tensors | {"lm_head.weight": np.full_like(tensors["lm_head.weight"], np.inf)}, path)
    with pytest.raises(BuildError, match="non-finite"):
        build_engine(source, SPEC, out=tmp_path / "engine")


def test_checkpoints_of_other_tools_are_accepted_by_path(tmp_path: Path) -> None:
    source = convert_tiny(tmp_path)
    (source.path / "manifest.json").unlink()
    found = Store().find(Checkpoint, str(source.path))
    assert found.manifest is None
    built = build_engine(found, SPEC, out=tmp_path / "engine")
    assert _manifest(built).name == "checkpoint"


def test_sources_without_a_checkpoint_are_refused(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model")
    with pytest.raises(ArtifactError, match="not a TensorRT-LLM checkpoint's config"):
        plan_build(Store().find(Checkpoint, str(tmp_path / "model")), SPEC)
    with pytest.raises(ModelNotFoundError, match="neither a folder nor the name of a checkpoint"):
        Store().find(Checkpoint, "nothing-like-that")


def test_imported_names_resolve_to_their_checkpoint(checkpoint: Checkpoint) -> None:
    record = NameRecord(
        name="tiny",
        source="local:tiny",
        model="",
        checkpoint=str(checkpoint.path),
        engine="",
        repository="",
        imported="2026-01-01T00:00:00+00:00",
    )
    Store().record(record)
    assert Store().find(Checkpoint, "tiny") == checkpoint


def test_command_prints_the_path(checkpoint: Checkpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["build", str(checkpoint.path), "--max-batch-size", "4", "--out", str(tmp_path / "engine")]
    assert run([*arguments, "--dry-run"]) == 0
    assert "float32 weights, f32 arithmetic, f32 KV cache" in capsys.readouterr().out
    assert not (tmp_path / "engine").exists()
    assert run(arguments) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'engine'}\n"
    assert run([*arguments, "--json", "--quiet"]) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    assert (result["reused"], result["max_batch_size"], result["kv_precision"]) == (True, 4, "f32")
    assert result["weights_bytes"] > 0
