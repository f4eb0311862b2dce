"""Multi-head latent attention (MLA, DeepSeek V2): its keys in a checkpoint's config, its tensors, its decoder.

A checkpoint has the model's own matrices. Runtimes cache a token's latent vector and rotated key, side by side, as one
key/value head: `head_size` and `num_key_value_heads` say so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import llama
from trtserve.checkpoint.architectures.base import (
    Decoder,
    HfConfig,
    LatentAttention,
    SourceNames,
    Split,
    Target,
    require_activation,
    required,
    superset,
)
from trtserve.checkpoint.architectures.parts.expert_tensors import experts_of
from trtserve.checkpoint.architectures.parts.positions import (
    beyond_rotary,
    inverse_frequencies,
    rotary,
    rotary_scale,
    scaling_type,
)

_SIZES = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
# transformers gives the norms inside the attention no epsilon, so that they have the default of their class.
_EPSILON = 1e-6


def latent_config(hf: HfConfig) -> dict[str, Any]:
    """Return the sizes, positions and latent attention of a model, with transformers' names for the latter."""
    sizes = required(hf, "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    latent = required(hf, *_SIZES)
    lower = required(hf, "q_lora_rank") if hf.get("q_lora_rank") is not None else {}
    require_activation(hf.get("hidden_act", "silu"), "silu")
    base, scaling = rotary(hf)
    return {
        **sizes,
        **latent,
        **lower,
        "num_key_value_heads": 1,
        "head_size": latent["kv_lora_rank"] + latent["qk_rope_head_dim"],
        "hidden_act": hf.get("hidden_act", "silu"),
        "norm_epsilon": hf.get("rms_norm_eps", 1e-6),
        "position_embedding_type": "rope_gptj",
        "rope_interleave": bool(hf.get("rope_interleave", True)),
        "max_position_embeddings": hf["max_position_embeddings"],
        "rotary_embedding_dim": latent["qk_rope_head_dim"],
        "rotary_base": base,
        "rotary_scaling": scaling,
        "attn_bias": bool(hf.get("attention_bias", False)),
        "tie_word_embeddings": bool(hf.get("tie_word_embeddings", False)),
        **superset("latent attention", *beyond_rotary(scaling)),
    }


def _latent(config: CheckpointConfig) -> LatentAttention:
    rank, rotated, plain, value = (config.own(key, 0) for key in _SIZES)
    return LatentAttention(rank=rank, rotated=rotated, plain=plain, value=value, epsilon=_EPSILON)


def latent_names(config: CheckpointConfig) -> SourceNames:
    return replace(llama.NAMES, latent=True, qkv=(), biases=frozenset())


def latent_targets(config: CheckpointConfig, theirs: str, layer: int) -> Iterator[Target]:
    """Yield the tensors of a layer's attention; ranks share the heads, and each has all of the latent vector."""
    latent, heads, hidden = _latent(config), config.num_attention_heads, config.hidden_size
    lower, biased = config.own("q_lora_rank", 0), config.own("attn_bias", False)
    queries, values = heads * (latent.plain + latent.rotated), heads * (latent.plain + latent.value)
    matrices: list[tuple[str, str, tuple[int, int], Split, bool]] = [
        ("q_b", "q_b_proj" if lower else "q_proj", (queries, lower or hidden), "column", False),
        ("kv_a", "kv_a_proj_with_mqa", (latent.rank + latent.rotated, hidden), "replicated", biased),
        ("kv_b", "kv_b_proj", (values, latent.rank), "column", False),
        ("dense", "o_proj", (hidden, heads * latent.value), "row", biased),
    ]
    norms = {"kv_a_layernorm": latent.rank}
    if lower:
        matrices.insert(0, ("q_a", "q_a_proj", (lower, hidden), "replicated", biased))
        norms["q_a_layernorm"] = lower
    ours, theirs = f"transformer.layers.{layer}.attention.", f"{theirs}self_attn."
    for name, source, shape, split, bias in matrices:
        yield Target(
            name=f"{ours}{name}.weight", sources=(f"{theirs}{source}.weight",), shape=shape, split=split, layer=layer
        )
        if bias:
            yield Target(name=f"{ours}{name}.bias", sources=(f"{theirs}{source}.bias",), shape=shape[:1], layer=layer)
    for name, size in norms.items():
        yield Target(name=f"{ours}{name}.weight", sources=(f"{theirs}{name}.weight",), shape=(size,), layer=layer)


def latent_decoder(config: CheckpointConfig) -> Decoder:
    """Describe the decoder; with yarn, scores grow with the length as in DeepSeek's own code."""
    latent, scaling = _latent(config), config.rotary_scaling
    scale = 1 / math.sqrt(latent.plain + latent.rotated)
    if scaling is not None and scaling_type(scaling) != "default" and (dimensions := scaling.get("mscale_all_dim")):
        factor = float(scaling["factor"])
        scale *= (0.1 * float(dimensions) * math.log(factor) + 1.0 if factor > 1 else 1.0) ** 2
    return Decoder(
        norm="rms",
        positions="rope",
        mlp="experts",
        activation="silu",
        attention_scale=scale,
        rope_inv_freq=inverse_frequencies(latent.rotated, config.rotary_base, scaling),
        rope_scale=rotary_scale(scaling),
        rope_interleaved=config.own("rope_interleave", True),
        latent=latent,
        experts=experts_of(config),
    )
