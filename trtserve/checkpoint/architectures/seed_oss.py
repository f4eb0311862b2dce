"""Seed-OSS: Llama whose queries, keys and values, and outputs of attention have biases each for itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import llama
from trtserve.checkpoint.architectures.base import HfConfig, Part, SourceNames

_DEFAULTS = {"max_position_embeddings": 524288, "num_key_value_heads": 8, "head_dim": 128, "attention_bias": True}


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return Llama's config and whether the outputs of attention have a bias."""
    config = llama.own_config(hf, "Seed-OSS", defaults=_DEFAULTS)
    return config | {"attention_out_bias": bool(hf.get("attention_out_bias", False))}


def names(config: CheckpointConfig) -> SourceNames:
    biases: dict[Part, bool] = {
        "qkv": config.own("attn_bias", False),
        "dense": config.own("attention_out_bias", False),
        **dict.fromkeys(("fc", "gate", "proj"), config.own("mlp_bias", False)),
    }
    return replace(llama.NAMES, biases=frozenset(part for part, biased in biases.items() if biased))
