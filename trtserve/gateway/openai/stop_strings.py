"""Stop strings: the text ends before the first one, wherever tokens are split."""

from __future__ import annotations

from collections.abc import Sequence


class StoppedText:
    """A growing text without its stop string; an end that may begin one is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def add(self, piece: str, *, last: bool = False) -> str:
        """Return what the next piece adds to the text; `last`: nothing follows, so nothing is held back."""
        if self.stopped:
            return ""
        if not self._stops:
            return piece
        text = self._held + piece
        starts = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if starts:
            self.stopped = True
            return text[: min(starts)]
        keep = 0 if last else max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that `stop` begins with."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
