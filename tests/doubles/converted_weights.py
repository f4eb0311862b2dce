"""Names and shapes of a checkpoint's tensors by family, for checkpoints of zeros."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Name of a tensor → dtype of safetensors, shape.
Tensors = dict[str, tuple[str, tuple[int, ...]]]
DTYPES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}
_BYTES = {"F16": 2, "BF16": 2, "F32": 4, "I8": 1, "F8_E4M3": 1}
_PLAIN_MLP = frozenset({"gpt", "phi", "falcon"})  # fc and proj, no gate


def linear(prefix: str, out: int, width: int, config: Mapping[str, Any]) -> Tensors:
    """Return one linear layer in the scheme of `quantization`: [out, in] unless its plugin takes [in, out]."""
    dtype = DTYPES[config["dtype"]]
    algorithm = config["quantization"]["quant_algo"]
    group = config["quantization"].get("group_size", 128)
    schemes: dict[str | None, Tensors] = {
        None: {"weight": (dtype, (out, width))},
        "W8A16": {"weight": ("I8", (width, out)), "per_channel_scale": (dtype, (out,))},
        "W4A16": {"weight": ("I8", (width, out // 2)), "per_channel_scale": (dtype, (out,))},
        "W4A16_AWQ": {
            "weight": ("F16", (width, out // 4)),
            "weights_scaling_factor": ("F16", (max(width // group, 1), out)),
            "prequant_scaling_factor": ("F16", (width,)),
        },
        "FP8": {
            "weight": ("F8_E4M3", (out, width)),
            "activation_scaling_factor": ("F32", (1,)),
            "weights_scaling_factor": ("F32", (1,)),
        },
    }
    # Every other scheme keeps its weights in 8 bits with a scale per channel.
    found = schemes.get(algorithm, {"weight": ("I8", (out, width)), "per_channel_scale": ("F32", (1, out))})
    return {f"{prefix}.{name}": tensor for name, tensor in found.items()}


def _layer(prefix: str, family: str, config: Mapping[str, Any], tp: int) -> Tensors:
    dtype = DTYPES[config["dtype"]]
    hidden, size = config["hidden_size"], config["head_size"]
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    inner = config["intermediate_size"]
    qkv = (heads + 2 * max(kv, tp)) * size // tp
    tensors: Tensors = {
        f"{prefix}.input_layernorm.weight": (dtype, (hidden,)),
        f"{prefix}.post_layernorm.weight": (dtype, (hidden,)),
    }
    tensors |= linear(f"{prefix}.attention.qkv", qkv, hidden, config)
    tensors |= linear(f"{prefix}.attention.dense", hidden, heads * size // tp, config)
    # Phi-3 keeps gate and up in one matrix.
    fused = config["architecture"] == "Phi3ForCausalLM"
    tensors |= linear(f"{prefix}.mlp.fc", (2 if fused else 1) * inner // tp, hidden, config)
    if family not in _PLAIN_MLP:
        tensors |= linear(f"{prefix}.mlp.gate", inner // tp, hidden, config)
    tensors |= linear(f"{prefix}.mlp.proj", hidden, inner // tp, config)
    if config.get("attn_bias"):
        tensors[f"{prefix}.attention.qkv.bias"] = (dtype, (qkv,))
    if family == "gpt":
        for name, extent in (
            ("input_layernorm", hidden),
            ("post_layernorm", hidden),
            ("attention.qkv", qkv),
            ("attention.dense", hidden),
            ("mlp.fc", inner // tp),
            ("mlp.proj", hidden),
        ):
            tensors[f"{prefix}.{name}.bias"] = (dtype, (extent,))
    return tensors


def rank_tensors(family: str, config: Mapping[str, Any], rank: int) -> Tensors:
    """All tensors of one rank's file."""
    mapping = config["mapping"]
    tp, pp = mapping["tp_size"], mapping["pp_size"]
    stage, dtype = rank // tp, DTYPES[config["dtype"]]
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    tensors: Tensors = {}
    for layer in range(config["num_hidden_layers"] // pp):
        tensors |= _layer(f"transformer.layers.{layer}", family, config, tp)
    if stage == 0:
        tensors["transformer.vocab_embedding.weight"] = (dtype, (vocabulary, hidden))
        if family == "gpt":
            tensors["transformer.position_embedding.weight"] = (dtype, (config["max_position_embeddings"], hidden))
    if stage == pp - 1:
        tensors["transformer.ln_f.weight"] = (dtype, (hidden,))
        if family == "gpt":
            tensors["transformer.ln_f.bias"] = (dtype, (hidden,))
        tensors["lm_head.weight"] = (dtype, (-(-vocabulary // tp), hidden))
    return tensors


def write_zeros(path: Path, tensors: Tensors) -> None:
    """A safetensors file with these tensors, all zero."""
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        size = _BYTES[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
