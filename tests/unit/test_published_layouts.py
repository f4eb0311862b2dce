"""Models as the hub has them, with leftovers in their files and nulls in their configs, convert like plain ones."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from tests.support.families import FAMILIES
from tests.support.published_models import PUBLISHED, Published
from tests.support.stages import convert_model
from tests.support.tiny_models import read_safetensors, write_safetensors, write_tiny_model
from trtserve.artifacts import Model
from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint import architectures
from trtserve.checkpoint.architectures.base import Decoder
from trtserve.checkpoint.repacking import dequantized
from trtserve.checkpoint.source import read_source
from trtserve.checkpoint.supported import SourceQuantization, supported_family
from trtserve.pipeline.parity.converted import changes_of
from trtserve.specs import ConvertSpec

_TYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "U8": np.uint8, "BOOL": np.bool_}
_EMBEDDINGS = ("model.embed_tokens.weight", "model.decoder.embed_tokens.weight", "transformer.wte.weight")
_TABLES = (*_EMBEDDINGS, "transformer.word_embeddings.weight")


def files_of(model: Published, plain: Path, folder: Path) -> Path:
    """The weights of the `plain` model in a folder, named and accompanied as they are published."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(model.config))
    tensors = dict(read_safetensors(plain / "model.safetensors"))
    if model.copied_head:
        assert model.copied_head not in tensors
        tensors[model.copied_head] = next(tensors[name] for name in _TABLES if name in tensors)
    named = {name.removeprefix(model.bare): values for name, values in tensors.items()}
    assert bool(model.bare) is (named.keys() != tensors.keys())
    write_safetensors(folder / "model.safetensors", named | dict(leftovers_of(model)))
    return folder


def leftovers_of(model: Published) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """Tensors that no conversion needs, of every layer: ones, as in a mask."""
    for pattern, (code, shape) in model.leftovers.items():
        for layer in range(2 if "{}" in pattern else 1):
            yield pattern.format(layer), np.ones(shape, _TYPES[code])


def converted(folder: Path, out: Path, **spec: Any) -> Mapping[str, bytes]:
    """Contents of config.json and of the files of two ranks."""
    made = convert_model(Model(path=folder), ConvertSpec(tp_size=2, **spec), out=out)
    return {name: (made.path / name).read_bytes() for name in ("config.json", "rank0.safetensors", "rank1.safetensors")}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_layouts_convert_to_the_same_weights(name: str, tmp_path: Path) -> None:
    model = PUBLISHED[name]
    plain = write_tiny_model(tmp_path / "plain", model.family, dtype=model.dtype, **model.plain)
    expected = converted(plain, tmp_path / "one")
    actual = converted(files_of(model, plain, tmp_path / "published"), tmp_path / "two")
    assert json.loads(actual["config.json"]) == json.loads(expected["config.json"])
    assert actual == expected


@pytest.mark.parametrize("name", [name for name, model in PUBLISHED.items() if model.leftovers])
def test_unused_tensors_are_not_counted_as_rounded(name: str, tmp_path: Path) -> None:
    """The check judges by what became of the weights; masks and position tables are none."""
    model = PUBLISHED[name]
    plain = write_tiny_model(tmp_path / "plain", model.family, dtype=model.dtype, **model.plain)
    folder = files_of(model, plain, tmp_path / "published")
    config = CheckpointConfig.of(json.loads(converted(folder, tmp_path / "out", dtype=model.dtype)["config.json"]))
    assert changes_of(config, folder) == changes_of(config, plain)


def test_attention_masks_of_quantised_models_are_skipped(tmp_path: Path) -> None:
    """The check calculates such a model with the floats that its tensors stand for."""
    model = PUBLISHED["gpt-neox-20b"]
    plain = write_tiny_model(tmp_path / "plain", model.family, dtype=model.dtype, **model.plain)
    sources = read_source(files_of(model, plain, tmp_path / "published"), "gpt_neox.")
    floats = dict(dequantized(sources, SourceQuantization(method="gptq", group_size=32)))
    masks = {f"gpt_neox.layers.{layer}.attention.bias" for layer in range(2)}
    assert floats.keys() == sources.keys() - masks


def described(hf: Mapping[str, Any]) -> tuple[dict[str, Any], Decoder, bool]:
    """What a checkpoint's config says, its decoder with a window for each layer, and whether its head is tied.

    Left out is what transformers spells in another way of the same meaning: Gemma's GELU, windows that repeat, the
    number of norms of a Falcon that has two by its architecture.
    """
    family = supported_family(hf)
    config = family.checkpoint_config(hf)
    decoder = family.decoder(CheckpointConfig.of(config))
    windows = tuple(decoder.window(layer) for layer in range(config["num_hidden_layers"]))
    spelled = ("max_attention_window", "num_ln_in_parallel_attn") + (("hidden_act",) if "Gemma" in str(hf) else ())
    kept = {key: value for key, value in config.items() if key not in spelled}
    return kept, replace(decoder, windows=windows), architectures.tied(hf)


# transformers does not know the model type of the first Falcon 40b.
@pytest.mark.parametrize(
    "name", [name for name, model in PUBLISHED.items() if model.config["model_type"] != "RefinedWeb"]
)
def test_published_and_resaved_configs_agree(name: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    published = dict(PUBLISHED[name].config)
    (tmp_path / "config.json").write_text(json.dumps(published))
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert saved.keys() != published.keys()
    assert described(saved) == described(published)


@pytest.mark.needs("torch")
@pytest.mark.parametrize("family", FAMILIES)
def test_models_resaved_by_transformers_convert_to_the_same_weights(family: str, tmp_path: Path) -> None:
    """It renames and joins tensors (experts, norms) when it loads them, and has to undo that."""
    from transformers import AutoModelForCausalLM

    plain = write_tiny_model(tmp_path / "plain", family, dtype="float16")
    AutoModelForCausalLM.from_pretrained(plain).save_pretrained(tmp_path / "saved")
    expected, actual = converted(plain, tmp_path / "one"), converted(tmp_path / "saved", tmp_path / "two")
    for file in ("rank0.safetensors", "rank1.safetensors"):
        assert actual[file] == expected[file], file


def test_a_gemma_3n_with_images_and_sound_converts_like_its_text_half(tmp_path: Path) -> None:
    plain, whole = (write_tiny_model(tmp_path / name, "gemma3n") for name in ("plain", "whole"))
    text = json.loads((plain / "config.json").read_text())
    outer = {"architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n", "text_config": text}
    (whole / "config.json").write_text(json.dumps(outer | {"torch_dtype": text["torch_dtype"]}))
    tensors = {
        name.replace("model.", "model.language_model.", 1): values
        for name, values in read_safetensors(plain / "model.safetensors").items()
    }
    others = ("audio_tower.conformer.0.weight", "vision_tower.conv.weight", "embed_audio.embedding.weight")
    tensors |= {f"model.{name}": np.ones((2, 2), np.float32) for name in (*others, "embed_vision.embedding.weight")}
    write_safetensors(whole / "model.safetensors", tensors)
    assert converted(whole, tmp_path / "one") == converted(plain, tmp_path / "two")


def test_experts_stored_one_by_one_convert_like_those_in_one_tensor(tmp_path: Path) -> None:
    """The files of Qwen3.5 and 3.6 in FP8 have them so."""
    plain, apart = (write_tiny_model(tmp_path / name, "qwen3_5_moe") for name in ("plain", "apart"))
    tensors = read_safetensors(plain / "model.safetensors")
    for name in [name for name in tensors if ".experts." in name]:
        prefix, _, part = name.rpartition(".")
        for number, values in enumerate(tensors.pop(name)):
            halves = np.split(values, 2) if part == "gate_up_proj" else [values]
            names = ["gate_proj", "up_proj"] if part == "gate_up_proj" else [part]
            tensors |= {f"{prefix}.{number}.{one}.weight": half for one, half in zip(names, halves, strict=True)}
    write_safetensors(apart / "model.safetensors", tensors)
    assert converted(apart, tmp_path / "one") == converted(plain, tmp_path / "two")
