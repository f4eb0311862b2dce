"""One sequence on its way through the executor: what was asked, what it has produced, where it stands."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trtserve.executor.beams import BeamSearch
from trtserve.executor.drafts import DraftLogits
from trtserve.executor.enums import FinishReason
from trtserve.executor.kv_cache import BlockUse, CacheKey
from trtserve.executor.logits_processing import LogitsProcessor
from trtserve.executor.lora_weights import Adapter
from trtserve.executor.results import RequestPerfMetrics
from trtserve.executor.sampling import Choice, Row, SamplingParameters
from trtserve.executor.stop_words import StopWords

NO_END = -1
DEFAULT_PRIORITY = 0.5
UNKEYED = CacheKey(np.zeros(0, dtype=np.int64), reusable=False, stored=False)

PostProcessor = Callable[..., Any]


@dataclass(slots=True, eq=False)
class Family:
    """The sequences of one request: `open` counts those that have not ended, `failed` tells that an error ended all.

    They hold one LoRA `adapter` together.
    """

    size: int = 1
    open: int = 1
    failed: bool = False
    adapter: Adapter | None = None


@dataclass(slots=True, eq=False)
class Logits:
    """Logits that go into the response: `context` f32[prompt, V]; of each step the rows f32[b, V] in `generation`."""

    context: npt.NDArray[np.float32] | None = None
    generation: list[npt.NDArray[np.float32]] | None = None


@dataclass(slots=True, eq=False)
class Sequence:
    """A request, or one of the sequences that it asks for; `width` is 1, or how many beams are searched.

    A `single_step` sequence has draft tokens and ends after the step that verifies them: its `max_tokens` is one more.
    `context` holds the tokens to compute before the next one is chosen: the prompt, after a pause also what was
    generated. `computed` counts the tokens whose keys and values are in the cache, `capacity` what the blocks of each
    slot can hold. `slots` are its rows in the block table, none until blocks are set aside. Times are monotonic
    seconds.
    """

    id: int
    prompt: npt.NDArray[np.int64]
    max_tokens: int
    end_id: int = NO_END
    stop_words: StopWords | None = None
    parameters: SamplingParameters = field(default_factory=SamplingParameters)
    processor: LogitsProcessor | None = None
    family: Family = field(default_factory=Family)
    index: int = 0
    priority: float = DEFAULT_PRIORITY
    key: CacheKey = UNKEYED
    draft: tuple[int, ...] = ()
    draft_logits: DraftLogits | None = None
    single_step: bool = False
    adapter: Adapter | None = None
    prompt_table: npt.NDArray[np.float32] | None = None
    positions: npt.NDArray[np.int64] | None = None
    post_processor: PostProcessor | None = None
    logits: Logits | None = None
    metrics: RequestPerfMetrics | None = None
    streaming: bool = False
    return_all: bool = False
    exclude_input: bool = False
    client_id: int | None = None
    arrival: float = field(default_factory=time.monotonic)
    deadline: float | None = None
    use: BlockUse = field(default_factory=BlockUse)
    generated: list[int] = field(default_factory=list)
    log_probs: list[float] | None = None
    cum_log_prob: float = 0.0
    sent: int = 0
    computed: int = 0
    capacity: int = 0
    slots: tuple[int, ...] = ()
    iterations: int = 0
    search: BeamSearch | None = field(init=False, default=None)
    row: Row = field(init=False)
    width: int = field(init=False)
    context: npt.NDArray[np.int64] = field(init=False)
    context_length: int = field(init=False)
    prompt_length: int = field(init=False)
    special: bool = field(init=False)
    _watched: bool = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_length = self.context_length = len(self.prompt)
        self.context = self.prompt
        self.width = self.parameters.beam_width
        processor = self.processor or LogitsProcessor(self.parameters, self.prompt, vocab_size=0, end_id=NO_END)
        self.row = Row(self.parameters, processor, self.generated, self.log_probs is not None)
        self._watched = not (processor.neutral and self.parameters.top_p_decay == 1)
        self.special = self.post_processor is not None or self.logits is not None
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
    def context_left(self) -> int:
        """Context tokens that are not computed yet."""
        return self.context_length - self.computed

    @property
    def total_tokens(self) -> int:
        """Tokens at its longest, prompt included."""
        return self.prompt_length + self.max_tokens

    def accept(self, choice: Choice) -> FinishReason:
        """Append the chosen token unless it ends the sequence; says whether and why the sequence has ended."""
        token = choice.token
        if token == self.end_id:
            return FinishReason.END_ID
        if self._watched:
            self.row.processor.accept(token)
        if self.log_probs is not None:
            self.log_probs.append(choice.log_prob)
            self.cum_log_prob += choice.full_log_prob
        stopped = self.stop_words is not None and self.stop_words.end(self.generated, token)
        self.generated.append(token)
        if stopped:
            return FinishReason.STOP_WORDS
        return FinishReason.LENGTH if len(self.generated) >= self.max_tokens else FinishReason.NOT_FINISHED

    def pause(self) -> None:
        """Begin again without blocks: what one sequence has generated becomes context, beams are searched anew."""
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
        """Whether LongRoPE rotates it as one of more than `beyond` tokens: when its context has more, as transformers.

        Beams and drafts cannot change that on their way; there the tokens count that they may come to.
        """
        fixed = self.width > 1 or self.single_step
        return (self.total_tokens if fixed else self.context_length) > beyond

    def outgrows(self, beyond: int) -> bool:
        """True when its next token makes a sequence of more than `beyond` tokens that was begun as one of fewer."""
        return self.generating and not self.is_long(beyond) and self.prompt_length + len(self.generated) > beyond

    def compute_again(self) -> None:
        """Make all tokens so far the context, to be computed into the blocks that it has: its rotation has changed."""
        self.context = np.concatenate([self.prompt, as_tokens(self.generated)])
        self.context_length = len(self.context)
        self.computed = 0

    def cached_tokens(self) -> npt.NDArray[np.int64]:
        """All tokens so far, of which the last is not in the cache."""
        return np.concatenate([self.prompt, as_tokens(self.generated)]) if self.generated else self.prompt


def as_tokens(tokens: list[int]) -> npt.NDArray[np.int64]:
    """Token ids as the model takes them, i64[n]."""
    array: npt.NDArray[Any] = np.array(tokens, dtype=np.int64)
    return array
