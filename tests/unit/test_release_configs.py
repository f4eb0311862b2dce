"""config.json of every family in every release, and which releases take a model at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.doubles.checkpoint import LoaderError, read_config, read_mapping
from tests.support.families import FAMILIES
from tests.support.release_changes import NEWEST, before, expected_config
from tests.support.stages import convert_model
from tests.support.tiny_models import read_safetensors, write_tiny_model
from tests.support.unsupported_release import ENGINELESS
from trtserve.artifacts import Model
from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint import architectures
from trtserve.checkpoint.unified import CheckpointReader
from trtserve.errors import UnsupportedModelError, UsageError
from trtserve.nvidia.releases import RELEASES, order
from trtserve.nvidia.releases.loaders import foreign_keys
from trtserve.pipeline.checkpoint_config import checkpoint_config
from trtserve.pipeline.convert import plan_conversion
from trtserve.specs import ConvertSpec


def config_of(family: str, *, changes: dict[str, Any] | None = None, **spec: Any) -> CheckpointConfig:
    wanted: dict[str, Any] = {"tp_size": 2, "dtype": "bfloat16", "quantize": "int8"} | spec
    return checkpoint_config(FAMILIES[family].config | (changes or {}), ConvertSpec(**wanted))


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.nvidia])
def test_config_is_that_of_the_release_key_for_key(family: str) -> None:
    since = FAMILIES[family].since
    for release in RELEASES:
        if before(release, since):
            with pytest.raises(UnsupportedModelError, match=f"{since} is the first release"):
                config_of(family, trtllm_version=f"{release}.0")
            continue
        config = config_of(family, trtllm_version=f"{release}.0")
        assert config.content == expected_config(family, release), release
        # What a release leaves out, its loader fills in: so does ours.
        module = architectures.family(config.architecture)
        assert module.decoder(config) == module.decoder(CheckpointConfig.of(NEWEST[family])), release


@pytest.mark.parametrize("family", NEWEST)
def test_without_a_release_loaders_of_all_releases_take_it(family: str) -> None:
    config = config_of(family)
    for release in RELEASES:
        if not before(release, FAMILIES[family].since):
            theirs = expected_config(family, release)
            for section in ("mapping", "quantization", "moe"):
                assert config.content.get(section, {}).keys() <= theirs.get(section, {}).keys()
    newest = NEWEST[family]
    assert {key for key in newest if key not in ("mapping", "quantization", "moe")} <= config.content.keys()
    assert all(config.content[key] == newest[key] for key in newest if key not in ("mapping", "quantization", "moe"))


@pytest.mark.parametrize(
    ("family", "changes", "release", "message"),
    [
        ("falcon", {"rope_theta": 500000.0}, "0.14", "does not support rotary_base = 500000.0"),
        ("falcon_new", {"num_ln_in_parallel_attn": 1}, "0.14", "does not support num_ln_in_parallel_attn"),
        ("phi3", {"partial_rotary_factor": 0.5}, "0.18", "does not support rotary_pct = 0.5"),
    ],
)
def test_what_a_release_cannot_express_is_refused(
    family: str, changes: dict[str, Any], release: str, message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        config_of(family, changes=changes, trtllm_version=release)
    config_of(family, changes=changes, trtllm_version="1.0")  # not refused


@pytest.mark.parametrize(
    ("family", "spec", "message"),
    [
        ("gemma2", {"pp_size": 3, "trtllm_version": "0.15"}, "head is the embedding table"),
        ("gemma2", {"pp_size": 2, "trtllm_version": "0.19"}, "does not divide the 3 layers"),
        ("llama", {"trtllm_version": ENGINELESS}, "no TensorRT engines any more"),
        ("llama", {"trtllm_version": "0.11.0"}, "older than 0.12"),
        ("llama", {"trtllm_version": "new"}, "not a version"),
    ],
)
def test_what_a_release_would_load_otherwise_is_refused(family: str, spec: dict[str, Any], message: str) -> None:
    with pytest.raises((UsageError, UnsupportedModelError), match=message):
        config_of(family, **spec)


def test_stages_that_a_release_would_load_are_named() -> None:
    with pytest.raises(UsageError) as caught:
        config_of("gemma2", pp_size=2, trtllm_version="0.19")
    assert str(caught.value.hint).startswith("Sizes that fit: 1, 3; ")


def test_uneven_stages_are_those_of_releases_that_know_them() -> None:
    assert config_of("gemma2", pp_size=2, trtllm_version="0.20").mapping.pp_size == 2
    assert config_of("gemma2", pp_size=2).mapping.pp_size == 2
    assert config_of("gemma2", pp_size=3, trtllm_version="0.19").mapping.pp_size == 3


@pytest.mark.parametrize("tp_size", [1, 2])
def test_gemma_has_one_table_in_releases_that_share_it(tmp_path: Path, tp_size: int) -> None:
    folder = write_tiny_model(tmp_path / "hf", "gemma")
    spec = ConvertSpec(tp_size=tp_size, dtype="float32")
    new = convert_model(Model(path=folder), spec, out=tmp_path / "new").path
    old = convert_model(
        Model(path=folder), ConvertSpec(tp_size=tp_size, dtype="float32", trtllm_version="0.15.0"), out=tmp_path / "old"
    ).path
    for rank in range(tp_size):
        separate = read_safetensors(new / f"rank{rank}.safetensors")
        head = separate.pop("lm_head.weight")
        shared = read_safetensors(old / f"rank{rank}.safetensors")
        assert shared.keys() == separate.keys()
        assert all(np.array_equal(shared[name], separate[name]) for name in separate)
        np.testing.assert_array_equal(shared["transformer.vocab_embedding.weight"], head)
    np.testing.assert_array_equal(
        CheckpointReader(old).merged("lm_head.weight"), CheckpointReader(new).merged("lm_head.weight")
    )


@pytest.mark.parametrize("family", ["llama", "qwen2_moe", "gemma"])
def test_the_loaders_of_releases_take_what_is_theirs(tmp_path: Path, family: str) -> None:
    path = tmp_path / "config.json"
    for release in RELEASES:
        number = order(release)
        for asked in (release, None):
            path.write_text(json.dumps(config_of(family, trtllm_version=asked).content))
            read_mapping(read_config(path, number), number)
            assert foreign_keys(CheckpointConfig.of(json.loads(path.read_text())), release) == []
    newest = config_of(family, trtllm_version="1.2")
    assert foreign_keys(newest, "0.20")[:2] == ["mapping.cp_config", "mapping.enable_attention_dp"]
    path.write_text(json.dumps(newest.content))
    with pytest.raises(LoaderError, match="unexpected keyword argument"):
        read_mapping(read_config(path, (0, 20)), (0, 20))


def test_a_release_is_part_of_what_a_checkpoint_is(tmp_path: Path) -> None:
    model = Model(path=write_tiny_model(tmp_path / "hf"))
    plans = {
        version: plan_conversion(model, ConvertSpec(trtllm_version=version))
        for version in (None, "1.2.0", "1.2.1", "0.18")
    }
    assert plans["1.2.0"].fingerprint == plans["1.2.1"].fingerprint
    assert len({plan.fingerprint for plan in plans.values()}) == 3
    made = convert_model(model, ConvertSpec(trtllm_version="0.18.2"), out=tmp_path / "out")
    assert made.manifest is not None
    assert made.manifest.tools == {"checkpoint format": "TensorRT-LLM 0.18"}
    assert made.manifest.spec["trtllm_version"] == "0.18"
