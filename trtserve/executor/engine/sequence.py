"""The state of one sequence: its request, its tokens, and its blocks in the KV cache."""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trtserve.executor.engine.beams import BeamSearch
from trtserve.executor.engine.drafts import DraftLogits, NgramDrafter
from trtserve.executor.engine.kv_cache import CacheKey
from trtserve.executor.engine.logits_processing import LogitsProcessor
from trtserve.executor.engine.lora import LoraAdapter
from trtserve.executor.engine.requests import BlockUse, FinishReason, PostProcessor, RequestMetrics
from trtserve.executor.engine.sampling import Choice, SamplingParameters, SamplingRow
from trtserve.executor.engine.stop_words import StopWords

NO_END = -1
DEFAULT_PRIORITY = 0.5
NO_CACHE_KEY = CacheKey(np.zeros(0, dtype=np.int64), reusable=False, stored=False)


@dataclass(slots=True, eq=False)
class RequestGroup:
    """The sequences of one request."""

    size: int = 1
    open: int = 1
    """Sequences that have not ended."""
    failed: bool = False
    """Whether an error ended all of them."""
    adapter: LoraAdapter | None = None
    """The LoRA adapter that they use together."""


@dataclass(slots=True, eq=False)
class Logits:
    """Logits that the request asked for."""

    context: npt.NDArray[np.float32] | None = None
    """f32[prompt, V]"""
    generation: list[npt.NDArray[np.float32]] | None = None
    """For each step f32[beams, V]."""


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
    drafter: NgramDrafter | None = None
    """Makes draft tokens of its own text."""
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
    sent: int = 0
    """Tokens that were already sent in responses."""
    computed: int = 0
    """Tokens whose keys and values are in the cache."""
    capacity: int = 0
    """Tokens for which each slot has blocks."""
    slots: tuple[int, ...] = ()
    """Rows of the block table, one per beam; none until blocks are reserved."""
    iterations: int = 0
    ahead: int = 0
    """Tokens that are being chosen in steps whose results have not arrived."""
    place: int = 0
    """Its row in the last step that chose a token for it."""
    search: BeamSearch | None = field(init=False, default=None)
    row: SamplingRow = field(init=False)
    width: int = field(init=False)
    """Number of beams, or 1 without beam search."""
    context: npt.NDArray[np.int64] = field(init=False)
    """Tokens to compute before the next one is chosen: the prompt; after a pause also the generated tokens."""
    context_length: int = field(init=False)
    prompt_length: int = field(init=False)
    uses_logits: bool = field(init=False)
    """Whether logits are returned or post-processed."""
    drawn: bool = field(init=False)
    """Whether a model that chooses tokens itself can choose those of this sequence."""
    _updates_processor: bool = field(init=False)
    """Whether the logits processor must see every token."""

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
                self.parameters,
                processor,
                end_id=self.end_id,
                max_tokens=self.max_tokens,
                stop_words=self.stop_words,
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
