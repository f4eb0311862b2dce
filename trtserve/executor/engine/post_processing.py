"""The user's logits post-processors: callables that change logits first, named, batched, or given with a request."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from trtserve.executor.engine.requests import PostProcessor
from trtserve.executor.engine.sequence import Sequence

Logits = npt.NDArray[np.float32]


class PostProcessors:
    """Calls the logits post-processors of a step.

    A post-processor is called with (request id, logits f32[n, beams, V] to change in place, tokens per beam, None as
    the stream, client id), the batched one with lists of these; n is 1 except for draft tokens.
    """

    def __init__(self, batched: PostProcessor | None = None) -> None:
        self._batched = batched

    def apply(self, rows: list[tuple[Sequence, Logits]]) -> dict[Sequence, str]:
        """Let the post-processors of the sequences change their rows f32[r, V]; return error messages by sequence.

        The rows of a post-processor that raises become NaN.
        """
        failures: dict[Sequence, str] = {}
        batched: list[tuple[Sequence, Logits]] = []
        for sequence, logits in rows:
            if sequence.post_processor is None:
                continue
            if sequence.post_processor is self._batched:
                batched.append((sequence, logits))
            else:
                self._call(sequence.post_processor, _arguments(sequence, logits), [(sequence, logits)], failures)
        if batched and self._batched is not None:
            columns = zip(*(_arguments(sequence, logits) for sequence, logits in batched), strict=True)
            ids, logits_of, tokens, _, clients = (list(column) for column in columns)
            self._call(self._batched, (ids, logits_of, tokens, None, clients), batched, failures)
        return failures

    def _call(
        self,
        processor: PostProcessor,
        arguments: tuple[Any, ...],
        rows: list[tuple[Sequence, Logits]],
        failures: dict[Sequence, str],
    ) -> None:
        try:
            processor(*arguments)
        except Exception as error:  # noqa: BLE001 - the user's code may raise anything
            for sequence, logits in rows:
                logits[:] = np.nan
                failures[sequence] = f"the logits post-processor failed: {type(error).__name__}: {error}"


def _arguments(sequence: Sequence, logits: Logits) -> tuple[Any, ...]:
    prompt, search = sequence.prompt.tolist(), sequence.search
    answers = [sequence.generated] if search is None else [beam.tokens for beam in search.beams]
    rows = logits.reshape(-1, 1 if search is None else len(logits), logits.shape[1])
    return sequence.id, rows, [[*prompt, *answer] for answer in answers], None, sequence.client_id
