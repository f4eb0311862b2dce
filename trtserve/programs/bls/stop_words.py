"""Stop words matched on text: a text ends after the first one, wherever tokens and pieces are split."""

from __future__ import annotations

from collections.abc import Sequence


class StopWords:
    """The words of one batch row; empty words are ignored."""

    def __init__(self, words: Sequence[str] = ()) -> None:
        self._words = tuple(word for word in words if word)
        self.longest = max(map(len, self._words), default=0)

    def __bool__(self) -> bool:
        return bool(self._words)

    def end(self, text: str, start: int = 0) -> int | None:
        """Return the index after the word that is completed first in `text[start:]`, or None without a word."""
        ends = [at + len(word) for word in self._words if (at := text.find(word, start)) >= 0]
        return min(ends, default=None)


class StoppedText:
    """Pieces of a growing text, cut after the first stop word; later pieces are empty."""

    def __init__(self, words: StopWords) -> None:
        self._words = words
        self._tail = ""
        self.stopped = False

    def add(self, piece: str) -> str:
        """Return the part of the next piece that belongs to the text."""
        if self.stopped:
            return ""
        if not self._words:
            return piece
        window = self._tail + piece
        end = self._words.end(window)
        if end is None:
            # A word may begin in this piece and end in a later one.
            self._tail = window[max(0, len(window) - self._words.longest + 1) :] if self._words.longest > 1 else ""
            return piece
        self.stopped = True
        return piece[: end - len(self._tail)]
