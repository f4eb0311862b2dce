"""Families with Llama's layer names: Llama, Mistral, Mixtral, Qwen, Gemma."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tests.support.families import expected
from tests.support.families.expected import DENSE, EXPERTS, LAYER_WINDOWS, ROPE_BASE, ROPE_SCALING, SCORES, WINDOW
from tests.support.families.family import Family, Shapes
from tests.support.families.shards import llama_ranks

_SANDWICH = ("post_attention", "pre_feedforward", "post_feedforward")
_NORMS_AFTER_ATTENTION = {"gemma2": _SANDWICH, "gemma3_text": _SANDWICH, "vaultgemma": ("pre_feedforward",)}


def llama_tensors(config: Mapping[str, Any]) -> Shapes:
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    yield "model.embed_tokens.weight", (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        mlp = {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
        yield prefix + "input_layernorm.weight", (hidden,)
        for norm in _NORMS_AFTER_ATTENTION.get(config["model_type"], ("post_attention",)):
            yield f"{prefix}{norm}_layernorm.weight", (hidden,)
        yield from _attention(config, prefix)
        if "num_experts_per_tok" in config:
            yield from _experts(config, prefix)
        else:
            yield from _linears(prefix, mlp, bias=config.get("mlp_bias", False))
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (vocab, hidden)


def _experts(config: Mapping[str, Any], prefix: str) -> Shapes:
    hidden, mixtral = config["hidden_size"], config["model_type"] == "mixtral"
    count = config["num_local_experts" if mixtral else "num_experts"]
    inner = config["intermediate_size" if mixtral else "moe_intermediate_size"]
    prefix += "block_sparse_moe." if mixtral else "mlp."
    yield f"{prefix}gate.weight", (count, hidden)
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    for expert in range(count):
        yield f"{prefix}experts.{expert}.{gate}.weight", (inner, hidden)
        yield f"{prefix}experts.{expert}.{up}.weight", (inner, hidden)
        yield f"{prefix}experts.{expert}.{down}.weight", (hidden, inner)
    if config["model_type"] == "qwen2_moe":
        shared = config["shared_expert_intermediate_size"]
        parts = {"gate_proj": (shared, hidden), "up_proj": (shared, hidden), "down_proj": (hidden, shared)}
        yield from _linears(f"{prefix}shared_expert.", parts, bias=False)
        yield f"{prefix}shared_expert_gate.weight", (1, hidden)


def _attention(config: Mapping[str, Any], prefix: str) -> Shapes:
    hidden, heads, kind = config["hidden_size"], config["num_attention_heads"], config["model_type"]
    size = config.get("head_dim") or hidden // heads
    rows = {"q": heads * size, "k": config["num_key_value_heads"] * size, "v": config["num_key_value_heads"] * size}
    bias = config.get("attention_bias", False)
    fused = {f"self_attn.{part}_proj": (count, hidden) for part, count in rows.items()}
    yield from _linears(prefix, fused, bias=bias or kind == "qwen2" or config.get("qkv_bias", kind == "qwen2_moe"))
    yield from _linears(prefix, {"self_attn.o_proj": (hidden, heads * size)}, bias=bias)
    if kind in ("qwen3", "qwen3_moe", "gemma3_text"):
        yield prefix + "self_attn.q_norm.weight", (size,)
        yield prefix + "self_attn.k_norm.weight", (size,)


def _linears(prefix: str, shapes: Mapping[str, tuple[int, int]], *, bias: bool) -> Shapes:
    for name, shape in shapes.items():
        yield f"{prefix}{name}.weight", shape
        if bias:
            yield f"{prefix}{name}.bias", shape[:1]


def _family(**fields: Any) -> Family:
    return Family(tensors=llama_tensors, ranks=llama_ranks, **fields)


LLAMA = _family(
    config={
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 320,
        "max_position_embeddings": 512,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    expected=expected.LLAMA,
    config_class="LLaMAConfig",
    shards=(
        {},
        {"vocab_size": 323, "num_key_value_heads": 1},
        {"num_key_value_heads": 4, "tie_word_embeddings": True, "vocab_size": 321},
        {"attention_bias": True, "mlp_bias": True, "head_dim": 32},
    ),
    logits=({"attention_bias": True, "mlp_bias": True},),
    constants=ROPE_BASE,
)

LLAMA3 = _family(
    config=LLAMA.config
    | {
        "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
            "rope_type": "llama3",
        },
        "tie_word_embeddings": True,
    },
    expected=expected.LLAMA
    | {
        "rotary_base": 500000.0,
        "rotary_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        "tie_word_embeddings": True,
    },
    config_class="LLaMAConfig",
    shards=({"vocab_size": 321},),
    logits=({"tie_word_embeddings": False},),
    constants=ROPE_BASE | ROPE_SCALING,
    # Llama 3.1
    real={"max_position_embeddings": 131072, "rope_scaling": {"original_max_position_embeddings": 8192}},
)

LLAMA_LINEAR = _family(
    config=LLAMA.config | {"rope_scaling": {"type": "linear", "factor": 2.0}},
    expected=expected.LLAMA | {"rotary_scaling": {"type": "linear", "factor": 2.0, "rope_type": "linear"}},
    config_class="LLaMAConfig",
    constants=ROPE_BASE | ROPE_SCALING,
)

LLAMA_DYNAMIC = _family(
    config=LLAMA.config | {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
    expected=expected.LLAMA | {"rotary_scaling": {"type": "dynamic", "factor": 4.0, "rope_type": "dynamic"}},
    config_class="LLaMAConfig",
    constants=ROPE_BASE,
)

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

LLAMA_YARN = _family(
    config=LLAMA.config | {"rope_scaling": YARN},
    expected=expected.LLAMA | {"rotary_scaling": YARN, "superset": ["rotary scaling 'yarn'"]},
    nvidia=False,
    logits=(
        {},
        {"rope_scaling": YARN | {"mscale": 2.0, "mscale_all_dim": 1.0, "beta_fast": 4, "beta_slow": 0.5}},
        {"rope_scaling": YARN | {"attention_factor": 0.8, "truncate": False}, "head_dim": 32},
        {"rope_scaling": {"type": "yarn", "factor": 2.0}, "rope_theta": 500.0},
    ),
    constants=ROPE_BASE | ROPE_SCALING,
)

MISTRAL = _family(
    config=LLAMA.config
    | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "head_dim": 16, "sliding_window": None},
    expected=expected.LLAMA,
    config_class="LLaMAConfig",
    shards=(
        {"sliding_window": 64},
        {"vocab_size": 323, "num_key_value_heads": 1, "tie_word_embeddings": True},
        {"num_key_value_heads": 4, "attention_bias": True},
    ),
    logits=({"sliding_window": 24},),
    constants=ROPE_BASE | WINDOW,
    real={"sliding_window": 4096, "max_position_embeddings": 32768},  # Mistral 7B v0.1
)

MIXTRAL = _family(
    config=MISTRAL.config
    | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    expected=expected.LLAMA
    | {"hidden_act": "swiglu", "moe": DENSE | {"num_experts": 8, "top_k": 2, "normalization_mode": 1}},
    config_class="LLaMAConfig",
    shards=({"vocab_size": 323}, {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    logits=({}, {"sliding_window": 24}),
    int4=0.35,
    constants=ROPE_BASE | EXPERTS,
)

QWEN2 = _family(
    config=LLAMA.config
    | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "use_sliding_window": False,
        "sliding_window": 24,
        "max_window_layers": 1,
    },
    expected=expected.QWEN | {"qwen_type": "qwen2", "attn_bias": True, "tie_word_embeddings": False},
    config_class="QWenConfig",
    shards=({"vocab_size": 323}, {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    logits=({}, {"use_sliding_window": True}),
    constants=ROPE_BASE | LAYER_WINDOWS,
    real={"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 1},
)

QWEN3 = _family(
    config=QWEN2.config
    | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True},
    expected=expected.QWEN
    | {
        "qwen_type": "qwen3",
        "attn_bias": False,
        "head_size": 32,
        "rotary_embedding_dim": 32,
        "tie_word_embeddings": True,
    },
    config_class="QWenConfig",
    since="1.0",
    shards=(
        {"vocab_size": 323},
        {"tie_word_embeddings": False, "num_key_value_heads": 4},
        {"num_key_value_heads": 1, "attention_bias": True},
    ),
    logits=({"tie_word_embeddings": False}, {"tie_word_embeddings": False, "attention_bias": True}),
    constants=ROPE_BASE,
)

QWEN2_MOE = _family(
    config=QWEN2.config
    | {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 96,
        "norm_topk_prob": False,
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
    },
    expected=expected.QWEN_MOE
    | {
        "qwen_type": "qwen2_moe",
        "attn_bias": True,
        "moe": expected.QWEN_MOE["moe"] | {"shared_expert_intermediate_size": 96},
        "moe_shared_expert_intermediate_size": 96,
    },
    config_class="QWenConfig",
    shards=({"vocab_size": 323}, {"tie_word_embeddings": True, "num_key_value_heads": 4, "qkv_bias": False}),
    logits=({}, {"use_sliding_window": True, "norm_topk_prob": True}),
    constants=ROPE_BASE | EXPERTS,
)

QWEN3_MOE = _family(
    config=QWEN2_MOE.config
    | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 32, "norm_topk_prob": True},
    expected=expected.QWEN_MOE
    | {
        "qwen_type": "qwen3_moe",
        "attn_bias": False,
        "head_size": 32,
        "rotary_embedding_dim": 32,
        "moe": expected.QWEN_MOE["moe"] | {"normalization_mode": 1},  # ours: upstream's mode is 0 for every Qwen
    },
    config_class="QWenConfig",
    since="1.1",
    shards=({"vocab_size": 323}, {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    logits=({}, {"norm_topk_prob": False, "attention_bias": True}),
    constants=ROPE_BASE | EXPERTS,
)

GEMMA = _family(
    config=LLAMA.config
    | {
        "architectures": ["GemmaForCausalLM"],
        "model_type": "gemma",
        "hidden_act": "gelu",
        "num_key_value_heads": 1,
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
    },
    expected=expected.GEMMA | {"num_key_value_heads": 1, "hidden_act": "gelu", "inter_layernorms": False},
    config_class="GemmaConfig",
    shards=({"vocab_size": 323}, {"tie_word_embeddings": False, "num_key_value_heads": 4}),
    logits=({"tie_word_embeddings": False},),
    constants=ROPE_BASE,
)

GEMMA2 = _family(
    config=GEMMA.config
    | {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
        "query_pre_attn_scalar": 24,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
        "sliding_window": 24,
    },
    expected=expected.GEMMA
    | {
        "num_hidden_layers": 3,
        "hidden_act": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 24,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
        "max_attention_window": [24, None],  # ours: upstream drops the windows
    },
    config_class="GemmaConfig",
    since="0.13",
    shards=({"vocab_size": 323}, {"tie_word_embeddings": False}),
    logits=(
        {"attn_logit_softcapping": 2.0, "tie_word_embeddings": False},
        {"attn_logit_softcapping": None, "tie_word_embeddings": False},
    ),
    int4=0.5,  # norms after attention and MLP pass on all of an error that other families damp
    constants=ROPE_BASE
    | LAYER_WINDOWS
    | SCORES
    | {"attention soft-cap dropped", "wrong attention soft-cap", "logits soft-cap dropped"},
    real={"sliding_window": 4096},
)

VAULTGEMMA = replace(
    GEMMA2,
    config={key: value for key, value in GEMMA2.config.items() if key != "hidden_act"}
    | {"architectures": ["VaultGemmaForCausalLM"], "model_type": "vaultgemma"},
    expected=GEMMA2.expected | {"inter_layernorms": False, "superset": ["the family VaultGemma"]},
    nvidia=False,
    config_class="",
    int4=0.3,
    norm_centre=0,
)

GEMMA3 = _family(
    config={key: value for key, value in GEMMA2.config.items() if key != "hidden_act"}
    | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window_pattern": 2,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
    },
    expected=expected.GEMMA
    | {
        "num_hidden_layers": 3,
        "hidden_act": "gelu",
        "rotary_base": 1000000.0,
        "full_attention_rotary_scaling": {"rope_type": "linear", "factor": 8.0},  # ours: upstream drops it
        "query_pre_attn_scalar": 24,
        "final_logit_softcapping": None,
        "_sliding_window_pattern": 2,
        "rope_local_base_freq": 10000.0,
        "sliding_window": 24,
    },
    config_class="GemmaConfig",
    since="0.19",
    shards=({"vocab_size": 323}, {"tie_word_embeddings": False, "num_key_value_heads": 1}),
    logits=(
        {"tie_word_embeddings": False},
        {"final_logit_softcapping": 30.0, "rope_scaling": None, "tie_word_embeddings": False},
    ),
    int4=0.5,
    constants=ROPE_BASE
    | SCORES
    | {"windows in other layers", "windows by one", "rope scaling dropped", "wrong local rope base"},
    real={"sliding_window": 512},
)


LLAMA_LIKE: dict[str, Family] = {
    "llama": LLAMA,
    "llama3": LLAMA3,
    "llama_linear": LLAMA_LINEAR,
    "llama_dynamic": LLAMA_DYNAMIC,
    "llama_yarn": LLAMA_YARN,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "mixtral": MIXTRAL,
    "qwen2_moe": QWEN2_MOE,
    "qwen3_moe": QWEN3_MOE,
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "vaultgemma": VAULTGEMMA,
}
