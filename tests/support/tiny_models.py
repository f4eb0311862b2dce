"""Random Hugging Face models of a few kilobytes, made with NumPy only."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from tests.support.families import FAMILIES

Array = npt.NDArray[Any]

_DTYPES: dict[str, tuple[str, Any]] = {
    "float32": ("F32", np.float32),
    "float16": ("F16", np.float16),
    "bfloat16": ("BF16", ml_dtypes.bfloat16),
}
# Of tensors that are no weights: masks of attention.
_OTHER_TYPES: tuple[tuple[str, Any], ...] = (("U8", np.uint8), ("BOOL", np.bool_))


def write_tiny_model(
    folder: Path,
    family: str = "llama",
    *,
    dtype: str = "float32",
    seed: int = 0,
    shards: int = 1,
    gain: float = 2.0,
    **overrides: Any,
) -> Path:
    """Fill `folder` with a random model of `family` and return it.

    `overrides` are keys of config.json under their Hugging Face names; `shards` > 1 writes an indexed set of files.
    `gain` is how strong the layers are: below 0.1 the last token decides alone, so that rounding changes no answer.
    """
    known = FAMILIES[family]
    config = known.config | {"dtype": dtype, "torch_dtype": dtype} | overrides
    generator = np.random.default_rng(seed)
    tensors = {
        name: random_weights(generator, name, shape, dtype, gain, known.norm_centre)
        for name, shape in known.tensors(config)
    }
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", config)
    _write_json(
        folder / "generation_config.json",
        {"bos_token_id": 1, "eos_token_id": config["eos_token_id"], "pad_token_id": 2},
    )
    _write_weights(folder, tensors, shards)
    write_byte_tokenizer(folder, max_length=config.get("max_position_embeddings") or config.get("n_positions", 512))
    return folder


def random_weights(
    generator: np.random.Generator, name: str, shape: tuple[int, ...], dtype: str, gain: float, centre: float
) -> Array:
    """Return weights whose greedy output depends on all tokens: strong layers, small embeddings, sharp attention."""
    noise = generator.standard_normal(shape, dtype=np.float32)
    if not shape:  # of xIELU
        values = np.full((), 0.5 if name.endswith(".beta") else -1e-6, np.float32)
    elif name.endswith("bias"):
        values = 0.1 * noise
    elif "norm" in name or ".ln_" in name or name.endswith("layer_scalar"):
        values = (1 if ".linear_attn." in name else centre) + 0.1 * noise
    elif len(shape) == 1:  # sinks of attention, decays of states
        values = noise
    elif "embed" in name or "lm_head" in name or "wte" in name or "wpe" in name:
        values = 0.4 * noise
    else:
        fan_in = shape[0] if ".c_" in name else shape[1]
        values = noise * np.float32(gain / np.sqrt(fan_in))  # NumPy 1 and 2 must round alike
    cast: Array = values.astype(_DTYPES[dtype][1])
    return cast


def read_safetensors(path: Path) -> dict[str, Array]:
    """All tensors of a file, taken apart by the safetensors library."""
    import safetensors

    kinds = {code: np.dtype(kind) for code, kind in (*_DTYPES.values(), *_OTHER_TYPES)}
    deserialize: Callable[[bytes], list[tuple[str, dict[str, Any]]]] = safetensors.deserialize
    return {
        name: np.frombuffer(bytes(view["data"]), dtype=kinds[view["dtype"]]).reshape(view["shape"])
        for name, view in deserialize(path.read_bytes())
    }


def write_safetensors(path: Path, tensors: Mapping[str, Array]) -> None:
    """Write a safetensors file: 8 bytes of header length, JSON header, tensors in order."""
    codes = {np.dtype(kind): code for code, kind in (*_DTYPES.values(), *_OTHER_TYPES)}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        header[name] = {"dtype": codes[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as handle:
        handle.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            handle.write(np.ascontiguousarray(tensor).tobytes())


def _write_weights(folder: Path, tensors: Mapping[str, Array], shards: int) -> None:
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors)
        return
    names = list(tensors)
    files = {
        name: f"model-{index * shards // len(names) + 1:05}-of-{shards:05}.safetensors"
        for index, name in enumerate(names)
    }
    for file in sorted(set(files.values())):
        write_safetensors(folder / file, {name: tensors[name] for name in names if files[name] == file})
    total = sum(tensor.nbytes for tensor in tensors.values())
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": files})


def write_byte_tokenizer(folder: Path, *, max_length: int = 512) -> None:
    """Write a tokenizer of 256 byte tokens after <unk> 0, <s> 1, </s> 2; encoding puts <s> in front."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    special = ["<unk>", "<s>", "</s>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "pad_token": "</s>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": max_length,
        },
    )


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
