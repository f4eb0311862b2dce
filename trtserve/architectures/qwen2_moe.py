"""Qwen2-MoE (also Qwen1.5-MoE): a Qwen2 with experts in place of the MLP, and one that all tokens share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trtserve.architectures import llama
from trtserve.architectures.base import CheckpointConfig, Decoder, HfConfig, Target, required
from trtserve.architectures.expert_tensors import ExpertNames, experts_of
from trtserve.architectures.llama import unused
from trtserve.architectures.llama_tensors import Parts, llama_targets
from trtserve.architectures.qwen_experts import NAMES, qwen_moe_config
from trtserve.architectures.windows import layer_kinds, windows_of

__all__ = ["BASE_PREFIX", "TIED", "checkpoint_config", "decoder", "targets", "unused"]

BASE_PREFIX = "model."
TIED = False

_NAMES: ExpertNames = replace(NAMES, shared="mlp.shared_expert")


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Family part of the checkpoint's config: keys of TensorRT-LLM 1.2's QWenConfig, and the windows."""
    shared = required(hf, "shared_expert_intermediate_size")["shared_expert_intermediate_size"]
    return qwen_moe_config(
        hf,
        qwen_type="qwen2_moe",
        attn_bias=bool(hf.get("qkv_bias", True)),
        shared_size=shared,
        windows=_windows(hf),
    )


def _windows(hf: HfConfig) -> list[int | None]:
    """Windows of every other layer before `max_window_layers`, unless `layer_types` says otherwise."""
    window = hf.get("sliding_window", 4096) if hf.get("use_sliding_window") else None
    last = hf.get("max_window_layers", 28)
    kinds = layer_kinds(hf) or [
        "sliding_attention" if layer % 2 == 0 and layer < last else "full_attention"
        for layer in range(hf["num_hidden_layers"])
    ]
    return windows_of(kinds, window)


def targets(config: CheckpointConfig) -> list[Target]:
    """Every tensor of the checkpoint of the whole model, in file order."""
    return llama_targets(config, Parts(qkv_bias=bool(config.get("attn_bias", True)), experts=_NAMES))


def decoder(config: CheckpointConfig) -> Decoder:
    """What the decoder is made of."""
    bias = bool(config.get("attn_bias", True))
    plain = llama.decoder({**config, "hidden_act": "silu"})
    return replace(
        plain, mlp="experts", experts=experts_of(config), attention_bias=bias, dense_bias=False, mlp_bias=False
    )
