"""Divide a step's tokens among contexts: whole contexts, or chunks by TensorRT-LLM's chunking policies."""

from __future__ import annotations

from trtserve.executor.engine.limits import EngineLimits
from trtserve.executor.engine.options import ContextChunkingPolicy
from trtserve.executor.engine.sequence import Sequence

_WINDOW_UNIT = 256
"""Smallest chunk unit in tokens if contexts may be longer than the attention window."""


class ContextChunker:
    """Divides the tokens of a step among contexts; all but the last chunk of a context end at multiples of the unit."""

    def __init__(self, limits: EngineLimits, tokens_per_block: int, policy: ContextChunkingPolicy) -> None:
        self._limits = limits
        self._equal_progress = limits.chunked and policy is ContextChunkingPolicy.EQUAL_PROGRESS
        windowed = bool(limits.windows) and min(limits.windows) < limits.max_input_len
        unit = max(tokens_per_block, _WINDOW_UNIT) if windowed and limits.chunked else tokens_per_block
        # A unit above the budget could never be scheduled.
        self._unit = min(unit, limits.max_num_tokens)

    def cost(self, sequence: Sequence, left: int) -> int:
        """Return the tokens that the context of `sequence` takes from the `left` ones before other sequences.

        0 with chunking. A context that a pause has made longer than a step takes everything and comes in chunks.
        """
        if self._limits.chunked:
            return 0
        wanted = sequence.context_left + len(sequence.draft)
        return wanted if wanted <= self._limits.max_num_tokens else max(left, self._unit)

    def divide(self, contexts: list[Sequence], left: int) -> list[tuple[Sequence, int]]:
        """Return the chunks of `contexts` in a step with `left` tokens for them; drafts that do not fit are cut."""
        wanted = [sequence.context_left for sequence in contexts]
        if sum(wanted) <= left:
            sizes = wanted
        elif self._equal_progress:
            sizes = self._equal_sizes(contexts, left)
        else:
            sizes = self._first_sizes(contexts, left)
        left -= sum(sizes)
        for sequence, size in zip(contexts, sizes, strict=True):
            if sequence.draft and size == sequence.context_left:
                sequence.draft = sequence.draft[:left]
                left -= len(sequence.draft)
        chunks = [(sequence, size) for sequence, size in zip(contexts, sizes, strict=True) if size]
        if len(chunks) > 1:
            chunks.sort(key=lambda chunk: (chunk[1] == chunk[0].context_left, chunk[0].key.adapter or 0))
        return chunks

    def _first_sizes(self, contexts: list[Sequence], left: int) -> list[int]:
        """First come, first served: the first contexts get everything."""
        sizes = []
        for sequence in contexts:
            size = sequence.context_left
            if size > left:
                size = max(0, left - (sequence.computed + left) % self._unit)
            sizes.append(size)
            left -= size
        return sizes

    def _equal_sizes(self, contexts: list[Sequence], left: int) -> list[int]:
        """Round robin, one unit per context, until the budget is used."""
        sizes = [0] * len(contexts)
        growing = True
        while growing:
            growing = False
            for index, sequence in enumerate(contexts):
                to_boundary = self._unit - (sequence.computed + sizes[index]) % self._unit
                more = min(to_boundary, sequence.context_left - sizes[index])
                if 0 < more <= left:
                    sizes[index] += more
                    left -= more
                    growing = True
        return sizes
