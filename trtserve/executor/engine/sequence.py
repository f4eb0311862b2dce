"""The state of one sequence: its request, its tokens, its beams and stop words, and its blocks in the KV cache."""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trtserve.executor.engine.drafts import DraftLogits, NgramDrafter
from trtserve.executor.engine.kv_cache import CacheKey
from trtserve.executor.engine.logits_processing import LogitsProcessor
from trtserve.executor.engine.lora import LoraAdapter
from trtserve.executor.engine.requests import BlockUse, FinishReason, PostProcessor, RequestMetrics
from trtserve.executor.engine.sampling import Choice, SamplingParameters, SamplingRow, log_softmax


class StopWords:
    """Stop words (non-empty tuples of tokens) of one sequence."""

    def __init__(self, words: SequenceOf[tuple[int, ...]], prompt: npt.NDArray[np.int64]) -> None:
        self.words = tuple(dict.fromkeys(words))
        self._reach = max(map(len, self.words)) - 1
        self._prompt_tail: list[int] = prompt[max(len(prompt) - self._reach, 0) :].tolist()
        # Grouped by their last token, so that most steps compare no word.
        self._by_end: dict[int, list[tuple[int, ...]]] = {}
        for word in self.words:
            self._by_end.setdefault(word[-1], []).append(word)

    def end(self, generated: SequenceOf[int], token: int) -> bool:
        """True when prompt, `generated` and `token` together end with a stop word."""
        words = self._by_end.get(token)
        if words is None:
            return False
        tail = list(generated[-self._reach :]) if self._reach else []
        if len(tail) < self._reach:
            tail = [*self._prompt_tail, *tail]
        tail.append(token)
        return any(len(word) <= len(tail) and tuple(tail[-len(word) :]) == word for word in words)


Floats = npt.NDArray[np.float32]

_RUN = 64
_ROUNDING = 1e-3


@dataclass(slots=True)
class Beam:
    """One continuation of the prompt."""

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)  # for each token the row of its step's logits
    cum_log_prob: float = 0.0  # sum of the log-probabilities, including that of the end token
    reason: FinishReason = FinishReason.NOT_FINISHED

    def extended(self, token: int, log_prob: float, origin: int) -> Beam:
        return Beam(
            [*self.tokens, token], [*self.log_probs, log_prob], [*self.origins, origin], self.cum_log_prob + log_prob
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
    """The search of one sequence, as in TensorRT-LLM; `beams` are those that still grow, the most probable first."""

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


NO_END = -1
DEFAULT_PRIORITY = 0.5
NO_CACHE_KEY = CacheKey(np.zeros(0, dtype=np.int64), reusable=False, stored=False)


@dataclass(slots=True, eq=False)
class RequestGroup:
    """The sequences of one request."""

    size: int = 1
    open: int = 1  # sequences that have not ended
    failed: bool = False  # whether an error ended all of them
    adapter: LoraAdapter | None = None  # the LoRA adapter that they use together


@dataclass(slots=True, eq=False)
class Logits:
    """Logits that the request asked for."""

    context: npt.NDArray[np.float32] | None = None  # f32[prompt, V]
    generation: list[npt.NDArray[np.float32]] | None = None  # for each step f32[beams, V]


@dataclass(slots=True, eq=False)
class Sequence:
    """A request, or one of the sequences of a request with num_return_sequences. Times are monotonic seconds."""

    id: int
    prompt: npt.NDArray[np.int64]
    max_tokens: int
    end_id: int = NO_END
    stop_words: StopWords | None = None
    parameters: SamplingParameters = field(default_factory=SamplingParameters)
    processor: LogitsProcessor | None = None
    group: RequestGroup = field(default_factory=RequestGroup)
    index: int = 0
    priority: float = DEFAULT_PRIORITY
    key: CacheKey = NO_CACHE_KEY
    draft: tuple[int, ...] = ()
    draft_logits: DraftLogits | None = None
    drafter: NgramDrafter | None = None  # makes draft tokens of its own text
    single_step: bool = False
    """It has draft tokens and ends after the step that verifies them; `max_tokens` is their number plus one."""
    adapter: LoraAdapter | None = None
    prompt_table: npt.NDArray[np.float32] | None = None
    positions: npt.NDArray[np.int64] | None = None
    post_processor: PostProcessor | None = None
    logits: Logits | None = None
    metrics: RequestMetrics | None = None
    streaming: bool = False
    return_all: bool = False
    exclude_input: bool = False
    client_id: int | None = None
    arrival: float = field(default_factory=time.monotonic)
    deadline: float | None = None
    use: BlockUse = field(default_factory=BlockUse)
    generated: list[int] = field(default_factory=list)
    log_probs: list[tuple[float, float]] | None = None
    """For each token its log-probability, and the sum of those in the whole vocabulary so far."""
    sent: int = 0  # tokens that were already sent in responses
    computed: int = 0  # tokens whose keys and values are in the cache
    capacity: int = 0  # tokens for which each slot has blocks
    slots: tuple[int, ...] = ()  # rows of the block table, one per beam; none until blocks are reserved
    iterations: int = 0
    ahead: int = 0  # tokens that are being chosen in steps whose results have not arrived
    place: int = 0  # its row in the last step that chose a token for it
    search: BeamSearch | None = field(init=False, default=None)
    row: SamplingRow = field(init=False)
    width: int = field(init=False)  # number of beams, or 1 without beam search
    context: npt.NDArray[np.int64] = field(init=False)
    """Tokens to compute before the next one is chosen: the prompt; after a pause also the generated tokens."""
    context_length: int = field(init=False)
    prompt_length: int = field(init=False)
    uses_logits: bool = field(init=False)  # whether logits are returned or post-processed
    drawn: bool = field(init=False)  # whether a model that chooses tokens itself can choose those of this sequence
    _updates_processor: bool = field(init=False)  # whether the logits processor must see every token

    def __post_init__(self) -> None:
        self.prompt_length = self.context_length = len(self.prompt)
        self.context = self.prompt
        self.width = self.parameters.beam_width
        processor = self.processor or LogitsProcessor(self.parameters, self.prompt, vocab_size=0, end_id=NO_END)
        self.row = SamplingRow(self.parameters, processor, self.generated, self.log_probs is not None)
        self._updates_processor = not (processor.neutral and self.parameters.top_p_decay == 1)
        self.uses_logits = self.post_processor is not None or self.logits is not None
        self.drawn = processor.drawable and self.width == 1 and not (self.uses_logits or self.single_step)
        if self.width > 1:
            self.search = BeamSearch(
                self.parameters, processor, end_id=self.end_id, max_tokens=self.max_tokens, stop_words=self.stop_words
            )

    @property
    def generating(self) -> bool:
        """True once the whole context is in the cache."""
        return self.computed >= self.context_length

    @property
    def awaits_token(self) -> bool:
        """True while it cannot join a step, because its next token is not known or will be its last."""
        return self.ahead > 0 and not (self.drawn and len(self.generated) + self.ahead < self.max_tokens)

    @property
    def context_left(self) -> int:
        """Context tokens that are not computed yet."""
        return self.context_length - self.computed

    @property
    def total_tokens(self) -> int:
        """Number of tokens when it reaches max_tokens, including the prompt."""
        return self.prompt_length + self.max_tokens

    def accept(self, choice: Choice) -> FinishReason:
        """Append the chosen token unless it is the end token; return whether and why the sequence has ended."""
        token = choice.token
        if token == self.end_id:
            return FinishReason.END_ID
        if self._updates_processor:
            self.row.processor.accept(token)
        if self.log_probs is not None:
            so_far = self.log_probs[-1][1] if self.log_probs else 0.0
            self.log_probs.append((choice.log_prob, so_far + choice.full_log_prob))
        stopped = self.stop_words is not None and self.stop_words.end(self.generated, token)
        self.generated.append(token)
        if self.drafter is not None:
            self.drafter.accept(token)
        if stopped:
            return FinishReason.STOP_WORDS
        return FinishReason.LENGTH if len(self.generated) >= self.max_tokens else FinishReason.NOT_FINISHED

    def pause(self) -> None:
        """Give up all blocks: generated tokens become part of the context; a beam search starts again."""
        self.computed = self.capacity = 0
        self.slots = ()
        if self.search is not None:
            self.search.restart()
            if self.logits is not None and self.logits.generation is not None:
                self.logits.generation.clear()
        elif self.generated:
            self.context = np.concatenate([self.prompt, as_tokens(self.generated)])
            self.context_length = len(self.context)
            extra = self.key.extra_ids and self.key.extra_ids[: self.prompt_length] + (0,) * len(self.generated)
            self.key = replace(self.key, tokens=self.context, extra_ids=extra)

    def is_long(self, beyond: int) -> bool:
        """Return whether LongRoPE uses its long factors: for contexts of more than `beyond` tokens, as in transformers.

        Beams and drafts cannot change their rotation later, so their largest possible length counts.
        """
        fixed = self.width > 1 or self.single_step
        return (self.total_tokens if fixed else self.context_length) > beyond

    def outgrows(self, beyond: int) -> bool:
        """True when the next token takes a sequence of short rotation beyond `beyond` tokens."""
        tokens = self.prompt_length + len(self.generated) + self.ahead
        return self.generating and not self.is_long(beyond) and tokens > beyond

    def recompute(self) -> None:
        """Compute all tokens again, in the same blocks, because the rotation has changed."""
        self.context = np.concatenate([self.prompt, as_tokens(self.generated)])
        self.context_length = len(self.context)
        self.computed = 0

    def cached_tokens(self) -> npt.NDArray[np.int64]:
        """All tokens so far; the last one is not in the cache yet."""
        return np.concatenate([self.prompt, as_tokens(self.generated)]) if self.generated else self.prompt


def as_tokens(tokens: SequenceOf[int]) -> npt.NDArray[np.int64]:
    """Return token ids as i64[n]."""
    array: npt.NDArray[Any] = np.array(tokens, dtype=np.int64)
    return array
