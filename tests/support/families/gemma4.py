"""Gemma 4's text model: heads of two sizes, shared keys, and an input to each layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from tests.support.families import expected
from tests.support.families.expected import EXPERTS, LAYER_WINDOWS, ROPE_BASE, ROPE_SIZE
from tests.support.families.family import Config, Family, Shapes
from tests.support.families.llama_like import LLAMA
from tests.support.families.shards import Array, Tensors, split_qkv, split_rows, split_vocabulary

NORMS = {
    "input_layernorm": "input_layernorm",
    "post_layernorm": "post_attention_layernorm",
    "pre_feedforward_layernorm": "pre_feedforward_layernorm",
    "post_feedforward_layernorm": "post_feedforward_layernorm",
}

EXPERT_NORMS = {
    "mlp.pre_experts_layernorm": "pre_feedforward_layernorm_2",
    "mlp.post_experts_layernorm": "post_feedforward_layernorm_2",
    "mlp.post_shared_layernorm": "post_feedforward_layernorm_1",
}
INPUTS = {
    "inputs.gate": "per_layer_input_gate",
    "inputs.proj": "per_layer_projection",
    "post_inputs_layernorm": "post_per_layer_input_norm",
}
WHOLE = {
    "layer_embedding": "embed_tokens_per_layer",
    "layer_projection": "per_layer_model_projection",
    "layer_norm": "per_layer_projection_norm",
}


def _of_layer(hf: Mapping[str, Any], layer: int) -> tuple[int, int, bool, int]:
    """Return key/value heads, the size of a head, whether the layer has keys of its own, and the MLP's width."""
    full, same = hf["layer_types"][layer] == "full_attention", hf.get("attention_k_eq_v")
    kv_heads = hf.get("num_global_key_value_heads") if full and same else None
    shares = layer >= hf["num_hidden_layers"] - hf["num_kv_shared_layers"]
    wide = 2 if shares and hf.get("use_double_wide_mlp") else 1
    size = hf.get("global_head_dim", hf["head_dim"]) if full else hf["head_dim"]
    inner = hf["intermediate_size"]
    inner = inner[layer] if isinstance(inner, list) else inner
    return kv_heads or hf["num_key_value_heads"], size, not shares, wide * inner


def tensors(hf: Mapping[str, Any]) -> Shapes:
    hidden, vocab, heads, own = (
        hf[key] for key in ("hidden_size", "vocab_size", "num_attention_heads", "hidden_size_per_layer_input")
    )
    yield "model.embed_tokens.weight", (vocab, hidden)
    if own:
        yield "model.embed_tokens_per_layer.weight", (vocab, own * hf["num_hidden_layers"])
        yield "model.per_layer_model_projection.weight", (own * hf["num_hidden_layers"], hidden)
        yield "model.per_layer_projection_norm.weight", (own,)
    for layer in range(hf["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        kv_heads, size, keys, inner = _of_layer(hf, layer)
        yield from ((f"{name}{norm}.weight", (hidden,)) for norm in NORMS.values())
        same = hf.get("attention_k_eq_v") and hf["layer_types"][layer] == "full_attention"
        for part, count in {"q": heads, "k": kv_heads, "v": 0 if same else kv_heads}.items():
            if count and (keys or part == "q"):
                yield f"{name}self_attn.{part}_proj.weight", (count * size, hidden)
        yield from ((f"{name}self_attn.{part}_norm.weight", (size,)) for part in ("qk" if keys else "q"))
        yield f"{name}self_attn.o_proj.weight", (hidden, heads * size)
        for part, shape in {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}.items():
            yield f"{name}mlp.{part}_proj.weight", shape
        if own:
            yield f"{name}per_layer_input_gate.weight", (own, hidden)
            yield f"{name}per_layer_projection.weight", (hidden, own)
            yield f"{name}post_per_layer_input_norm.weight", (hidden,)
        if count := hf.get("num_experts"):
            yield from ((f"{name}{norm}.weight", (hidden,)) for norm in EXPERT_NORMS.values())
            yield f"{name}router.scale", (hidden,)
            yield f"{name}router.per_expert_scale", (count,)
            yield f"{name}router.proj.weight", (count, hidden)
            yield f"{name}experts.gate_up_proj", (count, 2 * hf["moe_intermediate_size"], hidden)
            yield f"{name}experts.down_proj", (count, hidden, hf["moe_intermediate_size"])
        yield f"{name}layer_scalar", (1,)
    yield "model.norm.weight", (hidden,)
    if not hf["tie_word_embeddings"]:
        yield "lm_head.weight", (vocab, hidden)


def _experts(
    put: Callable[[str, list[Array]], None], source: Tensors, theirs: str, ours: str, tp: int, ep: int
) -> None:
    for one, other in EXPERT_NORMS.items():
        put(f"{ours}{one}.weight", [source[f"{theirs}{other}.weight"]] * tp)
    put(f"{ours}mlp.router_norm.weight", [source[f"{theirs}router.scale"]] * tp)
    for one, other in {"weight": "proj.weight", "scale": "per_expert_scale"}.items():
        put(f"{ours}mlp.router.{one}", [source[f"{theirs}router.{other}"].astype(np.float32)] * tp)
    gates, ups = np.split(source[f"{theirs}experts.gate_up_proj"], 2, axis=1)

    def parts_of(stack: Array, axis: int) -> list[Array]:
        return [np.split(np.split(stack, ep)[rank % ep], tp // ep, axis=axis)[rank // ep] for rank in range(tp)]

    pairs = zip(parts_of(ups, 1), parts_of(gates, 1), strict=True)
    put(f"{ours}mlp.fc.weight", [np.concatenate(pair, axis=1) for pair in pairs])
    put(f"{ours}mlp.proj.weight", parts_of(source[f"{theirs}experts.down_proj"], 2))


def ranks(source: Tensors, hf: Config, tp: int, ep: int = 1) -> list[Tensors]:
    made: list[Tensors] = [{} for _ in range(tp)]

    def put(name: str, parts: list[Array]) -> None:
        for rank, part in zip(made, parts, strict=True):
            rank[name] = part

    table = source["model.embed_tokens.weight"]
    put("transformer.vocab_embedding.weight", [table] * tp)
    put("lm_head.weight", split_vocabulary(source.get("lm_head.weight", table), tp))
    put("transformer.ln_f.weight", [source["model.norm.weight"]] * tp)
    for ours, theirs in WHOLE.items() if hf["hidden_size_per_layer_input"] else ():
        put(f"transformer.{ours}.weight", [source[f"model.{theirs}.weight"]] * tp)
    for layer in range(hf["num_hidden_layers"]):
        ours, theirs = f"transformer.layers.{layer}.", f"model.layers.{layer}."
        replicated = NORMS | {"attention.q_layernorm": "self_attn.q_norm"}
        replicated |= INPUTS if hf["hidden_size_per_layer_input"] else {}
        q = source[f"{theirs}self_attn.q_proj.weight"]
        if f"{theirs}self_attn.k_proj.weight" in source:
            replicated["attention.k_layernorm"] = "self_attn.k_norm"
            k = source[f"{theirs}self_attn.k_proj.weight"]
            v = source.get(f"{theirs}self_attn.v_proj.weight", k)
            put(f"{ours}attention.qkv.weight", split_qkv(q, k, v, _of_layer(hf, layer)[1], tp))
        else:
            put(f"{ours}attention.qkv.weight", split_rows(q, tp))
        for one, other in replicated.items():
            put(f"{ours}{one}.weight", [source[f"{theirs}{other}.weight"]] * tp)
        if f"{theirs}layer_scalar" in source:
            put(f"{ours}scale", [source[f"{theirs}layer_scalar"].astype(np.float32)] * tp)
        put(f"{ours}attention.dense.weight", np.split(source[f"{theirs}self_attn.o_proj.weight"], tp, axis=1))
        gate, up = (split_rows(source[f"{theirs}mlp.{part}_proj.weight"], tp) for part in ("gate", "up"))
        down = np.split(source[f"{theirs}mlp.down_proj.weight"], tp, axis=1)
        if not hf.get("num_experts"):
            for one, parts in {"fc": gate, "gate": up, "proj": down}.items():
                put(f"{ours}mlp.{one}.weight", parts)
            continue
        put(f"{ours}mlp.shared_expert.fc.weight", [np.concatenate(pair) for pair in zip(up, gate, strict=True)])
        put(f"{ours}mlp.shared_expert.proj.weight", down)
        _experts(put, source, theirs, ours, tp, ep)
    return made


GEMMA4 = Family(
    norm_centre=0.4,  # scores have no scale but that of the norms
    tensors=tensors,
    ranks=ranks,
    config={key: value for key, value in LLAMA.config.items() if key != "hidden_act"}
    | {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "pad_token_id": 0,
        "hidden_activation": "gelu_pytorch_tanh",
        "num_hidden_layers": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"] + ["full_attention"] * 2,
        "sliding_window": 24,
        "head_dim": 16,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 320,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "final_logit_softcapping": 30.0,
    },
    expected={key: expected.GEMMA[key] for key in expected.GEMMA.keys() - {"rotary_scaling", "inter_layernorms"}}
    | {
        "num_hidden_layers": 5,
        "norm_epsilon": 1e-5,
        "head_size": 16,
        "rotary_embedding_dim": 16,
        "hidden_act": "gelu_pytorch_tanh",
        "use_parallel_embedding": False,
        "rotary_base": 1e6,
        "rotary_pct": 0.25,
        "rope_local_base_freq": 1e4,
        "final_logit_softcapping": 30.0,
        "full_head_size": 32,
        "full_num_key_value_heads": 2,
        "keys_are_values": False,
        "shared_key_layers": 2,
        "shared_wide_mlp": True,
        "layer_input_size": 8,
        "max_attention_window": [24, None, 24, None, None],
        "superset": ["the family Gemma 4"],
    },
    nvidia=False,
    stages=False,
    shards=({}, {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    logits=(
        {},
        {
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "use_double_wide_mlp": False,
            "final_logit_softcapping": None,
        },
        {"num_kv_shared_layers": 1, "use_double_wide_mlp": False, "num_key_value_heads": 4},
    ),
    int4=0.5,
    constants=ROPE_BASE | ROPE_SIZE | LAYER_WINDOWS | {"wrong local rope base", "logits soft-cap dropped"},
)

GEMMA4_MOE = replace(
    GEMMA4,
    config=GEMMA4.config
    | {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 3,
        "moe_intermediate_size": 32,
    },
    expected=GEMMA4.expected
    | {
        "num_hidden_layers": 3,
        "shared_key_layers": 0,
        "shared_wide_mlp": False,
        "layer_input_size": 0,
        "max_attention_window": [24, None, None],
        "moe": expected.DENSE
        | {"num_experts": 8, "top_k": 3, "normalization_mode": 1, "shared_expert_intermediate_size": 128},
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 128,
        "shared_expert_gate": False,
        "experts_apart": True,
    },
    shards=({}, {"num_key_value_heads": 1}),
    logits=(
        {},
        {
            "num_experts": 4,
            "top_k_experts": 1,
            "hidden_size_per_layer_input": 8,
            "num_kv_shared_layers": 1,
            "use_double_wide_mlp": True,
            "final_logit_softcapping": None,
        },
        {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "num_key_value_heads": 4},
    ),
    constants=GEMMA4.constants | EXPERTS,
)
