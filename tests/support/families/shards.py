"""The shards of a TensorRT-LLM checkpoint, computed with NumPy straight from the format's description."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Tensors = dict[str, Array]

NORMS = {
    "input_layernorm": "input_layernorm",
    "post_layernorm": "post_attention_layernorm",
    "pre_feedforward_layernorm": "pre_feedforward_layernorm",
    "post_feedforward_layernorm": "post_feedforward_layernorm",
    "attention.q_layernorm": "self_attn.q_norm",
    "attention.k_layernorm": "self_attn.k_norm",
}

# Families with other names for some.
NORMS_OF = {
    "vaultgemma": {"post_layernorm": "pre_feedforward_layernorm", "pre_feedforward_layernorm": "absent"},
    "afmoe": {
        "pre_feedforward_layernorm": "pre_mlp_layernorm",
        "post_feedforward_layernorm": "post_mlp_layernorm",
    },
    "hunyuan_v1_moe": {
        "attention.q_layernorm": "self_attn.query_layernorm",
        "attention.k_layernorm": "self_attn.key_layernorm",
    },
}


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Names of a layer's experts."""

    router: str = "mlp.gate"
    experts: str = "mlp.experts.{}."
    parts: tuple[str, str, str] | None = ("gate_proj", "up_proj", "down_proj")
    """None: all experts are stacked, their matrices [in, out]."""
    shared: str = "mlp.shared_expert"
    correction: str | None = None


_DEEPSEEK = Mixture(shared="mlp.shared_experts", correction="mlp.gate.e_score_correction_bias")
MIXTURES = {
    "mixtral": Mixture(
        router="block_sparse_moe.gate", experts="block_sparse_moe.experts.{}.", parts=("w1", "w3", "w2")
    ),
    "minimax_m2": Mixture(
        router="block_sparse_moe.gate",
        experts="block_sparse_moe.experts.{}.",
        parts=("w1", "w3", "w2"),
        correction="block_sparse_moe.e_score_correction_bias",
    ),
    "olmoe": Mixture(),
    "glm4_moe": _DEEPSEEK,
    "glm4_moe_lite": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v2": Mixture(shared="mlp.shared_experts"),
    "dots1": _DEEPSEEK,
    "solar_open": _DEEPSEEK,
    "flex_olmo": Mixture(),
    "ernie4_5_moe": replace(_DEEPSEEK, correction="mlp.moe_statics.e_score_correction_bias"),
    "hy_v3": replace(_DEEPSEEK, router="mlp.router.gate", correction="mlp.expert_bias", shared="mlp.shared_mlp"),
    "hunyuan_v1_moe": Mixture(router="mlp.gate.wg", shared="mlp.shared_mlp"),
    "exaone_moe": replace(_DEEPSEEK, correction="mlp.e_score_correction_bias"),
    "afmoe": replace(_DEEPSEEK, router="mlp.router.gate", correction="mlp.expert_bias"),
    "gpt_oss": Mixture(router="mlp.router", experts="mlp.experts.", parts=None),
}


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


def llama_ranks(source: Tensors, hf: dict[str, Any], tp: int, ep: int = 1) -> list[Tensors]:
    """Return the expected checkpoint of a model with Llama's tensor names: tp ranks, ep of them for experts."""
    head_size = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
    kind = hf["model_type"]
    gemma, own_norms = "gemma" in kind, NORMS_OF.get(kind, {})
    ranks: list[Tensors] = [{} for _ in range(tp)]

    def put(name: str, parts: list[Array]) -> None:
        for rank, part in zip(ranks, parts, strict=True):
            rank[name] = part

    table = source["model.embed_tokens.weight"]
    put("transformer.vocab_embedding.weight", split_vocabulary(table, tp) if gemma else [table] * tp)
    for name, norm in _norms(source, hf["num_hidden_layers"], NORMS | own_norms, offset=1 if gemma else 0).items():
        put(name, [norm] * tp)
    put("lm_head.weight", split_vocabulary(table if hf["tie_word_embeddings"] else source["lm_head.weight"], tp))
    for layer in range(hf["num_hidden_layers"]):
        theirs, ours = f"model.layers.{layer}.", f"transformer.layers.{layer}."
        for name, parts in _queries(source, theirs, head_size, tp):
            put(ours + name, parts)
        for name, their_name in (("attention.dense", "self_attn.o_proj"), ("mlp.proj", "mlp.down_proj")):
            for kind in _kinds(source, theirs + their_name):
                whole = source[f"{theirs}{their_name}.{kind}"]
                put(f"{ours}{name}.{kind}", np.split(whole, tp, axis=1) if kind == "weight" else [whole] * tp)
        for kind in _kinds(source, f"{theirs}mlp.up_proj"):
            put(f"{ours}mlp.fc.{kind}", split_rows(source[f"{theirs}mlp.gate_proj.{kind}"], tp))
            put(f"{ours}mlp.gate.{kind}", split_rows(source[f"{theirs}mlp.up_proj.{kind}"], tp))
        for name, parts in expert_parts(source, hf, theirs, tp, ep).items():
            put(ours + name, parts)
    return ranks


def _queries(source: Tensors, theirs: str, head_size: int, tp: int) -> Iterator[tuple[str, list[Array]]]:
    for kind in _kinds(source, f"{theirs}self_attn.k_proj"):
        q, k, v = (source[f"{theirs}self_attn.{part}_proj.{kind}"] for part in "qkv")
        yield f"attention.qkv.{kind}", split_qkv(q, k, v, head_size, tp)
    if (gate := f"{theirs}self_attn.gate_proj.weight") in source:
        yield "attention.gate.weight", split_rows(source[gate], tp)


def latent_ranks(source: Tensors, hf: dict[str, Any], tp: int, ep: int = 1) -> list[Tensors]:
    """Return the expected checkpoint of a DeepSeek: ranks share the heads, and each has all of the latent vector."""
    ours, rest = {}, dict(source)
    for name in source:
        layer, found, part = name.partition(".self_attn.")
        if found:
            ours[f"transformer.layers.{layer.rpartition('.')[2]}.attention.", part] = rest.pop(name)
    ranks = llama_ranks(rest, hf, tp, ep)
    columns = {"q_proj.weight": "q_b.weight", "q_b_proj.weight": "q_b.weight", "kv_b_proj.weight": "kv_b.weight"}
    for (prefix, part), values in ours.items():
        if part in columns:
            name, parts = columns[part], split_rows(values, tp)
        elif part == "o_proj.weight":
            name, parts = "dense.weight", np.split(values, tp, axis=1)
        else:
            own = part.replace("kv_a_proj_with_mqa", "kv_a").replace("o_proj", "dense").replace("_proj", "")
            name, parts = own, [values] * tp
        for rank, values_of_rank in zip(ranks, parts, strict=True):
            rank[prefix + name] = values_of_rank
    return ranks


def expert_parts(source: Tensors, hf: dict[str, Any], prefix: str, tp: int, ep: int) -> dict[str, list[Array]]:
    """The tensors of a layer's experts by rank; rank r is expert-parallel rank r % ep."""
    names = MIXTURES.get(hf["model_type"], Mixture())
    if prefix + names.router + ".weight" not in source:
        return {}
    count = source[prefix + names.router + ".weight"].shape[0]

    def part(stack: Array, axis: int, rank: int) -> Array:
        held: Array = np.split(stack, ep)[rank % ep]
        return np.split(held, tp // ep, axis=axis)[rank // ep]

    found = {
        f"mlp.router.{kind}": [source[f"{prefix}{names.router}.{kind}"].astype(np.float32)] * tp
        for kind in _kinds(source, prefix + names.router)
    }
    if names.correction is not None:
        found["mlp.router.correction"] = [source[prefix + names.correction].reshape(-1).astype(np.float32)] * tp
    if names.parts is None:  # gpt-oss: [experts, in, out], rows of gates and factors in turn
        experts = prefix + names.experts
        outer, inner = source[f"{experts}gate_up_proj"].swapaxes(1, 2), source[f"{experts}down_proj"].swapaxes(1, 2)
        found["mlp.fc.weight"] = [part(outer, 1, r) for r in range(tp)]
        found["mlp.fc.bias"] = [part(source[f"{experts}gate_up_proj_bias"], 1, r)[..., None] for r in range(tp)]
        found["mlp.proj.bias"] = [
            np.split(source[f"{experts}down_proj_bias"], ep)[r % ep][..., None] for r in range(tp)
        ]
        found["attention.sinks"] = split_rows(source[f"{prefix}self_attn.sinks"], tp)
    else:
        gate, up, inner = (
            np.stack([source[f"{prefix}{names.experts.format(e)}{name}.weight"] for e in range(count)])
            for name in names.parts
        )
        found["mlp.fc.weight"] = [np.concatenate([part(up, 1, r), part(gate, 1, r)], axis=1) for r in range(tp)]
    found["mlp.proj.weight"] = [part(inner, 2, r) for r in range(tp)]
    shared = prefix + names.shared
    if f"{shared}.up_proj.weight" in source:
        halves = [split_rows(source[f"{shared}.{name}.weight"], tp) for name in ("up_proj", "gate_proj")]
        found["mlp.shared_expert.fc.weight"] = [np.concatenate(pair) for pair in zip(*halves, strict=True)]
        found["mlp.shared_expert.proj.weight"] = np.split(source[f"{shared}.down_proj.weight"], tp, axis=1)
    if f"{shared}_gate.weight" in source:
        found["mlp.shared_expert_gate.weight"] = [source[f"{shared}_gate.weight"]] * tp
    return found


def _norms(source: Tensors, layers: int, kinds: dict[str, str], *, offset: int) -> Tensors:
    names = {"transformer.ln_f.weight": "model.norm.weight"}
    for layer in range(layers):
        names |= {
            f"transformer.layers.{layer}.{ours}.weight": f"model.layers.{layer}.{theirs}.weight"
            for ours, theirs in kinds.items()
        }
    stored = {ours: source[theirs] for ours, theirs in names.items() if theirs in source}
    return {name: (values.astype(np.float32) + offset).astype(values.dtype) for name, values in stored.items()}


def _kinds(source: Tensors, name: str) -> list[str]:
    return [kind for kind in ("weight", "bias") if f"{name}.{kind}" in source]


def gpt2_ranks(source: Tensors, hf: dict[str, Any], tp: int, ep: int = 1) -> list[Tensors]:
    """Return the expected checkpoint of a GPT-2 for tp ranks."""
    assert ep == 1
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
