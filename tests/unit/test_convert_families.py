"""Conversion of each family: every rank against independent shards, stages against the whole, sums before rounding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.support.families import FAMILIES, cases
from tests.support.families.shards import Tensors
from tests.support.stages import convert_model
from tests.support.tiny_models import read_safetensors, write_tiny_model
from trtserve.artifacts import Checkpoint, Model
from trtserve.checkpoint.source import read_hf_config
from trtserve.checkpoint.supported import supported_family
from trtserve.checkpoint.unified import CheckpointReader
from trtserve.errors import UnsupportedModelError, UsageError
from trtserve.specs import ConvertSpec


def convert(folder: Path, out: Path, **spec: Any) -> Checkpoint:
    return convert_model(Model(path=folder), ConvertSpec(**spec), out=out)


def read_ranks(folder: Path, count: int) -> list[Tensors]:
    assert sorted(path.name for path in folder.glob("*.safetensors")) == sorted(
        f"rank{rank}.safetensors" for rank in range(count)
    )
    return [read_safetensors(folder / f"rank{rank}.safetensors") for rank in range(count)]


def read_model(folder: Path) -> tuple[Tensors, dict[str, Any]]:
    source = {name: values for path in folder.glob("*.safetensors") for name, values in read_safetensors(path).items()}
    return source, json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize(("family", "overrides"), cases("shards"))
def test_each_rank_holds_its_shard(tmp_path: Path, family: str, overrides: dict[str, Any]) -> None:
    folder = write_tiny_model(tmp_path / "hf", family, shards=2, **overrides)
    source, hf = read_model(folder)
    shards = {tp: FAMILIES[family].ranks(source, hf, tp) for tp in (1, 2, 4)}
    (whole,) = shards[1]
    for tp, ranks in shards.items():
        made = convert(folder, tmp_path / f"{tp}", tp_size=tp, dtype="float32").path
        for actual, wanted in zip(read_ranks(made, tp), ranks, strict=True):
            assert actual.keys() == wanted.keys(), tp
            for name, values in wanted.items():
                assert np.array_equal(actual[name], values), f"{name}, {tp} ranks"
        reader = CheckpointReader(made)
        assert set(reader.names()) == whole.keys(), tp
        for name, values in whole.items():
            assert np.array_equal(reader.merged(name), values), f"{name}, {tp} ranks"


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.stages])
def test_two_stages_together_equal_one(tmp_path: Path, family: str) -> None:
    layers: dict[str, Any] = {FAMILIES[family].layers_key: 3}
    if kinds := FAMILIES[family].config.get("layer_types"):
        layers["layer_types"] = [*kinds, kinds[0]]
    if pattern := FAMILIES[family].config.get("hybrid_override_pattern"):
        layers["hybrid_override_pattern"] = (2 * pattern)[:3]
    folder = write_tiny_model(tmp_path / "hf", family, dtype="bfloat16", **layers)
    source, hf = read_model(folder)
    (whole,) = FAMILIES[family].ranks(source, hf, 1)
    first, second = read_ranks(convert(folder, tmp_path / "two", pp_size=2).path, 2)
    moved = {name.replace(".layers.0.", ".layers.2."): values for name, values in second.items()}
    assert not first.keys() & moved.keys()
    assert "transformer.vocab_embedding.weight" in first
    assert {"lm_head.weight", "transformer.ln_f.weight"} <= second.keys()
    assert (first | moved).keys() == whole.keys()
    reader = CheckpointReader(convert(folder, tmp_path / "four", tp_size=2, pp_size=2).path)
    assert set(reader.names()) == whole.keys()
    for name, values in whole.items():
        for found in ((first | moved)[name], reader.merged(name)):
            assert found.dtype == values.dtype
            np.testing.assert_array_equal(found, values, err_msg=name)


@pytest.mark.parametrize("source", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("wanted", ["float32", "float16", "bfloat16"])
def test_gemma_norm_offset_is_added_before_rounding(tmp_path: Path, source: str, wanted: str) -> None:
    folder = write_tiny_model(tmp_path / "hf", "gemma", dtype=source)
    stored = read_safetensors(folder / "model.safetensors")["model.norm.weight"]
    wide = stored if source == "float16" else stored.astype(np.float32)
    kind = np.dtype(ml_dtypes.bfloat16 if wanted == "bfloat16" else wanted)
    ranks = read_ranks(convert(folder, tmp_path / "out", dtype=wanted, tp_size=2).path, 2)
    for rank in ranks:
        np.testing.assert_array_equal(rank["transformer.ln_f.weight"], (wide + wide.dtype.type(1)).astype(kind))


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "falcon"])
@pytest.mark.parametrize("dimension", [0, 1])
def test_a_parallel_embedding_is_split_over_ranks(tmp_path: Path, family: str, dimension: int) -> None:
    folder = write_tiny_model(tmp_path / "hf", family, vocab_size=322)
    whole = read_ranks(convert(folder, tmp_path / "one", dtype="float32").path, 1)[0]
    wishes = {"use_parallel_embedding": True, "embedding_sharding_dim": dimension}
    made = convert(folder, tmp_path / "two", dtype="float32", tp_size=2, **wishes)
    config = json.loads((made.path / "config.json").read_text())
    assert wishes.items() <= config.items()
    ranks = read_ranks(made.path, 2)
    tables = [name for name in whole if name.endswith("_embedding.weight")]
    assert len(tables) == (2 if family in ("gpt2", "opt") else 1)
    for name in tables:
        np.testing.assert_array_equal(np.concatenate([rank[name] for rank in ranks], axis=dimension), whole[name])
    reader = CheckpointReader(made.path)
    for name, values in whole.items():
        np.testing.assert_array_equal(reader.merged(name), values, err_msg=name)


def test_indivisible_parallel_embedding_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(
        tmp_path / "hf", hidden_size=66, num_attention_heads=4, head_dim=16, num_key_value_heads=4
    )
    with pytest.raises(UsageError, match="hidden size 66 is not divisible by 4"):
        convert(folder, tmp_path / "out", tp_size=4, use_parallel_embedding=True, embedding_sharding_dim=1)
    with pytest.raises(UsageError, match="--embedding-sharding-dim"):
        ConvertSpec(embedding_sharding_dim=2)  # type: ignore[arg-type]


def test_a_phi3_with_heads_of_another_size_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "hf", "phi3", head_dim=32)
    with pytest.raises(UnsupportedModelError, match=r"head_dim = 32, and hidden_size / num_attention_heads is \d+"):
        supported_family(read_hf_config(folder))
