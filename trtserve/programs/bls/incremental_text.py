"""The text of a growing list of token ids, in pieces of complete characters that join to the full text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[list[int]]], list[str]]

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class IncrementalText:
    """The text of one sequence, piece by piece.

    `decode` turns rows of ids into texts. A piece is the difference between two decodings of a short window: the ids
    of the last piece, and the same followed by the new ids. A window whose text ends in U+FFFD may end inside a
    character, so its piece is held back until the character is complete, or until `finish`.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._context: list[int] = []
        self._fresh: list[int] = []

    def add(self, ids: Sequence[int]) -> str:
        """Return the text that `ids` complete, or "" when they end inside a character."""
        self._fresh += ids
        return self._piece(complete_only=True)

    def finish(self) -> str:
        """Return what was held back."""
        return self._piece(complete_only=False)

    def _piece(self, *, complete_only: bool) -> str:
        if not self._fresh:
            return ""
        window = self._context + self._fresh
        known, text = self._decode([self._context, window]) if self._context else ("", self._decode([window])[0])
        if complete_only and text.endswith(_REPLACEMENT):
            return ""
        self._context, self._fresh = self._fresh, []
        return text[len(known) :]


class AccumulatedText:
    """The text so far each time, as with the parameter accumulate_tokens."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._sent = ""

    def add(self, ids: Sequence[int]) -> str:
        """Return the text of all ids so far, without an incomplete character at the end."""
        self._ids += ids
        self._sent = self._decode([self._ids])[0].rstrip(_REPLACEMENT)
        return self._sent

    def finish(self) -> str:
        """Return the text of all ids, or "" when it was sent already."""
        text = self._decode([self._ids])[0]
        return "" if text == self._sent else text


def common_length(first: Sequence[object], second: Sequence[object]) -> int:
    """Return how many items at the beginning of both are the same."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(first), len(second)))
