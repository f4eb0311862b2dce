"""Falcon: multi-query or grouped attention beside the MLP or before it, rotary positions or alibi."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from trtserve.architectures.activations import require_activation
from trtserve.architectures.alibi import alibi_slopes
from trtserve.architectures.base import CheckpointConfig, Decoder, HfConfig, Target, required
from trtserve.architectures.named_tensors import Part, SourceNames, named_targets
from trtserve.architectures.rope import inverse_frequencies, unscaled_base
from trtserve.errors import UnsupportedModelError

BASE_PREFIX = "transformer."
TIED = True

_ONE_NORM = {"input_layernorm": "input_layernorm"}
_MATRICES: frozenset[Part] = frozenset(("qkv", "dense", "fc", "proj"))
# How the models spelled their sizes before transformers knew them (RefinedWeb).
_SPELLINGS = {"hidden_size": "n_embed", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Family part of the checkpoint's config: keys of TensorRT-LLM 1.2's FalconConfig."""
    spelled = dict(hf) | {name: hf[other] for name, other in _SPELLINGS.items() if hf.get(other) is not None}
    sizes = required(spelled, *_SPELLINGS, "vocab_size")
    new = _is_new(hf)
    parallel = bool(hf.get("parallel_attn", True))
    if new and not parallel:
        raise UnsupportedModelError(
            "This Falcon has the new decoder architecture without parallel attention; no such layer is known."
        )
    require_activation(hf.get("activation", "gelu"), "gelu")
    return {
        "architecture": "FalconForCausalLM",
        **sizes,
        "num_key_value_heads": _kv_heads(hf, sizes["num_attention_heads"], new=new),
        "intermediate_size": hf.get("ffn_hidden_size") or 4 * sizes["hidden_size"],
        "head_size": sizes["hidden_size"] // sizes["num_attention_heads"],
        "hidden_act": "gelu",
        "norm_epsilon": hf.get("layer_norm_epsilon", 1e-5),
        "position_embedding_type": "alibi_with_scale" if hf.get("alibi") else "rope_gpt_neox",
        "max_position_embeddings": hf.get("max_position_embeddings", 2048),
        "rotary_embedding_dim": sizes["hidden_size"] // sizes["num_attention_heads"],
        "bias": bool(hf.get("bias", False)),
        "parallel_attention": parallel,
        "num_ln_in_parallel_attn": hf.get("num_ln_in_parallel_attn"),
        "new_decoder_architecture": new,
        "rotary_base": unscaled_base(hf),
    }


def _is_new(hf: HfConfig) -> bool:
    """The architecture of 40B and later; RefinedWeb is the model type of the first 40B."""
    return bool(hf.get("new_decoder_architecture")) or hf.get("model_type") == "RefinedWeb"


def _kv_heads(hf: HfConfig, heads: int, *, new: bool) -> int:
    """180B says multi_query although its heads are grouped."""
    if hf.get("multi_query", True) and not new:
        return 1
    return int(hf.get("num_kv_heads") or hf.get("n_head_kv") or heads)


def _norms(config: CheckpointConfig) -> dict[str, str]:
    """Norms of a layer by their names in the checkpoint; two side by side where the new architecture has two."""
    if config["new_decoder_architecture"] and (config.get("num_ln_in_parallel_attn") or 2) == 2:
        return {"input_layernorm": "ln_attn", "mlp_layernorm": "ln_mlp"}
    if config["new_decoder_architecture"] or config["parallel_attention"]:
        return _ONE_NORM
    return _ONE_NORM | {"post_layernorm": "post_attention_layernorm"}


def _names(config: CheckpointConfig) -> SourceNames:
    return SourceNames(
        embedding="transformer.word_embeddings",
        layer="transformer.h.{}.",
        norms=_norms(config),
        qkv=("self_attention.query_key_value",),
        dense="self_attention.dense",
        fc="mlp.dense_h_to_4h",
        proj="mlp.dense_4h_to_h",
        head="lm_head",
        final_norm="transformer.ln_f",
        biases=_MATRICES if config["bias"] else frozenset(),
        grouped=True,
    )


def targets(config: CheckpointConfig) -> list[Target]:
    """Every tensor of the checkpoint of the whole model, in file order."""
    config = _with_defaults(config)
    return named_targets(config, _names(config), tied=bool(config.get("tie_word_embeddings", TIED)))


def _with_defaults(config: CheckpointConfig) -> CheckpointConfig:
    """TensorRT-LLM's defaults of keys that older checkpoints leave out."""
    return {"bias": True, "new_decoder_architecture": False, "parallel_attention": False, **config}


def unused(config: CheckpointConfig) -> Sequence[str]:
    """Position tables of old exports; with tied embeddings also a copy of the table under the head's name."""
    patterns = ["transformer.h.*.self_attention.rotary.inv_freq", "transformer.h.*.self_attention.rotary_emb.inv_freq"]
    return [*patterns, "lm_head.weight"] if config.get("tie_word_embeddings", TIED) else patterns


def decoder(config: CheckpointConfig) -> Decoder:
    """What the decoder is made of.

    The slopes of alibi are scaled like the scores. transformers rounds slopes × positions to bfloat16; TensorRT-LLM
    does not, and neither do engines made from this.
    """
    config = _with_defaults(config)
    norms, scale = _norms(config), 1 / math.sqrt(config["head_size"])
    alibi = str(config["position_embedding_type"]).startswith("alibi")
    slopes = tuple(slope * scale for slope in alibi_slopes(config["num_attention_heads"]))
    frequencies = inverse_frequencies(config["head_size"], config.get("rotary_base", 10000.0), None)
    return Decoder(
        norm="layer",
        positions="alibi" if alibi else "rope",
        mlp="plain",
        activation=require_activation(config["hidden_act"]),
        attention_bias=bool(config["bias"]),
        dense_bias=bool(config["bias"]),
        mlp_bias=bool(config["bias"]),
        attention_scale=scale,
        rope_inv_freq=None if alibi else frequencies,
        alibi_slopes=slopes if alibi else None,
        block="sequential" if "post_layernorm" in norms else "parallel",
        mlp_norm=next((name for name in norms if name != "input_layernorm"), None),
    )
