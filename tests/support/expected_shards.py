"""The shards of a TensorRT-LLM checkpoint, computed with NumPy straight from the format's description."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Tensors = dict[str, Array]


def split_rows(whole: Array, tp: int) -> list[Array]:
    return np.split(whole, tp, axis=0)


def split_vocabulary(whole: Array, tp: int) -> list[Array]:
    padding = -len(whole) % tp
    return split_rows(np.concatenate([whole, np.zeros((padding, *whole.shape[1:]), whole.dtype)]), tp)


def split_qkv(q: Array, k: Array, v: Array, head_size: int, tp: int) -> list[Array]:
    def repeated(part: Array) -> Array:
        heads = part.reshape(-1, head_size, *part.shape[1:])
        return heads.repeat(max(1, tp // len(heads)), axis=0).reshape(-1, *part.shape[1:])

    parts = [split_rows(part, tp) for part in (q, repeated(k), repeated(v))]
    return [np.concatenate(rank) for rank in zip(*parts, strict=True)]


def llama_ranks(source: Tensors, hf: dict[str, Any], tp: int) -> list[Tensors]:
    """The checkpoint of a Llama or Mistral for tp ranks."""
    head_size = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
    ranks: list[Tensors] = [{} for _ in range(tp)]

    def put(name: str, parts: list[Array]) -> None:
        for rank, part in zip(ranks, parts, strict=True):
            rank[name] = part

    put("transformer.vocab_embedding.weight", [source["model.embed_tokens.weight"]] * tp)
    put("transformer.ln_f.weight", [source["model.norm.weight"]] * tp)
    head = source["model.embed_tokens.weight"] if hf["tie_word_embeddings"] else source["lm_head.weight"]
    put("lm_head.weight", split_vocabulary(head, tp))
    for layer in range(hf["num_hidden_layers"]):
        theirs, ours = f"model.layers.{layer}.", f"transformer.layers.{layer}."
        put(ours + "input_layernorm.weight", [source[theirs + "input_layernorm.weight"]] * tp)
        put(ours + "post_layernorm.weight", [source[theirs + "post_attention_layernorm.weight"]] * tp)
        for kind in ("weight", "bias") if hf.get("attention_bias") else ("weight",):
            q, k, v = (source[f"{theirs}self_attn.{part}_proj.{kind}"] for part in "qkv")
            put(f"{ours}attention.qkv.{kind}", split_qkv(q, k, v, head_size, tp))
            dense = source[f"{theirs}self_attn.o_proj.{kind}"]
            put(f"{ours}attention.dense.{kind}", np.split(dense, tp, axis=1) if kind == "weight" else [dense] * tp)
        for kind in ("weight", "bias") if hf.get("mlp_bias") else ("weight",):
            put(f"{ours}mlp.fc.{kind}", split_rows(source[f"{theirs}mlp.gate_proj.{kind}"], tp))
            put(f"{ours}mlp.gate.{kind}", split_rows(source[f"{theirs}mlp.up_proj.{kind}"], tp))
            down = source[f"{theirs}mlp.down_proj.{kind}"]
            put(f"{ours}mlp.proj.{kind}", np.split(down, tp, axis=1) if kind == "weight" else [down] * tp)
    return ranks


def gpt2_ranks(source: Tensors, hf: dict[str, Any], tp: int) -> list[Tensors]:
    """The checkpoint of a GPT-2 for tp ranks."""
    ranks: list[Tensors] = [{} for _ in range(tp)]

    def put(name: str, parts: list[Array]) -> None:
        for rank, part in zip(ranks, parts, strict=True):
            rank[name] = part

    put("transformer.vocab_embedding.weight", [source["transformer.wte.weight"]] * tp)
    put("transformer.position_embedding.weight", [source["transformer.wpe.weight"]] * tp)
    untied = not hf.get("tie_word_embeddings", True)
    put("lm_head.weight", split_vocabulary(source["lm_head.weight" if untied else "transformer.wte.weight"], tp))
    for kind in ("weight", "bias"):
        put(f"transformer.ln_f.{kind}", [source[f"transformer.ln_f.{kind}"]] * tp)
    for layer in range(hf["n_layer"]):
        theirs, ours = f"transformer.h.{layer}.", f"transformer.layers.{layer}."
        for kind in ("weight", "bias"):
            put(f"{ours}input_layernorm.{kind}", [source[f"{theirs}ln_1.{kind}"]] * tp)
            put(f"{ours}post_layernorm.{kind}", [source[f"{theirs}ln_2.{kind}"]] * tp)
            q, k, v = np.split(source[f"{theirs}attn.c_attn.{kind}"].T, 3, axis=0)
            put(f"{ours}attention.qkv.{kind}", split_qkv(q, k, v, hf["n_embd"] // hf["n_head"], tp))
            put(f"{ours}mlp.fc.{kind}", split_rows(source[f"{theirs}mlp.c_fc.{kind}"].T, tp))
            for name, their_name in (("attention.dense", "attn.c_proj"), ("mlp.proj", "mlp.c_proj")):
                whole = source[f"{theirs}{their_name}.{kind}"].T
                put(f"{ours}{name}.{kind}", np.split(whole, tp, axis=1) if kind == "weight" else [whole] * tp)
    return ranks
