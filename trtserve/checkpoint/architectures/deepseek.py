"""DeepSeek: V2, V3 and R1, Kimi K2, and GLM-4.7-Flash, which is built the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures.base import Decoder, HfConfig, SourceNames, WrongConfigError, superset
from trtserve.checkpoint.architectures.parts.expert_tensors import DEEPSEEK_EXPERTS, deepseek_experts, experts_of
from trtserve.checkpoint.architectures.parts.latent import latent_config, latent_decoder, latent_names
from trtserve.errors import UnsupportedModelError

# DeepSeek V2 and V2-Lite: latent attention (MLA), routers with a softmax, shared experts.

_DEEPSEEK_V2: dict[str, Any] = {"n_shared_experts": 2, "first_k_dense_replace": 0, "max_position_embeddings": 2048}
_GROUPS = {"greedy": False, "group_limited_greedy": True}


def deepseek_v2_checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return the sizes, the latent attention and the experts, whose scores transformers never scales to sum to 1."""
    hf = {**_DEEPSEEK_V2, **hf}
    method, scores = hf.get("topk_method") or "greedy", hf.get("scoring_func", "softmax")
    if method not in _GROUPS or scores != "softmax" or hf.get("norm_topk_prob"):
        raise WrongConfigError(
            f"config.json has topk_method = {method!r}, scoring_func = {scores!r} and norm_topk_prob = "
            f"{hf.get('norm_topk_prob', False)}; expected {' or '.join(_GROUPS)}, softmax and false."
        )
    if hf.get("mlp_bias"):
        raise UnsupportedModelError("config.json has mlp_bias = true; expected a DeepSeek V2 without these biases.")
    groups = {} if _GROUPS[method] else {"n_group": 1, "topk_group": 1}
    common = latent_config({**hf, "rope_interleave": True})
    experts = deepseek_experts({**hf, **groups, "norm_topk_prob": False, "scoring_func": "sigmoid"})
    return {**common, **experts, "scoring_func": "softmax"}


def deepseek_v2_names(config: CheckpointConfig) -> SourceNames:
    return replace(latent_names(config), experts=replace(DEEPSEEK_EXPERTS, correction=None))


def deepseek_v2_decoder(config: CheckpointConfig) -> Decoder:
    """Describe the decoder; a group of experts is as good as its best one."""
    return replace(latent_decoder(config), experts=replace(experts_of(config), group_scores=1))


# DeepSeek V3 and R1, Kimi K2, GLM-4.7-Flash: latent attention (MLA), sigmoid routers that choose among groups.

# transformers' defaults for absent keys.
_DEEPSEEK_V3: dict[str, Any] = {
    "n_shared_experts": 1, "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8,
    "first_k_dense_replace": 3, "max_position_embeddings": 4096,
}  # fmt: skip
_GLM: dict[str, Any] = {
    **_DEEPSEEK_V3,
    "routed_scaling_factor": 1.8,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 202752,
    "rms_norm_eps": 1e-5,
}


def deepseek_v3_checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return the sizes, the latent attention and the experts."""
    hf = {**(_GLM if hf.get("model_type") == "glm4_moe_lite" else _DEEPSEEK_V3), **hf}
    if hf.get("model_type") == "glm4_moe_lite":
        hf["first_k_dense_replace"] = _dense_first(hf)
    common = latent_config(hf)
    return {**common, **deepseek_experts(hf), **superset(*common["superset"], "sigmoid routers")}


def _dense_first(hf: HfConfig) -> int:
    """Return how many layers of a GLM have no experts; transformers reads `mlp_layer_types` alone.

    Raises UnsupportedModelError when they are not the first ones.
    """
    kinds, layers = hf.get("mlp_layer_types"), hf["num_hidden_layers"]
    if kinds is None:
        return 1
    dense = kinds.count("dense") if isinstance(kinds, list) else 0
    if kinds != ["dense"] * dense + ["sparse"] * (layers - dense):
        raise WrongConfigError(
            f"config.json has mlp_layer_types = {kinds!r}; expected {layers} layers, first `dense`, then `sparse`."
        )
    return dense


def deepseek_v3_names(config: CheckpointConfig) -> SourceNames:
    """Return the names of the source tensors; the layer after the last one predicts more tokens and is not used."""
    plain = latent_names(config)
    unused = (*plain.unused, f"model.layers.{config.num_hidden_layers}.*")
    return replace(plain, experts=DEEPSEEK_EXPERTS, unused=unused)


def deepseek_v3_decoder(config: CheckpointConfig) -> Decoder:
    return latent_decoder(config)
