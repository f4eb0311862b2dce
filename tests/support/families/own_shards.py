"""Expected shards of families with their own tensor names, calculated with NumPy from the format's description."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from tests.support.families.shards import Array, Tensors, split_qkv, split_rows, split_vocabulary


@dataclass(frozen=True, kw_only=True)
class Names:
    """Hugging Face's names of a family's tensors, without .weight and .bias."""

    embedding: str
    layer: str
    """The prefix of a layer, with {} for its number."""
    norms: Mapping[str, str]
    """Norms of a layer: name in the checkpoint → name in the model."""
    qkv: Sequence[str]
    """Query, key and value, or one matrix of all three."""
    dense: str
    fc: str
    proj: str
    final_norm: str
    head: str


def ranks_by_names(names: Names) -> Callable[..., list[Tensors]]:
    """Return the function of `Family.ranks` for a family with these names."""
    return partial(_ranks, names)


def _ranks(names: Names, source: Tensors, hf: dict[str, Any], tp: int, ep: int = 1) -> list[Tensors]:
    """Return the expected checkpoint for tp ranks; the source decides which norms and biases exist."""
    assert ep == 1
    whole = _outside(names, source, hf, tp)
    for layer in range(hf.get("num_hidden_layers") or hf["n_layer"]):
        whole |= _layer_norms(names, source, layer, tp)
        whole |= _layer_matrices(names, source, hf, layer, tp)
    return [{name: shards[rank] for name, shards in whole.items()} for rank in range(tp)]


def _outside(names: Names, source: Tensors, hf: dict[str, Any], tp: int) -> dict[str, list[Array]]:
    table, head = names.embedding, names.head
    rows = source.get(f"{head}.weight", source[f"{table}.weight"])
    tokens = source[f"{table}.weight"]
    if (project := source.get("model.decoder.project_in.weight")) is not None:
        tokens, rows = tokens @ project.T, rows @ source["model.decoder.project_out.weight"]
    whole = {"transformer.vocab_embedding.weight": [tokens] * tp}
    if hf["model_type"] == "opt":
        whole["transformer.position_embedding.weight"] = [source["model.decoder.embed_positions.weight"][2:]] * tp
    for ours, norm in (("ln_embed", "transformer.word_embeddings_layernorm"), ("ln_f", names.final_norm)):
        whole |= {f"transformer.{ours}.{part}": [source[f"{norm}.{part}"]] * tp for part in _parts(source, norm)}
    if f"{head}.bias" in source:
        whole["lm_head.bias"] = split_vocabulary(source[f"{head}.bias"], tp)
    return whole | {"lm_head.weight": split_vocabulary(rows, tp)}


def _layer_norms(names: Names, source: Tensors, layer: int, tp: int) -> dict[str, list[Array]]:
    theirs, ours, norms = names.layer.format(layer), f"transformer.layers.{layer}.", names.norms
    if f"{theirs}ln_attn.weight" in source:
        norms = {"input_layernorm": "ln_attn", "mlp_layernorm": "ln_mlp"}
    return {
        f"{ours}{name}.{part}": [source[f"{theirs}{norm}.{part}"]] * tp
        for name, norm in norms.items()
        for part in _parts(source, theirs + norm)
    }


def _layer_matrices(names: Names, source: Tensors, hf: dict[str, Any], layer: int, tp: int) -> dict[str, list[Array]]:
    kind = hf["model_type"]
    theirs, ours = names.layer.format(layer), f"transformer.layers.{layer}."
    whole = {}
    for part in _parts(source, theirs + names.qkv[0]):
        parts = [source[f"{theirs}{name}.{part}"] for name in names.qkv]
        whole[f"{ours}attention.qkv.{part}"] = _attention(parts, hf, tp)
    for name, linear, split in (
        ("attention.dense", names.dense, _row),
        ("mlp.proj", names.proj, _row),
        ("mlp.fc", names.fc, _column),
    ):
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
