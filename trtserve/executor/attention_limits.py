"""What the paged attention of OpenVINO cannot calculate; told before any graph is built, so without importing it."""

from __future__ import annotations

from trtserve.architectures.base import Decoder
from trtserve.errors import UnsupportedModelError


def require_paged_attention(decoder: Decoder) -> None:
    """UnsupportedModelError that names the part of `decoder` for which the operator has no place."""
    if decoder.attention_softcap is not None:
        raise UnsupportedModelError(
            f"The model caps its attention scores at {decoder.attention_softcap:g} (attention soft-cap, "
            "attn_logit_softcapping), which OpenVINO's paged attention cannot do.",
            hint="The checkpoint itself is complete: trtllm-build makes an engine for NVIDIA GPUs of it.",
        )
