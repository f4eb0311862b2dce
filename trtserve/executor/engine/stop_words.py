"""Tell whether the tokens of a sequence end with a stop word."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class StopWords:
    """Stop words (non-empty tuples of tokens) of one sequence."""

    def __init__(self, words: Sequence[tuple[int, ...]], prompt: npt.NDArray[np.int64]) -> None:
        self.words = tuple(dict.fromkeys(words))
        self._reach = max(map(len, self.words)) - 1
        self._prompt_tail: list[int] = prompt[max(len(prompt) - self._reach, 0) :].tolist()
        # Grouped by their last token, so that most steps compare no word.
        self._by_end: dict[int, list[tuple[int, ...]]] = {}
        for word in self.words:
            self._by_end.setdefault(word[-1], []).append(word)

    def end(self, generated: Sequence[int], token: int) -> bool:
        """True when prompt, `generated` and `token` together end with a stop word."""
        words = self._by_end.get(token)
        if words is None:
            return False
        tail = list(generated[-self._reach :]) if self._reach else []
        if len(tail) < self._reach:
            tail = [*self._prompt_tail, *tail]
        tail.append(token)
        return any(len(word) <= len(tail) and tuple(tail[-len(word) :]) == word for word in words)
