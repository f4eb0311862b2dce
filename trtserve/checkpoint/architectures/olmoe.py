"""OLMoE and FlexOlmo: Llama with experts, and norms over all heads; FlexOlmo has OLMo 2's norms after each part."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import llama
from trtserve.checkpoint.architectures.base import Block, Decoder, HfConfig, SourceNames, moe_object, superset
from trtserve.checkpoint.architectures.olmo2 import BRANCH_NORMS
from trtserve.checkpoint.architectures.parts.expert_tensors import NOT_NORMALIZED, RENORMALIZED, expert_counts
from trtserve.checkpoint.architectures.qwen2_moe import EXPERTS
from trtserve.checkpoint.architectures.qwen3 import HEAD_NORMS
from trtserve.errors import UnsupportedModelError

# transformers' defaults for absent keys.
_OLMOE = {"num_experts": 64, "num_experts_per_tok": 8, "rms_norm_eps": 1e-5}
_FLEX = {"num_experts": 7, "num_experts_per_tok": 5, "rms_norm_eps": 1e-6, "rope_theta": 500000.0}


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return Llama's sizes and the experts."""
    if hf.get("clip_qkv") is not None:
        raise UnsupportedModelError(f"config.json has clip_qkv = {hf['clip_qkv']}: clipped queries are not supported.")
    flex = hf["architectures"][0] == "FlexOlmoForCausalLM"
    hf = {**(_FLEX if flex else _OLMOE), **hf}
    experts, chosen = expert_counts(hf, "num_experts")
    mode = RENORMALIZED if hf.get("norm_topk_prob") else NOT_NORMALIZED
    common = llama.common_config(hf, longest=4096)
    return {
        **common,
        "moe": moe_object(num_experts=experts, top_k=chosen, normalization_mode=mode),
        "attn_bias": bool(hf.get("attention_bias", False)),
        "post_norms": flex,
        **superset(*common.get("superset", ()), "norms over all heads"),
    }


def names(config: CheckpointConfig) -> SourceNames:
    plain = replace(llama.names(config), head_norms=HEAD_NORMS, head_norm_weights="row", experts=EXPERTS)
    return replace(plain, norms=BRANCH_NORMS) if config.own("post_norms", False) else plain


def decoder(config: CheckpointConfig) -> Decoder:
    block: Block = "branch" if config.own("post_norms", False) else "sequential"
    return replace(llama.expert_decoder(config), qk_norm="all", block=block)
