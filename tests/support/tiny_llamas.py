"""Configs and tensors of random models whose layers are named like Llama's: Llama, Mistral, Mixtral, Qwen, Gemma."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

Shapes = Iterator[tuple[str, tuple[int, ...]]]
Families = dict[str, tuple[dict[str, Any], Callable[[Mapping[str, Any]], Shapes]]]

_LLAMA: dict[str, Any] = {
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
}

_LLAMA3: dict[str, Any] = _LLAMA | {
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": True,
}

_LINEAR: dict[str, Any] = _LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}}

_MISTRAL: dict[str, Any] = _LLAMA | {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "head_dim": 16,
    "sliding_window": None,
}

_DYNAMIC: dict[str, Any] = _LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 4.0}}

_QWEN2: dict[str, Any] = _LLAMA | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "use_sliding_window": False,
    "sliding_window": 24,
    "max_window_layers": 1,
}

_QWEN3: dict[str, Any] = _QWEN2 | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 32,
    "tie_word_embeddings": True,
}

_MIXTRAL: dict[str, Any] = _MISTRAL | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}

_QWEN2_MOE: dict[str, Any] = _QWEN2 | {
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 96,
    "norm_topk_prob": False,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}

_QWEN3_MOE: dict[str, Any] = _QWEN2_MOE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 32,
    "norm_topk_prob": True,
}

_GEMMA: dict[str, Any] = _LLAMA | {
    "architectures": ["GemmaForCausalLM"],
    "model_type": "gemma",
    "hidden_act": "gelu",
    "num_key_value_heads": 1,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
}

_GEMMA2: dict[str, Any] = _GEMMA | {
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
}

_GEMMA3: dict[str, Any] = {key: value for key, value in _GEMMA2.items() if key != "hidden_act"} | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "sliding_window_pattern": 2,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
}


def _shapes(config: Mapping[str, Any]) -> Shapes:
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    yield "model.embed_tokens.weight", (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        mlp = {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
        yield prefix + "input_layernorm.weight", (hidden,)
        yield prefix + "post_attention_layernorm.weight", (hidden,)
        if config["model_type"] in ("gemma2", "gemma3_text"):
            yield prefix + "pre_feedforward_layernorm.weight", (hidden,)
            yield prefix + "post_feedforward_layernorm.weight", (hidden,)
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


LLAMAS: Families = {
    "llama": (_LLAMA, _shapes),
    "llama3": (_LLAMA3, _shapes),
    "llama_linear": (_LINEAR, _shapes),
    "llama_dynamic": (_DYNAMIC, _shapes),
    "mistral": (_MISTRAL, _shapes),
    "qwen2": (_QWEN2, _shapes),
    "qwen3": (_QWEN3, _shapes),
    "mixtral": (_MIXTRAL, _shapes),
    "qwen2_moe": (_QWEN2_MOE, _shapes),
    "qwen3_moe": (_QWEN3_MOE, _shapes),
    "gemma": (_GEMMA, _shapes),
    "gemma2": (_GEMMA2, _shapes),
    "gemma3": (_GEMMA3, _shapes),
}
