"""Gemma 2: Gemma with norms on both sides of each block, soft-caps, and a window in every other layer."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import gemma
from trtserve.checkpoint.architectures.base import Decoder, HfConfig, SourceNames, superset
from trtserve.checkpoint.architectures.gemma import gemma_config
from trtserve.checkpoint.architectures.parts.positions import (
    beyond_rotary,
    layer_kinds,
    rotary,
    window_keys,
    windows_of,
)

_FEEDFORWARD_NORMS = ("pre_feedforward_layernorm", "post_feedforward_layernorm")


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return the family's part of the checkpoint's config: keys of TensorRT-LLM 1.2's GemmaConfig and the windows."""
    base, scaling = rotary(hf)
    kinds = layer_kinds(hf) or ["sliding_attention", "full_attention"]
    return {
        **gemma_config(hf, activation=hf.get("hidden_act", "gelu_pytorch_tanh"), kv_heads=4, longest=8192),
        "rotary_base": base,
        "rotary_scaling": scaling,
        **superset(*beyond_rotary(scaling)),
        "inter_layernorms": True,
        "query_pre_attn_scalar": hf.get("query_pre_attn_scalar", 256),
        "final_logit_softcapping": hf.get("final_logit_softcapping", 30.0),
        "attn_logit_softcapping": hf.get("attn_logit_softcapping", 50.0),
        **window_keys(windows_of(kinds, hf.get("sliding_window", 4096))),
    }


def names(config: CheckpointConfig) -> SourceNames:
    plain = gemma.names(config)
    return replace(plain, norms={**plain.norms, **{name: name for name in _FEEDFORWARD_NORMS}})


def decoder(config: CheckpointConfig) -> Decoder:
    return replace(
        gemma.decoder(config),
        block="sandwich",
        attention_scale=1 / math.sqrt(config.own("query_pre_attn_scalar", float(config.head_size))),
        attention_softcap=config.own_or_none("attn_logit_softcapping", float),
        logits_softcap=config.own_or_none("final_logit_softcapping", float),
    )
