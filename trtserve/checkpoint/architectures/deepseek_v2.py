"""DeepSeek V2 and V2-Lite: latent attention (MLA), routers with a softmax, shared experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures.base import Decoder, HfConfig, SourceNames, WrongConfigError
from trtserve.checkpoint.architectures.glm4_moe import EXPERTS
from trtserve.checkpoint.architectures.parts.expert_tensors import deepseek_experts, experts_of
from trtserve.checkpoint.architectures.parts.latent import latent_config, latent_decoder, latent_names

_DEFAULTS: dict[str, Any] = {"n_shared_experts": 2, "first_k_dense_replace": 0, "max_position_embeddings": 2048}
_GROUPS = {"greedy": False, "group_limited_greedy": True}


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return the sizes, the latent attention and the experts, whose scores transformers never scales to sum to 1."""
    hf = {**_DEFAULTS, **hf}
    method, scores = hf.get("topk_method") or "greedy", hf.get("scoring_func", "softmax")
    if method not in _GROUPS or scores != "softmax" or hf.get("norm_topk_prob"):
        raise WrongConfigError(
            f"config.json has topk_method = {method!r}, scoring_func = {scores!r} and norm_topk_prob = "
            f"{hf.get('norm_topk_prob', False)}; expected {' or '.join(_GROUPS)}, softmax and false."
        )
    groups = {} if _GROUPS[method] else {"n_group": 1, "topk_group": 1}
    common = latent_config({**hf, "rope_interleave": True})
    experts = deepseek_experts({**hf, **groups, "norm_topk_prob": False, "scoring_func": "sigmoid"})
    return {**common, **experts, "scoring_func": "softmax"}


def names(config: CheckpointConfig) -> SourceNames:
    return replace(latent_names(config), experts=replace(EXPERTS, correction=None))


def decoder(config: CheckpointConfig) -> Decoder:
    """Describe the decoder; a group of experts is as good as its best one."""
    return replace(latent_decoder(config), experts=replace(experts_of(config), group_scores=1))
