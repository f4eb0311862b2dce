"""What happens to a row of logits before a token is chosen from it: bias, temperature, penalties, bans and guides.

Reference: executor-api sections 2.2 to 2.4. What depends on the tokens so far is counted as they come, so that a step
costs the same however long the sequence is.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from trtserve.executor.sampling import SamplingParameters

Floats = npt.NDArray[np.float32]
Int64s = npt.NDArray[np.int64]

_TEMPERATURE_EPSILON = 1e-6
# The end token before `min_tokens`: chosen only where all else is banned, as by a guide that has come to its end.
_LAST_RESORT = np.finfo(np.float32).min


class Mask(Protocol):
    """A guide as the processor sees it (guided.Guide)."""

    failure: str | None

    def mask(self, row: Floats) -> None:
        """Set the logits of tokens that the guide does not allow next to −∞."""

    def accept(self, token: int) -> None:
        """Go on to the state after `token`."""

    def fork(self) -> Mask:
        """An independent guide in the same state."""


class LogitsProcessor:
    """The logits of one sequence, or one beam, on their way to the sampler.

    `neutral` tells that rows may be used as they are, `keeps_order` that their largest logit stays the largest,
    `top_p` is the mass of the nucleus at this step.
    """

    def __init__(
        self,
        parameters: SamplingParameters,
        prompt: Int64s,
        *,
        vocab_size: int,
        end_id: int,
        bad_words: SequenceOf[SequenceOf[int]] = (),
        bias: Floats | None = None,
        guide: Mask | None = None,
    ) -> None:
        size = parameters.no_repeat_ngram_size
        self._parameters = parameters
        self._prompt = prompt
        self._bias = bias
        self._divisor = np.float32(1 if parameters.temperature == 1 else parameters.temperature + _TEMPERATURE_EPSILON)
        self.counts = TokenCounts(parameters, prompt, vocab_size) if parameters.penalised else None
        self._guarded_end = end_id if parameters.min_tokens > 0 and 0 <= end_id < vocab_size else None
        self.ngrams = Ngrams(size, prompt, vocab_size) if size else None
        self._bad_words = BadWords(bad_words, vocab_size) if any(bad_words) else None
        self.guide = guide
        self.top_p = parameters.top_p
        conditions = (bias, self.counts, self._guarded_end, self.ngrams, self._bad_words, guide)
        self.keeps_order = all(each is None for each in conditions)
        self.neutral = self.keeps_order and parameters.temperature == 1 and not parameters.min_p

    @property
    def failure(self) -> str | None:
        """Why the guide allows no token any more; None when it does, or when there is none."""
        return None if self.guide is None else self.guide.failure

    def process(self, row: npt.NDArray[Any], generated: SequenceOf[int]) -> Floats:
        """The logits f32[V] that count after the tokens `generated`, which `accept` has seen; `row` is not changed.

        All are −∞ when no token is left. What is not a number, in the row or in the request, comes through as such.
        """
        result: Floats = np.array(row, dtype=np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            if self._bias is not None:
                result += self._bias
            if self._divisor != 1:
                result /= self._divisor
            if self.counts is not None:
                self.counts.penalise(result)
        if not self.keeps_order:
            self._ban(result, generated)
        if self._parameters.min_p:
            _drop_improbable(result, self._parameters.min_p)
        return result

    def _ban(self, row: Floats, generated: SequenceOf[int]) -> None:
        if self._guarded_end is not None and len(generated) < self._parameters.min_tokens:
            row[self._guarded_end] = _LAST_RESORT
        if self.ngrams is not None:
            self.ngrams.ban(row)
        if self._bad_words is not None:
            self._bad_words.ban(row, self._tail(generated, self._bad_words.reach))
        if self.guide is not None:
            self.guide.mask(row)

    def _tail(self, generated: SequenceOf[int], count: int) -> list[int]:
        """The last `count` tokens of the prompt and what was generated, fewer when there are no more."""
        tail = list(generated[-count:]) if count else []
        missing = count - len(tail)
        if missing:
            tail = [*self._prompt[-missing:].tolist(), *tail]
        return tail

    def accept(self, token: int) -> None:
        """Take note that `token` was chosen."""
        if self.counts is not None:
            self.counts.add(token)
        if self.ngrams is not None:
            self.ngrams.add(token)
        if self.guide is not None:
            self.guide.accept(token)
        if self._parameters.top_p_decay != 1:
            self._decay(token)

    def _decay(self, token: int) -> None:
        parameters = self._parameters
        if token == parameters.top_p_reset_ids:
            self.top_p = parameters.top_p
        else:
            self.top_p = max(self.top_p * parameters.top_p_decay, parameters.top_p_min)

    def fork(self) -> LogitsProcessor:
        """An independent processor in the same state: a beam splits."""
        twin = copy.copy(self)
        if self.counts is not None:
            twin.counts = self.counts.fork()
        if self.ngrams is not None:
            twin.ngrams = self.ngrams.fork()
        if self.guide is not None:
            twin.guide = self.guide.fork()
        return twin


def _drop_improbable(row: Floats, min_p: float) -> None:
    """Mask the tokens whose probability is below `min_p` times the best one's."""
    highest = row.max()
    if np.isfinite(highest):
        row[np.exp(row - highest) < min_p] = -np.inf


class TokenCounts:
    """How often each token has occurred, and the penalties that follow from it.

    `prompt_ignore_length` tokens at the start of the prompt are not counted for presence and frequency; for repetition
    every token counts, as in TensorRT-LLM. Ids beyond the vocabulary (rows of a prompt table) are not counted.
    """

    def __init__(self, parameters: SamplingParameters, prompt: Int64s, vocab_size: int) -> None:
        inside = (prompt >= 0) & (prompt < vocab_size)
        ids, places = np.unique(prompt[inside], return_inverse=True)
        counted = np.flatnonzero(inside) >= parameters.prompt_ignore_length
        self._repetition = np.float32(parameters.repetition_penalty)
        self._presence = np.float32(parameters.presence_penalty)
        self._frequency = np.float32(parameters.frequency_penalty)
        self._size = len(ids)
        self.ids: Int64s = np.concatenate([ids, np.zeros(64, dtype=np.int64)])
        self.counts: Floats = np.zeros(len(self.ids), dtype=np.float32)
        self.counts[: self._size] = np.bincount(places[counted], minlength=self._size)
        self.places: dict[int, int] = {token: place for place, token in enumerate(ids.tolist())}

    def add(self, token: int) -> None:
        """Count `token` once more."""
        place = self.places.get(token)
        if place is None:
            place = self.places[token] = self._size
            if place == len(self.ids):
                self.ids, self.counts = np.resize(self.ids, 2 * place), np.resize(self.counts, 2 * place)
            self.ids[place], self.counts[place] = token, 0
            self._size += 1
        self.counts[place] += 1

    def penalise(self, row: Floats) -> None:
        """Apply repetition, presence and frequency penalty to the tokens that have occurred."""
        ids, counts = self.ids[: self._size], self.counts[: self._size]
        values = row[ids]
        if self._repetition != 1:
            values = np.where(values < 0, values * self._repetition, values / self._repetition)
        if self._presence:
            values[counts > 0] -= self._presence
        if self._frequency:
            values -= self._frequency * counts
        row[ids] = values

    def fork(self) -> TokenCounts:
        """An independent copy."""
        twin = copy.copy(self)
        twin.ids, twin.counts, twin.places = self.ids.copy(), self.counts.copy(), self.places.copy()
        return twin


class Ngrams:
    """Which tokens would complete an n-gram that the sequence, prompt included, already has."""

    def __init__(self, size: int, prompt: Int64s, vocab_size: int) -> None:
        tokens = prompt.tolist()
        self._length = size - 1
        self._tail = tuple(tokens[max(len(tokens) - self._length, 0) :])
        # Of the prompt: shared by all forks. Tokens beyond the vocabulary have no logit that could be masked.
        self._of_prompt: dict[tuple[int, ...], set[int]] = {}
        self.of_answer: dict[tuple[int, ...], set[int]] = {}
        for start, token in enumerate(tokens[self._length :]):
            if 0 <= token < vocab_size:
                self._of_prompt.setdefault(tuple(tokens[start : start + self._length]), set()).add(token)

    def add(self, token: int) -> None:
        """Take note of `token`."""
        if len(self._tail) == self._length:
            self.of_answer.setdefault(self._tail, set()).add(token)
        self._tail = (*self._tail, token)[-self._length :] if self._length else ()

    def ban(self, row: Floats) -> None:
        """Mask the tokens that would repeat an n-gram."""
        for known in (self._of_prompt, self.of_answer):
            tokens = known.get(self._tail)
            if tokens:
                row[list(tokens)] = -np.inf

    def fork(self) -> Ngrams:
        """An independent copy."""
        twin = copy.copy(self)
        twin.of_answer = {context: set(tokens) for context, tokens in self.of_answer.items()}
        return twin


class BadWords:
    """Words that must not come: single tokens always, longer ones by their last token once the rest has been said.

    `reach` is the number of tokens to look back.
    """

    def __init__(self, words: Iterable[SequenceOf[int]], vocab_size: int) -> None:
        self._single: list[int] = []
        # By the last token before the banned one, so that a step looks at few words.
        self._longer: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        self.reach = 0
        # Each once: a client may send the same words thousands of times, and every step looks at all of them.
        for word in dict.fromkeys(map(tuple, words)):
            if word and 0 <= word[-1] < vocab_size:
                self._add(word[:-1], word[-1])

    def _add(self, context: tuple[int, ...], banned: int) -> None:
        if context:
            self._longer.setdefault(context[-1], []).append((context, banned))
            self.reach = max(self.reach, len(context))
        else:
            self._single.append(banned)

    def ban(self, row: Floats, tail: list[int]) -> None:
        """Mask what would complete a word after `tail`, the last `reach` tokens."""
        if self._single:
            row[self._single] = -np.inf
        for context, banned in self._longer.get(tail[-1], ()) if tail else ():
            if tuple(tail[-len(context) :]) == context:
                row[banned] = -np.inf
