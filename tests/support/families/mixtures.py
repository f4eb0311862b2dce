"""Families of experts that TensorRT-LLM's checkpoints lack."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from tests.support.families import expected
from tests.support.families.expected import EXPERTS, LAYER_WINDOWS, ROPE_BASE, ROPE_SIZE
from tests.support.families.family import Family, Shapes
from tests.support.families.llama_like import LLAMA, YARN, llama_tensors
from tests.support.families.shards import MIXTURES, Tensors, latent_ranks, llama_ranks

_COMMON: dict[str, Any] = expected.SIZES | {
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "hidden_act": "silu",
    "position_embedding_type": "rope_gpt_neox",
    "rotary_base": 10000.0,
    "rotary_scaling": None,
    "tie_word_embeddings": False,
}


def _tensors(config: Mapping[str, Any]) -> Shapes:
    """Yield the tensors of a model with the names in `shards.MIXTURES`."""
    names, hidden = MIXTURES[config["model_type"]], config["hidden_size"]
    count = next(config[key] for key in _COUNTS if key in config)
    inner = config["intermediate_size"] if config["model_type"] == "hunyuan_v1_moe" else _inner(config)
    sparse = sparse_layers(config)
    for name, shape in _without_experts(config):
        if not any(name.startswith(f"model.layers.{layer}.mlp.") for layer in sparse):
            yield name, shape
    for layer in sparse:
        prefix = f"model.layers.{layer}."
        yield f"{prefix}{names.router}.weight", (count, hidden)
        if names.correction is not None:
            yield prefix + names.correction, (1, count) if "statics" in names.correction else (count,)
        gate, up, down = names.parts or ("", "", "")
        for expert in range(count):
            place = prefix + names.experts.format(expert)
            yield f"{place}{gate}.weight", (inner, hidden)
            yield f"{place}{up}.weight", (inner, hidden)
            yield f"{place}{down}.weight", (hidden, inner)
        if shared := inner * _shared(config):
            yield f"{prefix}{names.shared}.gate_proj.weight", (shared, hidden)
            yield f"{prefix}{names.shared}.up_proj.weight", (shared, hidden)
            yield f"{prefix}{names.shared}.down_proj.weight", (hidden, shared)


_COUNTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert")


def _shared(config: Mapping[str, Any]) -> int:
    """How many experts see every token; Hunyuan may list them for each layer."""
    found = next((config[key] for key in _SHARED if key in config), 0)
    return int(found[0] if isinstance(found, list) else found)


def _inner(config: Mapping[str, Any]) -> int:
    return int(config.get("moe_intermediate_size") or config["intermediate_size"])


def sparse_layers(config: Mapping[str, Any]) -> list[int]:
    """The layers with experts."""
    kinds, layers = config.get("mlp_layer_types"), range(config["num_hidden_layers"])
    if kinds is not None:
        return [layer for layer in layers if kinds[layer] == "sparse"]
    if config["model_type"] == "ernie4_5_moe":
        first, every = config["moe_layer_start_index"], config.get("moe_layer_interval", 1)
        last = config.get("moe_layer_end_index", -1)
        last = len(layers) - 1 if last == -1 else last
        return [layer for layer in layers if first <= layer <= last and not (layer + 1) % every]
    dense = 1 if config["model_type"] == "hy_v3" else config.get("num_dense_layers", 0)
    return [layer for layer in layers if layer >= config.get("first_k_dense_replace", dense)]


def _without_experts(config: Mapping[str, Any]) -> Shapes:
    """Yield the tensors of a Llama, and the norms of queries and keys."""
    plain = {key: value for key, value in config.items() if key not in ("num_experts_per_tok", "num_experts")}
    kind, size = config["model_type"], config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    renamed = ("input_layernorm", "post_feedforward_layernorm") if kind == "flex_olmo" else ("", "")
    for named, shape in llama_tensors(plain):
        name = named.replace(*renamed)
        if kind not in ("glm4_moe", "solar_open") or not name.endswith("o_proj.bias"):
            yield name, shape
        if kind == "afmoe" and name.endswith("input_layernorm.weight"):
            prefix = name.removesuffix("input_layernorm.weight")
            yield from ((f"{prefix}{each}_mlp_layernorm.weight", shape) for each in ("pre", "post"))
        if kind == "afmoe" and name.endswith("q_proj.weight"):
            yield name.replace("q_proj", "gate_proj"), shape
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            norm = f"{name.removesuffix('proj.weight')}norm.weight"
            if kind in ("minimax_m2", "olmoe", "flex_olmo"):
                yield norm, shape[:1]
            elif kind == "hunyuan_v1_moe":
                long = {"q": "query", "k": "key"}[name.removesuffix("_proj.weight")[-1]]
                yield name.replace(f"{name.removesuffix('_proj.weight')[-1]}_proj", f"{long}_layernorm"), (size,)
            elif kind in ("dots1", "exaone_moe", "afmoe", "hy_v3") or config.get("use_qk_norm"):
                yield norm, (size,)


def _gpt_oss_tensors(config: Mapping[str, Any]) -> Shapes:
    hidden, inner, count = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    for name, shape in _without_experts(config):
        if ".mlp." not in name:
            yield name, shape
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield f"{prefix}self_attn.sinks", (config["num_attention_heads"],)
        yield f"{prefix}mlp.router.weight", (count, hidden)
        yield f"{prefix}mlp.router.bias", (count,)
        yield f"{prefix}mlp.experts.gate_up_proj", (count, hidden, 2 * inner)
        yield f"{prefix}mlp.experts.gate_up_proj_bias", (count, 2 * inner)
        yield f"{prefix}mlp.experts.down_proj", (count, inner, hidden)
        yield f"{prefix}mlp.experts.down_proj_bias", (count, hidden)


GPT_OSS = Family(
    tensors=_gpt_oss_tensors,
    ranks=llama_ranks,
    config={key: value for key, value in LLAMA.config.items() if key != "rope_theta"}
    | {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "head_dim": 32,
        "attention_bias": True,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 64,
        "sliding_window": 24,
        "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
        "swiglu_limit": 1.5,
    },
    expected=_COMMON
    | {
        "head_size": 32,
        "rotary_embedding_dim": 32,
        "intermediate_size": 64,
        "moe_intermediate_size": 64,
        "attn_bias": True,
        "rotary_base": 150000.0,
        "moe": expected.DENSE | {"num_experts": 8, "top_k": 2, "normalization_mode": 1},
        "swiglu_alpha": 1.702,
        "swiglu_limit": 1.5,
        "max_attention_window": [24, None],
        "superset": ["attention sinks", "clamped gates and biases of experts"],
    },
    nvidia=False,
    shards=({"vocab_size": 323}, {"num_key_value_heads": 1, "attention_bias": False}),
    logits=(
        {},
        {"rope_parameters": YARN | {"truncate": False}, "sliding_window": 7},
        {"swiglu_alpha": 1.0, "layer_types": ["full_attention", "sliding_attention"], "attention_bias": False},
    ),
    constants=ROPE_BASE | EXPERTS | LAYER_WINDOWS,
)

_ROUTED = expected.DENSE | {"num_experts": 8, "top_k": 3, "normalization_mode": 1}
_DEEPSEEK = {
    "moe": _ROUTED | {"shared_expert_intermediate_size": 32},
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "shared_expert_gate": False,
    "scoring_func": "sigmoid",
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    "dense_layers": [0],
    "superset": ["sigmoid routers"],
}

GLM4_MOE = Family(
    tensors=_tensors,
    ranks=llama_ranks,
    config=LLAMA.config
    | {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "head_dim": 32,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
    },
    expected=_COMMON
    | _DEEPSEEK
    | {"head_size": 32, "rotary_embedding_dim": 16, "rotary_pct": 0.5, "attn_bias": True, "use_qk_norm": False},
    nvidia=False,
    shards=({"vocab_size": 323}, {"num_key_value_heads": 1, "use_qk_norm": True, "attention_bias": False}),
    logits=(
        {},
        {"use_qk_norm": True, "attention_bias": False, "norm_topk_prob": False, "first_k_dense_replace": 0},
        {"n_group": 4, "topk_group": 2, "n_shared_experts": 2, "num_hidden_layers": 3, "partial_rotary_factor": 0.25},
    ),
    constants=ROPE_BASE | ROPE_SIZE | EXPERTS,
)

DOTS1 = Family(
    tensors=_tensors,
    ranks=llama_ranks,
    config={key: value for key, value in GLM4_MOE.config.items() if key != "partial_rotary_factor"}
    | {
        "architectures": ["Dots1ForCausalLM"],
        "model_type": "dots1",
        "attention_bias": False,
        "sliding_window": 24,
        "max_window_layers": 1,
    },
    expected=_COMMON
    | _DEEPSEEK
    | {"head_size": 32, "rotary_embedding_dim": 32, "attn_bias": False, "max_attention_window": [None, 24]},
    nvidia=False,
    logits=({}, {"sliding_window": None, "n_group": 2, "first_k_dense_replace": 0}),
    constants=ROPE_BASE | EXPERTS | LAYER_WINDOWS,
    real={"sliding_window": 4096, "max_position_embeddings": 32768},
)

MINIMAX_M2 = Family(
    tensors=_tensors,
    ranks=llama_ranks,
    config=LLAMA.config
    | {
        "architectures": ["MiniMaxM2ForCausalLM"],
        "model_type": "minimax_m2",
        "head_dim": 32,
        "rotary_dim": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "intermediate_size": 64,
    },
    expected=_COMMON
    | {
        "head_size": 32,
        "rotary_embedding_dim": 16,
        "rotary_pct": 0.5,
        "intermediate_size": 64,
        "moe": _ROUTED,
        "scoring_func": "sigmoid",
        "superset": ["sigmoid routers", "norms over all heads"],
    },
    nvidia=False,
    shards=({"vocab_size": 323}, {"num_key_value_heads": 1}),
    logits=({}, {"rotary_dim": 32, "num_key_value_heads": 4}),
    constants=ROPE_BASE | ROPE_SIZE | EXPERTS,
)

OLMOE = Family(
    tensors=_tensors,
    ranks=llama_ranks,
    config=LLAMA.config
    | {
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "intermediate_size": 64,
        "norm_topk_prob": False,
    },
    expected=_COMMON
    | {
        "intermediate_size": 64,
        "moe": _ROUTED | {"normalization_mode": 0},
        "attn_bias": False,
        "superset": ["norms over all heads"],
    },
    nvidia=False,
    logits=({}, {"norm_topk_prob": True, "num_key_value_heads": 1}),
    constants=ROPE_BASE | EXPERTS,
)

FLEX_OLMO = replace(
    OLMOE,
    config=OLMOE.config
    | {"architectures": ["FlexOlmoForCausalLM"], "model_type": "flex_olmo", "rope_theta": 5e5, "pad_token_id": 0},
    expected=OLMOE.expected | {"rotary_base": 5e5, "post_norms": True},
    int4=0.5,
)

_SPARSE = {key: value for key, value in GLM4_MOE.config.items() if key not in ("first_k_dense_replace", "head_dim")}
SOLAR_OPEN = replace(
    GLM4_MOE,
    config={key: value for key, value in _SPARSE.items() if key != "partial_rotary_factor"}
    | {"architectures": ["SolarOpenForCausalLM"], "model_type": "solar_open", "head_dim": 32, "rope_theta": 1e6},
    expected={key: value for key, value in GLM4_MOE.expected.items() if key != "rotary_pct"}
    | {"rotary_embedding_dim": 32, "rotary_base": 1e6, "dense_layers": []},
    shards=({"attention_bias": False},),
    logits=({}, {"attention_bias": False, "norm_topk_prob": False, "n_group": 2, "topk_group": 2}),
    constants=ROPE_BASE | EXPERTS,
)

ERNIE4_5_MOE = Family(
    tensors=_tensors,
    ranks=llama_ranks,
    config=LLAMA.config
    | {
        "architectures": ["Ernie4_5_MoeForCausalLM"],
        "model_type": "ernie4_5_moe",
        "pad_token_id": 0,
        "moe_k": 3,
        "moe_num_experts": 8,
        "moe_num_shared_experts": 2,
        "moe_intermediate_size": 32,
        "moe_layer_start_index": 1,
        "use_bias": False,
    },
    expected=_COMMON
    | {
        "attn_bias": False,
        "mlp_bias": False,
        "moe": _ROUTED | {"shared_expert_intermediate_size": 64},
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 64,
        "shared_expert_gate": False,
        "dense_layers": [0],
        "superset": ["the family ERNIE 4.5"],
    },
    nvidia=False,
    logits=(
        {},
        {"moe_layer_start_index": 0, "moe_layer_end_index": 2, "moe_layer_interval": 2, "num_hidden_layers": 4},
        {"moe_num_shared_experts": 0, "rope_scaling": YARN, "num_key_value_heads": 4},
    ),
    constants=ROPE_BASE | EXPERTS,
)

HUNYUAN_V1_MOE = Family(
    tensors=_tensors,
    ranks=llama_ranks,
    config=LLAMA.config
    | {
        "architectures": ["HunYuanMoEV1ForCausalLM"],
        "model_type": "hunyuan_v1_moe",
        "pad_token_id": 0,
        "head_dim": 16,
        "intermediate_size": 32,
        "num_experts": 8,
        "moe_topk": [3, 3],
        "num_shared_expert": 1,
        "rope_scaling": {"type": "dynamic", "alpha": 8.0, "factor": 1.0},
    },
    expected=_COMMON
    | {
        "intermediate_size": 32,
        "rotary_base": 10000.0 * 8 ** (16 / 14),
        "attn_bias": False,
        "mlp_bias": False,
        "moe": _ROUTED | {"shared_expert_intermediate_size": 32},
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
        "shared_expert_gate": False,
        "superset": ["the family Hunyuan"],
    },
    nvidia=False,
    shards=({"vocab_size": 323}, {"moe_intermediate_size": [32, 32], "num_shared_expert": [1, 1]}),
    logits=({}, {"moe_topk": 1, "attention_bias": True, "rope_scaling": None, "head_dim": 32}),
    int4=0.5,
    constants=ROPE_BASE | EXPERTS,
)

EXAONE_MOE = Family(
    tensors=_tensors,
    ranks=llama_ranks,
    config=LLAMA.config
    | {
        "architectures": ["ExaoneMoeForCausalLM"],
        "model_type": "exaone_moe",
        "num_hidden_layers": 4,
        "sliding_window": 24,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "num_shared_experts": 1,
        "moe_intermediate_size": 32,
        "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 1,
    },
    expected=_COMMON
    | _DEEPSEEK
    | {
        "num_hidden_layers": 4,
        "attn_bias": False,
        "mlp_bias": False,
        "max_attention_window": [24, 24, 24, None],
        "unrotated_layers": [False, False, False, True],
        "superset": ["the family K-EXAONE"],
    },
    nvidia=False,
    logits=(
        {},
        {
            "mlp_layer_types": ["sparse", "dense", "sparse", "dense"],
            "layer_types": ["full_attention", "sliding_attention"] * 2,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
        },
    ),
    int4=0.6,
    constants=ROPE_BASE | EXPERTS | LAYER_WINDOWS,
)

AFMOE = Family(
    tensors=_tensors,
    ranks=llama_ranks,
    config=LLAMA.config
    | {
        "architectures": ["AfmoeForCausalLM"],
        "model_type": "afmoe",
        "head_dim": 16,
        "num_hidden_layers": 4,
        "sliding_window": 24,
        "num_dense_layers": 1,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "num_shared_experts": 1,
        "moe_intermediate_size": 32,
        "route_scale": 1.5,
        "mup_enabled": True,
    },
    expected=_COMMON
    | _DEEPSEEK
    | {
        "num_hidden_layers": 4,
        "attn_bias": False,
        "mlp_bias": False,
        "max_attention_window": [24, 24, 24, None],
        "unrotated_layers": [False, False, False, True],
        "embedding_multiplier": 8.0,
        "superset": ["the family Trinity"],
    },
    nvidia=False,
    logits=(
        {},
        {"mup_enabled": False, "global_attn_every_n_layers": 2, "num_dense_layers": 0, "num_hidden_layers": 2},
    ),
    constants=ROPE_BASE | EXPERTS | LAYER_WINDOWS,
)

HY_V3 = Family(
    tensors=_tensors,
    ranks=llama_ranks,
    config=LLAMA.config
    | {
        "architectures": ["HYV3ForCausalLM"],
        "model_type": "hy_v3",
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "num_shared_experts": 1,
        "moe_intermediate_size": 32,
        "router_scaling_factor": 1.5,
    },
    expected=_COMMON | _DEEPSEEK | {"attn_bias": False, "mlp_bias": False, "superset": ["the family Hunyuan 3"]},
    nvidia=False,
    logits=(
        {},
        {
            "mlp_layer_types": ["sparse", "sparse", "dense"],
            "num_hidden_layers": 3,
            "num_shared_experts": 2,
            "attention_bias": True,
        },
    ),
    constants=ROPE_BASE | EXPERTS,
)


def _llama4_tensors(config: Mapping[str, Any]) -> Shapes:
    hidden, inner, count = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    dense = {**config, "intermediate_size": config["intermediate_size_mlp"]}
    sparse = _llama4_sparse(config)
    for name, shape in _without_experts(dense):
        prefix = name.partition("mlp.")[0]
        if ".mlp." not in name:
            yield name, shape
        elif int(prefix.split(".")[2]) not in sparse:
            yield name.replace("mlp.", "feed_forward."), shape
    for layer in sparse:
        prefix = f"model.layers.{layer}.feed_forward."
        yield f"{prefix}router.weight", (count, hidden)
        yield f"{prefix}experts.gate_up_proj", (count, hidden, 2 * inner)
        yield f"{prefix}experts.down_proj", (count, inner, hidden)
        for part, shape in {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}.items():
            yield f"{prefix}shared_expert.{part}_proj.weight", shape


def _llama4_sparse(config: Mapping[str, Any]) -> list[int]:
    """The layers with experts."""
    step = config["interleave_moe_layer_step"]
    return list(config.get("moe_layers", range(step - 1, config["num_hidden_layers"], step)))


def _llama4_ranks(source: Tensors, hf: dict[str, Any], tp: int, ep: int = 1) -> list[Tensors]:
    """Return the expected checkpoint: its experts one by one with Qwen's names are those of any family."""
    usual: Tensors = {}
    for name, values in source.items():
        renamed = name.replace("feed_forward.router", "mlp.gate").replace("feed_forward.", "mlp.")
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            usual[renamed] = values
            continue
        prefix, _, part = renamed.rpartition(".")
        for expert, matrix in enumerate(values):
            halves = dict(zip(("gate_proj", "up_proj"), np.split(matrix.T, 2), strict=True))
            of_one = halves if part == "gate_up_proj" else {part: matrix.T}
            usual |= {f"{prefix}.{expert}.{each}.weight": rows for each, rows in of_one.items()}
    return llama_ranks(usual, hf, tp, ep)


LLAMA4 = Family(
    tensors=_llama4_tensors,
    ranks=_llama4_ranks,
    config=LLAMA.config
    | {
        "architectures": ["Llama4ForCausalLM"],
        "model_type": "llama4_text",
        "head_dim": 16,
        "intermediate_size": 32,
        "intermediate_size_mlp": 128,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "interleave_moe_layer_step": 2,
        "no_rope_layer_interval": 2,
        "attention_chunk_size": 24,
        "floor_scale": 50,
        "attn_scale": 0.3,
    },
    expected=_COMMON
    | {
        "attn_bias": False,
        "mlp_bias": False,
        "moe": expected.DENSE
        | {"num_experts": 8, "top_k": 2, "normalization_mode": 0, "shared_expert_intermediate_size": 32},
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
        "shared_expert_gate": False,
        "scoring_func": "sigmoid",
        "experts_scale_inputs": True,
        "dense_layers": [0],
        "attn_scale": 0.3,
        "floor_scale": 50,
        "attention_chunks": True,
        "use_qk_norm": True,
        "max_attention_window": [24, None],
        "unrotated_layers": [False, True],
        "superset": ["the family Llama 4"],
    },
    nvidia=False,
    logits=(
        {},
        {
            "num_hidden_layers": 4,
            "interleave_moe_layer_step": 1,
            "no_rope_layers": [1, 0, 0, 1],
            "num_experts_per_tok": 1,
            "use_qk_norm": False,
            "attention_bias": True,
        },
        {
            "moe_layers": [0],
            "layer_types": ["full_attention", "chunked_attention"],
            "attn_temperature_tuning": False,
            "tie_word_embeddings": False,
        },
    ),
    int4=0.6,
    constants=ROPE_BASE | EXPERTS | LAYER_WINDOWS,
    real={"attention_chunk_size": 8192},
)

_LATENT = {"kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 24, "v_head_dim": 40}


def _latent_tensors(config: Mapping[str, Any]) -> Shapes:
    hidden, heads, biased = config["hidden_size"], config["num_attention_heads"], config.get("attention_bias", False)
    rank, rotated, plain, value = (config[key] for key in _LATENT)
    lower, queries = config["q_lora_rank"], heads * (plain + rotated)
    first = {"q_proj": (queries, hidden)} if lower is None else {"q_a_proj": (lower, hidden)}
    matrices = first | {"kv_a_proj_with_mqa": (rank + rotated, hidden), "o_proj": (hidden, heads * value)}
    for name, shape in _tensors(config):
        if ".self_attn." not in name:
            yield name, shape
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}.self_attn."
        for name, shape in matrices.items():
            yield f"{prefix}{name}.weight", shape
            if biased and name != "q_proj":
                yield f"{prefix}{name}.bias", shape[:1]
        yield f"{prefix}kv_b_proj.weight", (heads * (plain + value), rank)
        yield f"{prefix}kv_a_layernorm.weight", (rank,)
        if lower is not None:
            yield f"{prefix}q_a_layernorm.weight", (lower,)
            yield f"{prefix}q_b_proj.weight", (queries, lower)


DEEPSEEK_V3 = Family(
    tensors=_latent_tensors,
    ranks=latent_ranks,
    config={key: value for key, value in GLM4_MOE.config.items() if key not in ("head_dim", "partial_rotary_factor")}
    | _LATENT
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "q_lora_rank": 48,
        "n_group": 4,
        "topk_group": 2,
        "attention_bias": False,
    },
    expected=_COMMON
    | _DEEPSEEK
    | _LATENT
    | {
        "num_key_value_heads": 1,
        "head_size": 48,
        "q_lora_rank": 48,
        "position_embedding_type": "rope_gptj",
        "rope_interleave": True,
        "attn_bias": False,
        "n_group": 4,
        "topk_group": 2,
        "superset": ["latent attention", "sigmoid routers"],
    },
    nvidia=False,
    logits=(
        {},
        {"q_lora_rank": None, "rope_interleave": False, "attention_bias": True},
        {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, "rms_norm_eps": 1e-4},
    ),
    constants=ROPE_BASE | EXPERTS,
)

GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    config=DEEPSEEK_V3.config
    | {
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "model_type": "glm4_moe_lite",
        "n_group": 1,
        "topk_group": 1,
    },
    expected=DEEPSEEK_V3.expected | {"n_group": 1, "topk_group": 1},
    logits=({}, {"mlp_layer_types": ["sparse", "sparse"], "first_k_dense_replace": 0}),
)

DEEPSEEK_V2 = replace(
    DEEPSEEK_V3,
    config=DEEPSEEK_V3.config
    | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "q_lora_rank": None,
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "n_shared_experts": 2,
        "routed_scaling_factor": 4.0,
    },
    expected={key: value for key, value in DEEPSEEK_V3.expected.items() if key != "q_lora_rank"}
    | {
        "moe": _ROUTED | {"shared_expert_intermediate_size": 64, "normalization_mode": 0},
        "moe_shared_expert_intermediate_size": 64,
        "routed_scaling_factor": 4.0,
        "scoring_func": "softmax",
        "n_group": 1,
        "topk_group": 1,
        "superset": ["latent attention"],
    },
    logits=(
        {},
        {
            "q_lora_rank": 48,
            "topk_method": "group_limited_greedy",
            "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
)

MIXTURE_FAMILIES: dict[str, Family] = {
    "gpt_oss": GPT_OSS,
    "glm4_moe": GLM4_MOE,
    "dots1": DOTS1,
    "minimax_m2": MINIMAX_M2,
    "olmoe": OLMOE,
    "flex_olmo": FLEX_OLMO,
    "solar_open": SOLAR_OPEN,
    "ernie4_5_moe": ERNIE4_5_MOE,
    "hunyuan_v1_moe": HUNYUAN_V1_MOE,
    "exaone_moe": EXAONE_MOE,
    "hy_v3": HY_V3,
    "afmoe": AFMOE,
    "llama4": LLAMA4,
    "deepseek_v3": DEEPSEEK_V3,
    "glm4_moe_lite": GLM4_MOE_LITE,
    "deepseek_v2": DEEPSEEK_V2,
}
