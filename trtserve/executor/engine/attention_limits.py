"""Windows of the layers, and what paged attention in OpenVINO cannot compute (without importing it)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trtserve.checkpoint.architectures.base import Decoder
from trtserve.errors import UnsupportedModelError


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
