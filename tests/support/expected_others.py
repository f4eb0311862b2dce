"""The shards of families with names of their own, computed with NumPy straight from the format's description."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.support.expected_shards import Array, Tensors, split_qkv, split_rows, split_vocabulary

# Hugging Face's names of embedding, layers, norms, query/key/value, dense, fc, proj, final norm and head.
NAMES: dict[str, tuple[str, str, dict[str, str], list[str], str, str, str, str, str]] = {
    "gptj": (
        *("transformer.wte", "transformer.h.{}.", {"input_layernorm": "ln_1"}),
        *(["attn.q_proj", "attn.k_proj", "attn.v_proj"], "attn.out_proj", "mlp.fc_in", "mlp.fc_out"),
        *("transformer.ln_f", "lm_head"),
    ),
    "gpt_neox": (
        *("gpt_neox.embed_in", "gpt_neox.layers.{}."),
        {"input_layernorm": "input_layernorm", "post_attention_layernorm": "post_attention_layernorm"},
        *(["attention.query_key_value"], "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
        *("gpt_neox.final_layer_norm", "embed_out"),
    ),
    "opt": (
        *("model.decoder.embed_tokens", "model.decoder.layers.{}."),
        {"input_layernorm": "self_attn_layer_norm", "post_layernorm": "final_layer_norm"},
        *(["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], "self_attn.out_proj", "fc1", "fc2"),
        *("model.decoder.final_layer_norm", "lm_head"),
    ),
    "phi": (
        *("model.embed_tokens", "model.layers.{}.", {"input_layernorm": "input_layernorm"}),
        *(["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], "self_attn.dense", "mlp.fc1", "mlp.fc2"),
        *("model.final_layernorm", "lm_head"),
    ),
    "phi3": (
        *("model.embed_tokens", "model.layers.{}."),
        {"input_layernorm": "input_layernorm", "post_layernorm": "post_attention_layernorm"},
        *(["self_attn.qkv_proj"], "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj", "model.norm", "lm_head"),
    ),
    "starcoder2": (
        *("model.embed_tokens", "model.layers.{}."),
        {"input_layernorm": "input_layernorm", "post_layernorm": "post_attention_layernorm"},
        *(["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], "self_attn.o_proj", "mlp.c_fc", "mlp.c_proj"),
        *("model.norm", "lm_head"),
    ),
    "bloom": (
        *("transformer.word_embeddings", "transformer.h.{}."),
        {"input_layernorm": "input_layernorm", "post_layernorm": "post_attention_layernorm"},
        *(["self_attention.query_key_value"], "self_attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
        *("transformer.ln_f", "lm_head"),
    ),
    "falcon": (
        *("transformer.word_embeddings", "transformer.h.{}."),
        {"input_layernorm": "input_layernorm", "post_layernorm": "post_attention_layernorm"},
        *(["self_attention.query_key_value"], "self_attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
        *("transformer.ln_f", "lm_head"),
    ),
}


def other_ranks(source: Tensors, hf: dict[str, Any], tp: int) -> list[Tensors]:
    """The checkpoint of a model for tp ranks; what its source has decides which norms and biases there are."""
    whole = _outside(source, hf, tp)
    for layer in range(hf.get("num_hidden_layers") or hf["n_layer"]):
        whole |= _layer_norms(source, hf, layer, tp) | _layer_matrices(source, hf, layer, tp)
    return [{name: shards[rank] for name, shards in whole.items()} for rank in range(tp)]


def _outside(source: Tensors, hf: dict[str, Any], tp: int) -> dict[str, list[Array]]:
    table, *_, final, head = NAMES[hf["model_type"]]
    rows = source.get(f"{head}.weight", source[f"{table}.weight"])
    tokens = source[f"{table}.weight"]
    if (project := source.get("model.decoder.project_in.weight")) is not None:
        tokens, rows = tokens @ project.T, rows @ source["model.decoder.project_out.weight"]
    whole = {"transformer.vocab_embedding.weight": [tokens] * tp}
    if hf["model_type"] == "opt":
        whole["transformer.position_embedding.weight"] = [source["model.decoder.embed_positions.weight"][2:]] * tp
    for ours, norm in (("ln_embed", "transformer.word_embeddings_layernorm"), ("ln_f", final)):
        whole |= {f"transformer.{ours}.{part}": [source[f"{norm}.{part}"]] * tp for part in _parts(source, norm)}
    if f"{head}.bias" in source:
        whole["lm_head.bias"] = split_vocabulary(source[f"{head}.bias"], tp)
    return whole | {"lm_head.weight": split_vocabulary(rows, tp)}


def _layer_norms(source: Tensors, hf: dict[str, Any], layer: int, tp: int) -> dict[str, list[Array]]:
    _, prefix, norms, *_ = NAMES[hf["model_type"]]
    theirs, ours = prefix.format(layer), f"transformer.layers.{layer}."
    if f"{theirs}ln_attn.weight" in source:
        norms = {"input_layernorm": "ln_attn", "mlp_layernorm": "ln_mlp"}
    return {
        f"{ours}{name}.{part}": [source[f"{theirs}{norm}.{part}"]] * tp
        for name, norm in norms.items()
        for part in _parts(source, theirs + norm)
    }


def _layer_matrices(source: Tensors, hf: dict[str, Any], layer: int, tp: int) -> dict[str, list[Array]]:
    kind = hf["model_type"]
    _, prefix, _, qkv, dense, fc, proj, *_ = NAMES[kind]
    theirs, ours = prefix.format(layer), f"transformer.layers.{layer}."
    whole = {}
    for part in _parts(source, theirs + qkv[0]):
        parts = [source[f"{theirs}{name}.{part}"] for name in qkv]
        whole[f"{ours}attention.qkv.{part}"] = _attention(parts, hf, tp)
    for name, linear, split in (("attention.dense", dense, _row), ("mlp.proj", proj, _row), ("mlp.fc", fc, _column)):
        for part in _parts(source, theirs + linear):
            whole[f"{ours}{name}.{part}"] = split(source[f"{theirs}{linear}.{part}"], kind, tp)
    return whole


def _parts(source: Tensors, name: str) -> list[str]:
    return [part for part in ("weight", "bias") if f"{name}.{part}" in source]


def _attention(parts: list[Array], hf: dict[str, Any], tp: int) -> list[Array]:
    hidden = hf.get("hidden_size") or hf.get("n_embed") or hf["n_embd"]
    heads = hf.get("num_attention_heads") or hf["n_head"]
    size = hidden // heads
    if len(parts) == 1:
        (fused,) = parts
        rows = fused.reshape(-1, size, *fused.shape[1:])  # [heads of all kinds, size, …]
        kv_heads = (len(rows) - heads) // 2
        if hf["model_type"] == "phi3":
            pieces = [rows[:heads], rows[heads : heads + kv_heads], rows[heads + kv_heads :]]
        else:
            groups = rows.reshape(kv_heads, heads // kv_heads + 2, *rows.shape[1:])
            pieces = [groups[:, :-2], groups[:, -2], groups[:, -1]]
        parts = [piece.reshape(-1, *fused.shape[1:]) for piece in pieces]
    q, k, v = parts
    return split_qkv(q, k, v, size, tp)


def _row(whole: Array, kind: str, tp: int) -> list[Array]:
    if whole.ndim == 2:
        return np.split(whole, tp, axis=1)
    rest = np.zeros_like(whole) if kind == "gptj" else whole
    return [whole, *[rest] * (tp - 1)]


def _column(whole: Array, kind: str, tp: int) -> list[Array]:
    if kind != "phi3":
        return split_rows(whole, tp)
    gate, up = np.split(whole, 2)
    return [np.concatenate(halves) for halves in zip(split_rows(up, tp), split_rows(gate, tp), strict=True)]
