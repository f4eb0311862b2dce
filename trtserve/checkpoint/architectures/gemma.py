"""Gemma: RMS norms that multiply by 1 + weight, scaled embeddings, a gated MLP with GELU, an explicit head size."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import llama
from trtserve.checkpoint.architectures.base import Decoder, HfConfig, SourceNames, required, superset
from trtserve.checkpoint.architectures.parts.positions import beyond_rotary, require_whole_heads, rotary
from trtserve.errors import UnsupportedModelError

# Both mean the tanh form: Gemma configs say "gelu", but the models were trained with tanh (transformers' GemmaConfig).
_ACTIVATIONS = ("gelu", "gelu_pytorch_tanh")
_HEAD_SIZE = 256


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return the family's part of the checkpoint's config: the keys of TensorRT-LLM 1.2's GemmaConfig."""
    base, scaling = rotary(hf)
    return {
        **gemma_config(hf, activation=hf.get("hidden_act", "gelu_pytorch_tanh"), kv_heads=16, longest=8192),
        "rotary_base": base,
        "rotary_scaling": scaling,
        **superset(*beyond_rotary(scaling)),
        "inter_layernorms": False,
    }


def gemma_config(hf: HfConfig, *, activation: str, kv_heads: int, longest: int) -> dict[str, Any]:
    """Return the keys of every Gemma; `kv_heads` and `longest` are transformers' defaults for absent keys.

    GemmaConfig always splits the embedding over tensor-parallel ranks. Upstream refuses a vocabulary that does not
    divide; we pad it, as TensorRT-LLM's embedding and head expect.
    """
    sizes = required(hf, "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    _refuse_variants(hf)
    require_whole_heads(hf)
    head_size = hf.get("head_dim") or _HEAD_SIZE
    return {
        **sizes,
        "num_key_value_heads": hf.get("num_key_value_heads") or kv_heads,
        "head_size": head_size,
        "hidden_act": activation,
        "norm_epsilon": hf.get("rms_norm_eps", 1e-6),
        "position_embedding_type": "rope_gpt_neox",
        "max_position_embeddings": hf.get("max_position_embeddings", longest),
        "rotary_embedding_dim": head_size,
        "attn_bias": False,
        "mlp_bias": False,
        "use_parallel_embedding": True,
    }


def _refuse_variants(hf: HfConfig) -> None:
    for key in ("attention_bias", "use_bidirectional_attention"):
        if hf.get(key):
            raise UnsupportedModelError(f"This Gemma sets {key}, which a TensorRT-LLM checkpoint cannot express.")
    for key in ("hidden_act", "hidden_activation"):
        if (hf.get(key) or _ACTIVATIONS[0]) not in _ACTIVATIONS:
            raise UnsupportedModelError(
                f"Activation {hf[key]!r} is not supported; supported: {', '.join(_ACTIVATIONS)}."
            )


def names(config: CheckpointConfig) -> SourceNames:
    """Return the names of the source tensors.

    The checkpoint stores 1 + weight of the norms, so that TensorRT-LLM's plain RMS norm applies.
    """
    del config
    return replace(llama.NAMES, norm_offset=1.0)


def decoder(config: CheckpointConfig) -> Decoder:
    plain = llama.decoder(replace(config, hidden_act="gelu_pytorch_tanh"))
    return replace(plain, embedding_scale=math.sqrt(config.hidden_size))
