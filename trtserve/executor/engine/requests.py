"""What the engine is asked for and what it answers: plain data without any behaviour.

The enumerations have the names and values of TensorRT-LLM's executor, so that the interface can offer them as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from trtserve.executor.engine.blocks import RetentionRules
from trtserve.executor.engine.sampling import SamplingParameters

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]

PostProcessor = Callable[..., Any]
"""Called with (request id, logits, tokens per beam, None, client id); see `step.PostProcessors`."""


class FinishReason(Enum):
    NOT_FINISHED = 0
    END_ID = 1
    STOP_WORDS = 2
    LENGTH = 3
    TIMED_OUT = 4
    CANCELLED = 5


class RequestStage(Enum):
    QUEUED = 0
    ENCODER_IN_PROGRESS = 1
    CONTEXT_IN_PROGRESS = 2
    GENERATION_IN_PROGRESS = 3
    GENERATION_COMPLETE = 4


class GuideType(Enum):
    JSON = 0
    JSON_SCHEMA = 1
    REGEX = 2
    EBNF_GRAMMAR = 3
    STRUCTURAL_TAG = 4


@dataclass(frozen=True, slots=True)
class GuideSource:
    """A guide as the client wrote it."""

    kind: GuideType
    text: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class AdapterSource:
    """A LoRA adapter that a request names, with the weights if the client has sent them."""

    task_id: int
    weights: Array | None = None
    config: Array | None = None


@dataclass(frozen=True, slots=True, eq=False)
class DraftSource:
    """Draft tokens of the client, and the logits that they were drawn from."""

    tokens: SequenceOf[int]
    logits: Array | None = None  # float[k, V]
    threshold: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PromptTable:
    """Embeddings of the ids from vocab_size on."""

    rows: Array  # float[n, hidden]
    extra_ids: SequenceOf[int] | None = None
    """One per prompt token; tells apart the rows of different tables in the KV cache."""


PromptLogProbs = tuple[list[float], list[list[tuple[int, float]]]]
"""For each token of a prompt but the first: its log-probability, and the most likely tokens with theirs."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GenerationRequest:
    """One generation request."""

    tokens: SequenceOf[int]
    max_tokens: int  # new tokens
    sampling: SamplingParameters
    num_sequences: int = 1  # sequences with seeds of their own; all beams of a sequence count as one
    problem: str | None = None  # why the request cannot be served, if that is known already
    streaming: bool = False
    end_id: int | None = None
    stop_words: SequenceOf[SequenceOf[int]] = ()
    bad_words: SequenceOf[SequenceOf[int]] = ()
    bias: Array | None = None  # float[V], added to the logits
    position_ids: SequenceOf[int] | None = None
    prompt_table: PromptTable | None = None
    draft: DraftSource | None = None
    adapter: AdapterSource | None = None
    guide: GuideSource | None = None
    post_processor: PostProcessor | None = None
    retention: RetentionRules | None = None
    images: SequenceOf[bytes] = ()  # files of the images that the prompt has places for
    cache_salt: int | None = None
    priority: float = 0.5
    time_limit: float | None = None  # seconds from its arrival on
    client_id: int | None = None
    return_log_probs: bool = False
    prompt_log_probs: bool = False
    top_log_probs: int = 0  # most likely tokens to return with the log-probability of each token
    return_context_logits: bool = False
    return_generation_logits: bool = False
    return_metrics: bool = False
    return_all_tokens: bool = False  # streamed responses repeat the earlier tokens
    exclude_input: bool = False


@dataclass(slots=True)
class BlockUse:
    """Blocks of the KV cache that one sequence has used."""

    total: int = 0  # allocated
    new: int = 0  # allocated without evicting reusable contents
    reused: int = 0
    missed: int = 0  # blocks of its context that could not be reused


@dataclass(slots=True, kw_only=True)
class RequestMetrics:
    """Times (monotonic seconds), iterations and drafts of one sequence."""

    arrival: float
    first_scheduled: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    first_iteration: int | None = None
    last_iteration: int | None = None
    drafted: int = 0
    accepted: int = 0
    blocks: BlockUse = field(default_factory=BlockUse)


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """What is new of a sequence, or the error that ended its request."""

    request_id: int
    client_id: int | None = None
    error: str | None = None
    tokens: list[list[int]] = field(default_factory=list)  # per beam, best first
    reasons: list[FinishReason] = field(default_factory=list)  # per beam
    index: int = 0  # which of the request's sequences it is
    ended: bool = False  # whether it is the sequence's last output
    is_last: bool = False  # whether it is the request's last output
    iterations: int = 0
    log_probs: list[list[float]] | None = None
    cum_log_probs: list[float] | None = None
    top_log_probs: list[list[tuple[int, float]]] | None = None
    """For each token the most likely ones, with their log-probabilities."""
    prompt_log_probs: PromptLogProbs | None = None  # with the first output
    prompt_tokens: int | None = None  # of a prompt with images, which take the places of more tokens than were sent
    context_logits: Floats | None = None  # f32[prompt, V]
    generation_logits: Floats | None = None  # f32[beams, max_tokens, V], for a stream f32[n, 1, V] of its new tokens
    metrics: RequestMetrics | None = None
