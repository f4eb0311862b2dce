"""How TensorRT-LLM writes in an engine's config.json what its flags call by name.

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
"""`speculative_decoding_mode` is a number with one bit for each: 1 for the first, 2, 4, 8 …"""


def speculative_mode(number: object) -> str | None:
    """The name of a speculative decoding mode; None for what is no number with one of these bits."""
    if isinstance(number, int) and number > 0 and number.bit_length() <= len(SPECULATIVE_MODES):
        return SPECULATIVE_MODES[number.bit_length() - 1]
    return None
