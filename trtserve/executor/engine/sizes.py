"""Sizes of a decoder, from the checkpoint's `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a whole decoder, not of one rank."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    epsilon: float

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Sizes:
        """Read the sizes, with TensorRT-LLM's defaults for keys that older releases omit."""
        heads = int(config["num_attention_heads"])
        hidden = int(config["hidden_size"])
        return cls(
            vocab=int(config["vocab_size"]),
            hidden=hidden,
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head=int(config.get("head_size") or hidden // heads),
            epsilon=float(config.get("norm_epsilon", 1e-5)),
        )
