"""Falcon: multi-query or grouped attention, parallel to the MLP or before it; rotary positions or ALiBi."""

from __future__ import annotations

import math
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures.base import (
    Decoder,
    HfConfig,
    Part,
    SourceNames,
    decoder_sizes,
    require_activation,
)
from trtserve.checkpoint.architectures.parts.positions import (
    alibi_slopes,
    inverse_frequencies,
    own_rotary,
    rotary_scale,
)
from trtserve.errors import UnsupportedModelError

_ONE_NORM = {"input_layernorm": "input_layernorm"}
_MATRICES: frozenset[Part] = frozenset(("qkv", "dense", "fc", "proj"))
# Size keys of the first models (RefinedWeb), before transformers supported them.
_SPELLINGS = {"hidden_size": "n_embed", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return the family's part of the checkpoint's config: the keys of TensorRT-LLM 1.2's FalconConfig."""
    spelled = dict(hf) | {name: hf[other] for name, other in _SPELLINGS.items() if hf.get(other) is not None}
    sizes = decoder_sizes(spelled)
    # The layers are those of 40B and later; RefinedWeb is the model type of the first 40B.
    new = bool(hf.get("new_decoder_architecture")) or hf.get("model_type") == "RefinedWeb"
    parallel = bool(hf.get("parallel_attn", True))
    if new and not parallel:
        raise UnsupportedModelError(
            "This Falcon combines new_decoder_architecture with parallel_attn = false, which no published model does."
        )
    require_activation(hf.get("activation", "gelu"), "gelu")
    base, scaling = own_rotary(hf)
    return {
        "architecture": "FalconForCausalLM",
        **sizes,
        "num_key_value_heads": _kv_heads(hf, sizes["num_attention_heads"], new=new),
        "intermediate_size": hf.get("ffn_hidden_size") or 4 * sizes["hidden_size"],
        "hidden_act": "gelu",
        "norm_epsilon": hf.get("layer_norm_epsilon", 1e-5),
        "position_embedding_type": "alibi_with_scale" if hf.get("alibi") else "rope_gpt_neox",
        "max_position_embeddings": hf.get("max_position_embeddings", 2048),
        "bias": bool(hf.get("bias", False)),
        "parallel_attention": parallel,
        "num_ln_in_parallel_attn": hf.get("num_ln_in_parallel_attn"),
        "new_decoder_architecture": new,
        "rotary_base": base,
        **scaling,
    }


def _kv_heads(hf: HfConfig, heads: int, *, new: bool) -> int:
    """Return the number of key/value heads; 180B sets multi_query although its heads are grouped."""
    if hf.get("multi_query", True) and not new:
        return 1
    return int(hf.get("num_kv_heads") or hf.get("n_head_kv") or heads)


def _norms(config: CheckpointConfig) -> dict[str, str]:
    """Return a layer's norms, keyed by checkpoint name; the new architecture has two parallel ones."""
    if config.own("new_decoder_architecture", False) and config.own("num_ln_in_parallel_attn", 2) == 2:
        return {"input_layernorm": "ln_attn", "mlp_layernorm": "ln_mlp"}
    if config.own("new_decoder_architecture", False) or config.own("parallel_attention", False):
        return _ONE_NORM
    return _ONE_NORM | {"post_layernorm": "post_attention_layernorm"}


def names(config: CheckpointConfig) -> SourceNames:
    return SourceNames(
        embedding="transformer.word_embeddings",
        layer="transformer.h.{}.",
        norms=_norms(config),
        qkv=("self_attention.query_key_value",),
        dense="self_attention.dense",
        fc="mlp.dense_h_to_4h",
        proj="mlp.dense_4h_to_h",
        final_norm="transformer.ln_f",
        biases=_MATRICES if config.own("bias", True) else frozenset(),
        grouped=True,
        unused=("transformer.h.*.self_attention.rotary.inv_freq", "transformer.h.*.self_attention.rotary_emb.inv_freq"),
    )


def decoder(config: CheckpointConfig) -> Decoder:
    """Describe the decoder from the checkpoint's config.

    The slopes of alibi are scaled like the scores. transformers rounds slopes × positions to bfloat16; TensorRT-LLM
    does not, and neither do engines made from this.
    """
    norms, scale = _norms(config), 1 / math.sqrt(config.head_size)
    alibi = config.position_embedding_type.startswith("alibi")
    slopes = tuple(slope * scale for slope in alibi_slopes(config.num_attention_heads))
    frequencies = inverse_frequencies(config.head_size, config.rotary_base, config.rotary_scaling)
    return Decoder(
        norm="layer",
        positions="alibi" if alibi else "rope",
        mlp="plain",
        activation=require_activation(config.hidden_act),
        attention_scale=scale,
        rope_inv_freq=None if alibi else frequencies,
        rope_scale=rotary_scale(config.rotary_scaling),
        alibi_slopes=slopes if alibi else None,
        block="sequential" if "post_layernorm" in norms else "parallel",
        mlp_norm=next((name for name in norms if name != "input_layernorm"), None),
    )
