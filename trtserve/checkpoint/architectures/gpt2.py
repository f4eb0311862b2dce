"""GPT-2: layer norms, learned positions, Conv1D weights stored [in, out], plain MLP."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures.base import (
    Decoder,
    HfConfig,
    Target,
    dense_moe,
    embedding_split,
    fused_qkv,
    require_activation,
    required,
)
from trtserve.errors import UnsupportedModelError

BASE_PREFIX = "transformer."
TIED = True


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return the family's part of the checkpoint's config: the keys of TensorRT-LLM 1.2's GPTConfig.

    GPTConfig has no key for tied embeddings: upstream uses the embedding as head for every GPT-2, we use the model's
    own head when it has one.
    """
    sizes = required(hf, "n_embd", "n_layer", "n_head", "n_positions", "vocab_size")
    for key in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if hf.get(key):
            raise UnsupportedModelError(f"This GPT-2 sets {key}, which a TensorRT-LLM checkpoint cannot express.")
    activation = hf.get("activation_function", "gelu_new")
    require_activation(activation)
    head_size = sizes["n_embd"] // sizes["n_head"]
    return {
        "hidden_size": sizes["n_embd"],
        "num_hidden_layers": sizes["n_layer"],
        "num_attention_heads": sizes["n_head"],
        "num_key_value_heads": sizes["n_head"],
        "intermediate_size": hf.get("n_inner") or 4 * sizes["n_embd"],
        "vocab_size": sizes["vocab_size"],
        "head_size": head_size,
        "hidden_act": activation,
        "norm_epsilon": hf.get("layer_norm_epsilon", 1e-5),
        "position_embedding_type": "learned_absolute",
        "max_position_embeddings": sizes["n_positions"],
        "rotary_embedding_dim": head_size,
        # TensorRT-LLM multiplies q·k by 1 / (q_scaling · √head_size).
        "q_scaling": 1 if hf.get("scale_attn_weights", True) else 1 / math.sqrt(head_size),
        **_constants(),
    }


def _constants() -> dict[str, Any]:
    """Return the GPTConfig keys that are equal for all models of this family."""
    return {
        "gpt_variant": "gpt2",
        "bias": True,
        "embedding_scale": None,
        "apply_query_key_layer_scaling": False,
        "rotary_pct": 1.0,
        "rotary_base": 10000.0,
        "rotary_scaling": None,
        "inner_layernorm": False,
        "norm_before_bmm1": False,
        "moe": dense_moe(normalization_mode=1),
    }


def targets(config: CheckpointConfig) -> list[Target]:
    """Return every tensor of the unsharded checkpoint, in file order."""
    vocab, hidden = config.vocab_size, config.hidden_size
    tables = (("vocab", "wte", vocab), ("position", "wpe", config.max_position_embeddings))
    embeddings = [
        Target(
            name=f"transformer.{name}_embedding.weight",
            sources=(f"transformer.{source}.weight",),
            shape=(rows, hidden),
            split=embedding_split(config),
        )
        for name, source, rows in tables
    ]
    layers = [target for layer in range(config.num_hidden_layers) for target in _layer(config, layer)]
    norms = [
        Target(name=f"transformer.ln_f.{kind}", sources=(f"transformer.ln_f.{kind}",), shape=(hidden,), last_stage=True)
        for kind in ("weight", "bias")
    ]
    head = "transformer.wte.weight" if config.own("tie_word_embeddings", True) else "lm_head.weight"
    lm_head = Target(name="lm_head.weight", sources=(head,), shape=(vocab, hidden), split="vocab", last_stage=True)
    return [*embeddings, *layers, *norms, lm_head]


def _layer(config: CheckpointConfig, layer: int) -> Iterator[Target]:
    hidden, inner = config.hidden_size, config.intermediate_size
    yield from _norm(hidden, layer, "input_layernorm", "ln_1")
    yield from _attention(config, layer)
    yield from _norm(hidden, layer, "post_layernorm", "ln_2")
    yield _weight(layer, "mlp.fc", "mlp.c_fc", (inner, hidden), column=True)
    yield _bias(layer, "mlp.fc", "mlp.c_fc", inner, column=True)
    yield _weight(layer, "mlp.proj", "mlp.c_proj", (hidden, inner), column=False)
    yield _bias(layer, "mlp.proj", "mlp.c_proj", hidden, column=False)


def _attention(config: CheckpointConfig, layer: int) -> Iterator[Target]:
    hidden, parts = config.hidden_size, fused_qkv(config)
    for kind in ("weight", "bias"):
        yield Target(
            name=f"transformer.layers.{layer}.attention.qkv.{kind}",
            sources=(f"transformer.h.{layer}.attn.c_attn.{kind}",),
            shape=(sum(parts), hidden) if kind == "weight" else (sum(parts),),
            split="qkv",
            parts=parts,
            head_size=config.head_size,
            transpose=kind == "weight",
            layer=layer,
        )
    yield _weight(layer, "attention.dense", "attn.c_proj", (hidden, hidden), column=False)
    yield _bias(layer, "attention.dense", "attn.c_proj", hidden, column=False)


def _norm(hidden: int, layer: int, name: str, source: str) -> Iterator[Target]:
    for kind in ("weight", "bias"):
        yield Target(
            name=f"transformer.layers.{layer}.{name}.{kind}",
            sources=(f"transformer.h.{layer}.{source}.{kind}",),
            shape=(hidden,),
            layer=layer,
        )


def _weight(layer: int, name: str, source: str, shape: tuple[int, int], *, column: bool) -> Target:
    return Target(
        name=f"transformer.layers.{layer}.{name}.weight",
        sources=(f"transformer.h.{layer}.{source}.weight",),
        shape=shape,
        split="column" if column else "row",
        transpose=True,
        layer=layer,
    )


def _bias(layer: int, name: str, source: str, size: int, *, column: bool) -> Target:
    return Target(
        name=f"transformer.layers.{layer}.{name}.bias",
        sources=(f"transformer.h.{layer}.{source}.bias",),
        shape=(size,),
        split="column" if column else "replicated",
        layer=layer,
    )


def unused(config: CheckpointConfig) -> Sequence[str]:
    """Return causal masks of old exports, and the head when embeddings are tied."""
    patterns = ["transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias"]
    return [*patterns, "lm_head.weight"] if config.own("tie_word_embeddings", True) else patterns


def decoder(config: CheckpointConfig) -> Decoder:
    """Describe the decoder from the checkpoint's config."""
    return Decoder(
        norm="layer",
        positions="learned",
        mlp="plain",
        activation=require_activation(config.hidden_act),
        attention_bias=config.own("bias", True),
        dense_bias=config.own("bias", True),
        mlp_bias=config.own("bias", True),
        attention_scale=1 / (config.own("q_scaling", 1.0) * math.sqrt(config.head_size)),
    )
