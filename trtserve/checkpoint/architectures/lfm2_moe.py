"""LFM2 with experts: sigmoid routers with a correction, and an MLP in the first layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import lfm2
from trtserve.checkpoint.architectures.base import Decoder, ExpertNames, HfConfig, SourceNames, superset
from trtserve.checkpoint.architectures.parts.expert_tensors import deepseek_experts, experts_of

_EXPERTS = ExpertNames(
    router="feed_forward.gate",
    gate="feed_forward.experts.{}.w1",
    up="feed_forward.experts.{}.w3",
    down="feed_forward.experts.{}.w2",
)
# transformers' defaults for absent keys.
_DEFAULTS: dict[str, Any] = {
    "num_dense_layers": 2,
    "use_expert_bias": True,
    "num_experts_per_tok": 4,
    "num_experts": 32,
    "moe_intermediate_size": 1792,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
}


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return LFM2's config, whose MLPs have their width as it is, and the experts."""
    hf = {**_DEFAULTS, **hf, "block_auto_adjust_ff_dim": False}
    as_deepseek = {
        "n_routed_experts": hf["num_experts"],
        "first_k_dense_replace": hf["num_dense_layers"],
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 0,
    }
    plain = lfm2.checkpoint_config(hf)
    return {
        **plain,
        **deepseek_experts({**hf, **as_deepseek}),
        "hidden_act": "swiglu",
        "use_expert_bias": bool(hf["use_expert_bias"]),
        **superset(*plain["superset"], "sigmoid routers"),
    }


def names(config: CheckpointConfig) -> SourceNames:
    correction = "feed_forward.expert_bias" if config.own("use_expert_bias", True) else None
    return replace(lfm2.names(config), experts=replace(_EXPERTS, correction=correction))


def decoder(config: CheckpointConfig) -> Decoder:
    return replace(lfm2.decoder(replace(config, hidden_act="silu")), mlp="experts", experts=experts_of(config))
