"""Configs and tensors of random models that are named in their own ways: Phi, GPT-J, GPT-NeoX, OPT, BLOOM, Falcon …"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tests.support.tiny_llamas import Families, Shapes

_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 320,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_GPTJ: dict[str, Any] = {
    "architectures": ["GPTJForCausalLM"],
    "model_type": "gptj",
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_inner": None,
    "n_positions": 512,
    "rotary_dim": 8,
    "vocab_size": 320,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_GPT_NEOX: dict[str, Any] = _SIZES | {
    "architectures": ["GPTNeoXForCausalLM"],
    "model_type": "gpt_neox",
    "intermediate_size": 256,
    "max_position_embeddings": 512,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
    "rotary_pct": 0.25,
    "rotary_emb_base": 10000,
    "use_parallel_residual": True,
    "tie_word_embeddings": False,
}

_OPT: dict[str, Any] = _SIZES | {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "ffn_dim": 128,
    "word_embed_proj_dim": 64,
    "max_position_embeddings": 512,
    "activation_function": "relu",
    "do_layer_norm_before": True,
    "pad_token_id": 1,
}

_PHI: dict[str, Any] = _SIZES | {
    "architectures": ["PhiForCausalLM"],
    "model_type": "phi",
    "intermediate_size": 128,
    "max_position_embeddings": 512,
    "hidden_act": "gelu_new",
    "layer_norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}

_PHI3: dict[str, Any] = _SIZES | {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
    "original_max_position_embeddings": 512,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "pad_token_id": 2,
}

_PHI3_LONG: dict[str, Any] = _PHI3 | {
    "original_max_position_embeddings": 64,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0, 1.05, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6],
        "long_factor": [1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0],
    },
}

_STARCODER2: dict[str, Any] = _SIZES | {
    "architectures": ["Starcoder2ForCausalLM"],
    "model_type": "starcoder2",
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
    "hidden_act": "gelu_pytorch_tanh",
    "norm_epsilon": 1e-5,
    "rope_theta": 100000.0,
    "use_bias": True,
    "sliding_window": 24,
    "tie_word_embeddings": True,
}

_BLOOM: dict[str, Any] = {
    "architectures": ["BloomForCausalLM"],
    "model_type": "bloom",
    "n_embed": 64,
    "n_layer": 2,
    "num_attention_heads": 4,
    "vocab_size": 320,
    "layer_norm_epsilon": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}

_FALCON: dict[str, Any] = _SIZES | {
    "architectures": ["FalconForCausalLM"],
    "model_type": "falcon",
    "max_position_embeddings": 512,
    "layer_norm_epsilon": 1e-5,
    "alibi": False,
    "bias": False,
    "multi_query": True,
    "new_decoder_architecture": False,
    "parallel_attn": True,
}

_FALCON_NEW: dict[str, Any] = _FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}
_FALCON_RW: dict[str, Any] = _FALCON | {"alibi": True, "bias": True, "multi_query": False, "parallel_attn": False}


def _norms(prefix: str, names: Iterable[str], hidden: int, *, bias: bool = True) -> Shapes:
    for name in names:
        yield f"{prefix}{name}.weight", (hidden,)
        if bias:
            yield f"{prefix}{name}.bias", (hidden,)


def _linears(prefix: str, shapes: Mapping[str, tuple[int, int]], *, bias: bool) -> Shapes:
    for name, shape in shapes.items():
        yield f"{prefix}{name}.weight", shape
        if bias:
            yield f"{prefix}{name}.bias", shape[:1]


def _head(name: str, config: Mapping[str, Any], hidden: int, *, tied: bool, bias: bool = False) -> Shapes:
    if not config.get("tie_word_embeddings", tied):
        yield f"{name}.weight", (config["vocab_size"], hidden)
    if bias:
        yield f"{name}.bias", (config["vocab_size"],)


def _gptj_shapes(config: Mapping[str, Any]) -> Shapes:
    hidden = config["n_embd"]
    yield "transformer.wte.weight", (config["vocab_size"], hidden)
    for layer in range(config["n_layer"]):
        prefix = f"transformer.h.{layer}."
        yield from _norms(prefix, ("ln_1",), hidden)
        attention = {f"attn.{name}_proj": (hidden, hidden) for name in ("q", "k", "v", "out")}
        yield from _linears(prefix, attention, bias=False)
        yield from _linears(prefix, {"mlp.fc_in": (4 * hidden, hidden), "mlp.fc_out": (hidden, 4 * hidden)}, bias=True)
    yield from _norms("transformer.", ("ln_f",), hidden)
    yield from _head("lm_head", config, hidden, tied=False, bias=True)


def _gpt_neox_shapes(config: Mapping[str, Any]) -> Shapes:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    yield "gpt_neox.embed_in.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"gpt_neox.layers.{layer}."
        yield from _norms(prefix, ("input_layernorm", "post_attention_layernorm"), hidden)
        yield from _fused(prefix, "attention", 3 * hidden, hidden, inner, bias=True)
    yield from _norms("gpt_neox.", ("final_layer_norm",), hidden)
    yield from _head("embed_out", config, hidden, tied=False)


def _fused(prefix: str, attention: str, rows: int, hidden: int, inner: int, *, bias: bool) -> Shapes:
    linears = {
        f"{attention}.query_key_value": (rows, hidden),
        f"{attention}.dense": (hidden, hidden),
        "mlp.dense_h_to_4h": (inner, hidden),
        "mlp.dense_4h_to_h": (hidden, inner),
    }
    yield from _linears(prefix, linears, bias=bias)


def _opt_shapes(config: Mapping[str, Any]) -> Shapes:
    hidden, inner, base = config["hidden_size"], config["ffn_dim"], "model.decoder."
    width = config["word_embed_proj_dim"]
    yield f"{base}embed_tokens.weight", (config["vocab_size"], width)
    if width != hidden:
        yield f"{base}project_in.weight", (hidden, width)
        yield f"{base}project_out.weight", (width, hidden)
    yield f"{base}embed_positions.weight", (config["max_position_embeddings"] + 2, hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"{base}layers.{layer}."
        yield from _norms(prefix, ("self_attn_layer_norm", "final_layer_norm"), hidden)
        attention = {f"self_attn.{name}_proj": (hidden, hidden) for name in ("q", "k", "v", "out")}
        yield from _linears(prefix, attention | {"fc1": (inner, hidden), "fc2": (hidden, inner)}, bias=True)
    if config["do_layer_norm_before"]:
        yield from _norms(base, ("final_layer_norm",), hidden)
    yield from _head("lm_head", config, width, tied=True)


def _phi_shapes(config: Mapping[str, Any]) -> Shapes:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield from _norms(prefix, ("input_layernorm",), hidden)
        attention = {f"self_attn.{name}": (hidden, hidden) for name in ("q_proj", "k_proj", "v_proj", "dense")}
        yield from _linears(prefix, attention | {"mlp.fc1": (inner, hidden), "mlp.fc2": (hidden, inner)}, bias=True)
    yield from _norms("model.", ("final_layernorm",), hidden)
    yield from _head("lm_head", config, hidden, tied=False, bias=True)


def _phi3_shapes(config: Mapping[str, Any]) -> Shapes:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    rows = (heads + 2 * config["num_key_value_heads"]) * (hidden // heads)
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield from _norms(prefix, ("input_layernorm", "post_attention_layernorm"), hidden, bias=False)
        attention = {"self_attn.qkv_proj": (rows, hidden), "self_attn.o_proj": (hidden, hidden)}
        mlp = {"mlp.gate_up_proj": (2 * inner, hidden), "mlp.down_proj": (hidden, inner)}
        yield from _linears(prefix, attention | mlp, bias=False)
    yield from _norms("model.", ("norm",), hidden, bias=False)
    yield from _head("lm_head", config, hidden, tied=False)


def _starcoder2_shapes(config: Mapping[str, Any]) -> Shapes:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    keys = config["num_key_value_heads"] * (hidden // config["num_attention_heads"])
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield from _norms(prefix, ("input_layernorm", "post_attention_layernorm"), hidden)
        rows = {"q": hidden, "k": keys, "v": keys, "o": hidden}
        attention = {f"self_attn.{name}_proj": (count, hidden) for name, count in rows.items()}
        mlp = {"mlp.c_fc": (inner, hidden), "mlp.c_proj": (hidden, inner)}
        yield from _linears(prefix, attention | mlp, bias=config["use_bias"])
    yield from _norms("model.", ("norm",), hidden)
    yield from _head("lm_head", config, hidden, tied=True)


def _bloom_shapes(config: Mapping[str, Any]) -> Shapes:
    hidden = config["n_embed"]
    yield "transformer.word_embeddings.weight", (config["vocab_size"], hidden)
    yield from _norms("transformer.", ("word_embeddings_layernorm",), hidden)
    for layer in range(config["n_layer"]):
        prefix = f"transformer.h.{layer}."
        yield from _norms(prefix, ("input_layernorm", "post_attention_layernorm"), hidden)
        yield from _fused(prefix, "self_attention", 3 * hidden, hidden, 4 * hidden, bias=True)
    yield from _norms("transformer.", ("ln_f",), hidden)
    yield from _head("lm_head", config, hidden, tied=True)


def _falcon_shapes(config: Mapping[str, Any]) -> Shapes:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    new = config["new_decoder_architecture"]
    kv_heads = config["num_kv_heads"] if new else 1 if config["multi_query"] else heads
    yield "transformer.word_embeddings.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"transformer.h.{layer}."
        yield from _norms(prefix, _falcon_norms(config), hidden)
        rows = (heads + 2 * kv_heads) * (hidden // heads)
        yield from _fused(prefix, "self_attention", rows, hidden, 4 * hidden, bias=config["bias"])
    yield from _norms("transformer.", ("ln_f",), hidden)
    yield from _head("lm_head", config, hidden, tied=True)


def _falcon_norms(config: Mapping[str, Any]) -> tuple[str, ...]:
    if config["new_decoder_architecture"] and config.get("num_ln_in_parallel_attn") != 1:
        return ("ln_attn", "ln_mlp")
    return ("input_layernorm",) if config["parallel_attn"] else ("input_layernorm", "post_attention_layernorm")


OTHERS: Families = {
    "gptj": (_GPTJ, _gptj_shapes),
    "gpt_neox": (_GPT_NEOX, _gpt_neox_shapes),
    "opt": (_OPT, _opt_shapes),
    "phi": (_PHI, _phi_shapes),
    "phi3": (_PHI3, _phi3_shapes),
    "phi3_long": (_PHI3_LONG, _phi3_shapes),
    "starcoder2": (_STARCODER2, _starcoder2_shapes),
    "bloom": (_BLOOM, _bloom_shapes),
    "falcon": (_FALCON, _falcon_shapes),
    "falcon_new": (_FALCON_NEW, _falcon_shapes),
    "falcon_rw": (_FALCON_RW, _falcon_shapes),
}
