"""`trtserve inspect` on engines of every release's form, of both runtimes, in repositories, and on what is none."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest

from tests.doubles import trtllm_build
from tests.support.double_engines import checkpoint_config, write_checkpoint
from tests.support.doubles import Doubles
from tests.support.engine_folders import built_here
from tests.support.engine_folders import write_engine as write_plain_engine
from tests.support.tiny_models import write_tiny_model
from trtserve.artifacts import Engine
from trtserve.cli import run
from trtserve.errors import ArtifactError, CorruptFileError, ModelNotFoundError
from trtserve.pipeline.inspect import describe
from trtserve.store import Store

RELEASES = ("24.08", "24.09", "24.12", "25.04", "25.10", "26.07")


def _built(folder: Path, container: str, *flags: str, **changes: Any) -> Path:
    """An engine by the double of trtllm-build, for two ranks."""
    write_checkpoint(folder / "checkpoint", tp=2, **changes)
    doubles = Doubles(folder / "doubles", container=container)
    out = ("--output_dir", str(folder / "engine"), "--output_timing_cache", str(folder / "cache"))
    assert trtllm_build.main(["--checkpoint_dir", str(folder / "checkpoint"), *out, *flags], doubles.folder) == 0
    return folder / "engine"


@pytest.mark.parametrize("container", RELEASES)
def test_engines_of_trtllm_build_are_described(container: str, tmp_path: Path) -> None:
    flags = ("--max_batch_size", "4", "--max_beam_width", "2", "--max_draft_len", "3", "--gemm_plugin", "auto")
    mode = ("--speculative_decoding_mode", "draft_tokens_external")
    (found,) = describe(str(_built(tmp_path, container, *flags, *mode)))
    assert (found.kind, found.runtime) == ("engine", "tensorrt_llm")
    assert found.model["architecture"] == "LlamaForCausalLM"
    assert found.parallel == {"tp_size": 2, "pp_size": 1, "world_size": 2}
    assert found.limits["max_batch_size"] == 4
    assert found.limits["max_seq_len"] == 64
    assert found.features[:2] == ("2 beams", "3 draft tokens (draft_tokens_external)")
    assert found.plugins["gemm_plugin"] == "float16"
    assert "lora_plugin" not in found.plugins
    assert found.kv_cache["type"] == "PAGED"
    # 2 layers × 2 heads × 4 numbers × keys and values × 2 bytes
    assert found.kv_cache["bytes_per_token"] == 64
    assert found.kv_cache["tokens_per_block"] == (32 if container > "25.04" else 64)
    assert found.versions["tensorrt_llm"]
    assert [file.name for file in found.files] == ["rank0.engine", "rank1.engine"]
    assert not found.missing
    assert not found.built_on


def test_kv_cache_bytes_per_token(tmp_path: Path) -> None:
    quantized = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    model = {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 1, "hidden_size": 64}
    engine = write_plain_engine(tmp_path / "engine", tp_size=4, model={**model, "quantization": quantized})
    (found,) = describe(str(engine.path))
    # One head is copied to each of four ranks: 2 layers × 4 × 8 numbers × 2 × 1 byte.
    assert found.kv_cache["bytes_per_token"] == 128
    assert found.precision == "fp8 weights, float16 arithmetic, FP8 KV cache"
    assert found.quantization == quantized


@pytest.mark.parametrize(
    ("algorithm", "used"),
    [
        ("W8A16", ()),
        ("W4A16", ()),
        ("FP8", ()),
        ("W4A16_AWQ", ("group_size",)),
        ("W4A16_GPTQ", ("group_size",)),
        ("W8A8_SQ_PER_CHANNEL", ("smoothquant_val",)),
    ],
)
def test_unused_quantisation_settings_are_left_out(algorithm: str, used: tuple[str, ...], tmp_path: Path) -> None:
    stored = {"quant_algo": algorithm, "group_size": 128, "smoothquant_val": 0.5}
    (found,) = describe(str(write_plain_engine(tmp_path / "engine", model={"quantization": stored}).path))
    assert found.quantization == {name: stored[name] for name in ("quant_algo", *used)}


def test_parameters_of_small_models_are_millions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_tiny_model(tmp_path / "model")
    assert run(["convert", str(model), "--out", str(tmp_path / "checkpoint"), "--quiet"]) == 0
    capsys.readouterr()
    assert run(["inspect", str(tmp_path / "checkpoint")]) == 0
    assert re.search(r" 0\.[1-9] M parameters,", capsys.readouterr().out)


def test_features_in_words(tmp_path: Path) -> None:
    paged = _built(tmp_path, "25.10", "--use_paged_context_fmha", "enable")
    assert {"reuse of KV blocks", "chunked context"} <= set(describe(str(paged))[0].features)


def test_the_manifest_names_the_gpu(tmp_path: Path) -> None:
    engine = built_here(write_plain_engine(tmp_path / "engine"))
    (found,) = describe(str(engine.path))
    assert found.built_on == {"gpu": "NVIDIA H200", "sm": "90"}
    assert found.versions == {
        "tensorrt_llm": "0.18.2",
        "tensorrt": "10.9.0.34",
        "cuda": "12.8.1",
        "driver": "570.86",
    }


def test_the_tensorrt_version_is_read_from_the_engine(tmp_path: Path) -> None:
    engine = write_plain_engine(tmp_path / "engine").path
    head = struct.pack("<II", 0x74727466, 0) + bytes(16) + bytes((10, 14, 1, 48))
    (engine / "rank0.engine").write_bytes(head + bytes(100))
    assert describe(str(engine))[0].versions["tensorrt"] == "10.14.1.48"
    for other in (b"ftrt", b"ptrt" + head[4:], head[:4] + b"\1" + head[5:]):
        (engine / "rank0.engine").write_bytes(other)
        assert "tensorrt" not in describe(str(engine))[0].versions


def test_missing_ranks_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = write_plain_engine(tmp_path / "engine", tp_size=2).path
    (engine / "rank1.engine").unlink()
    assert describe(str(engine))[0].missing == ("rank1.engine",)
    assert run(["inspect", str(engine)]) == 0
    assert "file       rank1.engine, MISSING" in capsys.readouterr().out


def test_checkpoints_are_described(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path / "checkpoint", tp=2)
    (found,) = describe(str(tmp_path / "checkpoint"))
    assert (found.kind, found.parallel["world_size"], found.missing) == ("checkpoint", 2, ())
    assert run(["inspect", str(tmp_path / "checkpoint")]) == 0
    shown = capsys.readouterr().out
    assert "ranks      2 (tp_size 2, pp_size 1)" in shown
    assert "limits" not in shown


def test_a_long_word_of_a_manifest_is_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = built_here(write_plain_engine(tmp_path / "engine"))
    manifest = engine.path / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "created": "a" * 5000}))
    assert run(["inspect", str(engine.path)]) == 0
    assert f"built at   {'a' * 200}… (5000 characters)" in capsys.readouterr().out


def test_imports_and_repositories(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    assert run(["import", str(model), "--max-seq-len", "64", "--quiet", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)["result"]
    for text in ("tiny", record["engine"], record["repository"]):
        assert run(["inspect", text, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)["result"]
        assert found["runtime"] == "openvino"
        assert found["limits"]["max_seq_len"] == 64
        assert set(found["versions"]) == {"openvino"}
        assert found["built_on"]["machine"]
        assert found["kv_cache"]["bytes_per_token"] > 0
        assert not found["missing"]
    assert run(["inspect", "tiny"]) == 0
    assert "limits     16 requests" in capsys.readouterr().out


def test_model_folders_of_a_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    assert run(["import", str(model), "--max-seq-len", "64", "--quiet", "--out", str(tmp_path / "out")]) == 0
    engine = tmp_path / "out" / "tensorrt_llm" / "1"
    for folder in (engine, engine.parent, tmp_path / "out"):
        assert [found.path for found in describe(str(folder))] == [engine]
    monkeypatch.chdir(tmp_path / "out")
    assert [found.path for found in describe("tensorrt_llm")] == [engine]
    with pytest.raises(ArtifactError, match="is the model preprocessing of a repository, without an engine") as caught:
        describe("preprocessing/1")
    assert str(caught.value.hint).endswith(f"trtserve inspect {tmp_path / 'out'}")
    # An engine that lies elsewhere is found where gpt_model_path says.
    engine.rename(tmp_path / "elsewhere")
    engine.mkdir()
    config = tmp_path / "out" / "tensorrt_llm" / "config.pbtxt"
    config.write_text(config.read_text().replace('"tensorrt_llm/1"', f'"{tmp_path / "elsewhere"}"'))
    for folder in (engine, engine.parent, tmp_path / "out"):
        assert [found.path for found in describe(str(folder))] == [tmp_path / "elsewhere"]
    capsys.readouterr()
    assert run(["inspect", str(next((Store().root / "checkpoints").iterdir()))]) == 0
    assert capsys.readouterr().out.startswith("checkpoint ")


def test_the_repository_remembers_the_gpu(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    write_plain_engine(repository / "tensorrt_llm" / "1")
    (repository / "tensorrt_llm" / "config.pbtxt").write_text('name: "tensorrt_llm"')
    origin = {"tensorrt_llm": "0.18.2", "gpu": "NVIDIA H200", "sm": "90"}
    facts = {"core_models": {"tensorrt_llm": {"origin": origin}}}
    manifest = {"kind": "repository", "name": "r", "fingerprint": "f", "facts": facts}
    (repository / "manifest.json").write_text(json.dumps(manifest))
    (found,) = describe(str(repository))
    assert found.built_on == {"gpu": "NVIDIA H200", "sm": "90"}


def _folder(folder: Path, content: Any) -> Path:
    folder.mkdir()
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "config.json").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("content", "error", "told"),
    [
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, ArtifactError, "holds a Hugging Face model"),
        ({"builder_config": {}, "plugin_config": {}}, ArtifactError, "TensorRT-LLM before 0.9"),
        ({}, ArtifactError, "has no build_config"),
        ("{", CorruptFileError, "is not JSON"),
        ("[]", CorruptFileError, "is not a JSON object"),
    ],
)
def test_folders_without_an_engine_are_refused(content: Any, error: type[Exception], told: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=told):
        describe(str(_folder(tmp_path / "folder", content)))


def test_unknown_folders_and_names_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ArtifactError, match=r"is not an engine: it has no config\.json"):
        describe(str(tmp_path / "empty"))
    (tmp_path / "repository" / "model").mkdir(parents=True)
    (tmp_path / "repository" / "model" / "config.pbtxt").touch()
    with pytest.raises(ArtifactError, match="repository, without an engine"):
        describe(str(tmp_path / "repository"))
    with pytest.raises(ModelNotFoundError, match="nothing-here is neither a folder nor the name of an engine"):
        describe("nothing-here")


def test_unknown_families_are_described(tmp_path: Path) -> None:
    config = checkpoint_config(architecture="MambaForCausalLM")
    assert "num_key_value_heads" in config
    engine = Engine(path=write_plain_engine(tmp_path / "engine", model=config).path)
    (found,) = describe(str(engine.path))
    assert found.model["architecture"] == "MambaForCausalLM"
    assert "parameters" not in found.model
