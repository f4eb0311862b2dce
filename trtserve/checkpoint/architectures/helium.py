"""Helium: Llama that rotates neighbouring pairs, with biases of queries, keys and values only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import ernie4_5, llama
from trtserve.checkpoint.architectures.base import HfConfig, SourceNames

_DEFAULTS = {"max_position_embeddings": 4096, "head_dim": 128, "rope_theta": 1e5, "rms_norm_eps": 1e-8}
decoder = ernie4_5.decoder


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return Llama's config."""
    return llama.own_config(hf, "Helium", defaults=_DEFAULTS)


def names(config: CheckpointConfig) -> SourceNames:
    plain = llama.names(config)
    return replace(plain, biases=plain.biases - {"dense"})
