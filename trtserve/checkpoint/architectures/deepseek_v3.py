"""DeepSeek V3 and R1, Kimi K2, GLM-4.7-Flash: latent attention (MLA), sigmoid routers that choose among groups."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures.base import Decoder, HfConfig, SourceNames, WrongConfigError, superset
from trtserve.checkpoint.architectures.glm4_moe import EXPERTS
from trtserve.checkpoint.architectures.parts.expert_tensors import deepseek_experts
from trtserve.checkpoint.architectures.parts.latent import latent_config, latent_decoder, latent_names

# transformers' defaults for absent keys.
_DEFAULTS: dict[str, Any] = {
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "max_position_embeddings": 4096,
}
_GLM: dict[str, Any] = {
    **_DEFAULTS,
    "routed_scaling_factor": 1.8,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 202752,
    "rms_norm_eps": 1e-5,
}


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return the sizes, the latent attention and the experts."""
    hf = {**(_GLM if hf.get("model_type") == "glm4_moe_lite" else _DEFAULTS), **hf}
    if hf.get("model_type") == "glm4_moe_lite":
        hf["first_k_dense_replace"] = _dense_first(hf)
    common = latent_config(hf)
    return {
        **common,
        **deepseek_experts(hf),
        **superset(*common["superset"], "sigmoid routers"),
    }


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


def names(config: CheckpointConfig) -> SourceNames:
    """Return the names of the source tensors; the layer after the last one predicts more tokens and is not used."""
    plain = latent_names(config)
    unused = (*plain.unused, f"model.layers.{config.num_hidden_layers}.*")
    return replace(plain, experts=EXPERTS, unused=unused)


def decoder(config: CheckpointConfig) -> Decoder:
    return latent_decoder(config)
