"""Beam search over the continuations of one prompt, as TensorRT-LLM does it."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from trtserve.executor.engine.logits_processing import LogitsProcessor
from trtserve.executor.engine.requests import FinishReason
from trtserve.executor.engine.sampling import SamplingParameters, log_softmax
from trtserve.executor.engine.stop_words import StopWords

Floats = npt.NDArray[np.float32]

_RUN = 64
_ROUNDING = 1e-3


@dataclass(slots=True)
class Beam:
    """One continuation of the prompt."""

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)
    """For each token the row of its step's logits."""
    cum_log_prob: float = 0.0
    """Sum of the log-probabilities, including that of the end token."""
    reason: FinishReason = FinishReason.NOT_FINISHED

    def extended(self, token: int, log_prob: float, origin: int) -> Beam:
        return Beam(
            [*self.tokens, token],
            [*self.log_probs, log_prob],
            [*self.origins, origin],
            self.cum_log_prob + log_prob,
        )

    def ended(self, log_prob: float) -> Beam:
        """Return this beam with the end token, which only counts for the sum."""
        total = self.cum_log_prob + log_prob
        return Beam(self.tokens, self.log_probs, self.origins, total, FinishReason.END_ID)


def _bound(log_probs: Floats, bonus: npt.NDArray[np.float64], count: int) -> float:
    """Return a value that at least `count` continuations reach, if there are as many; much cheaper than sorting all.

    Each run of _RUN tokens has at least one continuation as good as its best.
    """
    best = np.maximum.reduceat(log_probs, np.arange(0, log_probs.shape[1], _RUN), axis=1) + bonus[:, None]
    if best.size < count:
        return -np.inf
    return float(np.partition(best, best.size - count, axis=None)[best.size - count]) - _ROUNDING


class BeamSearch:
    """The search of one sequence; `beams` are those that still grow, the most probable first."""

    def __init__(
        self,
        parameters: SamplingParameters,
        processor: LogitsProcessor,
        *,
        end_id: int,
        max_tokens: int,
        stop_words: StopWords | None = None,
    ) -> None:
        self._parameters = parameters
        self._width = parameters.beam_width
        self._processor = processor
        self._end_id = end_id
        self._max_tokens = max_tokens
        self._stop_words = stop_words
        self.restart()

    def restart(self) -> None:
        """Drop all beams and start with the prompt again."""
        self.beams = [Beam()]
        self.done = False
        self._processors = [self._processor.fork()]
        self._finished: list[tuple[float, Beam]] = []

    @property
    def longest(self) -> int:
        """Number of tokens of the longest beam."""
        finished = max((len(beam.tokens) for _, beam in self._finished), default=0)
        return max(finished, len(self.beams[0].tokens) if self.beams else 0)

    def log_probs(self, logits: npt.NDArray[Any]) -> Floats:
        """Return log-probabilities f32[b, V] of the continuations of each growing beam, from logits f32[b, V]."""
        if all(processor.neutral for processor in self._processors):
            return log_softmax(logits)
        rows = [
            processor.process(row, beam.tokens)
            for row, processor, beam in zip(logits, self._processors, self.beams, strict=True)
        ]
        return log_softmax(np.stack(rows))

    def step(self, log_probs: Floats) -> tuple[list[int], list[int]]:
        """Extend the beams by one token; return for each new beam the number of its parent, and its token."""
        parents: list[int] = []
        grown: list[Beam] = []
        for rank, (parent, token) in enumerate(self._candidates(log_probs)):
            beam, log_prob = self.beams[parent], float(log_probs[parent, token])
            ended = self._ended(beam, token, log_prob, parent)
            if ended is None:
                parents.append(parent)
                grown.append(beam.extended(token, log_prob, parent))
            elif rank < self._width:
                self._finish(ended, len(beam.tokens) + 1)
            if len(grown) == self._width:
                break
        tokens = [beam.tokens[-1] for beam in grown]
        self._processors = self._fork_processors(parents, tokens)
        self.beams = grown
        self._check_done()
        return parents, tokens

    def ranked(self) -> list[Beam]:
        """Return the best beams so far, best first, as many as requested; finished and growing ones by their scores."""
        growing = [] if self.done else [(self._score(beam, len(beam.tokens)), beam) for beam in self.beams]
        ordered = sorted([*self._finished, *growing], key=lambda scored: -scored[0])
        wanted = min(self._parameters.num_return_sequences, self._width)
        return [beam for _, beam in ordered[:wanted]]

    def _candidates(self, log_probs: Floats) -> list[tuple[int, int]]:
        """Return the best continuations as (beam, token), best first; enough that at least `width` do not end."""
        diversity = self._parameters.beam_search_diversity_rate
        bonus = np.array([beam.cum_log_prob + diversity * number for number, beam in enumerate(self.beams)])
        endings = 1 + (len(self._stop_words.words) if self._stop_words else 0)
        count = (1 + endings) * self._width
        parents, tokens = np.nonzero(log_probs >= (_bound(log_probs, bonus, count) - bonus)[:, None])
        values = bonus[parents] + log_probs[parents, tokens]
        order = np.lexsort((tokens, parents, -values))[:count]
        possible = order[values[order] > -np.inf]
        return list(zip(parents[possible].tolist(), tokens[possible].tolist(), strict=True))

    def _ended(self, beam: Beam, token: int, log_prob: float, origin: int) -> Beam | None:
        """Return the finished beam that `token` makes of `beam`, or None if it continues."""
        if token == self._end_id:
            return beam.ended(log_prob)
        if self._stop_words is None or not self._stop_words.end(beam.tokens, token):
            return None
        stopped = beam.extended(token, log_prob, origin)
        stopped.reason = FinishReason.STOP_WORDS
        return stopped

    def _finish(self, beam: Beam, length: int) -> None:
        """Keep a finished beam; if there are more than `width`, drop the worst."""
        self._finished.append((self._score(beam, length), beam))
        if len(self._finished) > self._width:
            self._finished.remove(min(self._finished, key=lambda scored: scored[0]))

    def _score(self, beam: Beam, length: int) -> float:
        return beam.cum_log_prob / float(max(length, 1) ** self._parameters.length_penalty)

    def _fork_processors(self, parents: SequenceOf[int], tokens: SequenceOf[int]) -> list[LogitsProcessor]:
        """Return a processor for each new beam that has seen its token."""
        if all(processor.neutral for processor in self._processors):
            return [self._processor] * len(parents)
        forks = [self._processors[parent].fork() for parent in parents]
        for fork, token in zip(forks, tokens, strict=True):
            fork.accept(token)
        return forks

    def _check_done(self) -> None:
        """Find out whether the search is over; beams of maximum length become finished ones."""
        length = len(self.beams[0].tokens) if self.beams else self._max_tokens
        if length >= self._max_tokens:
            for beam in self.beams:
                beam.reason = FinishReason.LENGTH
                self._finish(beam, length)
            self.done = True
        elif len(self._finished) == self._width:
            if self._parameters.early_stopping != 0 and self._parameters.length_penalty > 0:
                length = self._max_tokens
            # Over when the best growing beam, at its most favourable length, is no better than the worst finished one.
            worst = min(score for score, _ in self._finished)
            self.done = self._parameters.early_stopping == 1 or worst >= self._score(self.beams[0], length)
