"""Gemma 3 models that see images too: the text model is converted, as if it had been published alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.recorded_progress import Lines
from tests.support.stages import convert_model
from tests.support.tiny_models import read_safetensors, write_safetensors, write_tiny_model
from tests.support.tiny_vision import Spelling, write_tiny_vision_model
from trtserve.artifacts import Checkpoint, Model
from trtserve.checkpoint import architectures
from trtserve.checkpoint.supported import supported_family
from trtserve.errors import ConversionError, UnsupportedModelError
from trtserve.pipeline.checkpoint_config import checkpoint_config
from trtserve.pipeline.memory import check_memory
from trtserve.pipeline.parity.converted import numbers_beside
from trtserve.specs import ConvertSpec

# config.json of google/gemma-3-4b-it, without what only generation and images need.
GEMMA_3_4B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}


def test_omitted_sizes_default_to_those_of_transformers() -> None:
    config = checkpoint_config(GEMMA_3_4B, ConvertSpec())
    assert {
        "architecture": "Gemma3ForCausalLM",
        "dtype": "bfloat16",
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_size": 256,
        "max_position_embeddings": 131072,
        "norm_epsilon": 1e-6,
        "query_pre_attn_scalar": 256,
        "rotary_base": 1e6,
        "rotary_scaling": None,
        "full_attention_rotary_scaling": {"factor": 8.0, "rope_type": "linear"},
        "rope_local_base_freq": 1e4,
        "sliding_window": 1024,
        "_sliding_window_pattern": 6,
    }.items() <= config.content.items()
    # Those of the published files less SigLIP's and the projector's, and the copy of the embedding that the head is.
    assert architectures.parameter_count(config) == 4_300_079_472 - 419_816_304 + 262208 * 2560


def test_text_config_alone_gives_the_same_checkpoint() -> None:
    text = GEMMA_3_4B["text_config"] | {"architectures": ["Gemma3ForCausalLM"], "torch_dtype": "bfloat16"}
    assert checkpoint_config(text, ConvertSpec()) == checkpoint_config(GEMMA_3_4B, ConvertSpec())


@pytest.mark.parametrize("spelling", ["published", "newer"])
@pytest.mark.parametrize("tied", [True, False])
def test_checkpoint_equals_the_text_models(spelling: Spelling, tied: bool, tmp_path: Path) -> None:
    options: dict[str, Any] = {"dtype": "bfloat16", "tie_word_embeddings": tied}
    spec = ConvertSpec(tp_size=2, pp_size=3)
    lines = Lines()
    folder = write_tiny_vision_model(tmp_path / "vision", spelling, **options)
    seen = convert_model(Model(path=folder), spec, out=tmp_path / "a", progress=lines)
    alone = convert_model(
        Model(path=write_tiny_model(tmp_path / "text", "gemma3", **options)), spec, out=tmp_path / "b"
    )
    assert _files(seen) == _files(alone)
    assert [line for line in lines.lines if line.startswith("The model's vision tensors are left out (25 KiB)")]


def test_check_memory_includes_vision_tensors(tmp_path: Path) -> None:
    """The original is loaded whole, before its text model is taken out of it."""
    config = checkpoint_config(GEMMA_3_4B, ConvertSpec())
    assert check_memory(config, [9], beside=100).original - check_memory(config, [9]).original == 400
    folder = write_tiny_vision_model(tmp_path / "vision")
    stored = read_safetensors(folder / "model.safetensors")
    images = sum(values.size for name, values in stored.items() if not name.startswith("language_model."))
    assert numbers_beside(config, folder) == images > 10_000
    assert numbers_beside(config, write_tiny_model(tmp_path / "text", "gemma3")) == 0


def test_text_model_keeps_all_tensors(tmp_path: Path) -> None:
    lines = Lines()
    folder = write_tiny_model(tmp_path / "text", "gemma3")
    convert_model(Model(path=folder), ConvertSpec(), out=tmp_path / "a", progress=lines)
    assert not [line for line in lines.lines if "images" in line]


def test_unknown_tensors_next_to_the_text_model_are_refused(tmp_path: Path) -> None:
    folder = write_tiny_vision_model(tmp_path / "model")
    tensors = read_safetensors(folder / "model.safetensors")
    tensors["speech_tower.weight"] = tensors["multi_modal_projector.mm_soft_emb_norm.weight"]
    write_safetensors(folder / "model.safetensors", tensors)
    with pytest.raises(ConversionError, match=r"not known: speech_tower\.weight"):
        convert_model(Model(path=folder), ConvertSpec(), out=tmp_path / "a")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "has text_config = None"),
        ("gemma3_text", "has text_config = 'gemma3_text'"),
        ({"num_hidden_layers": "34"}, "num_hidden_layers = '34'"),
        ({"num_hidden_layers": 2, "rms_norm_eps": -1}, "rms_norm_eps = -1"),
        ({"num_hidden_layers": 2, "use_bidirectional_attention": True}, "sets use_bidirectional_attention"),
    ],
)
def test_invalid_text_config_is_refused(text: Any, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        supported_family(GEMMA_3_4B | {"text_config": text})


def _files(checkpoint: Checkpoint) -> dict[str, bytes | dict[str, Any]]:
    config = json.loads((checkpoint.path / "config.json").read_text())
    return {path.name: path.read_bytes() for path in checkpoint.path.glob("*.safetensors")} | {"config.json": config}
