"""Texts of a given number of tokens, for models that take text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from trtserve.bench.traffic import Prompt
from trtserve.errors import UsageError
from trtserve.query.tokenizer import TokenizerFiles

if TYPE_CHECKING:
    import numpy as np

TRIED_TOKENS = 2048
WORDS = 512
ATTEMPTS = 16


class TextWriter:
    """Writes texts of random words, each of which is one token wherever it stands.

    `special`: the server encodes prompts with special tokens (BOS); they are part of the length, since the engine
    computes them like the others.
    """

    def __init__(self, files: TokenizerFiles, *, special: bool, seed: int) -> None:
        import numpy as np

        self._files = files
        self._special = special
        self._generator: np.random.Generator = np.random.default_rng([seed, 2])
        self._joint, self._words = self._vocabulary()

    def __call__(self, length: int) -> Prompt:
        """A text of `length` tokens; where none is found, the longest below it, else the shortest. It has a word."""
        import numpy as np

        words, tried = self._draw(length), []
        for _ in range(ATTEMPTS):
            text = self._joint.join(words)
            ids = self._files.encode(text, special=self._special)
            tried.append((ids, text))
            surplus = len(ids) - length
            if surplus == 0:
                break
            kept = len(words) - surplus
            words = words[:kept] + self._draw(kept - len(words)) if kept > 1 else self._draw(1)
        ids, text = min(tried, key=lambda each: (len(each[0]) > length, abs(len(each[0]) - length)))
        return np.array(ids, np.int32), text

    def _draw(self, count: int) -> list[str]:
        return [self._words[index] for index in self._generator.integers(len(self._words), size=max(0, count))]

    def _vocabulary(self) -> tuple[str, list[str]]:
        """What stands between words, and the words: a space, else nothing where a space is a token of its own."""
        for joint in (" ", ""):
            words = [word for word in self._candidates(joint) if self._is_one_token(joint, word)][:WORDS]
            if words:
                return joint, words
        raise UsageError(
            f"The tokenizer in {self._files.folder} has no words of which prompts of a given length can be made.",
            hint="Measure with prompts of your own (`trtserve bench dataset`), or the core model, which takes ids.",
        )

    def _candidates(self, joint: str) -> Iterator[str]:
        tokenizer = self._files.tokenizer
        special = set(tokenizer.all_special_ids)
        tried = self._generator.permutation(len(tokenizer))[:TRIED_TOKENS]
        words = (tokenizer.decode([int(token)]).strip() for token in tried if int(token) not in special)
        found = (word for word in words if word.isascii() and (word.isalpha() if joint else word.isalnum()))
        return iter(dict.fromkeys(found))

    def _is_one_token(self, joint: str, word: str) -> bool:
        once, twice = (len(self._files.encode(joint.join([word] * times), special=False)) for times in (1, 2))
        return twice == once + 1 and (bool(joint) or once == 1)
