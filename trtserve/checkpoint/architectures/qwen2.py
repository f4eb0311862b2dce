"""Qwen2 and Qwen2.5: Llama with query, key and value biases, and optional windows from some layer on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import llama
from trtserve.checkpoint.architectures.base import Decoder, HfConfig, Target, dense_moe, require_activation, required
from trtserve.checkpoint.architectures.llama import unused
from trtserve.checkpoint.architectures.parts.llama_tensors import Parts, llama_targets
from trtserve.checkpoint.architectures.parts.positions import (
    layer_kinds,
    require_whole_heads,
    rotary,
    window_keys,
    windows_of,
)

__all__ = ["BASE_PREFIX", "TIED", "checkpoint_config", "decoder", "targets", "unused"]

BASE_PREFIX = "model."
TIED = False


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return the family's part of the checkpoint's config: keys of TensorRT-LLM 1.2's QWenConfig and the windows."""
    return qwen_config(hf, qwen_type="qwen2", attn_bias=True)


def qwen_config(
    hf: HfConfig, *, qwen_type: str, attn_bias: bool, windows: Sequence[int | None] | None = None
) -> dict[str, Any]:
    """Return the config of any dense Qwen; absent keys get the defaults of transformers' Qwen2Config.

    `windows` replaces the layers' windows in families with a rule of their own.
    """
    sizes = required(hf, "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    heads = sizes["num_attention_heads"]
    head_size = hf.get("head_dim") or sizes["hidden_size"] // heads
    base, scaling = rotary(hf)
    require_whole_heads(hf)
    require_activation(hf.get("hidden_act", "silu"))
    return {
        **sizes,
        "num_key_value_heads": hf.get("num_key_value_heads") or heads,
        "head_size": head_size,
        "hidden_act": hf.get("hidden_act", "silu"),
        "norm_epsilon": hf.get("rms_norm_eps", 1e-6),
        "position_embedding_type": "rope_gpt_neox",
        "max_position_embeddings": hf.get("max_position_embeddings", 32768),
        "rotary_embedding_dim": head_size,
        "rotary_base": base,
        "rotary_scaling": scaling,
        "attn_bias": attn_bias,
        "qwen_type": qwen_type,
        "tie_word_embeddings": bool(hf.get("tie_word_embeddings", TIED)),
        **_constants(),
        **window_keys(_windows(hf) if windows is None else windows),
    }


def _constants() -> dict[str, Any]:
    """Return the QWenConfig keys that are equal for all dense models."""
    return {
        "mlp_bias": False,
        "disable_weight_only_quant_plugin": False,
        "num_labels": 1,
        "use_logn_attn": False,
        "seq_length": 8192,
        "moe": dense_moe(normalization_mode=0),
        "moe_intermediate_size": 0,
        "moe_shared_expert_intermediate_size": 0,
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
    }


def _windows(hf: HfConfig) -> list[int | None]:
    """Return the layers' windows: from layer `max_window_layers` on, unless `layer_types` overrides it."""
    window = hf.get("sliding_window", 4096) if hf.get("use_sliding_window") else None
    first = hf.get("max_window_layers", 28)
    kinds = layer_kinds(hf) or [
        "sliding_attention" if layer >= first else "full_attention" for layer in range(hf["num_hidden_layers"])
    ]
    return windows_of(kinds, window)


def targets(config: CheckpointConfig) -> list[Target]:
    """Return every tensor of the unsharded checkpoint, in file order."""
    return llama_targets(config, Parts(qkv_bias=True))


def decoder(config: CheckpointConfig) -> Decoder:
    """Describe the decoder from the checkpoint's config."""
    return replace(llama.decoder(config), attention_bias=True, dense_bias=False, mlp_bias=False)
