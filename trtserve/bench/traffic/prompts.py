"""Prompts of a wanted number of tokens: random token ids for core models; `texts.py` writes texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from trtserve.bench.requests import Limits
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

    def __init__(self, limits: Limits, generator: np.random.Generator) -> None:
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
