"""Llama 1 – 3.x: RMS norms, rotary positions, grouped-query attention, gated MLP."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from trtserve.architectures.base import (
    Activation,
    CheckpointConfig,
    Decoder,
    HfConfig,
    Target,
    attention_windows,
    dense_moe,
    embedding_split,
    fused_qkv,
    required,
)
from trtserve.architectures.rope import inverse_frequencies, rotary
from trtserve.errors import UnsupportedModelError

HF_ARCHITECTURES: tuple[str, ...] = ("LlamaForCausalLM",)
BASE_PREFIX = "model."

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Family part of the checkpoint's config: keys of TensorRT-LLM 1.2's LLaMAConfig."""
    sizes = required(hf, "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    heads = sizes["num_attention_heads"]
    head_size = hf.get("head_dim") or sizes["hidden_size"] // heads
    base, scaling = rotary(hf)
    _require_activation(hf.get("hidden_act", "silu"))
    return {
        **sizes,
        "num_key_value_heads": hf.get("num_key_value_heads") or heads,
        "head_size": head_size,
        "hidden_act": hf.get("hidden_act", "silu"),
        "norm_epsilon": hf.get("rms_norm_eps", 1e-6),
        "position_embedding_type": "rope_gpt_neox",
        "max_position_embeddings": hf.get("max_position_embeddings", 2048),
        "rotary_embedding_dim": head_size,
        "rotary_base": base,
        "rotary_scaling": scaling,
        "attn_bias": bool(hf.get("attention_bias", False)),
        "mlp_bias": bool(hf.get("mlp_bias", False)),
        "tie_word_embeddings": bool(hf.get("tie_word_embeddings", False)),
        **_constants(),
    }


def _constants() -> dict[str, Any]:
    """Keys of LLaMAConfig that are the same for every model of this family."""
    return {
        "residual_mlp": False,
        "disable_weight_only_quant_plugin": False,
        "moe": dense_moe(normalization_mode=None),
        "remove_duplicated_kv_heads": False,
        "fc_after_embed": False,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "layer_idx_offset": 0,
        "embedding_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "output_multiplier_scale": 1.0,
    }


def _require_activation(name: str) -> Activation:
    if name not in _ACTIVATIONS:
        raise UnsupportedModelError(f"Activation {name!r} is not supported; supported: {', '.join(_ACTIVATIONS)}.")
    return _ACTIVATIONS[name]


def targets(config: CheckpointConfig) -> list[Target]:
    """Every tensor of the checkpoint of the whole model, in file order."""
    vocab, hidden = config["vocab_size"], config["hidden_size"]
    embedding = Target(
        name="transformer.vocab_embedding.weight",
        sources=("model.embed_tokens.weight",),
        shape=(vocab, hidden),
        split=embedding_split(config),
    )
    layers = [target for layer in range(config["num_hidden_layers"]) for target in _layer(config, layer)]
    norm = Target(name="transformer.ln_f.weight", sources=("model.norm.weight",), shape=(hidden,), last_stage=True)
    head = "model.embed_tokens.weight" if config.get("tie_word_embeddings") else "lm_head.weight"
    lm_head = Target(name="lm_head.weight", sources=(head,), shape=(vocab, hidden), split="vocab", last_stage=True)
    return [embedding, *layers, norm, lm_head]


def _layer(config: CheckpointConfig, layer: int) -> Iterator[Target]:
    hidden = config["hidden_size"]
    ours, theirs = f"transformer.layers.{layer}.", f"model.layers.{layer}."
    yield Target(
        name=ours + "input_layernorm.weight",
        sources=(theirs + "input_layernorm.weight",),
        shape=(hidden,),
        layer=layer,
    )
    yield from _attention(config, layer)
    yield Target(
        name=ours + "post_layernorm.weight",
        sources=(theirs + "post_attention_layernorm.weight",),
        shape=(hidden,),
        layer=layer,
    )
    yield from _mlp(config, layer)


def _attention(config: CheckpointConfig, layer: int) -> Iterator[Target]:
    hidden, head_size, parts = config["hidden_size"], config["head_size"], fused_qkv(config)
    ours, theirs = f"transformer.layers.{layer}.attention.", f"model.layers.{layer}.self_attn."
    kinds = ("weight", "bias") if config.get("attn_bias") else ("weight",)
    for kind in kinds:
        yield Target(
            name=f"{ours}qkv.{kind}",
            sources=[f"{theirs}{part}_proj.{kind}" for part in "qkv"],
            shape=(sum(parts), hidden) if kind == "weight" else (sum(parts),),
            split="qkv",
            parts=parts,
            head_size=head_size,
            layer=layer,
        )
    for kind in kinds:
        yield Target(
            name=f"{ours}dense.{kind}",
            sources=(f"{theirs}o_proj.{kind}",),
            shape=(hidden, parts[0]) if kind == "weight" else (hidden,),
            split="row" if kind == "weight" else "replicated",
            layer=layer,
        )


def _mlp(config: CheckpointConfig, layer: int) -> Iterator[Target]:
    """`fc` carries the activated branch, so it is gate_proj, and `gate` is up_proj."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    ours, theirs = f"transformer.layers.{layer}.mlp.", f"model.layers.{layer}.mlp."
    kinds = ("weight", "bias") if config.get("mlp_bias") else ("weight",)
    for name, source in (("fc", "gate_proj"), ("gate", "up_proj")):
        for kind in kinds:
            yield Target(
                name=f"{ours}{name}.{kind}",
                sources=(f"{theirs}{source}.{kind}",),
                shape=(inner, hidden) if kind == "weight" else (inner,),
                split="column",
                layer=layer,
            )
    for kind in kinds:
        yield Target(
            name=f"{ours}proj.{kind}",
            sources=(f"{theirs}down_proj.{kind}",),
            shape=(hidden, inner) if kind == "weight" else (hidden,),
            split="row" if kind == "weight" else "replicated",
            layer=layer,
        )


def unused(config: CheckpointConfig) -> Sequence[str]:
    """Position tables of old exports; with tied embeddings also a copy of the table under the head's name."""
    patterns = ["model.layers.*.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"]
    return [*patterns, "lm_head.weight"] if config.get("tie_word_embeddings") else patterns


def decoder(config: CheckpointConfig) -> Decoder:
    """What the decoder is made of."""
    return Decoder(
        norm="rms",
        positions="rope",
        mlp="gated",
        activation=_require_activation(config["hidden_act"]),
        attention_bias=bool(config.get("attn_bias")),
        dense_bias=bool(config.get("attn_bias")),
        mlp_bias=bool(config.get("mlp_bias")),
        attention_scale=1 / math.sqrt(config["head_size"]),
        rope_inv_freq=inverse_frequencies(
            config["head_size"], config.get("rotary_base", 10000.0), config.get("rotary_scaling")
        ),
        windows=attention_windows(config),
    )
