"""Families with their own tensor names: GPT-2, GPT-J, GPT-NeoX, OPT, Phi, StarCoder2, BLOOM, Falcon."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tests.support.families.expected import DENSE, ROPE_BASE, ROPE_SIZE, SCORES, SIZES, WINDOW
from tests.support.families.family import Family, Shapes
from tests.support.families.llama_like import YARN
from tests.support.families.own_shards import Names, ranks_by_names
from tests.support.families.shards import gpt2_ranks


def gpt2_tensors(config: Mapping[str, Any]) -> Shapes:
    hidden = config["n_embd"]
    inner = config["n_inner"] or 4 * hidden
    yield "transformer.wte.weight", (config["vocab_size"], hidden)
    yield "transformer.wpe.weight", (config["n_positions"], hidden)
    for layer in range(config["n_layer"]):
        prefix = f"transformer.h.{layer}."
        for norm in ("ln_1", "ln_2"):
            yield f"{prefix}{norm}.weight", (hidden,)
            yield f"{prefix}{norm}.bias", (hidden,)
        # Conv1D: [in, out]
        for name, shape in {
            "attn.c_attn": (hidden, 3 * hidden),
            "attn.c_proj": (hidden, hidden),
            "mlp.c_fc": (hidden, inner),
            "mlp.c_proj": (inner, hidden),
        }.items():
            yield f"{prefix}{name}.weight", shape
            yield f"{prefix}{name}.bias", shape[1:]
    yield "transformer.ln_f.weight", (hidden,)
    yield "transformer.ln_f.bias", (hidden,)
    if not config.get("tie_word_embeddings", True):
        yield "lm_head.weight", (config["vocab_size"], hidden)


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


def gptj_tensors(config: Mapping[str, Any]) -> Shapes:
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


def gpt_neox_tensors(config: Mapping[str, Any]) -> Shapes:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    yield "gpt_neox.embed_in.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"gpt_neox.layers.{layer}."
        yield from _norms(prefix, ("input_layernorm", "post_attention_layernorm"), hidden)
        biased = config.get("attention_bias", True)
        for name, shape in _fused(prefix, "attention", 3 * hidden, hidden, inner, bias=True):
            if biased or ".mlp." in name or name.endswith(".weight"):
                yield name, shape
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


def opt_tensors(config: Mapping[str, Any]) -> Shapes:
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


def phi_tensors(config: Mapping[str, Any]) -> Shapes:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield from _norms(prefix, ("input_layernorm",), hidden)
        attention = {f"self_attn.{name}": (hidden, hidden) for name in ("q_proj", "k_proj", "v_proj", "dense")}
        yield from _linears(prefix, attention | {"mlp.fc1": (inner, hidden), "mlp.fc2": (hidden, inner)}, bias=True)
    yield from _norms("model.", ("final_layernorm",), hidden)
    yield from _head("lm_head", config, hidden, tied=False, bias=True)


def phi3_tensors(config: Mapping[str, Any]) -> Shapes:
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


def starcoder2_tensors(config: Mapping[str, Any]) -> Shapes:
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


def bloom_tensors(config: Mapping[str, Any]) -> Shapes:
    hidden = config["n_embed"]
    yield "transformer.word_embeddings.weight", (config["vocab_size"], hidden)
    yield from _norms("transformer.", ("word_embeddings_layernorm",), hidden)
    for layer in range(config["n_layer"]):
        prefix = f"transformer.h.{layer}."
        yield from _norms(prefix, ("input_layernorm", "post_attention_layernorm"), hidden)
        yield from _fused(prefix, "self_attention", 3 * hidden, hidden, 4 * hidden, bias=True)
    yield from _norms("transformer.", ("ln_f",), hidden)
    yield from _head("lm_head", config, hidden, tied=True)


def falcon_tensors(config: Mapping[str, Any]) -> Shapes:
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


_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 320,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

GPT2 = Family(
    config={
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_inner": None,
        "n_positions": 512,
        "vocab_size": 320,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    tensors=gpt2_tensors,
    ranks=gpt2_ranks,
    expected=SIZES
    | {
        "intermediate_size": 256,
        "hidden_act": "gelu_new",
        "position_embedding_type": "learned_absolute",
        "gpt_variant": "gpt2",
        "bias": True,
        "q_scaling": 1.0,
        "embedding_scale": None,
        "apply_query_key_layer_scaling": False,
        "rotary_pct": 1.0,
        "rotary_base": 10000.0,
        "rotary_scaling": None,
        "inner_layernorm": False,
        "norm_before_bmm1": False,
        "moe": DENSE | {"normalization_mode": 1},
    },
    shards=({"vocab_size": 323}, {"n_inner": 96, "tie_word_embeddings": False}),
    constants=SCORES,
)

GPTJ = Family(
    config={
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
    },
    tensors=gptj_tensors,
    ranks=ranks_by_names(
        Names(
            embedding="transformer.wte",
            layer="transformer.h.{}.",
            norms={"input_layernorm": "ln_1"},
            qkv=["attn.q_proj", "attn.k_proj", "attn.v_proj"],
            dense="attn.out_proj",
            fc="mlp.fc_in",
            proj="mlp.fc_out",
            final_norm="transformer.ln_f",
            head="lm_head",
        )
    ),
    expected=SIZES
    | {
        "intermediate_size": 256,
        "hidden_act": "gelu",
        "position_embedding_type": "rope_gptj",
        "rotary_dim": 8,
    },
    shards=({"vocab_size": 323}, {"tie_word_embeddings": True}),
    constants=ROPE_SIZE,
    stages=False,
)

GPT_NEOX = Family(
    config=_SIZES
    | {
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
    },
    tensors=gpt_neox_tensors,
    ranks=ranks_by_names(
        Names(
            embedding="gpt_neox.embed_in",
            layer="gpt_neox.layers.{}.",
            norms={"input_layernorm": "input_layernorm", "post_attention_layernorm": "post_attention_layernorm"},
            qkv=["attention.query_key_value"],
            dense="attention.dense",
            fc="mlp.dense_h_to_4h",
            proj="mlp.dense_4h_to_h",
            final_norm="gpt_neox.final_layer_norm",
            head="embed_out",
        )
    ),
    expected=SIZES
    | {
        "intermediate_size": 256,
        "hidden_act": "gelu",
        "position_embedding_type": "rope_gpt_neox",
        "rotary_embedding_dim": 4,
        "rotary_emb_base": 10000,
        "rotary_pct": 0.25,
    },
    shards=({"vocab_size": 323}, {"tie_word_embeddings": True}),
    logits=(
        {},
        {"tie_word_embeddings": True, "rotary_pct": 1.0},
        {"use_parallel_residual": False, "attention_bias": False, "rope_scaling": {"type": "linear", "factor": 2.0}},
    ),
    constants=ROPE_SIZE | {"wrong rope base"},
    stages=False,
)

OPT = Family(
    config=_SIZES
    | {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "ffn_dim": 128,
        "word_embed_proj_dim": 64,
        "max_position_embeddings": 512,
        "activation_function": "relu",
        "do_layer_norm_before": True,
        "pad_token_id": 1,
    },
    tensors=opt_tensors,
    ranks=ranks_by_names(
        Names(
            embedding="model.decoder.embed_tokens",
            layer="model.decoder.layers.{}.",
            norms={"input_layernorm": "self_attn_layer_norm", "post_layernorm": "final_layer_norm"},
            qkv=["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
            dense="self_attn.out_proj",
            fc="fc1",
            proj="fc2",
            final_norm="model.decoder.final_layer_norm",
            head="lm_head",
        )
    ),
    expected=SIZES
    | {
        "intermediate_size": 128,
        "hidden_act": "relu",
        "position_embedding_type": "learned_absolute",
        "do_layer_norm_before": True,
    },
    shards=(
        {"vocab_size": 323},
        {"do_layer_norm_before": False, "tie_word_embeddings": False},
        {"word_embed_proj_dim": 32, "do_layer_norm_before": False, "vocab_size": 323},
        {"word_embed_proj_dim": 96, "tie_word_embeddings": False},
    ),
    logits=(
        {},
        {"do_layer_norm_before": False, "activation_function": "gelu"},
        {"word_embed_proj_dim": 32, "do_layer_norm_before": False},  # as OPT 350m
    ),
    stages=False,
)

PHI = Family(
    config=_SIZES
    | {
        "architectures": ["PhiForCausalLM"],
        "model_type": "phi",
        "intermediate_size": 128,
        "max_position_embeddings": 512,
        "hidden_act": "gelu_new",
        "layer_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    },
    tensors=phi_tensors,
    ranks=ranks_by_names(
        Names(
            embedding="model.embed_tokens",
            layer="model.layers.{}.",
            norms={"input_layernorm": "input_layernorm"},
            qkv=["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
            dense="self_attn.dense",
            fc="mlp.fc1",
            proj="mlp.fc2",
            final_norm="model.final_layernorm",
            head="lm_head",
        )
    ),
    expected=SIZES
    | {
        "intermediate_size": 128,
        "hidden_act": "gelu_new",
        "position_embedding_type": "rope_gpt_neox",
        "rotary_embedding_dim": 8,
        "rotary_base": 10000.0,
        "rotary_scaling": None,
        "rotary_pct": 0.5,
        "partial_rotary_factor": 0.4,
    },
    shards=({"vocab_size": 323}, {"tie_word_embeddings": True}),
    logits=({}, {"rope_scaling": YARN}),
    constants=ROPE_BASE | ROPE_SIZE,
    stages=False,
)

PHI3 = Family(
    config=_SIZES
    | {
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
    },
    tensors=phi3_tensors,
    ranks=ranks_by_names(
        Names(
            embedding="model.embed_tokens",
            layer="model.layers.{}.",
            norms={"input_layernorm": "input_layernorm", "post_layernorm": "post_attention_layernorm"},
            qkv=["self_attn.qkv_proj"],
            dense="self_attn.o_proj",
            fc="mlp.gate_up_proj",
            proj="mlp.down_proj",
            final_norm="model.norm",
            head="lm_head",
        )
    ),
    expected=SIZES
    | {
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "hidden_act": "swiglu",
        "position_embedding_type": "rope_gpt_neox",
        "rotary_base": 10000.0,
        "rotary_scaling": None,
        "rotary_pct": 1.0,
        "tie_word_embeddings": False,
    },
    config_class="Phi3Config",
    shards=({"vocab_size": 323, "num_key_value_heads": 1}, {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    logits=({}, {"partial_rotary_factor": 0.5, "sliding_window": 24}),
    constants=ROPE_BASE | ROPE_SIZE | WINDOW,
    real={"sliding_window": 2047, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096},
    stages=False,
)

PHI3_LONG = Family(
    config=PHI3.config
    | {
        "original_max_position_embeddings": 64,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0, 1.05, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6],
            "long_factor": [1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0],
        },
    },
    tensors=phi3_tensors,
    ranks=PHI3.ranks,
    expected=PHI3.expected
    | {
        "position_embedding_type": "long_rope",
        "original_max_position_embeddings": 64,
        "longrope_scaling_short_factors": [1.0, 1.05, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6],
        "longrope_scaling_long_factors": [1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0],
    },
    config_class="Phi3Config",
    logits=(),  # test_long_rope_oracle.py
    constants=ROPE_BASE | {"wrong short factors", "wrong long factors", "wrong original positions"},
    real={"max_position_embeddings": 131072, "original_max_position_embeddings": 4096},
    stages=False,
)

STARCODER2 = Family(
    config=_SIZES
    | {
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
    },
    tensors=starcoder2_tensors,
    ranks=ranks_by_names(
        Names(
            embedding="model.embed_tokens",
            layer="model.layers.{}.",
            norms={"input_layernorm": "input_layernorm", "post_layernorm": "post_attention_layernorm"},
            qkv=["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
            dense="self_attn.o_proj",
            fc="mlp.c_fc",
            proj="mlp.c_proj",
            final_norm="model.norm",
            head="lm_head",
        )
    ),
    expected=SIZES
    | {
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "hidden_act": "gelu",
        "position_embedding_type": "rope_gpt_neox",
        "gpt_variant": "starcoder2",
        "bias": True,
        "q_scaling": 1,
        "embedding_scale": None,
        "apply_query_key_layer_scaling": False,
        "rotary_pct": 1.0,
        "rotary_base": 100000.0,
        "rotary_scaling": None,
        "inner_layernorm": False,
        "norm_before_bmm1": False,
        "moe": DENSE | {"normalization_mode": 1},
        "max_attention_window": [24],  # ours: upstream drops the window
    },
    shards=({"vocab_size": 323}, {"tie_word_embeddings": False, "use_bias": False, "num_key_value_heads": 4}),
    logits=({}, {"tie_word_embeddings": False, "use_bias": False, "rope_scaling": YARN}),
    constants=ROPE_BASE | WINDOW | SCORES,
    real={"sliding_window": 4096},
)

BLOOM = Family(
    config={
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
    },
    tensors=bloom_tensors,
    ranks=ranks_by_names(
        Names(
            embedding="transformer.word_embeddings",
            layer="transformer.h.{}.",
            norms={"input_layernorm": "input_layernorm", "post_layernorm": "post_attention_layernorm"},
            qkv=["self_attention.query_key_value"],
            dense="self_attention.dense",
            fc="mlp.dense_h_to_4h",
            proj="mlp.dense_4h_to_h",
            final_norm="transformer.ln_f",
            head="lm_head",
        )
    ),
    expected=SIZES
    | {
        "intermediate_size": 256,
        "hidden_act": "gelu",
        "position_embedding_type": "alibi",
        "max_position_embeddings": None,
    },
    shards=({"vocab_size": 323}, {"tie_word_embeddings": False}),
    logits=({}, {"n_embed": 96, "num_attention_heads": 6}),
    stages=False,
)

FALCON = Family(
    config=_SIZES
    | {
        "architectures": ["FalconForCausalLM"],
        "model_type": "falcon",
        "max_position_embeddings": 512,
        "layer_norm_epsilon": 1e-5,
        "alibi": False,
        "bias": False,
        "multi_query": True,
        "new_decoder_architecture": False,
        "parallel_attn": True,
    },
    tensors=falcon_tensors,
    ranks=ranks_by_names(
        Names(
            embedding="transformer.word_embeddings",
            layer="transformer.h.{}.",
            norms={"input_layernorm": "input_layernorm", "post_layernorm": "post_attention_layernorm"},
            qkv=["self_attention.query_key_value"],
            dense="self_attention.dense",
            fc="mlp.dense_h_to_4h",
            proj="mlp.dense_4h_to_h",
            final_norm="transformer.ln_f",
            head="lm_head",
        )
    ),
    expected=SIZES
    | {
        "architecture": "FalconForCausalLM",
        "num_key_value_heads": 1,
        "intermediate_size": 256,
        "hidden_act": "gelu",
        "position_embedding_type": "rope_gpt_neox",
        "bias": False,
        "parallel_attention": True,
        "num_ln_in_parallel_attn": None,
        "new_decoder_architecture": False,
        "rotary_base": 10000.0,
    },
    config_class="FalconConfig",
    shards=({"vocab_size": 323}, {"tie_word_embeddings": False}),
    constants=ROPE_BASE,
)

FALCON_NEW = Family(
    config=FALCON.config | {"new_decoder_architecture": True, "num_kv_heads": 2},
    tensors=falcon_tensors,
    ranks=FALCON.ranks,
    expected=FALCON.expected | {"num_key_value_heads": 2, "new_decoder_architecture": True},
    config_class="FalconConfig",
    shards=({"vocab_size": 323, "tie_word_embeddings": False}, {"num_ln_in_parallel_attn": 1}),
    logits=({}, {"num_ln_in_parallel_attn": 1, "tie_word_embeddings": False, "rope_scaling": YARN}),
    constants=ROPE_BASE,
)

FALCON_RW = Family(
    config=FALCON.config | {"alibi": True, "bias": True, "multi_query": False, "parallel_attn": False},
    tensors=falcon_tensors,
    ranks=FALCON.ranks,
    expected=FALCON.expected
    | {
        "num_key_value_heads": 4,
        "position_embedding_type": "alibi_with_scale",
        "bias": True,
        "parallel_attention": False,
    },
    config_class="FalconConfig",
)

OWN_NAMES: dict[str, Family] = {
    "gpt2": GPT2,
    "gptj": GPTJ,
    "gpt_neox": GPT_NEOX,
    "opt": OPT,
    "phi": PHI,
    "phi3": PHI3,
    "phi3_long": PHI3_LONG,
    "starcoder2": STARCODER2,
    "bloom": BLOOM,
    "falcon": FALCON,
    "falcon_new": FALCON_NEW,
    "falcon_rw": FALCON_RW,
}
