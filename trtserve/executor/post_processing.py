"""Callables of the user that change logits before anything else does, by name, for all at once, or of one request."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from trtserve.executor.configs import ExecutorConfig
from trtserve.executor.requests import Request
from trtserve.executor.sequence import PostProcessor, Sequence

Logits = npt.NDArray[np.float32]


class PostProcessors:
    """The post-processors of one executor.

    One is called with (request id, logits f32[n, beams, V] to change in place, tokens per beam, None for the stream,
    client id), the batched one with lists of these. The client id is known from 0.13 on, n is 1 but for draft tokens.
    """

    def __init__(self, config: ExecutorConfig) -> None:
        own = config.logits_post_processor_config
        self._named = (own.processor_map if own else config.logits_post_processor_map) or {}
        self._batched = own.processor_batched if own else config.logits_post_processor_batched
        self._with_client = config.release not in ("0.10", "0.11", "0.12")

    def of(self, request: Request) -> PostProcessor | None:
        """The post-processor that `request` names or brings; RuntimeError for a name that is not known."""
        name = request.logits_post_processor_name
        if not name:
            return request.logits_post_processor
        found = self._batched if name == Request.BATCHED_POST_PROCESSOR_NAME else self._named.get(name)
        if found is None:
            raise RuntimeError(f"The logits post-processor {name!r} is not known to this executor")
        return found

    def apply(self, rows: list[tuple[Sequence, Logits]]) -> dict[Sequence, str]:
        """Let the post-processors of the sequences change their rows f32[r, V].

        Where one raises, the rows become NaN; returned is what it said, by sequence.
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
            processor(*(arguments if self._with_client else arguments[:-1]))
        except Exception as error:  # noqa: BLE001 - the user's code may raise anything
            for sequence, logits in rows:
                logits[:] = np.nan
                failures[sequence] = f"the logits post-processor failed: {type(error).__name__}: {error}"


def _arguments(sequence: Sequence, logits: Logits) -> tuple[Any, ...]:
    beams = len(logits) if sequence.search is not None else 1
    return sequence.id, logits.reshape(-1, beams, logits.shape[1]), _tokens(sequence), None, sequence.client_id


def _tokens(sequence: Sequence) -> list[list[int]]:
    """All tokens so far, per beam."""
    prompt = sequence.prompt.tolist()
    if sequence.search is None:
        return [[*prompt, *sequence.generated]]
    return [[*prompt, *beam.tokens] for beam in sequence.search.beams]
