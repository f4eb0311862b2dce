"""Sizes of a decoder and windows of its layers, and what OpenVINO's paged attention cannot compute."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures.base import Decoder
from trtserve.errors import UnsupportedModelError


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


def require_paged_attention(decoder: Decoder) -> None:
    """Raise UnsupportedModelError that names what `decoder` needs and the operator does not support."""
    if decoder.attention_softcap is not None:
        raise UnsupportedModelError(
            f"The model caps its attention scores at {decoder.attention_softcap:g} (attention soft-cap, "
            "attn_logit_softcapping), which OpenVINO's paged attention does not support.",
            hint="The checkpoint itself is complete: --runtime torch and tensorrt_llm build engines for GPUs from it.",
        )


def layer_windows(own: Sequence[int | None], asked: Sequence[int] | None, longest: int) -> list[int | None]:
    """Return the windows to repeat over the layers: the shorter one of the model's own and the requested one.

    A window as long as the longest sequence becomes None, which leaves the graph unchanged.
    """
    both: tuple[Sequence[int | None], ...] = (own or (None,), asked or (None,))
    repeated = [[turn[layer % len(turn)] for turn in both] for layer in range(math.lcm(*map(len, both)))]
    shortest = [min((window for window in pair if window is not None), default=longest) for pair in repeated]
    return [window if window < longest else None for window in shortest]
