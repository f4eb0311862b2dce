"""MiniMax M2: sigmoid routers with corrections, norms over all heads of queries and keys, half of each head rotated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import llama
from trtserve.checkpoint.architectures.base import Decoder, HfConfig, SourceNames, moe_object, required, superset
from trtserve.checkpoint.architectures.mixtral import EXPERTS
from trtserve.checkpoint.architectures.parts.expert_tensors import RENORMALIZED, expert_counts
from trtserve.checkpoint.architectures.qwen3 import HEAD_NORMS

# transformers' defaults for absent keys that differ from Llama's.
_DEFAULTS: dict[str, Any] = {
    "head_dim": 128,
    "num_key_value_heads": 8,
    "rope_theta": 5e6,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
}


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return Llama's sizes and the experts."""
    hf = {**_DEFAULTS, **hf}
    if hf.get("rotary_dim") is not None:  # what published models say instead of a fraction
        required(hf, "head_dim")
        hf = {"partial_rotary_factor": hf["rotary_dim"] / hf["head_dim"], **hf}
    experts, chosen = expert_counts(hf, "num_local_experts")
    common = llama.common_config(hf, longest=196608, partial=True)
    return {
        **common,
        "moe": moe_object(num_experts=experts, top_k=chosen, normalization_mode=RENORMALIZED),
        "scoring_func": "sigmoid",
        **superset(*common.get("superset", ()), "sigmoid routers", "norms over all heads"),
    }


def names(config: CheckpointConfig) -> SourceNames:
    del config
    correction = "block_sparse_moe.e_score_correction_bias"
    return replace(
        llama.NAMES, head_norms=HEAD_NORMS, head_norm_weights="row", experts=replace(EXPERTS, correction=correction)
    )


def decoder(config: CheckpointConfig) -> Decoder:
    return replace(llama.expert_decoder(config), qk_norm="all")
