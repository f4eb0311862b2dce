"""Beam search over the continuations of one prompt, as TensorRT-LLM does it (reference section 2.6)."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from trtserve.executor.enums import FinishReason
from trtserve.executor.logits_processing import LogitsProcessor
from trtserve.executor.sampling import SamplingParameters, log_softmax
from trtserve.executor.stop_words import StopWords

Floats = npt.NDArray[np.float32]

_RUN = 64
_ROUNDING = 1e-3


@dataclass(slots=True)
class Beam:
    """One continuation: its tokens with their log-probabilities and `cum_log_prob`, their sum.

    The end token belongs to the sum alone. `origins` holds for each token the row of its step's logits.
    """

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)
    cum_log_prob: float = 0.0
    reason: FinishReason = FinishReason.NOT_FINISHED

    def grown(self, token: int, log_prob: float, origin: int) -> Beam:
        """This beam with one token more."""
        return Beam(
            [*self.tokens, token],
            [*self.log_probs, log_prob],
            [*self.origins, origin],
            self.cum_log_prob + log_prob,
        )

    def ended(self, log_prob: float) -> Beam:
        """This beam with the end token, which counts for the sum and for nothing else."""
        total = self.cum_log_prob + log_prob
        return Beam(self.tokens, self.log_probs, self.origins, total, FinishReason.END_ID)


def _bound(log_probs: Floats, bonus: npt.NDArray[np.float64], count: int) -> float:
    """A value that at least `count` continuations reach, if there are so many: far cheaper than to sort all.

    Each run of the vocabulary has one continuation as good as its best.
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
        """Forget all beams and begin with the prompt again."""
        self.beams = [Beam()]
        self.done = False
        self._processors = [self._processor.fork()]
        self._finished: list[tuple[float, Beam]] = []

    @property
    def longest(self) -> int:
        """Tokens of the longest beam."""
        finished = max((len(beam.tokens) for _, beam in self._finished), default=0)
        return max(finished, len(self.beams[0].tokens) if self.beams else 0)

    def log_probs(self, logits: npt.NDArray[Any]) -> Floats:
        """Log-probabilities f32[b, V] of what may follow each growing beam, from the model's logits f32[b, V]."""
        if all(processor.neutral for processor in self._processors):
            return log_softmax(logits)
        rows = [
            processor.process(row, beam.tokens)
            for row, processor, beam in zip(logits, self._processors, self.beams, strict=True)
        ]
        return log_softmax(np.stack(rows))

    def step(self, log_probs: Floats) -> tuple[list[int], list[int]]:
        """Let the beams grow by one token; for each new beam the number of the one it grew from, and its token."""
        parents: list[int] = []
        grown: list[Beam] = []
        for rank, (parent, token) in enumerate(self._candidates(log_probs)):
            beam, log_prob = self.beams[parent], float(log_probs[parent, token])
            ended = self._ended(beam, token, log_prob, parent)
            if ended is None:
                parents.append(parent)
                grown.append(beam.grown(token, log_prob, parent))
            elif rank < self._width:
                self._finish(ended, len(beam.tokens) + 1)
            if len(grown) == self._width:
                break
        tokens = [beam.tokens[-1] for beam in grown]
        self._processors = self._forked(parents, tokens)
        self.beams = grown
        self._conclude()
        return parents, tokens

    def ranked(self) -> list[Beam]:
        """The best beams so far, best first: as many as were asked for, finished and growing ones by their scores."""
        growing = [] if self.done else [(self._score(beam, len(beam.tokens)), beam) for beam in self.beams]
        ordered = sorted([*self._finished, *growing], key=lambda scored: -scored[0])
        wanted = min(self._parameters.num_return_sequences, self._width)
        return [beam for _, beam in ordered[:wanted]]

    def _candidates(self, log_probs: Floats) -> list[tuple[int, int]]:
        """The best continuations as (beam, token), best first; enough of them that `width` do not end."""
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
        """The finished beam that `token` makes of `beam`; None when it goes on."""
        if token == self._end_id:
            return beam.ended(log_prob)
        if self._stop_words is None or not self._stop_words.end(beam.tokens, token):
            return None
        stopped = beam.grown(token, log_prob, origin)
        stopped.reason = FinishReason.STOP_WORDS
        return stopped

    def _finish(self, beam: Beam, length: int) -> None:
        """Keep a finished beam; when there are enough, the worst goes."""
        self._finished.append((self._score(beam, length), beam))
        if len(self._finished) > self._width:
            self._finished.remove(min(self._finished, key=lambda scored: scored[0]))

    def _score(self, beam: Beam, length: int) -> float:
        return beam.cum_log_prob / float(max(length, 1) ** self._parameters.length_penalty)

    def _forked(self, parents: SequenceOf[int], tokens: SequenceOf[int]) -> list[LogitsProcessor]:
        """A processor for each new beam, which knows its token."""
        if all(processor.neutral for processor in self._processors):
            return [self._processor] * len(parents)
        forks = [self._processors[parent].fork() for parent in parents]
        for fork, token in zip(forks, tokens, strict=True):
            fork.accept(token)
        return forks

    def _conclude(self) -> None:
        """See whether the search is over; beams at their largest length join the finished ones."""
        length = len(self.beams[0].tokens) if self.beams else self._max_tokens
        if length >= self._max_tokens:
            for beam in self.beams:
                beam.reason = FinishReason.LENGTH
                self._finish(beam, length)
            self.done = True
        elif len(self._finished) == self._width:
            self.done = self._parameters.early_stopping == 1 or self._cannot_improve(length)

    def _cannot_improve(self, length: int) -> bool:
        """True when the best growing beam, at the length that flatters it, is no better than the worst finished one."""
        if self._parameters.early_stopping != 0 and self._parameters.length_penalty > 0:
            length = self._max_tokens
        worst = min(score for score, _ in self._finished)
        return worst >= self._score(self.beams[0], length)
