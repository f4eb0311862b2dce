"""Qwen2 and Qwen2.5: Llama with query, key and value biases, and optional windows from some layer on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import llama
from trtserve.checkpoint.architectures.base import HfConfig, SourceNames, moe_object
from trtserve.checkpoint.architectures.parts.positions import attention_kinds, window_keys, windows_of

# QWenConfig's keys that are equal for all dense models.
_CONSTANTS: dict[str, Any] = {
    "mlp_bias": False,
    "disable_weight_only_quant_plugin": False,
    "num_labels": 1,
    "use_logn_attn": False,
    "seq_length": 8192,
    "moe": moe_object(normalization_mode=0),
    "moe_intermediate_size": 0,
    "moe_shared_expert_intermediate_size": 0,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return the family's part of the checkpoint's config: keys of TensorRT-LLM 1.2's QWenConfig and the windows."""
    return qwen_config(hf, qwen_type="qwen2", attn_bias=True)


def qwen_config(
    hf: HfConfig, *, qwen_type: str, attn_bias: bool, windows: Sequence[int | None] | None = None
) -> dict[str, Any]:
    """Return the config of any dense Qwen; absent keys get the defaults of transformers' Qwen2Config.

    `windows` replaces the layers' windows in families with a rule of their own.
    """
    return {
        **llama.common_config(hf, longest=32768),
        "attn_bias": attn_bias,
        "qwen_type": qwen_type,
        **_CONSTANTS,
        **window_keys(_windows(hf) if windows is None else windows),
    }


def _windows(hf: HfConfig) -> list[int | None]:
    """Return the layers' windows: from layer `max_window_layers` on, unless `layer_types` overrides it."""
    window = hf.get("sliding_window", 4096) if hf.get("use_sliding_window") else None
    first = hf.get("max_window_layers", 28)
    return windows_of(attention_kinds(hf, lambda layer: layer >= first), window)


def names(config: CheckpointConfig) -> SourceNames:
    del config
    return replace(llama.NAMES, biases=frozenset({"qkv"}))
