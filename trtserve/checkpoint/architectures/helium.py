"""Helium: Llama that rotates neighbouring pairs, with biases of queries, keys and values only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import llama
from trtserve.checkpoint.architectures.base import HfConfig, SourceNames
from trtserve.checkpoint.architectures.ernie4_5 import decoder
from trtserve.checkpoint.architectures.llama import BASE_PREFIX, TIED

__all__ = ["BASE_PREFIX", "TIED", "checkpoint_config", "decoder", "names"]

_DEFAULTS = {"max_position_embeddings": 4096, "head_dim": 128, "rope_theta": 1e5, "rms_norm_eps": 1e-8}


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return Llama's config."""
    return llama.own_config(hf, "Helium", defaults=_DEFAULTS)


def names(config: CheckpointConfig) -> SourceNames:
    plain = llama.names(config)
    return replace(plain, biases=plain.biases - {"dense"})
