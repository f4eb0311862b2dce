"""GGUF files of tiny models, written as GGUF's specification and llama.cpp's names say, and what they stand for."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from statistics import NormalDist
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
_SHARED = {f"mlp.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")}
_AFTER_BOTH = {"post_attention_layernorm": "post_attention_norm"}
_MAMBA = {
    "mamba.in_proj": "ssm_in",
    "mamba.conv1d": "ssm_conv1d",
    "mamba.out_proj": "ssm_out",
    "mamba.norm": "ssm_norm",
}
_FEED_FORWARD = {
    "pre_ff_layernorm": "ffn_norm",
    **{f"feed_forward.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}
_LAYER_INPUTS = {
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
}
_DELTA_NET = {
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
}
_DELTA_NETS = ("qwen3next", "qwen35", "qwen35moe")
# Where an architecture has other names.
_OWN: dict[str, dict[str, str]] = {
    **dict.fromkeys(("gemma2", "gemma3", "gpt-oss", "olmo2", "exaone4", "seed_oss"), _AFTER_BOTH),
    **dict.fromkeys(_DELTA_NETS, _AFTER_BOTH | _SHARED | _DELTA_NET | {"mlp.shared_expert_gate": "ffn_gate_inp_shexp"}),
    "deepseek2": {
        "self_attn.q_a_proj": "attn_q_a",
        "self_attn.q_a_layernorm": "attn_q_a_norm",
        "self_attn.q_b_proj": "attn_q_b",
        "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
        "self_attn.kv_a_layernorm": "attn_kv_a_norm",
        **{f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
    },
    "qwen2moe": _SHARED | {"mlp.shared_expert_gate": "ffn_gate_inp_shexp"},
    "glm4": {
        "post_self_attn_layernorm": "post_attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "post_mlp_layernorm": "post_ffw_norm",
    },
    "hunyuan-dense": {"self_attn.query_layernorm": "attn_q_norm", "self_attn.key_layernorm": "attn_k_norm"},
    "hunyuan-moe": {
        "self_attn.query_layernorm": "attn_q_norm",
        "self_attn.key_layernorm": "attn_k_norm",
        "mlp.gate.wg": "ffn_gate_inp",
        **{f"mlp.shared_mlp.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
    },
    **dict.fromkeys(("granitehybrid", "falcon-h1"), _FEED_FORWARD | _MAMBA),
    "llama4": {
        **_FEED_FORWARD,
        "feed_forward.router": "ffn_gate_inp",
        **{f"feed_forward.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
    },
    "gemma4": _AFTER_BOTH
    | _LAYER_INPUTS
    | {
        "layer_scalar": "layer_output_scale",
        "router.proj": "ffn_gate_inp",
        "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
        "post_feedforward_layernorm_1": "post_ffw_norm_1",
        "post_feedforward_layernorm_2": "post_ffw_norm_2",
    },
    "gemma3n": _AFTER_BOTH
    | _LAYER_INPUTS
    | {
        "altup.correction_coefs": "altup_correct_coef",
        "altup.correct_output_scale": "altup_correct_scale",
        "altup.prediction_coefs": "altup_predict_coef",
        "altup.modality_router": "altup_router",
        "altup.router_norm": "altup_router_norm",
        "laurel.linear_left": "laurel_l",
        "laurel.linear_right": "laurel_r",
        "laurel.post_laurel_norm": "laurel_post_norm",
    },
    "lfm2": {
        "operator_norm": "attn_norm",
        "ffn_norm": "ffn_norm",
        "self_attn.q_layernorm": "attn_q_norm",
        "self_attn.k_layernorm": "attn_k_norm",
        "self_attn.out_proj": "attn_output",
        "conv.conv": "shortconv.conv",
        "conv.in_proj": "shortconv.in_proj",
        "conv.out_proj": "shortconv.out_proj",
        "feed_forward.w1": "ffn_gate",
        "feed_forward.w2": "ffn_down",
        "feed_forward.w3": "ffn_up",
    },
}
# What llama.cpp takes for all models of Llama 4.
SCOUT: dict[str, Any] = {
    "head_dim": 32,
    "intermediate_size": 64,
    "intermediate_size_mlp": 192,
    "num_hidden_layers": 4,
    "no_rope_layer_interval": 4,
    "attention_chunk_size": 8192,
    "floor_scale": 8192,
    "attn_scale": 0.1,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 16.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
    },
}
EXPERT_WIDTHS: dict[str, Any] = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 96}
DELTA_NET: dict[str, Any] = {
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "moe_intermediate_size": 64,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 0.5,
    "mscale_all_dim": 0.5,
}
_PERMUTED = ("llama", "granite", "granitehybrid", "granitemoe", "smollm3")
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
    if isinstance(first, bool):
        kind, pack = 7, lambda n: struct.pack("<?", n)
    if isinstance(first, float):
        kind, pack = 6, lambda n: struct.pack("<f", n)
    return struct.pack("<IIQ", 9, kind, len(content)) + b"".join(map(pack, content))


def stored(values: Array, kind: str) -> tuple[bytes, Array]:
    """The bytes of a tensor, and the float32 that they stand for."""
    flat = values.astype(np.float32).reshape(-1)
    if kind in ("F32", "F16"):
        cast = flat.astype("<f4" if kind == "F32" else "<f2")
        return cast.tobytes(), cast.astype(np.float32).reshape(values.shape)
    blocks = flat.reshape(-1, 32)
    peaks = np.take_along_axis(blocks, np.abs(blocks).argmax(1)[:, None], 1)
    scales = (peaks / (-8 if kind == "Q4_0" else 127)).astype("<f2")
    scales[scales == 0] = 1
    wide = scales.astype(np.float32)
    if kind == "Q4_0":
        codes = np.clip(np.rint(blocks / wide) + 8, 0, 15).astype(np.uint8)
        packed, meant = codes[:, :16] | codes[:, 16:] << 4, (codes.astype(np.float32) - 8) * wide
    else:
        signed = np.clip(np.rint(blocks / wide), -128, 127).astype(np.int8)
        packed, meant = signed.view(np.uint8), signed.astype(np.float32) * wide
    return np.concatenate([scales.view(np.uint8), packed], 1).tobytes(), meant.reshape(values.shape)


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
        stem, _, ending = (name if name.endswith(("weight", "bias", "sinks")) else f"{name}.weight").rpartition(".")
        layer, _, module = stem.removeprefix("model.layers.").partition(".")
        if architecture == "gpt-oss" and any(part in name for part in (".experts.", ".router.", ".sinks")):
            meant[name] = values
            tensors |= _gpt_oss(name.removeprefix("model.layers."), values)
            continue
        inner = name.partition(f".{layer}.")[2]
        odd = _of_delta_net(inner, values, kind, config, architecture) or _without_stem(inner, values, kind, config)
        if odd is not None:
            made, meant[name] = odd
            tensors |= {f"blk.{layer}.{own}": each for own, each in made.items()}
            continue
        if stem.startswith("model.altup_"):
            stack, _, _ = stem.removeprefix("model.").rpartition(".")
            stacks.setdefault(f"{_ALTUP[stack]}.weight", []).append((name, values))
            continue
        if not stem.startswith("model.layers."):
            own = _OUTER[stem]
        elif ".experts." in module:
            stacks.setdefault(f"blk.{layer}.ffn_{_EXPERTS[module.rpartition('.')[2]]}_exps.weight", []).append(
                (name, values)
            )
            continue
        else:
            usual = {**_NAMES, "post_attention_layernorm": "ffn_norm"}
            own = f"blk.{layer}." + {**usual, **_OWN.get(architecture, {})}[module]
        chosen = kind if values.ndim > 1 and not own.endswith(_FLOATS) else "F32"
        shifted = ("gemma", "gemma2", "gemma3", *_DELTA_NETS)
        shift = np.float32(architecture in shifted and own.endswith("norm") and not own.endswith("ssm_norm"))
        written, heads = values + shift, 0
        if architecture in _PERMUTED and own.endswith(("attn_q", "attn_k")):
            heads = config["num_attention_heads" if own.endswith("q") else "num_key_value_heads"]
            written = written.reshape(heads, 2, len(values) // heads // 2, -1).swapaxes(1, 2).reshape(values.shape)
        content, floats = stored(written, chosen)
        if heads:
            floats = floats.reshape(heads, len(values) // heads // 2, 2, -1).swapaxes(1, 2).reshape(values.shape)
        meant[name] = floats - shift
        tensors[f"{own}.{ending}"] = _shape(own, values, config), chosen, content
    for own, experts in stacks.items():
        experts.sort(key=lambda item: int(next(part for part in item[0].split(".")[::-1] if part.isdigit())))
        parts = [(name, stored(values, kind)) for name, values in experts]
        meant |= {name: floats for name, (_, floats) in parts}
        tensors[own] = (len(parts), *experts[0][1].shape), kind, b"".join(content for _, (content, _) in parts)
    tensors |= _rotations(config, architecture)
    file = write_gguf(folder / f"{family}.gguf", metadata_of(config, architecture), tensors)
    write_safetensors(plain / "model.safetensors", meant)
    return file, plain


def _of_delta_net(
    module: str, values: Array, kind: str, config: Mapping[str, Any], architecture: str
) -> tuple[dict[str, Written], Array] | None:
    """What llama.cpp orders otherwise: by name, and what it stands for; None for the rest."""
    if architecture not in _DELTA_NETS:
        return None
    if module.startswith("mlp.experts.") and values.ndim == 3:
        return _apart(("gate", "up") if "gate_up" in module else ("down",), "_exps", values, kind)
    own = {"linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias"}.get(module)
    own = own or f"{_DELTA_NET.get(module.removesuffix('.weight'))}.weight"
    heads, count = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key, value, each = config["linear_key_head_dim"], config["linear_value_head_dim"], count // heads
    if "in_proj_qkvz" in module:
        parts = np.split(values.reshape(heads, -1, values.shape[1]), np.cumsum([key, key, each * value]), 1)
        q, k, v, z = (part.reshape(-1, values.shape[1]) for part in parts)
        made = {"attn_qkv.weight": np.concatenate([q, k, v]), "attn_gate.weight": z}
        read = {name: stored(matrix, kind) for name, matrix in made.items()}
        wide = [floats for _, floats in read.values()]
        q, k, v = np.split(wide[0], [len(q), len(q) + len(k)])
        rows = [part.reshape(heads, -1, values.shape[1]) for part in (q, k, v, wide[1])]
        written = {name: (made[name].shape, kind, content) for name, (content, _) in read.items()}
        return written, np.concatenate(rows, 1).reshape(values.shape)
    if (module.startswith("linear_attn.") and own == "None.weight") or not module.startswith("linear_attn."):
        return None
    axis, first, size = (1 if own == "ssm_out.weight" else 0), 0, value
    if own in ("attn_qkv.weight", "ssm_conv1d.weight"):
        first = 2 * heads * key
    elif own in ("ssm_beta.weight", "ssm_alpha.weight", "ssm_a", "ssm_dt.bias"):
        size = 1
    elif own in ("ssm_norm.weight", "ssm_ba.weight"):
        return None
    order = np.arange(values.shape[axis])
    if architecture != "qwen3next":
        turns = order[first:].reshape(heads, each, size).swapaxes(0, 1).reshape(-1)
        order = np.concatenate([order[:first], turns])
    chosen = kind if own.startswith(("attn", "ssm_out", "ssm_beta", "ssm_alpha")) else "F32"
    turned = np.take(-np.exp(values) if own == "ssm_a" else values, order, axis)
    content, floats = stored(turned, chosen)
    meant = np.take(np.log(-floats) if own == "ssm_a" else floats, np.argsort(order), axis)
    return {own: (tuple(size for size in turned.shape if size > 1), chosen, content)}, meant.reshape(values.shape)


def _shape(own: str, values: Array, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the shape in the file: llama.cpp drops dimensions of 1, and Mamba's norms have their groups."""
    if own.endswith("ssm_norm"):
        if "mamba_n_groups" not in config:
            return values.shape
        return config["mamba_n_groups"], len(values) // config["mamba_n_groups"]
    return tuple(size for size in values.shape if size > 1) if own.endswith(_FLOATS) else values.shape


def _without_stem(
    module: str, values: Array, kind: str, config: Mapping[str, Any]
) -> tuple[dict[str, Written], Array] | None:
    """Write what has no `.weight` in transformers, and Granite's joined matrices: by name, and what they stand for."""
    if module.startswith("feed_forward.experts."):  # of Llama 4: [in, out]
        parts = ("gate", "up") if "gate_up" in module else ("down",)
        written, floats = _apart(parts, "_exps", values.swapaxes(1, 2), kind)
        return written, floats.swapaxes(1, 2)
    if module.startswith("experts."):
        content, floats = stored(values, kind)
        return {f"ffn_{'down' if 'down' in module else 'gate_up'}_exps.weight": (values.shape, kind, content)}, floats
    if module.endswith(("put_linear.weight", "router.layer.weight")):
        return _granite(module, values, kind, "_shexp" if config.get("num_local_experts") else "")
    if module == "self_attn.kv_b_proj.weight":
        return _latent(values, kind, config)
    if (own := _FLOAT_VECTORS.get(module)) is None:
        return None
    logarithm = own == "ssm_a"
    content, floats = stored(-np.exp(values) if logarithm else values, "F32")
    shape = (*values.shape, 1) if own in ("ssm_a", "ssm_d") else values.shape
    return {own: (shape, "F32", content)}, np.log(-floats) if logarithm else floats


def _latent(values: Array, kind: str, config: Mapping[str, Any]) -> tuple[dict[str, Written], Array]:
    """Keys [heads, rank, key] and values [heads, value, rank] of latent attention."""
    of_heads = values.reshape(config["num_attention_heads"], -1, values.shape[1])
    keys, rest = np.split(of_heads, [config["qk_nope_head_dim"]], 1)
    keys = np.ascontiguousarray(keys.swapaxes(1, 2))
    (first, read_keys), (second, read_values) = stored(keys, kind), stored(rest, kind)
    made = {"attn_k_b.weight": (keys.shape, kind, first), "attn_v_b.weight": (rest.shape, kind, second)}
    return made, np.concatenate([read_keys.swapaxes(1, 2), read_values], 1).reshape(values.shape)


def _granite(module: str, values: Array, kind: str, shared: str) -> tuple[dict[str, Written], Array]:
    """Granite's experts and its MLP, whose names end with `shared`: gates and factors in tensors of their own."""
    if "router" in module:
        content, floats = stored(values, "F32")
        return {"ffn_gate_inp.weight": (values.shape, "F32", content)}, floats
    end = "_exps" if "block_sparse_moe" in module else shared
    return _apart(("gate", "up") if "input" in module else ("down",), end, values, kind)


def _apart(parts: tuple[str, ...], end: str, values: Array, kind: str) -> tuple[dict[str, Written], Array]:
    """The parts of joined matrices in tensors of their own."""
    halves = np.split(values, len(parts), axis=-2)
    made = [stored(half, kind) for half in halves]
    written = {
        f"ffn_{part}{end}.weight": (half.shape, kind, content)
        for part, half, (content, _) in zip(parts, halves, made, strict=True)
    }
    return written, np.concatenate([floats for _, floats in made], -2)


def _rotations(config: Mapping[str, Any], architecture: str) -> dict[str, Written]:
    """What the frequencies of pairs are divided by, where the file has it as tensors."""
    tensors: dict[str, Written] = {}
    if architecture == "llama4" and (scaling := config.get("rope_scaling")):
        lengths = 2 * np.pi * config["rope_theta"] ** (np.arange(0, config["head_dim"], 2) / config["head_dim"])
        factors = np.where(lengths > 8192, scaling["factor"], 1).astype(np.float32)
        tensors["rope_freqs.weight"] = factors.shape, "F32", factors.tobytes()
    if (config.get("rope_scaling") or {}).get("type") == "longrope":
        for part in ("short", "long"):
            factors = np.asarray(config["rope_scaling"][f"{part}_factor"], np.float32)
            tensors[f"rope_factors_{part}.weight"] = factors.shape, "F32", factors.tobytes()
    if architecture == "gemma4":  # what the frequencies of layers without a window are divided by
        pairs = config["global_head_dim"] // 2
        factors = np.asarray([1.0] * (pairs // 4) + [1e30] * (pairs - pairs // 4), np.float32)
        tensors["rope_freqs.weight"] = factors.shape, "F32", factors.tobytes()
    return tensors


_FLOAT_VECTORS = {
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "mamba.A_log": "ssm_a",
    "mamba.D": "ssm_d",
    "mamba.dt_bias": "ssm_dt.bias",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
}
_ALTUP = {"altup_projections": "altup_proj", "altup_unembed_projections": "altup_unembd_proj"}
_OUTER = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.final_layernorm": "output_norm",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
    "model.embedding_norm": "token_embd_norm",
    "lm_head": "output",
}
# Matrices that stay floats.
_FLOATS = ("ffn_gate_inp", "ffn_gate_inp_shexp", "shortconv.conv", "ssm_conv1d")


def _gpt_oss(name: str, values: Array) -> dict[str, Written]:
    """The experts, routers and sinks: gates and factors in tensors of their own, [experts, out, in]."""
    layer, _, part = name.partition(".")
    blk = f"blk.{layer}."
    if "experts" in part:
        halves = (values[..., 0::2], values[..., 1::2]) if "gate_up" in part else (values,)
        stems = ("ffn_gate_exps", "ffn_up_exps") if "gate_up" in part else ("ffn_down_exps",)
        ending = "bias" if part.endswith("bias") else "weight"
        turned = {
            f"{stem}.{ending}": half if ending == "bias" else half.swapaxes(1, 2)
            for stem, half in zip(stems, halves, strict=True)
        }
    else:
        own = {"self_attn.sinks": "attn_sinks.weight"}.get(part, part.replace("mlp.router", "ffn_gate_inp"))
        turned = {own: values}
    return {blk + own: (each.shape, "F32", np.ascontiguousarray(each).tobytes()) for own, each in turned.items()}


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
        "expert_shared_feed_forward_length": "shared_intermediate_size"
        if architecture.startswith("granite")
        else "shared_expert_intermediate_size",
        "embedding_scale": "embedding_multiplier",
        "attention.scale": "attention_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling" if architecture.startswith("granite") else "logit_scale",
        "attention.layer_norm_epsilon": "layer_norm_eps",
        "shortconv.l_cache": "conv_L_cache",
        "rope.scaling.original_context_length": "original_max_position_embeddings",
    }
    own = {f"{architecture}.{key}": config[name] for key, name in keys.items() if config.get(name) is not None}
    if (base := f"{architecture}.rope.freq_base") in own:
        own[base] = float(own[base])
    own |= _kinds_of_layers(config, architecture) | _delta_net_sizes(config, architecture)
    own |= _latent_sizes(config) if architecture == "deepseek2" else {}
    if config.get("partial_rotary_factor"):
        size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        own[f"{architecture}.rope.dimension_count"] = int(size * config["partial_rotary_factor"])
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") == "yarn":
        own |= {
            f"{architecture}.rope.scaling.type": "yarn",
            f"{architecture}.rope.scaling.factor": float(scaling["factor"]),
            f"{architecture}.rope.scaling.original_context_length": scaling["original_max_position_embeddings"],
        }
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


def _latent_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of latent attention and its experts."""
    rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    v3 = config["model_type"] != "deepseek_v2"
    found: dict[str, Any] = {
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + rotated,
        "attention.value_length": rank,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rotated,
        "attention.value_length_mla": config["v_head_dim"],
        "rope.dimension_count": rotated,
        "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_count": config["n_routed_experts"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_weights_scale": float(config["routed_scaling_factor"]),
        "expert_weights_norm": config["norm_topk_prob"],
        "expert_group_count": config["n_group"],
        "expert_group_used_count": config["topk_group"],
        "expert_gating_func": 2 if v3 else 1,
    }
    if config.get("q_lora_rank"):
        found["attention.q_lora_rank"] = config["q_lora_rank"]
    if (dimensions := (config.get("rope_scaling") or {}).get("mscale_all_dim")) is not None:
        found["rope.scaling.yarn_log_multiplier"] = 0.1 * dimensions
    return {f"deepseek2.{key}": content for key, content in found.items()}


def _delta_net_sizes(config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """The heads of layers with a delta rule, and what part of a head the others rotate."""
    if architecture not in _DELTA_NETS:
        return {}
    sizes = {"group_count": "num_key_heads", "time_step_rank": "num_value_heads", "state_size": "key_head_dim"}
    return {
        **{f"{architecture}.ssm.{key}": config[f"linear_{name}"] for key, name in sizes.items()},
        f"{architecture}.ssm.conv_kernel": config["linear_conv_kernel_dim"],
        f"{architecture}.rope.dimension_count": int(config["head_dim"] * config.get("partial_rotary_factor", 0.25)),
        f"{architecture}.ssm.inner_size": config["linear_num_value_heads"] * config["linear_value_head_dim"],
    }


def _kinds_of_layers(config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """What differs from layer to layer."""
    kinds, heads = config.get("layer_types") or [], config.get("num_key_value_heads")
    if architecture == "lfm2":
        attending = [kind == "full_attention" for kind in kinds]
        return {
            "lfm2.attention.head_count_kv": [heads if each else 0 for each in attending],
            "lfm2.attention.layer_norm_rms_epsilon": config["norm_eps"],
        }
    if architecture == "llama4":
        return {
            "llama4.feed_forward_length": config["intermediate_size_mlp"],
            "llama4.expert_feed_forward_length": config["intermediate_size"],
            "llama4.interleave_moe_layer_step": config["interleave_moe_layer_step"],
        }
    if architecture in ("falcon-h1", "granitehybrid"):
        sizes = {"time_step_rank": "n_heads", "state_size": "d_state", "group_count": "n_groups"}
        inner = config["mamba_d_ssm"] if architecture == "falcon-h1" else 2 * config["hidden_size"]
        found = {
            f"{architecture}.ssm.{key}": config[f"mamba_{name}"]
            for key, name in (sizes | {"conv_kernel": "d_conv"}).items()
        } | {f"{architecture}.ssm.inner_size": inner}
        if architecture == "granitehybrid":
            bamba = config["model_type"] == "bamba"
            layers = range(config["num_hidden_layers"])
            attends = config["attn_layer_indices"] if bamba else [at for at in layers if kinds[at] == "attention"]
            found |= {
                "granitehybrid.attention.head_count_kv": [heads if layer in attends else 0 for layer in layers],
                "granitehybrid.rope.scaling.finetuned": bamba,
            }
            if bamba:
                half = config["hidden_size"] // config["num_attention_heads"] // 2
                found["granitehybrid.rope.dimension_count"] = half
        return found
    if architecture == "hunyuan-moe":
        return {
            "hunyuan-moe.expert_used_count": config["moe_topk"][0],
            "hunyuan-moe.expert_shared_count": config["num_shared_expert"],
            "hunyuan-moe.expert_shared_feed_forward_length": config["intermediate_size"],
        }
    if architecture == "gemma4":
        slides = [kind == "sliding_attention" for kind in kinds]
        shared, inner = config["num_kv_shared_layers"], config["intermediate_size"]
        first = len(kinds) - shared
        wide = [inner * (2 if layer >= first else 1) for layer in range(len(kinds))]
        of_full = config.get("num_global_key_value_heads") or heads
        return {
            "gemma4.attention.sliding_window_pattern": slides,
            "gemma4.attention.shared_kv_layers": shared,
            "gemma4.attention.key_length": config["global_head_dim"],
            "gemma4.attention.key_length_swa": config["head_dim"],
            "gemma4.embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
            **({"gemma4.expert_used_count": config["top_k_experts"]} if config.get("top_k_experts") else {}),
            "gemma4.rope.freq_base": 1e6,
            "gemma4.rope.freq_base_swa": 1e4,
            **({"gemma4.feed_forward_length": wide} if config.get("use_double_wide_mlp") else {}),
            **({"gemma4.attention.head_count_kv": [heads if each else of_full for each in slides]} if of_full else {}),
        }
    if architecture == "gemma3n":
        shares = config["activation_sparsity_pattern"]
        return {
            "gemma3n.attention.sliding_window_pattern": [kind == "sliding_attention" for kind in kinds],
            "gemma3n.attention.shared_kv_layers": config["num_kv_shared_layers"],
            "gemma3n.embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
            "gemma3n.altup.num_inputs": config["altup_num_inputs"],
            "gemma3n.altup.active_idx": config.get("altup_active_idx", 0),
            "gemma3n.activation_sparsity_scale": [
                NormalDist().inv_cdf(share) if share else float("-inf") for share in shares
            ],
        }
    if architecture == "exaone4" and config.get("sliding_window"):
        return {"exaone4.attention.sliding_window_pattern": [kind == "sliding_attention" for kind in kinds]}
    return {}
