"""Hunyuan with experts (A13B): the dense Hunyuan's attention, and a shared expert beside the chosen ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import hunyuan_v1_dense, llama
from trtserve.checkpoint.architectures.base import Decoder, HfConfig, SourceNames, WrongConfigError, required
from trtserve.checkpoint.architectures.parts.expert_tensors import RENORMALIZED, expert_counts, softmax_experts
from trtserve.checkpoint.architectures.qwen2_moe import EXPERTS
from trtserve.errors import UnsupportedModelError


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return Hunyuan's config and the experts, whose numbers may be listed for each layer."""
    experts, chosen, shared = (
        _same(hf, key, default) for key, default in (("num_experts", 1), ("moe_topk", 1), ("num_shared_expert", 1))
    )
    inner = _same(hf, "moe_intermediate_size", required(hf, "intermediate_size")["intermediate_size"])
    if shared != 1 or inner != hf["intermediate_size"]:
        raise WrongConfigError(
            f"config.json has num_shared_expert = {shared}, moe_intermediate_size = {inner} and intermediate_size = "
            f"{hf['intermediate_size']}; expected one shared expert, and experts of that size."
        )
    counts = expert_counts({"num_experts": experts, "num_experts_per_tok": chosen}, "num_experts")
    return {
        **hunyuan_v1_dense.checkpoint_config(hf),
        **softmax_experts({"moe_intermediate_size": inner}, counts, RENORMALIZED, shared=1),
    }


def _same(hf: HfConfig, key: str, default: int) -> object:
    """Return a number that a list gives for each layer. Raises UnsupportedModelError where layers differ."""
    found = hf.get(key)
    listed = found if isinstance(found, list) else [default if found is None else found]
    if not listed or any(each != listed[0] for each in listed):
        raise UnsupportedModelError(f"config.json has {key} = {found!r:.80}; expected the same for all layers.")
    return listed[0]


def names(config: CheckpointConfig) -> SourceNames:
    experts = replace(EXPERTS, router="mlp.gate.wg", shared="mlp.shared_mlp")
    return replace(hunyuan_v1_dense.names(config), experts=experts)


def decoder(config: CheckpointConfig) -> Decoder:
    return replace(llama.expert_decoder(config), qk_norm="rotated")
