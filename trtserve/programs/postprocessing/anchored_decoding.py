"""Decode pieces of a text so that they join: a leading space must survive."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from ..shared.tokenizer import decode_function, encode

_REMEMBERED = 16384


class AnchoredDecoder:
    """Decodes rows of ids after an anchor letter, which is cut off again.

    Many tokenizers drop the space before the first word. A row that begins with a special token (BOS) is the
    beginning of a text and is decoded without an anchor; any other row may continue a text, so it keeps its space.
    """

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool) -> None:
        self._decode = decode_function(tokenizer, skip_special_tokens=skip_special_tokens)
        self._special_ids = frozenset(tokenizer.all_special_ids)
        self._anchor = encode(tokenizer, "a", special=False)
        self._anchor_text = self._decode(self._anchor)
        self._token = lru_cache(maxsize=_REMEMBERED)(lambda token: self._row([token]))

    def decode(self, rows: Sequence[list[int]]) -> list[str]:
        """Return the text of each row. Texts of single tokens, which streams consist of, are remembered."""
        return [self._token(ids[0]) if len(ids) == 1 else self._row(ids) for ids in rows]

    def _row(self, ids: list[int]) -> str:
        if self._is_beginning(ids):
            return self._decode(ids)
        text = self._decode(self._anchor + ids)
        if text.startswith(self._anchor_text):
            return text[len(self._anchor_text) :]
        # The tokenizer joined the anchor with what follows, so it cannot be cut off: decode the row alone.
        return self._decode(ids)

    def _is_beginning(self, ids: list[int]) -> bool:
        return bool(ids) and ids[0] in self._special_ids
