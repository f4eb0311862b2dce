"""Change a row of logits before a token is chosen from it: bias, temperature, penalties, bans and guides.

State that depends on earlier tokens is updated with every token, so that a step costs the same for any length.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from trtserve.executor.engine.guided import Guide
    from trtserve.executor.engine.sampling import SamplingParameters


Floats = npt.NDArray[np.float32]
Int64s = npt.NDArray[np.int64]

_TEMPERATURE_EPSILON = 1e-6
# The end token before `min_tokens`: chosen only if everything else is banned, for example by a guide at its end.
_LAST_RESORT = np.finfo(np.float32).min


class LogitsProcessor:
    """Processes the logits of one sequence or beam.

    neutral: rows need no processing.
    keeps_order: the largest logit stays the largest.
    drawable: nothing but temperature, penalties, bans of single tokens, min_tokens, a constant nucleus and a guide.
    top_p: the nucleus of this step.
    """

    def __init__(
        self,
        parameters: SamplingParameters,
        prompt: Int64s,
        *,
        vocab_size: int,
        end_id: int,
        bad_words: Sequence[Sequence[int]] = (),
        bias: Floats | None = None,
        guide: Guide | None = None,
    ) -> None:
        size = parameters.no_repeat_ngram_size
        self._parameters = parameters
        self._prompt = prompt
        self._bias = bias
        self.divisor = np.float32(1 if parameters.temperature == 1 else parameters.temperature + _TEMPERATURE_EPSILON)
        self.counts = TokenCounts(parameters, prompt, vocab_size) if parameters.penalised else None
        self.guarded_end = end_id if parameters.min_tokens > 0 and 0 <= end_id < vocab_size else None
        self.ngrams = Ngrams(size, prompt, vocab_size) if size else None
        self.bad_words = BadWords(bad_words, vocab_size) if any(bad_words) else None
        self.guide = guide
        self.top_p = parameters.top_p
        conditions = (bias, self.counts, self.guarded_end, self.ngrams, self.bad_words, guide)
        self.keeps_order = all(each is None for each in conditions)
        self.neutral = self.keeps_order and parameters.temperature == 1 and not parameters.min_p
        single_bans = self.bad_words is None or not self.bad_words.reach
        self.drawable = single_bans and parameters.top_p_decay == 1 and bias is None and self.ngrams is None

    @property
    def failure(self) -> str | None:
        """Why the guide allows no more tokens, or None if it does, or without a guide."""
        return None if self.guide is None else self.guide.failure

    def process(self, row: npt.NDArray[Any], generated: Sequence[int]) -> Floats:
        """Return the processed logits f32[V] after the tokens `generated`, all of which `accept` has seen.

        `row` is not changed. All logits are −∞ when no token is left. NaN in the row or in the request stays NaN.
        """
        result: Floats = np.array(row, dtype=np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            if self._bias is not None:
                result += self._bias
            if self.divisor != 1:
                result /= self.divisor
            if self.counts is not None:
                self.counts.penalise(result)
        if not self.keeps_order:
            self._ban(result, generated)
        if self._parameters.min_p:
            highest = result.max()
            if np.isfinite(highest):
                result[np.exp(result - highest) < self._parameters.min_p] = -np.inf
        return result

    def _ban(self, row: Floats, generated: Sequence[int]) -> None:
        if self.guarded_end is not None and len(generated) < self._parameters.min_tokens:
            row[self.guarded_end] = _LAST_RESORT
        if self.ngrams is not None:
            self.ngrams.ban(row)
        if self.bad_words is not None:
            self.bad_words.ban(row, self._tail(generated, self.bad_words.reach))
        if self.guide is not None:
            self.guide.mask(row)

    def _tail(self, generated: Sequence[int], count: int) -> list[int]:
        """Return the last `count` tokens of prompt and generated tokens; fewer if there are not as many."""
        tail = list(generated[-count:]) if count else []
        missing = count - len(tail)
        if missing:
            tail = [*self._prompt[-missing:].tolist(), *tail]
        return tail

    def accept(self, token: int) -> None:
        """Update the state after `token` was chosen."""
        if self.counts is not None:
            self.counts.add(token)
        if self.ngrams is not None:
            self.ngrams.add(token)
        if self.guide is not None:
            self.guide.accept(token)
        parameters = self._parameters
        if parameters.top_p_decay != 1:
            if token == parameters.top_p_reset_ids:
                self.top_p = parameters.top_p
            else:
                self.top_p = max(self.top_p * parameters.top_p_decay, parameters.top_p_min)

    def fork(self) -> LogitsProcessor:
        twin = copy.copy(self)
        if self.counts is not None:
            twin.counts = self.counts.fork()
        if self.ngrams is not None:
            twin.ngrams = self.ngrams.fork()
        if self.guide is not None:
            twin.guide = self.guide.fork()
        return twin


class TokenCounts:
    """Counts how often each token has occurred, for the penalties.

    The first `prompt_ignore_length` tokens of the prompt do not count for presence and frequency; for repetition every
    token counts, as in TensorRT-LLM. Ids outside the vocabulary (rows of a prompt table) do not count.
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
        place = self.places.get(token)
        if place is None:
            place = self.places[token] = self._size
            if place == len(self.ids):
                self.ids, self.counts = np.resize(self.ids, 2 * place), np.resize(self.counts, 2 * place)
            self.ids[place], self.counts[place] = token, 0
            self._size += 1
        self.counts[place] += 1

    def occurred(self) -> tuple[Int64s, Floats]:
        """Return the tokens that have occurred, and how often they count for presence and frequency."""
        return self.ids[: self._size], self.counts[: self._size]

    def penalise(self, row: Floats) -> None:
        """Apply repetition, presence and frequency penalty to the tokens that have occurred."""
        ids, counts = self.occurred()
        values = row[ids]
        if self._repetition != 1:
            values = np.where(values < 0, values * self._repetition, values / self._repetition)
        if self._presence:
            values[counts > 0] -= self._presence
        if self._frequency:
            values -= self._frequency * counts
        row[ids] = values

    def fork(self) -> TokenCounts:
        twin = copy.copy(self)
        twin.ids, twin.counts, twin.places = self.ids.copy(), self.counts.copy(), self.places.copy()
        return twin


class Ngrams:
    """Bans tokens that would complete an n-gram that the sequence, including its prompt, already has."""

    def __init__(self, size: int, prompt: Int64s, vocab_size: int) -> None:
        tokens = prompt.tolist()
        self._length = size - 1
        self._tail = tuple(tokens[max(len(tokens) - self._length, 0) :])
        # Those of the prompt are shared by all forks. Tokens outside the vocabulary have no logit to mask.
        self._of_prompt: dict[tuple[int, ...], set[int]] = {}
        self.of_answer: dict[tuple[int, ...], set[int]] = {}
        for start, token in enumerate(tokens[self._length :]):
            if 0 <= token < vocab_size:
                self._of_prompt.setdefault(tuple(tokens[start : start + self._length]), set()).add(token)

    def add(self, token: int) -> None:
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
        twin = copy.copy(self)
        twin.of_answer = {context: set(tokens) for context, tokens in self.of_answer.items()}
        return twin


class BadWords:
    """Bans words: single tokens always, longer words by their last token after the others.

    `reach` is the number of earlier tokens to look at.
    """

    def __init__(self, words: Iterable[Sequence[int]], vocab_size: int) -> None:
        self.single: list[int] = []
        # Grouped by the token before the banned one, so that a step compares few words.
        self._longer: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        self.reach = 0
        # Duplicates are removed: a client may send the same words thousands of times.
        for word in dict.fromkeys(map(tuple, words)):
            if word and 0 <= word[-1] < vocab_size:
                context, banned = word[:-1], word[-1]
                if context:
                    self._longer.setdefault(context[-1], []).append((context, banned))
                    self.reach = max(self.reach, len(context))
                else:
                    self.single.append(banned)

    def ban(self, row: Floats, tail: list[int]) -> None:
        """Mask tokens that would complete a word after `tail`, the last `reach` tokens."""
        if self.single:
            row[self.single] = -np.inf
        for context, banned in self._longer.get(tail[-1], ()) if tail else ():
            if tuple(tail[-len(context) :]) == context:
                row[banned] = -np.inf
