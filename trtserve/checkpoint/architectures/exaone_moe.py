"""K-EXAONE: EXAONE 4's attention with norms before it, and DeepSeek V3's experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import exaone4, llama
from trtserve.checkpoint.architectures.base import Decoder, HfConfig, SourceNames
from trtserve.checkpoint.architectures.glm4_moe import EXPERTS
from trtserve.checkpoint.architectures.parts.expert_tensors import deepseek_experts, layers_without_experts
from trtserve.checkpoint.architectures.qwen3 import HEAD_NORMS

# transformers' defaults for absent keys.
_DEFAULTS: dict[str, Any] = {
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "moe_intermediate_size": 1024,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
}


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return EXAONE 4's config and the experts; `mlp_layer_types` says which layers have them."""
    hf = {**_DEFAULTS, **hf}
    experts = deepseek_experts(
        {**hf, "n_routed_experts": hf["num_experts"], "n_shared_experts": hf["num_shared_experts"]}
    )
    return {**exaone4.checkpoint_config(hf), **experts, **layers_without_experts(hf)}


def names(config: CheckpointConfig) -> SourceNames:
    experts = replace(EXPERTS, correction="mlp.e_score_correction_bias")
    unused = (*llama.NAMES.unused, "mtp.*")
    return replace(llama.names(config), head_norms=HEAD_NORMS, experts=experts, unused=unused)


def decoder(config: CheckpointConfig) -> Decoder:
    return replace(llama.expert_decoder(config), qk_norm="heads")
