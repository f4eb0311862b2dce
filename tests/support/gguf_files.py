"""GGUF files of tiny models, written as GGUF's specification and llama.cpp's names say, and what they stand for."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.support.tiny_models import read_safetensors, write_safetensors, write_tiny_model

Array = npt.NDArray[Any]
Written = tuple[tuple[int, ...], str, bytes]

_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_EXPERTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 8}


def text(value: str) -> bytes:
    encoded = value.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def value(content: Any) -> bytes:
    """A metadata value with its type before it."""
    if isinstance(content, bool):
        return struct.pack("<I?", 7, content)
    if isinstance(content, int):
        return struct.pack("<II", 4, content)
    if isinstance(content, float):
        return struct.pack("<If", 6, content)
    if isinstance(content, str):
        return struct.pack("<I", 8) + text(content)
    first = content[0]
    kind, pack = (8, text) if isinstance(first, str) else (5, lambda n: struct.pack("<i", n))
    if isinstance(first, float):
        kind, pack = 6, lambda n: struct.pack("<f", n)
    return struct.pack("<IIQ", 9, kind, len(content)) + b"".join(map(pack, content))


def stored(values: Array, kind: str) -> tuple[bytes, Array]:
    """The bytes of a tensor, and the float32 that they stand for; written block by block."""
    flat = values.astype(np.float32).reshape(-1)
    if kind in ("F32", "F16"):
        cast = flat.astype("<f4" if kind == "F32" else "<f2")
        return cast.tobytes(), cast.astype(np.float32).reshape(values.shape)
    parts, meant = [], []
    for block in flat.reshape(-1, 32):
        peak = block[np.abs(block).argmax()]
        scale = np.float16(peak / (-8 if kind == "Q4_0" else 127) or 1)
        wide = np.float32(scale)
        if kind == "Q4_0":
            codes = np.clip(np.rint(block / wide) + 8, 0, 15).astype(np.uint8)
            parts.append(scale.tobytes() + (codes[:16] | codes[16:] << 4).tobytes())
            meant.append((codes.astype(np.float32) - 8) * wide)
        else:
            signed = np.clip(np.rint(block / wide), -128, 127).astype(np.int8)
            parts.append(scale.tobytes() + signed.tobytes())
            meant.append(signed.astype(np.float32) * wide)
    return b"".join(parts), np.concatenate(meant).reshape(values.shape)


def write_gguf(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[tuple[int, ...], str, bytes]]
) -> Path:
    """Write a file of version 3; a tensor has its shape (outermost first), type and bytes."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(text(key) + value(content) for key, content in metadata.items())
    data = b""
    for name, (shape, kind, content) in tensors.items():
        head += text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape[::-1])
        head += struct.pack("<IQ", _TYPES[kind], len(data))
        data += content + b"\0" * (-len(content) % 32)
    path.write_bytes(head + b"\0" * (-len(head) % 32) + data)
    return path


def write_gguf_model(folder: Path, family: str, architecture: str, kind: str, **overrides: Any) -> tuple[Path, Path]:
    """Write a tiny model as GGUF and as a Hugging Face folder with the weights that this stands for."""
    plain = write_tiny_model(folder / "plain", family, **overrides)
    config = json.loads((plain / "config.json").read_text())
    meant: dict[str, Array] = {}
    tensors: dict[str, Written] = {}
    stacks: dict[str, list[tuple[str, Array]]] = {}
    for name, values in read_safetensors(plain / "model.safetensors").items():
        stem, _, ending = name.rpartition(".")
        layer, _, module = stem.removeprefix("model.layers.").partition(".")
        if not stem.startswith("model.layers."):
            own = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}[stem]
        elif ".experts." in module:
            stacks.setdefault(f"blk.{layer}.ffn_{_EXPERTS[module.rpartition('.')[2]]}_exps.weight", []).append(
                (name, values)
            )
            continue
        else:
            sandwich = "gemma" in architecture and architecture != "gemma"
            after = "post_attention_norm" if sandwich else "ffn_norm"
            own = f"blk.{layer}." + (_NAMES | {"post_attention_layernorm": after})[module]
        chosen = kind if values.ndim > 1 and "ffn_gate_inp" not in own else "F32"
        shift = np.float32(1 if architecture.startswith("gemma") and own.endswith("norm") else 0)
        written, heads = values + shift, 0
        if architecture == "llama" and own.endswith(("attn_q", "attn_k")):
            heads = config["num_attention_heads" if own.endswith("q") else "num_key_value_heads"]
            written = written.reshape(heads, 2, len(values) // heads // 2, -1).swapaxes(1, 2).reshape(values.shape)
        content, floats = stored(written, chosen)
        if heads:
            floats = floats.reshape(heads, len(values) // heads // 2, 2, -1).swapaxes(1, 2).reshape(values.shape)
        meant[name] = floats - shift
        tensors[f"{own}.{ending}"] = values.shape, chosen, content
    for own, experts in stacks.items():
        experts.sort(key=lambda item: int(item[0].partition(".experts.")[2].partition(".")[0]))
        parts = [(name, stored(values, kind)) for name, values in experts]
        meant |= {name: floats for name, (_, floats) in parts}
        tensors[own] = (len(parts), *experts[0][1].shape), kind, b"".join(content for _, (content, _) in parts)
    file = write_gguf(folder / f"{family}.gguf", metadata_of(config, architecture), tensors)
    write_safetensors(plain / "model.safetensors", meant)
    return file, plain


def metadata_of(config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """The metadata of a model with 320 tokens: bytes, as GPT-2 spells them, and names."""
    keys = {
        "context_length": "max_position_embeddings",
        "embedding_length": "hidden_size",
        "block_count": "num_hidden_layers",
        "feed_forward_length": "intermediate_size",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
        "attention.layer_norm_rms_epsilon": "rms_norm_eps",
        "rope.freq_base": "rope_theta",
        "attention.key_length": "head_dim",
        "attention.sliding_window": "sliding_window",
        "expert_count": "num_experts" if "num_experts" in config else "num_local_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    }
    own = {f"{architecture}.{key}": config[name] for key, name in keys.items() if config.get(name) is not None}
    if (base := f"{architecture}.rope.freq_base") in own:
        own[base] = float(own[base])
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") == "linear":
        own |= {
            f"{architecture}.rope.scaling.type": "linear",
            f"{architecture}.rope.scaling.factor": float(scaling["factor"]),
        }
    size = config["vocab_size"]
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *(f"▁t{n}" for n in range(size - 259)),
    ]
    return {
        "general.architecture": architecture,
        **own,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * size,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * (size - 259)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
    }
