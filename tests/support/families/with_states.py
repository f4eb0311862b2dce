"""Families with layers that have a state instead of attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from tests.support.families.expected import DENSE, ROPE_BASE
from tests.support.families.family import Config, Family, Shapes
from tests.support.families.llama_like import LLAMA
from tests.support.families.ours import EXPECTED
from tests.support.families.shards import Array, Tensors, expert_parts, split_qkv, split_rows, split_vocabulary

Named = Iterator[tuple[str, Array]]


def _ranks_of(whole: Callable[[Tensors, Config], Named], source: Tensors, hf: Config, tp: int) -> list[Tensors]:
    """Return the checkpoint for tp ranks of the unsharded tensors; layers with a state are not shared."""
    ranks: list[Tensors] = [{} for _ in range(tp)]
    size = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
    counts = [hf[key] * size for key in ("num_attention_heads", "num_key_value_heads")]
    for name, values in whole(source, hf):
        if name.endswith("attention.qkv.weight"):
            q, k, v = np.split(values, np.cumsum(counts))
            parts = split_qkv(q, k, v, size, tp)
        elif name == "lm_head.weight":
            parts = split_vocabulary(values, tp)
        elif name.endswith(("mlp.fc.weight", "mlp.gate.weight", "attention.gate.weight")):
            parts = split_rows(values, tp)
        elif name.endswith(("attention.dense.weight", "mlp.proj.weight")):
            parts = np.split(values, tp, axis=1)
        else:
            parts = [values] * tp
        for rank, part in zip(ranks, parts, strict=True):
            rank[name] = part
    return ranks


LFM2_MIXER = ("in_proj", "conv", "out_proj")
LFM2_MLP = {"fc": "w1", "gate": "w3", "proj": "w2"}


def lfm2_attends(config: Mapping[str, Any], layer: int) -> bool:
    if config.get("layer_types"):
        return bool(config["layer_types"][layer] == "full_attention")
    return layer in config["full_attn_idxs"]


def lfm2_tensors(config: Mapping[str, Any]) -> Shapes:
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    size = hidden // heads
    yield "model.embed_tokens.weight", (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        for norm in ("operator_norm", "ffn_norm"):
            yield f"{name}{norm}.weight", (hidden,)
        if lfm2_attends(config, layer):
            for part, count in zip("qkv", (heads, kv_heads, kv_heads), strict=True):
                yield f"{name}self_attn.{part}_proj.weight", (count * size, hidden)
            yield f"{name}self_attn.out_proj.weight", (hidden, heads * size)
            for part in "qk":
                yield f"{name}self_attn.{part}_layernorm.weight", (size,)
        else:
            shapes = {"in_proj": (3 * hidden, hidden), "conv": (hidden, 1, config["conv_L_cache"])}
            for part, shape in (shapes | {"out_proj": (hidden, hidden)}).items():
                yield f"{name}conv.{part}.weight", shape
                if config.get("conv_bias"):
                    yield f"{name}conv.{part}.bias", shape[:1]
        for part, shape in {"w1": (inner, hidden), "w3": (inner, hidden), "w2": (hidden, inner)}.items():
            yield f"{name}feed_forward.{part}.weight", shape
    yield "model.embedding_norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (vocab, hidden)


def _lfm2(source: Tensors, hf: Config) -> Named:
    table = source["model.embed_tokens.weight"]
    yield "transformer.vocab_embedding.weight", table
    yield "lm_head.weight", source.get("lm_head.weight", table)
    yield "transformer.ln_f.weight", source["model.embedding_norm.weight"]
    for layer in range(hf["num_hidden_layers"]):
        theirs, ours = f"model.layers.{layer}.", f"transformer.layers.{layer}."
        yield f"{ours}input_layernorm.weight", source[f"{theirs}operator_norm.weight"]
        yield f"{ours}post_layernorm.weight", source[f"{theirs}ffn_norm.weight"]
        for one, other in LFM2_MLP.items():
            yield f"{ours}mlp.{one}.weight", source[f"{theirs}feed_forward.{other}.weight"]
        if lfm2_attends(hf, layer):
            qkv = [source[f"{theirs}self_attn.{part}_proj.weight"] for part in "qkv"]
            yield f"{ours}attention.qkv.weight", np.concatenate(qkv)
            yield f"{ours}attention.dense.weight", source[f"{theirs}self_attn.out_proj.weight"]
            for part in "qk":
                name = f"{part}_layernorm.weight"
                yield f"{ours}attention.{name}", source[f"{theirs}self_attn.{name}"]
            continue
        for part in LFM2_MIXER:
            for kind in ("weight", "bias"):
                if (values := source.get(f"{theirs}conv.{part}.{kind}")) is not None:
                    yield f"{ours}mixer.{part}.{kind}", values[:, 0] if values.ndim == 3 else values


def lfm2_ranks(source: Tensors, hf: Config, tp: int, ep: int = 1) -> list[Tensors]:
    assert ep == 1
    return _ranks_of(_lfm2, source, hf, tp)


def _attends(config: Mapping[str, Any], layer: int) -> bool:
    return not (layer + 1) % config["full_attention_interval"]


def qwen_tensors(config: Mapping[str, Any]) -> Shapes:
    hidden, vocab, size = config["hidden_size"], config["vocab_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    keys, values = (config[f"linear_num_{kind}_heads"] for kind in ("key", "value"))
    of_keys, of_values = keys * config["linear_key_head_dim"], values * config["linear_value_head_dim"]
    channels, taps = 2 * of_keys + of_values, config["linear_conv_kernel_dim"]
    yield "model.embed_tokens.weight", (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{name}{norm}.weight", (hidden,)
        if _attends(config, layer):
            for part, count in zip("qkv", (2 * heads, kv_heads, kv_heads), strict=True):
                yield f"{name}self_attn.{part}_proj.weight", (count * size, hidden)
            yield f"{name}self_attn.o_proj.weight", (hidden, heads * size)
            for part in "qk":
                yield f"{name}self_attn.{part}_norm.weight", (size,)
        else:
            fused = {"qkvz": channels + of_values, "ba": 2 * values}
            apart = {"qkv": channels, "z": of_values, "b": values, "a": values}
            for part, rows in (fused if config["model_type"] == "qwen3_next" else apart).items():
                yield f"{name}linear_attn.in_proj_{part}.weight", (rows, hidden)
            yield f"{name}linear_attn.conv1d.weight", (channels, 1, taps)
            yield f"{name}linear_attn.A_log", (values,)
            yield f"{name}linear_attn.dt_bias", (values,)
            yield f"{name}linear_attn.norm.weight", (config["linear_value_head_dim"],)
            yield f"{name}linear_attn.out_proj.weight", (hidden, of_values)
        yield from _qwen_mlp(config, f"{name}mlp.", layer)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (vocab, hidden)


def _qwen_mlp(config: Mapping[str, Any], name: str, layer: int) -> Shapes:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    parts = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    if "num_experts" not in config or layer in config.get("mlp_only_layers", ()):
        yield from ((f"{name}{part}.weight", shape) for part, shape in parts.items())
        return
    count, inner, shared = (
        config[key] for key in ("num_experts", "moe_intermediate_size", "shared_expert_intermediate_size")
    )
    yield f"{name}gate.weight", (count, hidden)
    if config["model_type"] == "qwen3_next":
        for expert in range(count):
            for part, shape in {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}.items():
                yield f"{name}experts.{expert}.{part}_proj.weight", shape
    else:
        yield f"{name}experts.gate_up_proj", (count, 2 * inner, hidden)
        yield f"{name}experts.down_proj", (count, hidden, inner)
    for part, shape in {"gate": (shared, hidden), "up": (shared, hidden), "down": (hidden, shared)}.items():
        yield f"{name}shared_expert.{part}_proj.weight", shape
    yield f"{name}shared_expert_gate.weight", (1, hidden)


def _qwen(source: Tensors, hf: Config) -> Named:
    table, size = source["model.embed_tokens.weight"], hf["head_dim"]
    yield "transformer.vocab_embedding.weight", table
    yield "lm_head.weight", source.get("lm_head.weight", table)
    yield "transformer.ln_f.weight", 1 + source["model.norm.weight"]
    for layer in range(hf["num_hidden_layers"]):
        theirs, ours = f"model.layers.{layer}.", f"transformer.layers.{layer}."
        yield f"{ours}input_layernorm.weight", 1 + source[f"{theirs}input_layernorm.weight"]
        yield f"{ours}post_layernorm.weight", 1 + source[f"{theirs}post_attention_layernorm.weight"]
        for one, other in {"fc": "gate", "gate": "up", "proj": "down"}.items():
            if f"{theirs}mlp.gate_proj.weight" in source:
                yield f"{ours}mlp.{one}.weight", source[f"{theirs}mlp.{other}_proj.weight"]
        if _attends(hf, layer):
            q, k, v = (source[f"{theirs}self_attn.{part}_proj.weight"] for part in "qkv")
            query, gate = np.split(q.reshape(-1, 2 * size, q.shape[1]), 2, axis=1)
            yield f"{ours}attention.qkv.weight", np.concatenate([query.reshape(-1, q.shape[1]), k, v])
            yield f"{ours}attention.gate.weight", gate.reshape(-1, q.shape[1])
            yield f"{ours}attention.dense.weight", source[f"{theirs}self_attn.o_proj.weight"]
            for part in "qk":
                yield f"{ours}attention.{part}_layernorm.weight", 1 + source[f"{theirs}self_attn.{part}_norm.weight"]
            continue
        net = f"{theirs}linear_attn."
        if hf["model_type"] == "qwen3_next":
            each = hf["linear_num_value_heads"] // hf["linear_num_key_heads"]
            sizes = [hf["linear_key_head_dim"], each * hf["linear_value_head_dim"]]
            inputs = _ungrouped(source[f"{net}in_proj_qkvz.weight"], [sizes[0], sizes[0], sizes[1], sizes[1]])
            gates = _ungrouped(source[f"{net}in_proj_ba.weight"], [each, each])
        else:
            inputs, gates = (
                np.concatenate([source[f"{net}in_proj_{part}.weight"] for part in parts])
                for parts in (("qkv", "z"), "ba")
            )
        yield f"{ours}mixer.in_proj.weight", inputs
        yield f"{ours}mixer.gates.weight", gates
        yield f"{ours}mixer.conv.weight", source[f"{net}conv1d.weight"][:, 0]
        yield f"{ours}mixer.decay", source[f"{net}A_log"].astype(np.float32)
        yield f"{ours}mixer.time_bias", source[f"{net}dt_bias"].astype(np.float32)
        for part in ("norm", "out_proj"):
            yield f"{ours}mixer.{part}.weight", source[f"{net}{part}.weight"]


def _ungrouped(grouped: Array, parts: list[int]) -> Array:
    """Return the first part of all groups, then the second, and so on."""
    groups = grouped.reshape(-1, sum(parts), grouped.shape[1])
    apart = np.split(groups, np.cumsum(parts)[:-1], axis=1)
    return np.concatenate([part.reshape(-1, grouped.shape[1]) for part in apart])


def qwen_ranks(source: Tensors, hf: Config, tp: int, ep: int = 1) -> list[Tensors]:
    source, ranks = dict(source), _ranks_of(_qwen, source, hf, tp)
    for layer in range(hf["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        experts = f"{prefix}mlp.experts."
        for expert, both in enumerate(source.get(f"{experts}gate_up_proj", ())):
            gate, up = np.split(both, 2)
            parts = {"gate_proj": gate, "up_proj": up, "down_proj": source[f"{experts}down_proj"][expert]}
            source |= {f"{experts}{expert}.{part}.weight": values for part, values in parts.items()}
        for name, of_ranks in expert_parts(source, hf, prefix, tp, ep).items():
            for rank, part in zip(ranks, of_ranks, strict=True):
                rank[f"transformer.layers.{layer}.{name}"] = part
    return ranks


_LLAMA = {key: value for key, value in LLAMA.config.items() if key != "rms_norm_eps"}
LINEAR: Config = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
QWEN: Config = LINEAR | {
    "pad_token_id": 0,
    "head_dim": 32,
    "rms_norm_eps": 1e-3,
    "full_attention_interval": 2,
}
QWEN_KEYS: Config = {
    "norm_epsilon": 1e-3,
    "head_size": 32,
    "rotary_embedding_dim": 8,
    "rotary_pct": 0.25,
    "mixer_layers": [0],
}
MOE: Config = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
MOE_KEYS: Config = {
    "hidden_act": "swiglu",
    "moe": DENSE | {"num_experts": 8, "top_k": 3, "normalization_mode": 1, "shared_expert_intermediate_size": 48},
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
    "dense_layers": [],
}
WITH_STATES: dict[str, Family] = {
    "lfm2": Family(
        tensors=lfm2_tensors,
        ranks=lfm2_ranks,
        config=_LLAMA
        | {
            "architectures": ["Lfm2ForCausalLM"],
            "model_type": "lfm2",
            "pad_token_id": 0,
            "norm_eps": 1e-5,
            "full_attn_idxs": [1],
            "conv_L_cache": 3,
            "block_auto_adjust_ff_dim": False,
        },
        expected=EXPECTED
        | {"mixer_layers": [0], "conv_bias": False, "conv_L_cache": 3, "superset": ["the family LFM2"]},
        nvidia=False,
        shards=({"vocab_size": 323, "num_key_value_heads": 1}, {"tie_word_embeddings": True, "conv_bias": True}),
        logits=({}, {"conv_bias": True, "conv_L_cache": 5, "num_hidden_layers": 4, "full_attn_idxs": [0, 2]}),
        constants=ROPE_BASE,
    ),
    "qwen3_5": Family(
        tensors=qwen_tensors,
        ranks=qwen_ranks,
        config=LLAMA.config
        | QWEN
        | {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "num_hidden_layers": 3},
        expected=EXPECTED
        | LINEAR
        | QWEN_KEYS
        | {
            "num_hidden_layers": 3,
            "mixer_layers": [0, 2],
            "fused_inputs": False,
            "superset": ["the family Qwen3.5"],
        },
        nvidia=False,
        shards=({"vocab_size": 323}, {"tie_word_embeddings": True, "num_key_value_heads": 1}),
        logits=({}, {"linear_num_key_heads": 4, "full_attention_interval": 3, "partial_rotary_factor": 0.5}),
        constants=ROPE_BASE,
    ),
    "qwen3_next": Family(
        tensors=qwen_tensors,
        ranks=qwen_ranks,
        config=LLAMA.config | QWEN | MOE | {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"},
        expected=EXPECTED
        | LINEAR
        | QWEN_KEYS
        | MOE_KEYS
        | {"fused_inputs": True, "superset": ["the family Qwen3-Next"]},
        nvidia=False,
        shards=({"vocab_size": 323},),
        logits=({}, {"linear_num_key_heads": 4, "mlp_only_layers": [0], "norm_topk_prob": False}),
        int4=0.6,
        constants=ROPE_BASE,
    ),
    "qwen3_5_moe": Family(
        tensors=qwen_tensors,
        ranks=qwen_ranks,
        config=LLAMA.config
        | QWEN
        | MOE
        | {"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text"},
        expected=EXPECTED | LINEAR | QWEN_KEYS | MOE_KEYS | {"fused_inputs": False, "superset": ["the family Qwen3.5"]},
        nvidia=False,
        shards=({},),
        logits=({},),
        int4=0.6,
        constants=ROPE_BASE,
    ),
}
