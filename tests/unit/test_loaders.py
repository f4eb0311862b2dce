"""A conversion for a release loads in it, or is refused before anything is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.families import FAMILIES
from tests.support.recorded_progress import Lines
from tests.support.stages import convert_model
from tests.support.tiny_models import read_safetensors, write_safetensors, write_tiny_model
from trtserve.artifacts import Checkpoint, Model
from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import checkpoint_targets
from trtserve.checkpoint.unified import CheckpointReader
from trtserve.errors import UnsupportedModelError, UsageError
from trtserve.nvidia.releases import RELEASES, load_table, order
from trtserve.nvidia.releases.loaders import loading_releases
from trtserve.pipeline.build import plan_build
from trtserve.pipeline.checkpoint_config import checkpoint_config
from trtserve.specs import BuildSpec, ConvertSpec

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def config_of(name: str, changes: dict[str, Any] | None = None, **spec: Any) -> CheckpointConfig:
    return checkpoint_config(FAMILIES[name].config | (changes or {}), ConvertSpec(**spec))


def convert(folder: Path, out: Path, lines: Lines | None = None, **spec: Any) -> Checkpoint:
    return convert_model(Model(path=folder), ConvertSpec(**spec), out=out, progress=lines or Lines())


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.nvidia and not family.stages])
def test_pipeline_stages_that_no_loader_takes_are_refused_for_a_release(name: str) -> None:
    for release in RELEASES:
        with pytest.raises(UsageError, match="--pp-size 2"):
            config_of(name, pp_size=2, trtllm_version=release)
        config_of(name, trtllm_version=release)  # not refused
    assert config_of(name, pp_size=2).mapping.pp_size == 2


def test_pipeline_stages_that_no_loader_takes_are_for_the_torch_runtime(tmp_path: Path) -> None:
    lines = Lines()
    made = convert(write_tiny_model(tmp_path / "hf", "opt"), tmp_path / "out", lines, pp_size=2)
    assert any("--pp-size 2" in warning and "--runtime torch" in warning for warning in lines.warnings)
    with pytest.raises(UsageError, match="--pp-size 2"):
        plan_build(made, BuildSpec(runtime="tensorrt_llm", trtllm_version="1.2.0"))


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2", "starcoder2", "falcon"])
def test_pipeline_stages_of_other_families_are_taken(name: str) -> None:
    for release in RELEASES:
        config_of(name, {"num_hidden_layers": 4, "n_layer": 4}, pp_size=2, trtllm_version=release)  # not refused


@pytest.mark.parametrize("release", ["0.15", "0.16", "1.2", None])
def test_gemma_embedding_along_the_hidden_size(release: str | None) -> None:
    spec: dict[str, Any] = {"tp_size": 2, "use_parallel_embedding": True, "embedding_sharding_dim": 1}
    if release != "0.15":
        assert config_of("gemma", trtllm_version=release, **spec).embedding_sharding_dim == 1
        return
    with pytest.raises(UsageError, match="--embedding-sharding-dim 1"):
        config_of("gemma", trtllm_version=release, **spec)
    config_of("gemma", trtllm_version=release, **spec | {"tp_size": 1})  # not refused


@pytest.mark.parametrize("release", RELEASES)
def test_gpt_neox_with_another_mlp_size_is_for_the_embedded_runtimes(tmp_path: Path, release: str) -> None:
    size = {"intermediate_size": 3 * FAMILIES["gpt_neox"].config["hidden_size"]}
    with pytest.raises(UnsupportedModelError, match="4 · hidden_size"):
        config_of("gpt_neox", size, trtllm_version=release)
    config_of("gpt_neox", size)  # not refused
    lines = Lines()
    made = convert(write_tiny_model(tmp_path / "hf", "gpt_neox", **size), tmp_path / "out", lines)
    assert any("4 · hidden_size" in warning for warning in lines.warnings)
    with pytest.raises(UnsupportedModelError, match="4 · hidden_size"):
        plan_build(made, BuildSpec(runtime="tensorrt_llm", trtllm_version=f"{release}.0"))
    plan_build(made, BuildSpec())


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("norms", [None, 2])
def test_falcon_40b_with_two_norms_is_converted(release: str, norms: int | None) -> None:
    config = config_of("falcon_new", {"num_ln_in_parallel_attn": norms}, trtllm_version=release)
    assert ("num_ln_in_parallel_attn" in config.content) == (order(release) >= (0, 15))


def test_falcon_7b_ignores_the_number_of_parallel_norms() -> None:
    config_of("falcon", {"num_ln_in_parallel_attn": 1}, trtllm_version="0.14")  # not refused


@pytest.mark.parametrize(
    ("release", "prefix"),
    [
        ("0.12", "transformer.layers.0.shared_expert"),
        ("0.15", "transformer.layers.0.shared_expert"),
        ("0.16", "transformer.layers.0.mlp.shared_expert"),
        (None, "transformer.layers.0.mlp.shared_expert"),
    ],
)
def test_shared_expert_is_named_as_in_the_release(tmp_path: Path, release: str | None, prefix: str) -> None:
    lines = Lines()
    folder = write_tiny_model(tmp_path / "hf", "qwen2_moe")
    made = convert(folder, tmp_path / "out", lines, tp_size=2, trtllm_version=release)
    names = {name for name in read_safetensors(made.path / "rank0.safetensors") if "layers.0." in name}
    shared = {name for name in names if "shared_expert" in name}
    assert shared == {f"{prefix}.fc.weight", f"{prefix}.proj.weight", f"{prefix}_gate.weight"}
    assert any("0.16 … 1.2" in line for line in lines.lines) == (release is None)
    one = convert(folder, tmp_path / "one")
    ours, theirs = CheckpointReader(one.path), CheckpointReader(made.path)
    assert ours.names() == theirs.names()
    for name in ours.names():
        np.testing.assert_array_equal(ours.merged(name), theirs.merged(name), err_msg=name)


@pytest.mark.parametrize(("made_for", "version"), [(None, "0.15.0"), ("0.15", "0.16.0")])
def test_engine_from_tensors_named_as_in_another_release_is_refused(
    tmp_path: Path, made_for: str | None, version: str
) -> None:
    folder = write_tiny_model(tmp_path / "hf", "qwen2_moe")
    made = convert(folder, tmp_path / "out", trtllm_version=made_for)
    with pytest.raises(UnsupportedModelError, match="shared_expert") as caught:
        plan_build(made, BuildSpec(runtime="tensorrt_llm", trtllm_version=version))
    assert f"--trtllm-version {version[:4]}" in str(caught.value.hint)
    right = convert(folder, tmp_path / "right", trtllm_version=version)
    plan_build(right, BuildSpec(runtime="tensorrt_llm", trtllm_version=version))
    plan_build(made, BuildSpec(runtime="openvino"))


def test_releases_of_a_checkpoint_are_in_its_manifest(tmp_path: Path) -> None:
    made = convert(write_tiny_model(tmp_path / "hf", "gemma2"), tmp_path / "out")
    assert made.manifest is not None
    assert made.manifest.tools == {"checkpoint format": "TensorRT-LLM 0.13 … 1.2"}


def test_a_head_that_differs_from_the_tied_embedding_is_reported(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "hf", "llama", tie_word_embeddings=True)
    tensors = read_safetensors(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    for head, differs in ((embedding, False), (embedding + 1, True)):
        write_safetensors(folder / "model.safetensors", tensors | {"lm_head.weight": head})
        lines = Lines()
        convert(folder, tmp_path / f"out-{differs}", lines)
        told = [line for line in lines.warnings if "The output head differs from the embedding" in line]
        assert bool(told) == differs


@pytest.mark.parametrize(
    ("scaling", "named"),
    [
        ({"factor": 2.0}, "without a type"),
        ({"rope_type": "linear"}, "lacks factor"),
        *(
            ({key: value for key, value in LLAMA3.items() if key != lost}, lost)
            for lost in LLAMA3
            if lost != "rope_type"
        ),
    ],
)
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma", "phi"])
def test_incomplete_rotary_scaling_is_refused(name: str, scaling: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        config_of(name, {"rope_scaling": scaling})


def test_complete_rotary_scaling_is_taken() -> None:
    assert config_of("llama", {"rope_scaling": LLAMA3}).rotary_scaling == LLAMA3
    assert config_of("llama", {"rope_scaling": {"rope_type": "default"}}).rotary_scaling is None
    assert config_of("llama", {"rope_scaling": None, "rope_parameters": {"rope_theta": 5e5}}).rotary_base == 5e5


def test_every_supported_architecture_is_in_the_table() -> None:
    families = load_table("loaders")["families"]
    listed = [name for row in families.values() for name in row["architectures"]]
    assert len(listed) == len(set(listed))
    assert {family.architecture for family in FAMILIES.values() if family.nvidia} <= set(listed)
    assert all(row["run"] and row["text"].keys() <= set(RELEASES) for row in families.values() if "text" in row)
    for row in (*load_table("loaders")["limits"], *load_table("loaders")["names"]):
        assert set(row["families"]) <= set(families)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_checkpoint_without_a_release_loads_in_all_that_know_the_model(name: str) -> None:
    config = config_of(name, tp_size=2 if "experts" not in name else 1)
    found = loading_releases(config)
    if config.superset:
        assert not FAMILIES[name].nvidia
        assert found == []
        assert checkpoint_targets(config)
        return
    assert found == list(RELEASES[RELEASES.index(found[0]) :])
    assert checkpoint_targets(config)


def test_a_model_beyond_the_format_is_refused_by_name_for_tensorrt_llm(tmp_path: Path) -> None:
    beyond: dict[str, Any] = {"attention_bias": True}
    words = "checkpoint format lacks biases of a Qwen 3's attention"
    with pytest.raises(UnsupportedModelError, match=f"TensorRT-LLM 1.2: TensorRT-LLM's {words}"):
        config_of("qwen3", beyond, trtllm_version="1.2")
    lines = Lines()
    made = convert(write_tiny_model(tmp_path / "hf", "qwen3", **beyond), tmp_path / "out", lines)
    assert any("lacks biases of a Qwen 3's attention" in step for step in lines.lines)
    for version in (None, "1.2.0"):  # whether or not TensorRT-LLM is here
        with pytest.raises(UnsupportedModelError, match=words) as refused:
            plan_build(made, BuildSpec(runtime="tensorrt_llm", trtllm_version=version))
        assert "--runtime openvino" in str(refused.value.hint)
