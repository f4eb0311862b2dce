"""Sizes of a decoder, from the checkpoint's `config.json`."""

from __future__ import annotations

from dataclasses import dataclass

from trtserve.artifacts.checkpoint_config import CheckpointConfig


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
    def of(cls, config: CheckpointConfig) -> Sizes:
        """Return the sizes in a checkpoint's config."""
        return cls(
            vocab=config.vocab_size,
            hidden=config.hidden_size,
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head=config.head_size,
            epsilon=config.norm_epsilon,
        )
