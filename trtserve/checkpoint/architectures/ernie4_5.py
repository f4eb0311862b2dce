"""ERNIE 4.5 (dense): Llama that rotates neighbouring pairs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import llama
from trtserve.checkpoint.architectures.base import Decoder, HfConfig

_DEFAULTS = {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return Llama's config; `use_bias` is for all matrices."""
    biased = bool(hf.get("use_bias"))
    ernie = {**hf, "attention_bias": biased, "mlp_bias": biased}
    return llama.own_config(ernie, "ERNIE 4.5", defaults=_DEFAULTS)


def decoder(config: CheckpointConfig) -> Decoder:
    return replace(llama.decoder(config), rope_interleaved=True)
