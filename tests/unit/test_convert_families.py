"""Conversion of each family: every rank against independent shards, stages against the whole, sums before rounding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.support.expected_shards import Tensors, gpt2_ranks, llama_ranks
from tests.support.tiny_models import read_safetensors, write_tiny_model
from trtserve.architectures.checkpoint import CheckpointReader
from trtserve.artifacts import Checkpoint, Model
from trtserve.convert import convert_model
from trtserve.errors import UsageError
from trtserve.specs import ConvertSpec


def convert(folder: Path, out: Path, **spec: Any) -> Checkpoint:
    return convert_model(Model(path=folder), ConvertSpec(**spec), out=out)


def read_ranks(folder: Path, count: int) -> list[Tensors]:
    assert sorted(path.name for path in folder.glob("*.safetensors")) == sorted(
        f"rank{rank}.safetensors" for rank in range(count)
    )
    return [read_safetensors(folder / f"rank{rank}.safetensors") for rank in range(count)]


CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"vocab_size": 323, "num_key_value_heads": 1}),
    ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": True, "vocab_size": 321}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 32}),
    ("llama3", {"vocab_size": 321}),
    ("llama_linear", {}),
    ("mistral", {"sliding_window": 64}),
    ("mistral", {"vocab_size": 323, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    ("qwen2", {"vocab_size": 323}),
    ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    ("qwen3", {"vocab_size": 323}),
    ("qwen3", {"tie_word_embeddings": False, "num_key_value_heads": 4}),
    ("mixtral", {"vocab_size": 323}),
    ("mixtral", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    ("qwen2_moe", {"vocab_size": 323}),
    ("qwen2_moe", {"tie_word_embeddings": True, "num_key_value_heads": 4, "qkv_bias": False}),
    ("qwen3_moe", {"vocab_size": 323}),
    ("qwen3_moe", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    ("gemma", {"vocab_size": 323}),
    ("gemma", {"tie_word_embeddings": False, "num_key_value_heads": 4}),
    ("gemma2", {"vocab_size": 323}),
    ("gemma2", {"tie_word_embeddings": False}),
    ("gemma3", {"vocab_size": 323}),
    ("gemma3", {"tie_word_embeddings": False, "num_key_value_heads": 1}),
    ("gpt2", {"vocab_size": 323}),
    ("gpt2", {"n_inner": 96, "tie_word_embeddings": False}),
]


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(("family", "overrides"), CASES)
def test_each_rank_holds_exactly_its_part(tmp_path: Path, family: str, overrides: dict[str, Any], tp: int) -> None:
    folder = write_tiny_model(tmp_path / "hf", family, shards=2, **overrides)
    hf = json.loads((folder / "config.json").read_text())
    source = {name: values for path in folder.glob("*.safetensors") for name, values in read_safetensors(path).items()}
    expected = (gpt2_ranks if family == "gpt2" else llama_ranks)(source, hf, tp)
    convert(folder, tmp_path / "out", tp_size=tp, dtype="float32")
    for actual, wanted in zip(read_ranks(tmp_path / "out", tp), expected, strict=True):
        assert actual.keys() == wanted.keys()
        for name, values in wanted.items():
            np.testing.assert_array_equal(actual[name], values, err_msg=name)


@pytest.mark.parametrize(
    "family",
    [
        *("llama3", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe"),
        *("gemma", "gemma2", "gemma3", "gpt2"),
    ],
)
def test_two_stages_hold_what_one_does(tmp_path: Path, family: str) -> None:
    layers: dict[str, Any] = {"n_layer" if family == "gpt2" else "num_hidden_layers": 3}
    folder = write_tiny_model(tmp_path / "hf", family, **layers)
    whole = read_ranks(convert(folder, tmp_path / "one", dtype="float32").path, 1)[0]
    first, second = read_ranks(convert(folder, tmp_path / "two", pp_size=2, dtype="float32").path, 2)
    moved = {name.replace(".layers.0.", ".layers.2."): values for name, values in second.items()}
    assert not first.keys() & moved.keys()
    assert (first | moved).keys() == whole.keys()
    for name, values in (first | moved).items():
        np.testing.assert_array_equal(values, whole[name], err_msg=name)


@pytest.mark.parametrize("source", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("wanted", ["float32", "float16", "bfloat16"])
def test_gemmas_norms_are_summed_before_they_are_rounded(tmp_path: Path, source: str, wanted: str) -> None:
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


def test_a_parallel_embedding_that_does_not_divide_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(
        tmp_path / "hf", hidden_size=66, num_attention_heads=4, head_dim=16, num_key_value_heads=4
    )
    with pytest.raises(UsageError, match="hidden size 66 does not divide by 4"):
        convert(folder, tmp_path / "out", tp_size=4, use_parallel_embedding=True, embedding_sharding_dim=1)
    with pytest.raises(UsageError, match="--embedding-sharding-dim"):
        ConvertSpec(embedding_sharding_dim=2)
