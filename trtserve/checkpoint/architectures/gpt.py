"""Older decoders whose checkpoints follow GPT: GPT-2, GPT-J, GPT-NeoX, OPT, BLOOM, StarCoder2."""

from __future__ import annotations

import math
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures.base import (
    Decoder,
    Factor,
    HfConfig,
    Part,
    SourceNames,
    decoder_sizes,
    moe_object,
    require_activation,
    superset,
)
from trtserve.checkpoint.architectures.parts.positions import (
    alibi_slopes,
    attention_windows,
    inverse_frequencies,
    own_rotary,
    rotary_fraction,
    rotary_scale,
    uniform_window,
)
from trtserve.errors import UnsupportedModelError

# GPT-2: layer norms, learned positions, Conv1D weights stored [in, out], plain MLP.

# GPTConfig's keys that are equal for all models of this family.
_GPT2_CONSTANTS: dict[str, Any] = {
    "gpt_variant": "gpt2",
    "bias": True,
    "embedding_scale": None,
    "apply_query_key_layer_scaling": False,
    "rotary_pct": 1.0,
    "rotary_base": 10000.0,
    "rotary_scaling": None,
    "inner_layernorm": False,
    "norm_before_bmm1": False,
    "moe": moe_object(normalization_mode=1),
}


def gpt2_checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return the family's part of the checkpoint's config: the keys of TensorRT-LLM 1.2's GPTConfig.

    GPTConfig has no key for tied embeddings: upstream uses the embedding as head for every GPT-2, we use the model's
    own head when it has one.
    """
    sizes = decoder_sizes(
        hf,
        hidden_size="n_embd",
        num_hidden_layers="n_layer",
        num_attention_heads="n_head",
        max_position_embeddings="n_positions",
    )
    for key in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if hf.get(key):
            raise UnsupportedModelError(f"This GPT-2 sets {key}, which a TensorRT-LLM checkpoint cannot express.")
    activation = hf.get("activation_function", "gelu_new")
    require_activation(activation)
    return {
        **sizes,
        "intermediate_size": hf.get("n_inner") or 4 * sizes["hidden_size"],
        "hidden_act": activation,
        "norm_epsilon": hf.get("layer_norm_epsilon", 1e-5),
        "position_embedding_type": "learned_absolute",
        # TensorRT-LLM multiplies q·k by 1 / (q_scaling · √head_size).
        "q_scaling": 1 if hf.get("scale_attn_weights", True) else 1 / math.sqrt(sizes["head_size"]),
        **_GPT2_CONSTANTS,
    }


gpt2_names = SourceNames(
    embedding="transformer.wte",
    positions="transformer.wpe",
    layer="transformer.h.{}.",
    norms={"input_layernorm": "ln_1", "post_layernorm": "ln_2"},
    qkv=("attn.c_attn",),
    dense="attn.c_proj",
    fc="mlp.c_fc",
    proj="mlp.c_proj",
    final_norm="transformer.ln_f",
    biases=frozenset(("qkv", "dense", "fc", "proj")),
    transposed=True,
    # Causal masks of old exports.
    unused=("transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias"),
)


def gpt2_decoder(config: CheckpointConfig) -> Decoder:
    return Decoder(
        norm="layer",
        positions="learned",
        mlp="plain",
        activation=require_activation(config.hidden_act),
        attention_scale=1 / (config.own("q_scaling", 1.0) * math.sqrt(config.head_size)),
    )


# GPT-J: parallel attention and MLP behind one layer norm, partially rotated heads with interleaved pairs.


def gptj_checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return the family's part of the checkpoint's config: the keys of TensorRT-LLM 1.2's GPTJConfig.

    `gelu` means the tanh approximation; GPTJConfig has no keys for the MLP's size and the rotary base.
    """
    sizes = decoder_sizes(
        hf,
        hidden_size="n_embd",
        num_hidden_layers="n_layer",
        num_attention_heads="n_head",
        max_position_embeddings="n_positions",
        rotary_dim="rotary_dim",
    )
    inner = 4 * sizes["hidden_size"]
    require_activation(hf.get("activation_function", "gelu_new"), "gelu_tanh")
    if hf.get("n_inner") not in (None, inner):
        raise UnsupportedModelError(
            f"This GPT-J has n_inner = {hf['n_inner']}; TensorRT-LLM's GPT-J needs 4 · n_embd = {inner}."
        )
    return {
        **sizes,  # rotary_embedding_dim is the full head size here, and rotary_dim the rotated part, as upstream
        "intermediate_size": inner,
        "hidden_act": "gelu",
        "norm_epsilon": hf.get("layer_norm_epsilon", 1e-5),
        "position_embedding_type": "rope_gptj",
    }


gptj_names = SourceNames(
    embedding="transformer.wte",
    layer="transformer.h.{}.",
    norms={"input_layernorm": "ln_1"},
    qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    dense="attn.out_proj",
    fc="mlp.fc_in",
    proj="mlp.fc_out",
    final_norm="transformer.ln_f",
    biases=frozenset(("fc", "proj", "head")),
    first_rank_bias=True,
    # Causal masks and position tables of old exports.
    unused=tuple(f"transformer.h.*.attn.{name}" for name in ("bias", "masked_bias", "embed_positions")),
)


def gptj_decoder(config: CheckpointConfig) -> Decoder:
    return Decoder(
        norm="layer",
        positions="rope",
        mlp="plain",
        activation="gelu_tanh",
        attention_scale=1 / math.sqrt(config.head_size),
        rope_inv_freq=inverse_frequencies(config.own("rotary_dim", 64), 10000.0, None),
        rope_interleaved=True,
        block="parallel",
        mlp_norm=None,
    )


# GPT-NeoX and Pythia: parallel attention and MLP with a layer norm each, partially rotated heads.

_SWITCHES = ("use_parallel_residual", "attention_bias")


def gpt_neox_checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return the family's part of the checkpoint's config: the keys of TensorRT-LLM 1.2's converter and loader."""
    sizes = decoder_sizes(hf, intermediate_size="intermediate_size")
    disabled = [key for key in _SWITCHES if not hf.get(key, True)]
    require_activation(hf.get("hidden_act", "gelu"), "gelu", "gelu_tanh", "relu")
    # transformers goes by these keys alone, unless the rotary parameters say more.
    own = {**hf, "rope_theta": hf.get("rotary_emb_base"), "partial_rotary_factor": hf.get("rotary_pct")}
    part = rotary_fraction(own, default=0.25)
    base, scaling = own_rotary(own)
    return {
        **sizes,
        "hidden_act": hf.get("hidden_act", "gelu"),
        "norm_epsilon": hf.get("layer_norm_eps", 1e-5),
        "position_embedding_type": "rope_gpt_neox",
        "max_position_embeddings": hf.get("max_position_embeddings", 2048),
        "rotary_embedding_dim": int(sizes["head_size"] * part),
        # An integer where the model's config has one, as upstream copies it.
        "rotary_emb_base": int(base) if base == hf.get("rotary_emb_base", 10000) == int(base) else base,
        "rotary_pct": part,
        **scaling,
        **dict.fromkeys(disabled, False),
        **superset(*scaling.get("superset", ()), *(f"a GPT-NeoX that disables {key}" for key in disabled)),
    }


def gpt_neox_names(config: CheckpointConfig) -> SourceNames:
    attention: tuple[Part, ...] = ("qkv", "dense") if config.own("attention_bias", True) else ()
    return SourceNames(
        embedding="gpt_neox.embed_in",
        layer="gpt_neox.layers.{}.",
        norms={"input_layernorm": "input_layernorm", "post_attention_layernorm": "post_attention_layernorm"},
        qkv=("attention.query_key_value",),
        dense="attention.dense",
        fc="mlp.dense_h_to_4h",
        proj="mlp.dense_4h_to_h",
        head="embed_out",
        final_norm="gpt_neox.final_layer_norm",
        biases=frozenset((*attention, "fc", "proj")),
        grouped=True,
        # Causal masks and position tables of old exports.
        unused=tuple(f"gpt_neox.layers.*.attention.{name}" for name in ("bias", "masked_bias", "rotary_emb.inv_freq")),
    )


def gpt_neox_decoder(config: CheckpointConfig) -> Decoder:
    head_size = config.head_size
    return Decoder(
        norm="layer",
        positions="rope",
        mlp="plain",
        activation=require_activation(config.hidden_act),
        attention_scale=1 / math.sqrt(head_size),
        rope_inv_freq=inverse_frequencies(
            int(head_size * config.own("rotary_pct", 0.25)),
            config.own("rotary_emb_base", 10000.0),
            config.rotary_scaling,
        ),
        rope_scale=rotary_scale(config.rotary_scaling),
        block="parallel" if config.own("use_parallel_residual", True) else "sequential",
        mlp_norm="post_attention_layernorm",
    )


# OPT: layer norms before or after attention and MLP, learned positions, ReLU.
# OPT-350m has embeddings narrower than its layers and projects them; the checkpoint stores the products.


def opt_checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return the family's part of the checkpoint's config: the keys of TensorRT-LLM 1.2's converter and loader."""
    sizes = decoder_sizes(hf, intermediate_size="ffn_dim")
    for key in ("enable_bias", "layer_norm_elementwise_affine"):
        if not hf.get(key, True):
            raise UnsupportedModelError(f"This OPT disables {key}, which a TensorRT-LLM checkpoint cannot express.")
    if hf.get("_remove_final_layer_norm"):
        raise UnsupportedModelError("This OPT has no final norm, which a TensorRT-LLM checkpoint cannot express.")
    require_activation(hf.get("activation_function", "relu"))
    return {
        **sizes,
        "hidden_act": hf.get("activation_function", "relu"),
        "norm_epsilon": 1e-5,
        "position_embedding_type": "learned_absolute",
        "max_position_embeddings": hf.get("max_position_embeddings", 2048),
        "do_layer_norm_before": bool(hf.get("do_layer_norm_before", True)),
    }


def _norms_before(config: CheckpointConfig) -> bool:
    return config.own("do_layer_norm_before", False)


def _projections(config: CheckpointConfig) -> dict[str, Factor]:
    """Return the projections before the first layer and after the last one."""
    width = config.own("word_embed_proj_dim", config.hidden_size)
    if width == config.hidden_size:
        return {}
    return {
        "transformer.vocab_embedding.weight": Factor(
            name="model.decoder.project_in.weight", width=width, transposed=True
        ),
        "lm_head.weight": Factor(name="model.decoder.project_out.weight", width=width),
    }


def opt_names(config: CheckpointConfig) -> SourceNames:
    return SourceNames(
        embedding="model.decoder.embed_tokens",
        layer="model.decoder.layers.{}.",
        norms={"input_layernorm": "self_attn_layer_norm", "post_layernorm": "final_layer_norm"},
        qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        dense="self_attn.out_proj",
        fc="fc1",
        proj="fc2",
        final_norm="model.decoder.final_layer_norm" if _norms_before(config) else None,
        biases=frozenset(("qkv", "dense", "fc", "proj")),
        positions="model.decoder.embed_positions",
        # Hugging Face numbers positions from 2, for padding that is never used.
        unused_positions=2,
        factors=_projections(config),
        # The version of fairseq's decoder.
        unused=("decoder.version", "model.decoder.version"),
    )


def opt_decoder(config: CheckpointConfig) -> Decoder:
    return Decoder(
        norm="layer",
        positions="learned",
        mlp="plain",
        activation=require_activation(config.hidden_act),
        attention_scale=1 / math.sqrt(config.head_size),
        block="sequential" if _norms_before(config) else "post",
    )


# BLOOM: ALiBi positions, normalised embeddings, layer norms, query, key and value fused per head.

# Size keys in older configs.
_SPELLINGS = {"hidden_size": "n_embed", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}


def bloom_checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return the family's part of the checkpoint's config: the keys of TensorRT-LLM 1.2's converter and loader.

    `gelu` means the tanh approximation here, as in every BLOOM. ALiBi has no maximum position.
    """
    spelled = dict(hf) | {name: hf[other] for name, other in _SPELLINGS.items() if hf.get(other) is not None}
    sizes = decoder_sizes(spelled)
    if hf.get("apply_residual_connection_post_layernorm"):
        raise UnsupportedModelError(
            "This BLOOM sets apply_residual_connection_post_layernorm, which a TensorRT-LLM checkpoint cannot express."
        )
    return {
        **sizes,
        "intermediate_size": 4 * sizes["hidden_size"],
        "hidden_act": "gelu",
        "norm_epsilon": hf.get("layer_norm_epsilon", 1e-5),
        "position_embedding_type": "alibi",
        "max_position_embeddings": None,
    }


bloom_names = SourceNames(
    embedding="transformer.word_embeddings",
    embedding_norm="transformer.word_embeddings_layernorm",
    layer="transformer.h.{}.",
    norms={"input_layernorm": "input_layernorm", "post_layernorm": "post_attention_layernorm"},
    qkv=("self_attention.query_key_value",),
    dense="self_attention.dense",
    fc="mlp.dense_h_to_4h",
    proj="mlp.dense_4h_to_h",
    final_norm="transformer.ln_f",
    biases=frozenset(("qkv", "dense", "fc", "proj")),
    grouped=True,
)


def bloom_decoder(config: CheckpointConfig) -> Decoder:
    return Decoder(
        norm="layer",
        positions="alibi",
        mlp="plain",
        activation="gelu_tanh",
        attention_scale=1 / math.sqrt(config.head_size),
        alibi_slopes=alibi_slopes(config.num_attention_heads),
        embedding_norm=True,
    )


# StarCoder2: layer norms, rotary positions, grouped-query attention, plain MLP; TensorRT-LLM treats it as a GPT.

# GPTConfig's keys that are equal for all models of this family.
_STARCODER2_CONSTANTS: dict[str, Any] = {
    "gpt_variant": "starcoder2",
    "q_scaling": 1,
    "embedding_scale": None,
    "apply_query_key_layer_scaling": False,
    "rotary_pct": 1.0,
    "rotary_scaling": None,
    "inner_layernorm": False,
    "norm_before_bmm1": False,
    "moe": moe_object(normalization_mode=1),
}


def starcoder2_checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return the family's part of the checkpoint's config: the keys of TensorRT-LLM 1.2's GPTConfig and the window.

    `gelu`, which upstream writes for every StarCoder2, means the tanh approximation.
    """
    sizes = decoder_sizes(hf, intermediate_size="intermediate_size")
    require_activation(hf.get("hidden_act", "gelu_pytorch_tanh"), "gelu_tanh")
    longest, (base, scaling) = hf.get("max_position_embeddings", 4096), own_rotary(hf)
    return {
        **sizes,
        "num_key_value_heads": hf.get("num_key_value_heads") or sizes["num_attention_heads"],
        "hidden_act": "gelu",
        "norm_epsilon": hf.get("norm_epsilon", 1e-5),
        "position_embedding_type": "rope_gpt_neox",
        "max_position_embeddings": longest,
        "bias": bool(hf.get("use_bias", True)),
        "rotary_base": base,
        **_STARCODER2_CONSTANTS,
        **uniform_window(hf, hf.get("sliding_window")),
        **scaling,
    }


def starcoder2_names(config: CheckpointConfig) -> SourceNames:
    return SourceNames(
        embedding="model.embed_tokens",
        layer="model.layers.{}.",
        norms={"input_layernorm": "input_layernorm", "post_layernorm": "post_attention_layernorm"},
        qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        dense="self_attn.o_proj",
        fc="mlp.c_fc",
        proj="mlp.c_proj",
        final_norm="model.norm",
        biases=frozenset(("qkv", "dense", "fc", "proj") if config.own("bias", True) else ()),
        unused=("model.layers.*.self_attn.rotary_emb.inv_freq",),
    )


def starcoder2_decoder(config: CheckpointConfig) -> Decoder:
    return Decoder(
        norm="layer",
        positions="rope",
        mlp="plain",
        activation="gelu_tanh",
        attention_scale=1 / (config.own("q_scaling", 1.0) * math.sqrt(config.head_size)),
        rope_inv_freq=inverse_frequencies(config.head_size, config.rotary_base, config.rotary_scaling),
        rope_scale=rotary_scale(config.rotary_scaling),
        windows=attention_windows(config),
    )
