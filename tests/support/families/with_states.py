"""Families with layers that have a state instead of attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from tests.support.families.expected import DENSE, EXPERTS, ROPE_BASE, ROPE_SIZE
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
        elif name.endswith(("mlp.fc.weight", "mlp.shared_expert.fc.weight")) and hf["model_type"].startswith(
            "granitemoe"
        ):
            halves = [split_rows(half, tp) for half in np.split(values, 2)]
            parts = [np.concatenate(pair) for pair in zip(*halves, strict=True)]
        elif name.endswith(("mlp.fc.weight", "mlp.gate.weight", "attention.gate.weight")):
            parts = split_rows(values, tp)
        elif name.endswith(("attention.dense.weight", "mlp.proj.weight", "mlp.shared_expert.proj.weight")):
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
    hidden, vocab = config["hidden_size"], config["vocab_size"]
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
        yield from _lfm2_mlp(config, f"{name}feed_forward.", layer)
    yield "model.embedding_norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (vocab, hidden)


def _lfm2_mlp(config: Mapping[str, Any], name: str, layer: int) -> Shapes:
    hidden, inner, dense = config["hidden_size"], config["intermediate_size"], config.get("num_dense_layers")
    if dense is None or layer < dense:
        for part, shape in {"w1": (inner, hidden), "w3": (inner, hidden), "w2": (hidden, inner)}.items():
            yield f"{name}{part}.weight", shape
        return
    count, inner = config["num_experts"], config["moe_intermediate_size"]
    yield f"{name}gate.weight", (count, hidden)
    yield f"{name}expert_bias", (count,)
    for expert in range(count):
        for part, shape in {"w1": (inner, hidden), "w3": (inner, hidden), "w2": (hidden, inner)}.items():
            yield f"{name}experts.{expert}.{part}.weight", shape


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
            if (values := source.get(f"{theirs}feed_forward.{other}.weight")) is not None:
                yield f"{ours}mlp.{one}.weight", values
        if (values := source.get(f"{theirs}feed_forward.expert_bias")) is not None:
            yield f"{ours}mlp.router.correction", values.astype(np.float32)
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
    usual = {"feed_forward.": "mlp.", ".w1.": ".gate_proj.", ".w3.": ".up_proj.", ".w2.": ".down_proj."}
    return _with_experts(_ranks_of(_lfm2, source, hf, tp), _renamed(source, usual), hf, tp, ep)


def _renamed(source: Tensors, words: Mapping[str, str]) -> Tensors:
    renamed = {}
    for name, values in source.items():
        for theirs, usual in words.items():
            name = name.replace(theirs, usual)  # noqa: PLW2901
        renamed[name] = values
    return renamed


def _with_experts(ranks: list[Tensors], source: Tensors, hf: Config, tp: int, ep: int) -> list[Tensors]:
    """Add the experts, which have Qwen's names in `source`; those in one tensor are told apart."""
    source = dict(source)
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


def granite_layers(config: Mapping[str, Any]) -> list[str]:
    """Return "mamba" or "attention" of each layer; Granite 3 has no list of them."""
    return config.get("layer_types") or ["attention"] * config["num_hidden_layers"]


def granite_tensors(config: Mapping[str, Any]) -> Shapes:
    hidden, vocab, kv_heads = config["hidden_size"], config["vocab_size"], config["num_key_value_heads"]
    size, shared = hidden // config["num_attention_heads"], config["shared_intermediate_size"]
    heads, inner = config.get("mamba_n_heads", 0), 2 * hidden
    channels = inner + 2 * config.get("mamba_n_groups", 0) * config.get("mamba_d_state", 0)
    count, own = config["num_local_experts"], config["intermediate_size"]
    yield "model.embed_tokens.weight", (vocab, hidden)
    for layer, kind in enumerate(granite_layers(config)):
        name = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{name}{norm}.weight", (hidden,)
        if kind == "attention":
            for part, rows in {"q": hidden, "k": kv_heads * size, "v": kv_heads * size, "o": hidden}.items():
                yield f"{name}self_attn.{part}_proj.weight", (rows, hidden)
        else:
            yield f"{name}mamba.in_proj.weight", (inner + channels + heads, hidden)
            yield f"{name}mamba.conv1d.weight", (channels, 1, config["mamba_d_conv"])
            yield f"{name}mamba.conv1d.bias", (channels,)
            yield from ((f"{name}mamba.{part}", (heads,)) for part in ("A_log", "dt_bias", "D"))
            yield f"{name}mamba.norm.weight", (inner,)
            yield f"{name}mamba.out_proj.weight", (hidden, inner)
        if shared:
            yield f"{name}shared_mlp.input_linear.weight", (2 * shared, hidden)
            yield f"{name}shared_mlp.output_linear.weight", (hidden, shared)
        if count:
            yield f"{name}block_sparse_moe.router.layer.weight", (count, hidden)
            yield f"{name}block_sparse_moe.input_linear.weight", (count, 2 * own, hidden)
            yield f"{name}block_sparse_moe.output_linear.weight", (count, hidden, own)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (vocab, hidden)


def _granite(source: Tensors, hf: Config) -> Named:
    table = source["model.embed_tokens.weight"]
    yield "transformer.vocab_embedding.weight", table
    yield "lm_head.weight", source.get("lm_head.weight", table)
    yield "transformer.ln_f.weight", source["model.norm.weight"]
    for layer, kind in enumerate(granite_layers(hf)):
        theirs, ours = f"model.layers.{layer}.", f"transformer.layers.{layer}."
        yield f"{ours}input_layernorm.weight", source[f"{theirs}input_layernorm.weight"]
        yield f"{ours}post_layernorm.weight", source[f"{theirs}post_attention_layernorm.weight"]
        if kind == "attention":
            qkv = [source[f"{theirs}self_attn.{part}_proj.weight"] for part in "qkv"]
            yield f"{ours}attention.qkv.weight", np.concatenate(qkv)
            yield f"{ours}attention.dense.weight", source[f"{theirs}self_attn.o_proj.weight"]
        else:
            yield from _state_space(source, f"{theirs}mamba.", ours)
        if not hf["shared_intermediate_size"]:
            continue
        gate, up = np.split(source[f"{theirs}shared_mlp.input_linear.weight"], 2)
        place = "mlp.shared_expert" if hf["num_local_experts"] else "mlp"
        yield f"{ours}{place}.fc.weight", np.concatenate([up, gate])
        yield f"{ours}{place}.proj.weight", source[f"{theirs}shared_mlp.output_linear.weight"]


def granite_ranks(source: Tensors, hf: Config, tp: int, ep: int = 1) -> list[Tensors]:
    usual = {
        "block_sparse_moe.router.layer.": "mlp.gate.",
        "block_sparse_moe.input_linear.weight": "mlp.experts.gate_up_proj",
        "block_sparse_moe.output_linear.weight": "mlp.experts.down_proj",
    }
    ranks = _ranks_of(_granite, source, hf, tp)
    return _with_experts(ranks, _renamed(source, usual), hf, tp, ep)


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
    return _with_experts(_ranks_of(_qwen, source, hf, tp), source, hf, tp, ep)


def nemotron_tensors(config: Mapping[str, Any]) -> Shapes:
    hidden, vocab, size = config["hidden_size"], config["vocab_size"], config["head_dim"]
    queries, keys = (config[f"num_{kind}_heads"] * size for kind in ("attention", "key_value"))
    heads, inner = config["mamba_num_heads"], config["mamba_num_heads"] * config["mamba_head_dim"]
    channels = inner + 2 * config["n_groups"] * config["ssm_state_size"]
    yield "backbone.embeddings.weight", (vocab, hidden)
    for layer, kind in enumerate(config["hybrid_override_pattern"]):
        name = f"backbone.layers.{layer}."
        mixer = f"{name}mixer."
        yield f"{name}norm.weight", (hidden,)
        if kind == "*":
            for part, shape in {"q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden)}.items():
                yield f"{mixer}{part}_proj.weight", shape
            yield f"{mixer}o_proj.weight", (hidden, queries)
        elif kind == "M":
            yield f"{mixer}in_proj.weight", (inner + channels + heads, hidden)
            yield f"{mixer}conv1d.weight", (channels, 1, config["conv_kernel"])
            yield f"{mixer}conv1d.bias", (channels,)
            yield from ((f"{mixer}{part}", (heads,)) for part in ("A_log", "dt_bias", "D"))
            yield f"{mixer}norm.weight", (inner,)
            yield f"{mixer}out_proj.weight", (hidden, inner)
        else:
            yield from _nemotron_mlp(config, mixer, experts=kind == "E")
    yield "backbone.norm_f.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (vocab, hidden)


def _nemotron_mlp(config: Mapping[str, Any], name: str, *, experts: bool) -> Shapes:
    hidden = config["hidden_size"]
    widths = {"": config["intermediate_size"]}
    if experts:
        yield f"{name}gate.weight", (config["n_routed_experts"], hidden)
        yield f"{name}gate.e_score_correction_bias", (config["n_routed_experts"],)
        widths = {f"experts.{e}.": config["moe_intermediate_size"] for e in range(config["n_routed_experts"])}
        widths["shared_experts."] = config["moe_shared_expert_intermediate_size"]
    for place, width in widths.items():
        yield f"{name}{place}up_proj.weight", (width, hidden)
        yield f"{name}{place}down_proj.weight", (hidden, width)


def _nemotron(source: Tensors, hf: Config) -> Named:
    table = source["backbone.embeddings.weight"]
    yield "transformer.vocab_embedding.weight", table
    yield "lm_head.weight", source.get("lm_head.weight", table)
    yield "transformer.ln_f.weight", source["backbone.norm_f.weight"]
    for layer, kind in enumerate(hf["hybrid_override_pattern"]):
        theirs, ours = f"backbone.layers.{layer}.mixer.", f"transformer.layers.{layer}."
        yield f"{ours}input_layernorm.weight", source[f"backbone.layers.{layer}.norm.weight"]
        if kind == "*":
            qkv = [source[f"{theirs}{part}_proj.weight"] for part in "qkv"]
            yield f"{ours}attention.qkv.weight", np.concatenate(qkv)
            yield f"{ours}attention.dense.weight", source[f"{theirs}o_proj.weight"]
        elif kind == "M":
            yield from _state_space(source, theirs, ours)
        elif kind == "-":
            yield f"{ours}mlp.fc.weight", source[f"{theirs}up_proj.weight"]
            yield f"{ours}mlp.proj.weight", source[f"{theirs}down_proj.weight"]


def falcon_tensors(config: Mapping[str, Any]) -> Shapes:
    hidden, vocab, inner = config["hidden_size"], config["vocab_size"], config["intermediate_size"]
    rows, kv_rows = hidden, hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    heads, width, biased = config["mamba_n_heads"], config.get("mamba_d_ssm", 2 * hidden), config.get("mamba_proj_bias")
    attends = config.get("attn_layer_indices")  # of Bamba; every layer of Falcon-H1 has both
    channels = width + 2 * config["mamba_n_groups"] * config["mamba_d_state"]
    yield "model.embed_tokens.weight", (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        yield from ((f"{name}{norm}.weight", (hidden,)) for norm in ("input_layernorm", "pre_ff_layernorm"))
        for part, shape in {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}.items():
            yield f"{name}feed_forward.{part}_proj.weight", shape
            if config.get("mlp_bias"):
                yield f"{name}feed_forward.{part}_proj.bias", shape[:1]
        if attends is None or layer in attends:
            for part, count in {"q": rows, "k": kv_rows, "v": kv_rows, "o": rows}.items():
                yield f"{name}self_attn.{part}_proj.weight", (count, hidden)
        if attends is not None and layer in attends:
            continue
        yield f"{name}mamba.in_proj.weight", (width + channels + heads, hidden)
        yield f"{name}mamba.conv1d.weight", (channels, 1, config["mamba_d_conv"])
        yield f"{name}mamba.conv1d.bias", (channels,)
        yield from ((f"{name}mamba.{part}", (heads,)) for part in ("A_log", "dt_bias", "D"))
        yield f"{name}mamba.out_proj.weight", (hidden, width)
        if config.get("mamba_rms_norm", True):
            yield f"{name}mamba.norm.weight", (width,)
        if biased:
            yield f"{name}mamba.in_proj.bias", (width + channels + heads,)
            yield f"{name}mamba.out_proj.bias", (hidden,)
    yield "model.final_layernorm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (vocab, hidden)


def _falcon(source: Tensors, hf: Config) -> Named:
    table = source["model.embed_tokens.weight"]
    yield "transformer.vocab_embedding.weight", table
    yield "lm_head.weight", source.get("lm_head.weight", table)
    yield "transformer.ln_f.weight", source["model.final_layernorm.weight"]
    for layer in range(hf["num_hidden_layers"]):
        theirs, ours = f"model.layers.{layer}.", f"transformer.layers.{layer}."
        yield f"{ours}input_layernorm.weight", source[f"{theirs}input_layernorm.weight"]
        yield f"{ours}post_layernorm.weight", source[f"{theirs}pre_ff_layernorm.weight"]
        if f"{theirs}self_attn.q_proj.weight" in source:
            qkv = [source[f"{theirs}self_attn.{part}_proj.weight"] for part in "qkv"]
            yield f"{ours}attention.qkv.weight", np.concatenate(qkv)
            yield f"{ours}attention.dense.weight", source[f"{theirs}self_attn.o_proj.weight"]
        for one, other in {"fc": "gate", "gate": "up", "proj": "down"}.items():
            yield f"{ours}mlp.{one}.weight", source[f"{theirs}feed_forward.{other}_proj.weight"]
        if f"{theirs}mamba.in_proj.weight" in source:
            yield from _state_space(source, f"{theirs}mamba.", ours)


def falcon_ranks(source: Tensors, hf: Config, tp: int, ep: int = 1) -> list[Tensors]:
    assert ep == 1
    return _ranks_of(_falcon, source, hf, tp)


def _state_space(source: Tensors, theirs: str, ours: str) -> Named:
    yield f"{ours}mixer.conv.weight", source[f"{theirs}conv1d.weight"][:, 0]
    yield f"{ours}mixer.conv.bias", source[f"{theirs}conv1d.bias"]
    for part in ("in_proj", "out_proj", "norm"):
        for kind in ("weight", "bias"):
            if (values := source.get(f"{theirs}{part}.{kind}")) is not None:
                yield f"{ours}mixer.{part}.{kind}", values
    for one, other in {"decay": "A_log", "time_bias": "dt_bias", "skip": "D"}.items():
        yield f"{ours}mixer.{one}", source[f"{theirs}{other}"].astype(np.float32)


def nemotron_ranks(source: Tensors, hf: Config, tp: int, ep: int = 1) -> list[Tensors]:
    ranks = _ranks_of(_nemotron, source, hf, tp)
    for layer, kind in enumerate(hf["hybrid_override_pattern"]):
        theirs, ours = f"backbone.layers.{layer}.mixer.", f"transformer.layers.{layer}.mlp."
        if kind != "E":
            continue
        outer, inner = (
            np.stack([source[f"{theirs}experts.{e}.{part}_proj.weight"] for e in range(hf["n_routed_experts"])])
            for part in ("up", "down")
        )
        for number, rank in enumerate(ranks):
            held, place = number % ep, number // ep
            rank[f"{ours}router.weight"] = source[f"{theirs}gate.weight"].astype(np.float32)
            rank[f"{ours}router.correction"] = source[f"{theirs}gate.e_score_correction_bias"].astype(np.float32)
            rank[f"{ours}fc.weight"] = np.split(np.split(outer, ep)[held], tp // ep, axis=1)[place]
            rank[f"{ours}proj.weight"] = np.split(np.split(inner, ep)[held], tp // ep, axis=2)[place]
            up, down = (source[f"{theirs}shared_experts.{part}_proj.weight"] for part in ("up", "down"))
            rank[f"{ours}shared_expert.fc.weight"] = np.split(up, tp)[number]
            rank[f"{ours}shared_expert.proj.weight"] = np.split(down, tp, axis=1)[number]
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
LFM2: Config = _LLAMA | {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "pad_token_id": 0,
    "norm_eps": 1e-5,
    "full_attn_idxs": [1],
    "conv_L_cache": 3,
    "block_auto_adjust_ff_dim": False,
}
GRANITE: Config = LLAMA.config | {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "pad_token_id": 0,
    "layer_types": ["mamba", "attention"],
    "embedding_multiplier": 2.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.7,
    "logits_scaling": 8.0,
    "shared_intermediate_size": 128,
    "num_local_experts": 0,
    "mamba_n_heads": 8,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "position_embedding_type": "nope",
}
GRANITE_KEYS: Config = EXPECTED | {
    "embedding_multiplier": 2.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.7,
    "logits_scaling": 8.0,
    "mixer_layers": [0],
    "unrotated_layers": [True],
    "ssm_heads": 8,
    "ssm_head": 16,
    "ssm_groups": 1,
    "ssm_state": 16,
    "ssm_taps": 4,
    "ssm_norm_groups": 1,
    "ssm_norm_first": False,
    "ssm_conv_bias": True,
    "ssm_bias": False,
    "superset": ["the family Granite"],
}
GRANITE_MOE: Config = LLAMA.config | {
    "architectures": ["GraniteMoeForCausalLM"],
    "model_type": "granitemoe",
    "embedding_multiplier": 2.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.7,
    "logits_scaling": 8.0,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "intermediate_size": 32,
    "shared_intermediate_size": 0,
}
GRANITE_MOE_KEYS: Config = EXPECTED | {
    "hidden_act": "swiglu",
    "intermediate_size": 32,
    "embedding_multiplier": 2.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.7,
    "logits_scaling": 8.0,
    "moe": MOE_KEYS["moe"] | {"shared_expert_intermediate_size": 0},
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 0,
    "shared_expert_gate": False,
    "superset": ["the family Granite"],
}
NEMOTRON: Config = {key: value for key, value in LLAMA.config.items() if key not in ("rms_norm_eps", "hidden_act")} | {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "pad_token_id": 0,
    "hybrid_override_pattern": "M-*-",
    "head_dim": 16,
    "layer_norm_epsilon": 1e-5,
    "mlp_hidden_act": "relu2",
    "mamba_num_heads": 8,
    "mamba_head_dim": 12,
    "ssm_state_size": 16,
    "n_groups": 2,
    "conv_kernel": 4,
    "time_step_min": 0.001,
}
NEMOTRON_KEYS: Config = EXPECTED | {
    "num_hidden_layers": 4,
    "hidden_act": "relu2",
    "mixer_layers": [0],
    "mlp_layers": [1, 3],
    "unrotated_layers": [True],
    "ssm_heads": 8,
    "ssm_head": 12,
    "ssm_groups": 2,
    "ssm_state": 16,
    "ssm_taps": 4,
    "ssm_norm_groups": 2,
    "ssm_norm_first": False,
    "ssm_conv_bias": True,
    "ssm_bias": False,
    "superset": ["the family Nemotron-H"],
}
FALCON_FACTORS: Config = {
    "embedding_multiplier": 2.0,
    "lm_head_multiplier": 0.5,
    "key_multiplier": 0.75,
    "attention_in_multiplier": 1.5,
    "attention_out_multiplier": 0.7,
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.6,
    "mlp_multipliers": [0.8, 1.2],
    "ssm_multipliers": [0.5, 0.75, 1.25, 1.5, 0.9],
}
WITH_STATES: dict[str, Family] = {
    "lfm2": Family(
        tensors=lfm2_tensors,
        ranks=lfm2_ranks,
        config=LFM2,
        expected=EXPECTED
        | {"mixer_layers": [0], "conv_bias": False, "conv_L_cache": 3, "superset": ["the family LFM2"]},
        nvidia=False,
        shards=({"vocab_size": 323, "num_key_value_heads": 1}, {"tie_word_embeddings": True, "conv_bias": True}),
        logits=({}, {"conv_bias": True, "conv_L_cache": 5, "num_hidden_layers": 4, "full_attn_idxs": [0, 2]}),
        constants=ROPE_BASE,
    ),
    "qwen3_5": Family(
        norm_centre=0,
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
        int4=0.4,
        constants=ROPE_BASE | ROPE_SIZE,
    ),
    "qwen3_next": Family(
        norm_centre=0,
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
        constants=ROPE_BASE | ROPE_SIZE | EXPERTS,
    ),
    "qwen3_5_moe": Family(
        norm_centre=0,
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
        constants=ROPE_BASE | ROPE_SIZE | EXPERTS,
    ),
    "lfm2_moe": Family(
        tensors=lfm2_tensors,
        ranks=lfm2_ranks,
        config=LFM2
        | {
            "architectures": ["Lfm2MoeForCausalLM"],
            "model_type": "lfm2_moe",
            "layer_types": ["conv", "full_attention"],
            "num_dense_layers": 1,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
        },
        expected={key: value for key, value in EXPECTED.items() if key != "hidden_act"}
        | {
            "hidden_act": "swiglu",
            "mixer_layers": [0],
            "conv_bias": False,
            "conv_L_cache": 3,
            "moe": MOE_KEYS["moe"] | {"shared_expert_intermediate_size": 0},
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 0,
            "dense_layers": [0],
            "shared_expert_gate": False,
            "scoring_func": "sigmoid",
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
            "use_expert_bias": True,
            "superset": ["the family LFM2", "sigmoid routers"],
        },
        nvidia=False,
        shards=({},),
        logits=({}, {"norm_topk_prob": False, "routed_scaling_factor": 0.7}),
        int4=0.6,
        constants=ROPE_BASE | EXPERTS,
    ),
    "granite_hybrid": Family(
        tensors=granite_tensors,
        ranks=granite_ranks,
        config=GRANITE,
        expected=GRANITE_KEYS,
        nvidia=False,
        shards=({"vocab_size": 323},),
        logits=({}, {"mamba_n_groups": 2, "position_embedding_type": "rope", "time_step_limit": [0.3, 2.0]}),
    ),
    "granite_hybrid_moe": Family(
        tensors=granite_tensors,
        ranks=granite_ranks,
        config=GRANITE | {"num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 32},
        expected=GRANITE_KEYS
        | {
            "hidden_act": "swiglu",
            "intermediate_size": 32,
            "moe": MOE_KEYS["moe"] | {"shared_expert_intermediate_size": 128},
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 128,
            "shared_expert_gate": False,
        },
        nvidia=False,
        shards=({},),
        logits=({},),
        int4=0.6,
        constants=EXPERTS,
    ),
    "granite_moe": Family(
        tensors=granite_tensors,
        ranks=granite_ranks,
        config=GRANITE_MOE,
        expected=GRANITE_MOE_KEYS,
        nvidia=False,
        shards=({},),
        logits=({}, {"attention_multiplier": 0.3, "tie_word_embeddings": True}),
        int4=0.6,
        constants=ROPE_BASE | EXPERTS,
    ),
    "granite_moe_shared": Family(
        tensors=granite_tensors,
        ranks=granite_ranks,
        config=GRANITE_MOE
        | {
            "architectures": ["GraniteMoeSharedForCausalLM"],
            "model_type": "granitemoeshared",
            "shared_intermediate_size": 48,
        },
        expected=GRANITE_MOE_KEYS
        | {
            "moe": MOE_KEYS["moe"] | {"shared_expert_intermediate_size": 48},
            "moe_shared_expert_intermediate_size": 48,
        },
        nvidia=False,
        shards=({},),
        logits=({},),
        int4=0.6,
        constants=ROPE_BASE | EXPERTS,
    ),
    "nemotron_h": Family(
        tensors=nemotron_tensors,
        ranks=nemotron_ranks,
        config=NEMOTRON,
        expected=NEMOTRON_KEYS,
        nvidia=False,
        shards=({"vocab_size": 323},),
        logits=({}, {"hybrid_override_pattern": "-M*M-", "n_groups": 4, "time_step_min": 0.4}),
    ),
    "nemotron_h_moe": Family(
        tensors=nemotron_tensors,
        ranks=nemotron_ranks,
        config=NEMOTRON
        | {
            "hybrid_override_pattern": "*E",
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 48,
            "routed_scaling_factor": 1.5,
        },
        expected=NEMOTRON_KEYS
        | {
            "num_hidden_layers": 2,
            "mixer_layers": [],
            "mlp_layers": [1],
            "moe": MOE_KEYS["moe"],
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 48,
            "shared_expert_gate": False,
            "scoring_func": "sigmoid",
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.5,
            "dense_layers": [0],
        },
        nvidia=False,
        shards=({},),
        logits=({"hybrid_override_pattern": "ME*E"}, {"hybrid_override_pattern": "ME*-E"}),
        int4=0.6,
        constants=EXPERTS,
    ),
    "falcon_h1": Family(
        tensors=falcon_tensors,
        ranks=falcon_ranks,
        config=LLAMA.config
        | FALCON_FACTORS
        | {
            "architectures": ["FalconH1ForCausalLM"],
            "model_type": "falcon_h1",
            "mamba_d_ssm": 96,
            "mamba_n_heads": 8,
            "mamba_d_head": 12,
            "mamba_d_state": 16,
            "mamba_n_groups": 2,
            "mamba_d_conv": 4,
            "mamba_rms_norm": False,
        },
        expected=EXPECTED
        | {
            "mixer_layers": [0, 1],
            "mixer_beside": True,
            "ssm_heads": 8,
            "ssm_head": 12,
            "ssm_groups": 2,
            "ssm_state": 16,
            "ssm_taps": 4,
            "ssm_norm_groups": 0,
            "ssm_norm_first": True,
            "ssm_conv_bias": True,
            "ssm_bias": False,
            "ssm_gate_factor": 0.625,
            "ssm_input_factor": 0.9375,
            "ssm_b_factor": 1.5625,
            "ssm_c_factor": 1.875,
            "ssm_step_factor": 1.125,
            "ssm_out_multiplier": 0.6,
            "mlp_gate_multiplier": 0.8,
            "mlp_down_multiplier": 1.2,
            "embedding_multiplier": 2.0,
            "lm_head_multiplier": 0.5,
            "key_multiplier": 1.6875,
            "attention_out_multiplier": 0.7 * 1.5,
            "superset": ["the family Falcon-H1"],
        },
        nvidia=False,
        shards=({"vocab_size": 323},),
        logits=(
            {},
            {
                "mamba_rms_norm": True,
                "mamba_norm_before_gate": False,
                "mamba_proj_bias": True,
                "projectors_bias": True,
                "ssm_in_multiplier": 1.0,
            },
            {"mamba_rms_norm": True, "mamba_n_groups": 4, "mlp_multipliers": None, "ssm_multipliers": None},
        ),
        constants=ROPE_BASE,
    ),
    "bamba": Family(
        tensors=falcon_tensors,
        ranks=falcon_ranks,
        config=LLAMA.config
        | {
            "architectures": ["BambaForCausalLM"],
            "model_type": "bamba",
            "pad_token_id": 0,
            "attn_layer_indices": [1],
            "mamba_n_heads": 8,
            "mamba_d_head": "auto",
            "mamba_d_state": 16,
            "mamba_n_groups": 2,
            "mamba_d_conv": 4,
        },
        expected=EXPECTED
        | {
            "rotary_embedding_dim": 8,
            "rotary_pct": 0.5,
            "mixer_layers": [0],
            "ssm_heads": 8,
            "ssm_head": 16,
            "ssm_groups": 2,
            "ssm_state": 16,
            "ssm_taps": 4,
            "ssm_norm_groups": 2,
            "ssm_norm_first": False,
            "ssm_conv_bias": True,
            "ssm_bias": False,
            "superset": ["the family Bamba"],
        },
        nvidia=False,
        shards=({"vocab_size": 323},),
        logits=(
            {},
            {
                "num_hidden_layers": 3,
                "attn_layer_indices": [0, 2],
                "mamba_n_groups": 1,
                "mamba_proj_bias": True,
                "mlp_bias": True,
                "time_step_limit": [0.3, 2.0],
            },
        ),
        constants=ROPE_BASE | ROPE_SIZE,
    ),
}
