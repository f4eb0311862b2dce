"""What Qwen2-MoE and Qwen3-MoE have in common: the names of their experts, and the keys of their configs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trtserve.architectures.activations import require_activation
from trtserve.architectures.base import HfConfig, moe_object, required
from trtserve.architectures.expert_tensors import NOT_NORMALIZED, RENORMALIZED, ExpertNames, expert_counts
from trtserve.architectures.qwen2 import qwen_config
from trtserve.errors import UnsupportedModelError

NAMES = ExpertNames(
    router="mlp.gate",
    gate="mlp.experts.{}.gate_proj",
    up="mlp.experts.{}.up_proj",
    down="mlp.experts.{}.down_proj",
)


def qwen_moe_config(
    hf: HfConfig, *, qwen_type: str, attn_bias: bool, shared_size: int, windows: Sequence[int | None]
) -> dict[str, Any]:
    """The config of a Qwen with experts; `shared_size` is the width of the shared expert, 0 without one.

    `normalization_mode` follows the model's `norm_topk_prob`. Upstream writes 0 whatever the model says, so that the
    experts of a Qwen3-MoE, which normalises, come out too weak (decision 0009).
    """
    _require_experts_everywhere(hf)
    require_activation(hf.get("hidden_act", "silu"), "silu")
    experts, chosen = expert_counts(hf, "num_experts")
    mode = RENORMALIZED if hf.get("norm_topk_prob") else NOT_NORMALIZED
    return {
        **qwen_config(hf, qwen_type=qwen_type, attn_bias=attn_bias, windows=windows),
        "hidden_act": "swiglu",
        "moe": moe_object(num_experts=experts, top_k=chosen, normalization_mode=mode, shared_size=shared_size),
        "moe_intermediate_size": required(hf, "moe_intermediate_size")["moe_intermediate_size"],
        "moe_shared_expert_intermediate_size": shared_size,
    }


def _require_experts_everywhere(hf: HfConfig) -> None:
    """TensorRT-LLM's Qwen has experts in all layers or in none."""
    dense, step = hf.get("mlp_only_layers") or [], hf.get("decoder_sparse_step", 1)
    if dense or step != 1:
        raise UnsupportedModelError(
            f"config.json gives mlp_only_layers = {dense} and decoder_sparse_step = {step}: some layers have no "
            "experts, which a TensorRT-LLM checkpoint cannot express.",
        )
