"""Check requests and make sequences of them, or refuse them; the scheduler decides when they run."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trtserve.executor.engine.drafts import DraftLogits, NgramDrafter
from trtserve.executor.engine.guided import UNGUIDED, CompiledGuide, Done, GuideFactory, Wanted
from trtserve.executor.engine.kv_cache import CacheKey
from trtserve.executor.engine.limits import EngineLimits, EngineOptions
from trtserve.executor.engine.logits_processing import LogitsProcessor
from trtserve.executor.engine.lora import AdapterCache
from trtserve.executor.engine.model import ChoosingModel, ModelRunner
from trtserve.executor.engine.requests import BlockUse, GenerationRequest, PromptTable, RequestMetrics
from trtserve.executor.engine.sampling import SamplingParameters
from trtserve.executor.engine.sequence import NO_END, Logits, RequestGroup, Sequence, StopWords, as_tokens


class Admission:
    """Turns requests into sequences for one executor."""

    def __init__(
        self, model: ModelRunner, limits: EngineLimits, options: EngineOptions, adapters: AdapterCache
    ) -> None:
        self._model = model
        self._limits = limits
        self._drafts = bool(options.ngram_max_draft_len and model.step_costs)
        self._reuse = options.kv_cache.reuse and limits.paged_context
        self._static = options.static_batching
        self._generation_logits = limits.gather_generation_logits or options.generation_logits
        self._adapters = adapters
        # Requests arrive and sequences end on different threads.
        self._adapters_lock = threading.Lock()
        self._guides = GuideFactory(options.guides, limits.vocab_size)
        self._guides.prepare()

    def guide(self, request: GenerationRequest) -> CompiledGuide | None:
        """Return the compiled guide of `request` (UNGUIDED without one), or None while it must still be compiled."""
        return UNGUIDED if request.guide is None else self._guides.ready(request.guide)

    def compile_guide(self, request: GenerationRequest, done: Done, wanted: Wanted) -> None:
        """Compile the guide of `request` in the background. Raises RuntimeError when too many guides wait."""
        assert request.guide is not None
        self._guides.compile(request.guide, done, wanted)

    def close(self) -> None:
        """End the compilation of guides."""
        self._guides.close()

    def admit(self, request: GenerationRequest, number: int, guide: CompiledGuide, *, arrival: float) -> list[Sequence]:
        """Return the sequences of request `number`, which has come at the time `arrival`.

        Raises RuntimeError with the message of its error output if it is invalid. A `max_tokens` that exceeds
        max_seq_len is reduced with a warning.
        """
        if request.problem is not None:
            raise RuntimeError(request.problem)
        check_sampling(request, self._limits)
        first = self._first_sequence(request, number, guide, arrival)
        if request.adapter is not None:
            with self._adapters_lock:
                first.adapter = first.group.adapter = self._adapters.resolve(request.adapter)
            first.key = replace(first.key, adapter=first.adapter.content)
        return [first, *(self._sibling(first, request, index, guide) for index in range(1, first.group.size))]

    def release(self, sequences: list[Sequence]) -> None:
        """Release the adapters of requests whose last sequence has ended."""
        for sequence in sequences:
            group = sequence.group
            if group.adapter is not None and (group.open == 0 or group.failed):
                adapter, group.adapter = group.adapter, None
                with self._adapters_lock:
                    self._adapters.release(adapter)

    def _first_sequence(
        self, request: GenerationRequest, number: int, guide: CompiledGuide, arrival: float
    ) -> Sequence:
        limits, parameters = self._limits, request.sampling
        prompt, length = as_tokens(request.tokens), len(request.tokens)
        sizes = {"hidden_size": self._model.hidden_size, "max_position": self._model.max_position}
        check_prompt(request, prompt, limits, reuse=self._reuse, **sizes)
        check_outputs(request, limits, generation_logits=self._generation_logits)
        draft = allowed_draft(request, limits)
        end_id = allowed_end_id(request.end_id, limits)
        words = tuple(tuple(word) for word in request.stop_words if word)
        max_tokens = allowed_max_tokens(request, length, len(draft), limits)
        streaming = request.streaming and not self._static
        if streaming:
            limits.check_streaming(length, max_tokens)
        draft_logits = None
        if request.draft is not None:
            max_tokens = len(draft) + 1  # one step verifies all draft tokens and adds one
            if request.draft.logits is not None:
                draft_logits = DraftLogits(request.draft.logits.astype(np.float32), request.draft.threshold)
        table = request.prompt_table
        processor = self._processor(request, prompt, parameters, end_id, guide)
        return Sequence(
            id=number,
            prompt=prompt,
            max_tokens=max_tokens,
            end_id=end_id,
            stop_words=StopWords(words, prompt) if words else None,
            parameters=parameters,
            processor=processor,
            group=RequestGroup(request.num_sequences, request.num_sequences),
            priority=request.priority,
            key=self._key(request, prompt, length + max_tokens),
            draft=draft,
            draft_logits=draft_logits,
            drafter=None if request.draft is not None else self._drafter(prompt, parameters, processor),
            single_step=request.draft is not None,
            prompt_table=None if table is None else np.ascontiguousarray(table.rows, dtype=np.float32),
            positions=None if request.position_ids is None else as_tokens(request.position_ids),
            post_processor=request.post_processor,
            logits=self._logits(request, length),
            metrics=RequestMetrics(arrival=arrival) if request.return_metrics else None,
            streaming=streaming,
            return_all=request.return_all_tokens,
            exclude_input=request.exclude_input or (self._static and request.streaming),
            client_id=request.client_id,
            arrival=arrival,
            deadline=None if request.time_limit is None else arrival + request.time_limit,
            log_probs=[] if request.return_log_probs else None,
        )

    def _sibling(self, first: Sequence, request: GenerationRequest, index: int, guide: CompiledGuide) -> Sequence:
        """Return another sequence of the same request, with its own seed and state; everything else is shared."""
        parameters = replace(request.sampling, seed=(request.sampling.seed + index) % 2**64)
        processor = self._processor(request, first.prompt, parameters, first.end_id, guide)
        return replace(
            first,
            index=index,
            parameters=parameters,
            drafter=None if first.drafter is None else self._drafter(first.prompt, parameters, processor),
            processor=processor,
            logits=self._logits(request, first.prompt_length),
            metrics=None if first.metrics is None else RequestMetrics(arrival=first.arrival),
            log_probs=None if first.log_probs is None else [],
            generated=[],
            use=BlockUse(),
        )

    def _drafter(
        self, prompt: npt.NDArray[np.int64], parameters: SamplingParameters, processor: LogitsProcessor
    ) -> NgramDrafter | None:
        if not self._drafts or parameters.beam_width > 1:
            return None
        # A model that chooses tokens would count those of wrong guesses.
        counted = (processor.counts, processor.bad_words, processor.guide)
        if isinstance(self._model, ChoosingModel) and any(each is not None for each in counted):
            return None
        return NgramDrafter(prompt.tolist(), vocab_size=self._limits.vocab_size)

    def _processor(
        self,
        request: GenerationRequest,
        prompt: npt.NDArray[np.int64],
        parameters: SamplingParameters,
        end_id: int,
        guide: CompiledGuide,
    ) -> LogitsProcessor:
        return LogitsProcessor(
            parameters,
            prompt,
            vocab_size=self._limits.vocab_size,
            end_id=end_id,
            bad_words=[word for word in request.bad_words if word],
            bias=allowed_bias(request.bias, self._limits),
            guide=None if guide is UNGUIDED else self._guides.guide(guide, end_id),
        )

    def _key(self, request: GenerationRequest, prompt: npt.NDArray[np.int64], longest: int) -> CacheKey:
        """Return the key of reusable blocks. Requests with own positions or a rotation that changes share none."""
        table, windows = request.prompt_table, self._limits.windows
        beyond = self._limits.long_rope_beyond
        own_positions = request.position_ids is not None or (beyond is not None and longest > beyond)
        extra_ids = None if table is None else table.extra_ids
        return CacheKey(
            tokens=prompt,
            extra_ids=None if extra_ids is None else tuple(extra_ids),
            salt=request.cache_salt,
            retention=request.retention,
            reusable=not (request.return_context_logits or own_positions),
            stored=request.sampling.beam_width == 1 and not own_positions and not (windows and longest > min(windows)),
        )

    def _logits(self, request: GenerationRequest, prompt_length: int) -> Logits | None:
        """Return the storage for requested logits; streamed beam search returns no generation logits."""
        beams = request.sampling.beam_width > 1
        generation = request.return_generation_logits and not (beams and request.streaming and not self._static)
        if not (request.return_context_logits or generation):
            return None
        context = (
            np.zeros((prompt_length, self._limits.vocab_size), dtype=np.float32)
            if request.return_context_logits
            else None
        )
        return Logits(context, [] if generation else None)


logger = logging.getLogger(__name__)

MOST_SEQUENCES = 1024
"""Most sequences of one request, the number of beams that TensorRT-LLM allows: each uses memory while it waits."""

_FINITE = (
    "temperature", "beam_search_diversity_rate", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "length_penalty",
)  # fmt: skip


def check_sampling(request: GenerationRequest, limits: EngineLimits) -> None:
    """Check the numbers of sequences and beams, and that all figures are finite."""
    # NaN or infinity would leave no valid logits, and no valid order of the queue.
    figures = {"priority": request.priority} | {name: getattr(request.sampling, name) for name in _FINITE}
    for name, value in figures.items():
        if not math.isfinite(value):
            raise RuntimeError(f"{name} is {value}; expected a finite number")
    if request.num_sequences > MOST_SEQUENCES:
        raise RuntimeError(
            f"num_return_sequences ({request.num_sequences}) exceeds {MOST_SEQUENCES}, the most sequences of a request"
        )
    if request.sampling.beam_width > limits.max_beam_width:
        raise RuntimeError(
            f"Requested beam width {request.sampling.beam_width} is larger than configured max beam width "
            f"{limits.max_beam_width}"
        )


def check_prompt(
    request: GenerationRequest,
    prompt: npt.NDArray[np.int64],
    limits: EngineLimits,
    *,
    hidden_size: int,
    max_position: int,
    reuse: bool,
) -> None:
    """Check the length, the token ids, the positions, and the prompt table that ids above the vocabulary refer to."""
    length = len(prompt)
    if length > limits.max_input_len:
        raise RuntimeError(f"Prompt length ({length}) exceeds maximum input length ({limits.max_input_len}).")
    rows = 0
    if request.prompt_table is not None:
        rows = _check_prompt_table(request.prompt_table, length, hidden_size, limits, reuse=reuse)
    lowest, highest = int(prompt.min()), int(prompt.max())
    if lowest < 0 or highest >= limits.vocab_size + rows:
        wrong = lowest if lowest < 0 else highest
        table = f" and the {rows} rows of the prompt table" if rows else ""
        raise RuntimeError(f"Token id {wrong} of the prompt is outside the vocabulary of {limits.vocab_size}{table}")
    if request.position_ids is not None:
        if len(request.position_ids) != length:
            raise RuntimeError(f"Got {len(request.position_ids)} position ids for a prompt of {length} tokens")
        if min(request.position_ids) < 0 or max(request.position_ids) >= max_position:
            raise RuntimeError(f"Position ids must be in 0 … {max_position - 1}")


def _check_prompt_table(table: PromptTable, length: int, width: int, limits: EngineLimits, *, reuse: bool) -> int:
    """Check the prompt table and return its number of rows."""
    rows, hidden = table.rows.shape
    most = limits.max_prompt_embedding_table_size
    if rows > most:
        built = "without a prompt table" if most == 0 else f"for {most} rows"
        raise RuntimeError(
            f"The prompt embedding table has {rows} rows, but the engine was built {built} "
            "(max_prompt_embedding_table_size)"
        )
    if hidden != width:
        raise RuntimeError(f"The prompt embedding table has hidden size {hidden}; the model has {width}")
    if not np.isfinite(table.rows.astype(np.float32, copy=False)).all():
        raise RuntimeError("The prompt embedding table has values that are not finite")
    extra_ids = table.extra_ids
    if reuse and extra_ids is None:
        raise RuntimeError("Input token extra ids must be provided when enabling kv cache reuse with prompt table")
    if extra_ids is not None and len(extra_ids) != length:
        raise RuntimeError(
            f"inputTokenExtraIds vector size ({len(extra_ids)}) must be the same as input token vector size ({length})."
        )
    return rows


def check_outputs(request: GenerationRequest, limits: EngineLimits, *, generation_logits: bool) -> None:
    """Check that the engine was built to return the requested logits."""
    if request.return_context_logits and not limits.gather_context_logits:
        raise RuntimeError("return_context_logits needs an engine that was built with gather_context_logits")
    if request.top_log_probs:
        raise RuntimeError(
            "num_top_log_probs needs the vllm runtime; return_generation_logits has all log-probabilities"
        )
    if request.prompt_log_probs:
        raise RuntimeError(
            "return_prompt_log_probs needs the vllm runtime; return_context_logits has all log-probabilities"
        )
    if request.images:
        raise RuntimeError("images need the vllm runtime, and a model that reads them")
    if request.return_generation_logits and not generation_logits:
        raise RuntimeError("return_generation_logits needs an engine that was built with gather_generation_logits")


def allowed_draft(request: GenerationRequest, limits: EngineLimits) -> tuple[int, ...]:
    """Return the draft tokens that fit after the prompt, or empty without a draft."""
    draft = request.draft
    if draft is None:
        return ()
    tokens, length = draft.tokens, len(request.tokens)
    if request.sampling.beam_width > 1:
        raise RuntimeError("Draft tokens need beam width 1")
    if len(tokens) > limits.max_draft_len:
        raise RuntimeError(
            f"Draft tokens length ({len(tokens)}) exceeds maximum draft tokens length ({limits.max_draft_len})."
        )
    _check_draft(draft.logits, tokens, limits.vocab_size)
    room = max(limits.max_input_len - length, 0)
    if len(tokens) > room:
        logger.warning(
            "Prompt length + number of draft tokens (%d + %d) exceeds maximum input length (%d): using %d draft tokens",
            length,
            len(tokens),
            limits.max_input_len,
            room,
        )
    return tuple(tokens[:room])


def _check_draft(logits: npt.NDArray[Any] | None, tokens: SequenceOf[int], vocab_size: int) -> None:
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        raise RuntimeError(f"A draft token is outside the vocabulary of {vocab_size}")
    if logits is None:
        return
    if logits.shape[1] != vocab_size:
        raise RuntimeError(f"The draft logits cover {logits.shape[1]} tokens; the vocabulary has {vocab_size}")
    # −∞ marks a token that the draft model must not choose; if it could choose none, there is no distribution.
    if not np.isfinite(logits.max(axis=1)).all():
        raise RuntimeError("The draft logits have NaN, +infinity, or a row without any finite value")


def allowed_max_tokens(request: GenerationRequest, prompt_length: int, draft_length: int, limits: EngineLimits) -> int:
    """Return `max_tokens`, reduced with a warning if the sequence would exceed max_seq_len."""
    room = max(limits.max_seq_len - prompt_length - draft_length, 1)
    if request.max_tokens > room:
        logger.warning(
            "max_tokens (%d) is reduced to %d: the prompt has %d tokens and max_seq_len is %d",
            request.max_tokens,
            room,
            prompt_length + draft_length,
            limits.max_seq_len,
        )
    return min(request.max_tokens, room)


def allowed_end_id(end_id: int | None, limits: EngineLimits) -> int:
    """Return the end token; −1 for none."""
    if end_id is None:
        return NO_END
    if not NO_END <= end_id < limits.vocab_size:
        raise RuntimeError(f"EndId ({end_id}) is not within acceptable range [{NO_END}, {limits.vocab_size})")
    return end_id


def allowed_bias(bias: npt.NDArray[Any] | None, limits: EngineLimits) -> npt.NDArray[np.float32] | None:
    """Return the bias to add to the logits, f32[vocab_size]; −∞ bans a token."""
    if bias is None or bias.size == 0:
        return None
    if bias.shape != (limits.vocab_size,):
        raise RuntimeError(
            f"The embedding bias has {bias.size} entries; expected as many as the vocabulary has ({limits.vocab_size})"
        )
    if bias.dtype not in (np.float32, np.float16):
        raise RuntimeError(f"The embedding bias has type {bias.dtype}; expected float32 or float16")
    if np.isnan(bias).any() or np.isposinf(bias).any():
        raise RuntimeError("The embedding bias has NaN or +infinity; use finite numbers, or -infinity to ban a token")
    return bias.astype(np.float32)
