"""Prompts of a wanted number of tokens: random token ids for core models, random texts for models that take text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from trtserve.bench.records import TrafficLimits
from trtserve.client.tokenizer import TokenizerFiles
from trtserve.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Prompt = tuple["npt.NDArray[np.int32]", "str | None"]
"""Token ids of a prompt, and its text for a text model."""


class Writer(Protocol):
    """Writes prompts."""

    def __call__(self, length: int) -> Prompt:
        """Return a new prompt of `length` tokens."""

    def join(self, parts: Sequence[Prompt]) -> Prompt:
        """Return one prompt that consists of `parts`."""


class IdWriter:
    """Writes random token ids within the vocabulary, without special tokens."""

    def __init__(self, limits: TrafficLimits, generator: np.random.Generator) -> None:
        import numpy as np

        if limits.vocab_size is None:
            raise UsageError(
                "The vocabulary size of the served engine is unknown here.",
                hint="Give it with --vocab-size (and --max-input-len, --max-seq-len to stay within the engine's "
                "limits).",
            )
        special = [token for token in limits.special_ids if token < limits.vocab_size]
        self._ids = np.setdiff1d(np.arange(limits.vocab_size), np.array(special, np.int64))
        self._generator = generator

    def __call__(self, length: int) -> Prompt:
        import numpy as np

        return self._generator.choice(self._ids, length).astype(np.int32), None

    def join(self, parts: Sequence[Prompt]) -> Prompt:
        import numpy as np

        return np.concatenate([ids for ids, _ in parts]), None


TRIED_TOKENS = 2048
WORDS = 512
ATTEMPTS = 16


class TextWriter:
    """Writes texts of random words, each of which is one token in any position.

    `special`: the server encodes prompts with special tokens (BOS); they count towards the length, since the engine
    processes them like other tokens.
    """

    def __init__(self, files: TokenizerFiles, *, special: bool, seed: int) -> None:
        import numpy as np

        self._files = files
        self._special = special
        self._generator: np.random.Generator = np.random.default_rng([seed, 2])
        self._separator, self._words = self._vocabulary()

    def __call__(self, length: int) -> Prompt:
        """Return a text of `length` tokens; if none is found, the longest shorter one, else the shortest.

        Every text has at least one word.
        """
        import numpy as np

        words, tried = self._draw(length), []
        for _ in range(ATTEMPTS):
            text = self._separator.join(words)
            ids = self._files.encode(text, special=self._special)
            tried.append((ids, text))
            surplus = len(ids) - length
            if surplus == 0:
                break
            kept = len(words) - surplus
            words = words[:kept] + self._draw(kept - len(words)) if kept > 1 else self._draw(1)
        ids, text = min(tried, key=lambda each: (len(each[0]) > length, abs(len(each[0]) - length)))
        return np.array(ids, np.int32), text

    def join(self, parts: Sequence[Prompt]) -> Prompt:
        """Return the texts after each other; at their borders the number of tokens can differ by one."""
        import numpy as np

        text = " ".join(text or "" for _, text in parts)
        return np.array(self._files.encode(text, special=self._special), np.int32), text

    def _draw(self, count: int) -> list[str]:
        return [self._words[index] for index in self._generator.integers(len(self._words), size=max(0, count))]

    def _vocabulary(self) -> tuple[str, list[str]]:
        """Return the separator of words and the words; the separator is empty if a space is a separate token."""
        tokenizer = self._files.tokenizer
        special = set(tokenizer.all_special_ids)
        for separator in (" ", ""):
            tokens = self._generator.permutation(len(tokenizer))[:TRIED_TOKENS]
            texts = (tokenizer.decode([int(token)]).strip() for token in tokens if int(token) not in special)
            plain = (text for text in texts if text.isascii() and (text.isalpha() if separator else text.isalnum()))
            words = [word for word in dict.fromkeys(plain) if self._is_one_token(separator, word)][:WORDS]
            if words:
                return separator, words
        raise UsageError(
            f"The tokenizer in {self._files.folder} has no words for prompts of an exact length.",
            hint="Use prompts of your own (`trtserve bench dataset`), or measure the core model with token ids.",
        )

    def _is_one_token(self, separator: str, word: str) -> bool:
        once, twice = (len(self._files.encode(separator.join([word] * times), special=False)) for times in (1, 2))
        return twice == once + 1 and (bool(separator) or once == 1)
