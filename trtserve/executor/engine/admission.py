"""Turn requests into sequences."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from trtserve.executor.engine import checks
from trtserve.executor.engine.drafts import DraftLogits
from trtserve.executor.engine.guided import (
    UNGUIDED,
    CompiledGuide,
    Done,
    GuideFactory,
    Wanted,
)
from trtserve.executor.engine.kv_cache import CacheKey
from trtserve.executor.engine.limits import EngineLimits
from trtserve.executor.engine.logits_processing import LogitsProcessor
from trtserve.executor.engine.lora import AdapterCache
from trtserve.executor.engine.model import ModelRunner
from trtserve.executor.engine.ngram_drafts import NgramDrafter
from trtserve.executor.engine.options import EngineOptions
from trtserve.executor.engine.requests import BlockUse, GenerationRequest, RequestMetrics
from trtserve.executor.engine.sampling import SamplingParameters
from trtserve.executor.engine.sequence import (
    Logits,
    RequestGroup,
    Sequence,
    as_tokens,
)
from trtserve.executor.engine.stop_words import StopWords


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
        """Return the guide of `request`, also when it has none. None: it has to be compiled first."""
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
        checks.check_sampling(request, self._limits)
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
        checks.check_prompt(request, prompt, self._model, limits, reuse=self._reuse)
        checks.check_outputs(request, limits, generation_logits=self._generation_logits)
        draft = checks.allowed_draft(request, limits)
        end_id = checks.allowed_end_id(request.end_id, limits)
        words = tuple(tuple(word) for word in request.stop_words if word)
        max_tokens = checks.allowed_max_tokens(request, length, len(draft), limits)
        streaming = request.streaming and not self._static
        if streaming:
            limits.check_streaming(length, max_tokens)
        draft_logits = None
        if request.draft is not None:
            max_tokens = len(draft) + 1  # one step verifies all draft tokens and adds one
            if request.draft.logits is not None:
                draft_logits = DraftLogits(request.draft.logits.astype(np.float32), request.draft.threshold)
        table = request.prompt_table
        return Sequence(
            id=number,
            prompt=prompt,
            max_tokens=max_tokens,
            end_id=end_id,
            stop_words=StopWords(words, prompt) if words else None,
            parameters=parameters,
            processor=self._processor(request, prompt, parameters, end_id, guide),
            group=RequestGroup(request.num_sequences, request.num_sequences),
            priority=request.priority,
            key=self._key(request, prompt, length + max_tokens),
            draft=draft,
            draft_logits=draft_logits,
            drafter=None if request.draft is not None else self._drafter(prompt, parameters),
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
        return replace(
            first,
            index=index,
            parameters=parameters,
            drafter=None if first.drafter is None else self._drafter(first.prompt, parameters),
            processor=self._processor(request, first.prompt, parameters, first.end_id, guide),
            logits=self._logits(request, first.prompt_length),
            metrics=None if first.metrics is None else RequestMetrics(arrival=first.arrival),
            log_probs=None if first.log_probs is None else [],
            generated=[],
            use=BlockUse(),
        )

    def _drafter(self, prompt: npt.NDArray[np.int64], parameters: SamplingParameters) -> NgramDrafter | None:
        if not self._drafts or parameters.beam_width > 1:
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
        guided = request.guide
        return LogitsProcessor(
            parameters,
            prompt,
            vocab_size=self._limits.vocab_size,
            end_id=end_id,
            bad_words=[word for word in request.bad_words if word],
            bias=checks.allowed_bias(request.bias, self._limits),
            guide=None
            if guided is None or guide is UNGUIDED
            else self._guides.guide(guided, end_id=end_id, guide=guide),
        )

    def _key(self, request: GenerationRequest, prompt: npt.NDArray[np.int64], longest: int) -> CacheKey:
        """Return what identifies reusable blocks; none with own positions or a rotation that depends on the length."""
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
