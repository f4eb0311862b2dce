"""Build: limits, precision and room are decided before the work; the engine is reused, proven, or explained."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from tests.support.checkpoints import convert_tiny
from tests.support.paged_steps import PagedSteps
from tests.support.recorded_progress import Lines
from tests.support.stages import build_engine
from trtserve.artifacts import Checkpoint, Engine, Manifest, load_artifact
from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.errors import UnsupportedModelError, UsageError
from trtserve.executor.loaders import read_engine_config
from trtserve.executor.openvino import runtime
from trtserve.executor.openvino.memory import weight_bytes
from trtserve.executor.openvino.paged_model import PagedModel
from trtserve.pipeline.build import plan_build
from trtserve.specs import BuildSpec
from trtserve.specs.runtime import longest_sequence

SPEC = BuildSpec(max_batch_size=4, max_seq_len=128)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A float32 Llama checkpoint of one rank."""
    return convert_tiny(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def engine(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Its engine."""
    return build_engine(checkpoint, SPEC, out=tmp_path_factory.mktemp("built") / "engine")


def _manifest(artifact: Engine) -> Manifest:
    assert artifact.manifest is not None
    return artifact.manifest


def _engine_config(artifact: Engine) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((artifact.path / "config.json").read_text(encoding="utf-8"))
    return config


def test_engine_folder_files(engine: Engine) -> None:
    assert sorted(path.name for path in engine.path.iterdir()) == [
        "config.json",
        "manifest.json",
        "rank0.bin",
        "rank0.xml",
    ]
    assert load_artifact(Engine, engine.path).name == "tiny"


def test_config_follows_tensorrt_llm(engine: Engine, checkpoint: Checkpoint) -> None:
    config = _engine_config(engine)
    assert list(config) == ["version", "pretrained_config", "build_config", "trtserve"]
    source = json.loads((checkpoint.path / "config.json").read_text(encoding="utf-8"))
    assert config["pretrained_config"] == source
    limits = {key: config["build_config"][key] for key in ("max_batch_size", "max_input_len", "max_seq_len")}
    assert limits == {"max_batch_size": 4, "max_input_len": 128, "max_seq_len": 128}
    assert config["build_config"]["max_num_tokens"] == 512
    own = config["trtserve"]
    assert (own["runtime"], own["compute_precision"], own["kv_precision"]) == ("openvino", "f32", "f32")
    assert own["openvino"] == metadata.version("openvino")


def test_manifest_records_what_the_proof_measured(engine: Engine) -> None:
    facts = _manifest(engine).facts
    assert facts["weights_bytes"] == (engine.path / "rank0.bin").stat().st_size
    assert facts["load_seconds"] > 0
    assert facts["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 4
    assert facts["compute_precision"] == "f32"


def test_equal_builds_are_reused(checkpoint: Checkpoint) -> None:
    first = build_engine(checkpoint, SPEC)
    lines = Lines()
    again = build_engine(checkpoint, SPEC, progress=lines)
    assert again == first
    assert any("is reused" in line for line in lines.lines)
    assert not any("Building" in line for line in lines.lines)
    spec = BuildSpec(max_batch_size=4, max_seq_len=128, kv_precision="u8")
    assert build_engine(checkpoint, spec).path != first.path


@pytest.mark.parametrize(
    "spec",
    [
        BuildSpec(max_batch_size=5, max_seq_len=128),
        BuildSpec(max_batch_size=4, max_seq_len=64),
        BuildSpec(max_batch_size=4, max_seq_len=128, max_input_len=64),
        BuildSpec(max_batch_size=4, max_seq_len=128, max_num_tokens=64),
        BuildSpec(max_batch_size=4, max_seq_len=128, kv_precision="f16"),
        BuildSpec(max_batch_size=4, max_seq_len=128, max_beam_width=2),
        BuildSpec(max_batch_size=4, max_seq_len=128, max_prompt_embedding_table_size=8),
        BuildSpec(max_batch_size=4, max_seq_len=128, use_paged_context_fmha="disable"),
        BuildSpec(max_batch_size=4, max_seq_len=128, lora_plugin="auto", lora_target_modules=["attn_q"]),
    ],
)
def test_fingerprint_covers_limits_features_and_precision(checkpoint: Checkpoint, spec: BuildSpec) -> None:
    assert plan_build(checkpoint, spec).fingerprint != plan_build(checkpoint, SPEC).fingerprint


def test_fingerprint_covers_int4_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of other groups are built anew; those that have none are reused."""
    sources = [convert_tiny(tmp_path / name, quantize=name) for name in ("int4", "int8")]
    before = [plan_build(source, SPEC).fingerprint for source in sources]
    monkeypatch.setattr("trtserve.executor.openvino.runtime.INT4_GROUPS", (128, 64, 32))
    after = [plan_build(source, SPEC).fingerprint for source in sources]
    assert [old == new for old, new in zip(before, after, strict=True)] == [False, True]


def test_fingerprint_covers_openvino_version(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    before = plan_build(checkpoint, SPEC).fingerprint
    monkeypatch.setattr(metadata, "version", lambda _: "2099.1")
    assert plan_build(checkpoint, SPEC).fingerprint != before


ODD: Any = {"overrides": {"vocab_size": 321}}
"""A vocabulary that no number of ranks divides."""


@pytest.fixture(scope="module")
def odd_engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("odd")
    return build_engine(convert_tiny(folder / "checkpoint", **ODD), SPEC, out=folder / "engine")


@pytest.mark.parametrize("sizes", [{"tp_size": 2}, {"tp_size": 4}, {"pp_size": 2}], ids=str)
def test_sharded_checkpoints_build_the_same_engine(sizes: Any, odd_engine: Engine, tmp_path: Path) -> None:
    """The odd vocabulary is padded, and tp 4 repeats the 2 key heads: neither may leave a trace."""
    lines = Lines()
    split = build_engine(
        convert_tiny(tmp_path / "split", **ODD, **sizes), SPEC, out=tmp_path / "engine", progress=lines
    )
    assert (split.path / "rank0.bin").read_bytes() == (odd_engine.path / "rank0.bin").read_bytes()
    mapping = _engine_config(split)["pretrained_config"]["mapping"]
    assert (mapping["world_size"], mapping["tp_size"], mapping["pp_size"]) == (1, 1, 1)
    assert any("ranks are merged" in line for line in lines.lines)


def test_limits_default_to_the_model(tmp_path: Path) -> None:
    short = plan_build(convert_tiny(tmp_path / "short"), BuildSpec()).engine.limits
    assert (short.max_seq_len, short.max_input_len) == (512, 512)
    assert (short.max_batch_size, short.max_num_tokens) == (16, 2048)
    overrides = {"max_position_embeddings": 131072}
    long = plan_build(convert_tiny(tmp_path / "long", overrides=overrides), BuildSpec()).engine.limits
    assert long.max_seq_len == 4096


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (BuildSpec(max_seq_len=513), "max-seq-len is 513; the model has 512 positions"),
        (BuildSpec(max_seq_len=64, max_input_len=65), "max-input-len is 65, more than --max-seq-len 64"),
        (BuildSpec(max_batch_size=8, max_num_tokens=7), "max-num-tokens is 7, but each of 8 requests"),
    ],
)
def test_impossible_limits_are_refused_with_numbers(checkpoint: Checkpoint, spec: BuildSpec, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan_build(checkpoint, spec)


@pytest.mark.parametrize(
    ("scaling", "longest"), [({"type": "linear", "factor": 2.0}, 200), ({"type": "llama3", "factor": 8.0}, 100)]
)
def test_linear_rope_scaling_lengthens_the_context_and_llama3_does_not(scaling: dict[str, Any], longest: int) -> None:
    config = CheckpointConfig.of({"max_position_embeddings": 100, "rotary_scaling": scaling})
    assert longest_sequence(config) == longest
    assert longest_sequence(CheckpointConfig.of({"max_position_embeddings": None, "rotary_scaling": None})) == 2048


def test_gemma3_positions_include_linear_scaling() -> None:
    scaling = {"max_position_embeddings": 100, "rotary_scaling": {"rope_type": "linear", "factor": 8.0}}
    assert longest_sequence(CheckpointConfig.of(scaling)) == 800
    assert longest_sequence(CheckpointConfig.of({"architecture": "Gemma3ForCausalLM", **scaling})) == 100


def test_dynamic_rope_scaling_is_limited_to_the_models_positions(tmp_path: Path) -> None:
    checkpoint = convert_tiny(tmp_path, overrides={"family": "llama_dynamic"})
    assert plan_build(checkpoint, BuildSpec(max_seq_len=512)).engine.limits.max_seq_len == 512
    with pytest.raises(UsageError, match="max-seq-len is 513; the model has 512 positions"):
        plan_build(checkpoint, BuildSpec(max_seq_len=513))


@pytest.mark.parametrize(("asked", "cache"), [("auto", "f32"), ("f32", "f32"), ("u8", None)])
def test_caches_of_capped_scores_have_the_precision_of_arithmetic(
    asked: Literal["auto", "f32", "u8"], cache: str | None, tmp_path: Path
) -> None:
    checkpoint = convert_tiny(tmp_path, overrides={"family": "gemma2"}, dtype="float32")
    spec = replace(SPEC, kv_precision=asked)
    if cache is None:
        with pytest.raises(UnsupportedModelError, match=r"precision of arithmetic, f32; --kv-precision is u8"):
            plan_build(checkpoint, spec)
    else:
        engine = build_engine(checkpoint, spec, out=tmp_path / "engine")
        assert read_engine_config(engine.path).trtserve.kv_precision == cache


@pytest.mark.parametrize(
    ("dtype", "kv", "bfloat16", "expected"),
    [
        ("float32", "auto", True, ("f32", "f32")),
        ("float32", "u8", True, ("f32", "u8")),
        ("float16", "auto", True, ("bf16", "u8")),
        ("bfloat16", "f16", True, ("bf16", "f16")),
        ("float16", "f32", True, ("f32", "f32")),
        ("float16", "auto", False, ("f32", "u8")),
        ("bfloat16", "f32", False, ("f32", "f32")),
    ],
)
def test_precision_follows_weights_and_machine(dtype: str, kv: str, bfloat16: bool, expected: tuple[str, str]) -> None:
    assert runtime.resolve_precision(dtype, kv, bfloat16=bfloat16)[:2] == expected


@pytest.mark.parametrize(
    ("family", "compute"),
    [("granite_hybrid", "f32"), ("nemotron_h", "f32"), ("falcon_h1", "f32"), ("qwen3_5", "bf16"), ("lfm2", "bf16")],
)
def test_states_that_drift_in_bfloat16_have_float32_arithmetic(
    family: str, compute: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trtserve.host.machine.has_bfloat16", lambda: True)
    checkpoint = convert_tiny(tmp_path, overrides={"family": family}, dtype="bfloat16")
    engine = plan_build(checkpoint, SPEC).engine
    assert isinstance(engine, runtime.OpenvinoPlan)
    assert (engine.compute_precision, any("Mamba-2" in note for note in engine.notes)) == (compute, compute == "f32")


@pytest.mark.parametrize(
    ("dtype", "quantize", "kv"),
    [
        ("float16", "none", "f16"),
        ("float16", "int8", "f32"),
        ("float16", "int4", "auto"),
        ("bfloat16", "none", "auto"),
        ("bfloat16", "int8", "f16"),
        ("bfloat16", "int4", "f32"),
    ],
)
def test_every_precision_builds_and_runs(dtype: str, quantize: str, kv: Any, tmp_path: Path) -> None:
    source = convert_tiny(tmp_path, dtype=dtype, quantize=quantize)
    lines = Lines()
    built = build_engine(source, BuildSpec(kv_precision=kv), out=tmp_path / "engine", progress=lines)
    words = dtype if quantize == "none" else quantize
    assert any(line.startswith(f"Loading the engine: {words} weights, ") for line in lines.lines)
    size = (built.path / "rank0.bin").stat().st_size
    # Beside the weights there are a few constants: frequencies, masks, shapes.
    assert 0 <= size - weight_bytes(CheckpointConfig.of(_engine_config(built)["pretrained_config"])) < 4096
    logits = PagedSteps(PagedModel(built.path, threads=1), {"a": range(3, 40)}).step({"a": 37})["a"]
    assert np.isfinite(logits).all()
