"""Speculative decoding modes as an engine's config.json encodes them.

Source: SpeculativeDecodingMode in tensorrt_llm/models/modeling_utils.py of 0.12 … 1.2.
"""

from __future__ import annotations

SPECULATIVE_MODES = (
    "none",
    "draft_tokens_external",
    "medusa",
    "lookahead_decoding",
    "explicit_draft_tokens",
    "eagle",
)
"""`speculative_decoding_mode` has one bit for each: 1 for the first, then 2, 4, 8 …"""


def speculative_mode(number: object) -> str | None:
    """Return the name of a mode, or None for a value without one of these bits."""
    if isinstance(number, int) and number > 0 and number.bit_length() <= len(SPECULATIVE_MODES):
        return SPECULATIVE_MODES[number.bit_length() - 1]
    return None
