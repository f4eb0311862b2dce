"""Granite 3: Llama with factors for embeddings, attention, residuals and logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import llama
from trtserve.checkpoint.architectures.base import Decoder, HfConfig, require_numbers
from trtserve.checkpoint.architectures.llama import BASE_PREFIX, TIED, names

__all__ = ["BASE_PREFIX", "TIED", "checkpoint_config", "decoder", "names"]

_FACTORS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return Llama's config and the factors under transformers' names; logits are divided by `logits_scaling`."""
    require_numbers(hf, *_FACTORS)
    config = llama.own_config(hf, "Granite", defaults={})
    return config | {key: float(hf.get(key, 1.0)) for key in _FACTORS}


def decoder(config: CheckpointConfig) -> Decoder:
    return replace(
        llama.decoder(config),
        attention_scale=config.own("attention_multiplier", 1.0),
        embedding_scale=config.own("embedding_multiplier", 1.0),
        residual_scale=config.own("residual_multiplier", 1.0),
        logits_scale=1 / config.own("logits_scaling", 1.0),
    )
