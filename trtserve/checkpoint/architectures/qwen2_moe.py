"""Qwen2-MoE (also Qwen1.5-MoE): Qwen2 with experts instead of the MLP, plus a shared expert."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import llama
from trtserve.checkpoint.architectures.base import (
    ExpertNames,
    HfConfig,
    SourceNames,
    moe_object,
    require_activation,
    require_sizes,
    required,
    superset,
)
from trtserve.checkpoint.architectures.parts.expert_tensors import NOT_NORMALIZED, RENORMALIZED, expert_counts
from trtserve.checkpoint.architectures.parts.positions import attention_kinds, windows_of
from trtserve.checkpoint.architectures.qwen2 import qwen_config
from trtserve.errors import UnsupportedModelError

EXPERTS = ExpertNames(
    router="mlp.gate",
    gate="mlp.experts.{}.gate_proj",
    up="mlp.experts.{}.up_proj",
    down="mlp.experts.{}.down_proj",
)
decoder = llama.expert_decoder


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return the family's part of the checkpoint's config: keys of TensorRT-LLM 1.2's QWenConfig and the windows."""
    shared = required(hf, "shared_expert_intermediate_size")["shared_expert_intermediate_size"]
    return qwen_moe_config(
        hf,
        qwen_type="qwen2_moe",
        attn_bias=bool(hf.get("qkv_bias", True)),
        shared_size=shared,
        windows=_windows(hf),
    )


def qwen_moe_config(
    hf: HfConfig, *, qwen_type: str, attn_bias: bool, shared_size: int, windows: Sequence[int | None]
) -> dict[str, Any]:
    """Return the config of a Qwen with experts; `shared_size` is the shared expert's width, 0 without one.

    `normalization_mode` follows the model's `norm_topk_prob`. Upstream always writes 0, which makes the experts of a
    normalising Qwen3-MoE too weak (decision 0009).
    """
    dense = dense_layers(hf)
    require_activation(hf.get("hidden_act", "silu"), "silu")
    experts, chosen = expert_counts(hf, "num_experts")
    mode = RENORMALIZED if hf.get("norm_topk_prob") else NOT_NORMALIZED
    common = qwen_config(hf, qwen_type=qwen_type, attn_bias=attn_bias, windows=windows)
    return {
        **common,
        "hidden_act": "swiglu",
        "moe": moe_object(num_experts=experts, top_k=chosen, normalization_mode=mode, shared_size=shared_size),
        "moe_intermediate_size": required(hf, "moe_intermediate_size")["moe_intermediate_size"],
        "moe_shared_expert_intermediate_size": shared_size,
        **({"dense_layers": dense} if dense else {}),
        **superset(*common.get("superset", ()), *["layers without experts"] * bool(dense)),
    }


def dense_layers(hf: HfConfig) -> list[int]:
    """Return the layers that have no experts."""
    given, step = hf.get("mlp_only_layers") or [], hf.get("decoder_sparse_step", 1)
    require_sizes({"decoder_sparse_step": step}, "decoder_sparse_step")
    if not isinstance(given, list):
        raise UnsupportedModelError(f"config.json has mlp_only_layers = {given!r}; expected a list of layers.")
    return [layer for layer in range(hf["num_hidden_layers"]) if layer in given or (layer + 1) % step]


def _windows(hf: HfConfig) -> list[int | None]:
    """Return the windows: every other layer before `max_window_layers`, unless `layer_types` overrides it."""
    window = hf.get("sliding_window", 4096) if hf.get("use_sliding_window") else None
    last = hf.get("max_window_layers", 28)
    return windows_of(attention_kinds(hf, lambda layer: layer % 2 == 0 and layer < last), window)


def names(config: CheckpointConfig) -> SourceNames:
    return replace(
        llama.NAMES,
        biases=frozenset({"qkv"} if config.own("attn_bias", True) else ()),
        experts=replace(EXPERTS, shared="mlp.shared_expert"),
    )
