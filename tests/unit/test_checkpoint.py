"""Reading checkpoints back: merged tensors equal the model's, whoever wrote the files and however they are split."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.stages import convert_model
from tests.support.tiny_models import read_safetensors, write_safetensors, write_tiny_model
from trtserve.artifacts import Model
from trtserve.checkpoint.unified import CheckpointReader
from trtserve.errors import ArtifactError, CorruptFileError, UnsupportedModelError
from trtserve.specs import ConvertSpec

Array = npt.NDArray[Any]


def convert(folder: Path, out: Path, **spec: Any) -> Path:
    return convert_model(Model(path=folder), ConvertSpec(**spec), out=out).path


@pytest.mark.parametrize("dimension", [0, 1])
def test_parallel_embeddings_of_other_tools_are_merged(tmp_path: Path, dimension: int) -> None:
    folder = write_tiny_model(tmp_path / "hf", vocab_size=321)
    checkpoint = convert(folder, tmp_path / "out", tp_size=2, dtype="float32")
    name = "transformer.vocab_embedding.weight"
    expected = CheckpointReader(checkpoint).merged(name)
    padded = np.concatenate([expected, np.zeros((1, 64), np.float32)]) if dimension == 0 else expected
    for rank, part in enumerate(np.split(padded, 2, axis=dimension)):
        path = checkpoint / f"rank{rank}.safetensors"
        write_safetensors(path, read_safetensors(path) | {name: part})
    change_config(checkpoint, use_parallel_embedding=True, embedding_sharding_dim=dimension)
    np.testing.assert_array_equal(CheckpointReader(checkpoint).merged(name), expected)


def test_an_absent_head_is_the_embedding(tmp_path: Path) -> None:
    checkpoint = convert(write_tiny_model(tmp_path / "hf", "llama3"), tmp_path / "out")
    path = checkpoint / "rank0.safetensors"
    tensors = read_safetensors(path)
    del tensors["lm_head.weight"]
    write_safetensors(path, tensors)
    reader = CheckpointReader(checkpoint)
    np.testing.assert_array_equal(reader.merged("lm_head.weight"), reader.merged("transformer.vocab_embedding.weight"))


def test_config_keys_missing_in_old_releases_get_defaults(tmp_path: Path) -> None:
    checkpoint = convert(write_tiny_model(tmp_path / "hf", "gpt2"), tmp_path / "out")
    config = json.loads((checkpoint / "config.json").read_text())
    for key in ("head_size", "num_key_value_heads", "intermediate_size", "rotary_embedding_dim"):
        del config[key]
    (checkpoint / "config.json").write_text(json.dumps(config | {"architecture": "GPTForCausalLM"}))
    reader = CheckpointReader(checkpoint)
    assert reader.merged("transformer.layers.1.attention.qkv.weight").shape == (192, 64)


def change_config(checkpoint: Path, **changes: Any) -> None:
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_damaged_checkpoints_are_refused(tmp_path: Path) -> None:
    checkpoint = convert(write_tiny_model(tmp_path / "hf"), tmp_path / "out", tp_size=2)
    path = checkpoint / "rank1.safetensors"
    tensors = read_safetensors(path)
    name = "transformer.layers.0.mlp.fc.weight"
    write_safetensors(path, tensors | {name: tensors[name][:-1]})
    with pytest.raises(CorruptFileError, match=r"fc\.weight has shape \[63, 64\]; its config requires \[64, 64\]"):
        CheckpointReader(checkpoint).merged(name)
    del tensors[name]
    write_safetensors(path, tensors)
    with pytest.raises(CorruptFileError, match=r"rank1\.safetensors lacks the tensor"):
        CheckpointReader(checkpoint).merged(name)
    path.unlink()
    with pytest.raises(ArtifactError, match=r"rank1\.safetensors is missing; the checkpoint has 2 ranks"):
        CheckpointReader(checkpoint).merged(name)


def test_folders_without_a_checkpoint_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"no config\.json"):
        CheckpointReader(tmp_path)
    folder = write_tiny_model(tmp_path / "hf")
    with pytest.raises(ArtifactError, match="has no `architecture`"):
        CheckpointReader(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(CorruptFileError, match="is not JSON"):
        CheckpointReader(folder)


def test_a_checkpoint_of_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    checkpoint = convert(write_tiny_model(tmp_path / "hf"), tmp_path / "out")
    change_config(checkpoint, architecture="MambaForCausalLM")
    with pytest.raises(UnsupportedModelError, match="MambaForCausalLM"):
        CheckpointReader(checkpoint)
