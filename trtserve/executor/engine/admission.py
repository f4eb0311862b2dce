"""Turn requests into sequences."""

from __future__ import annotations

import threading
from dataclasses import replace
from datetime import timedelta

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
from trtserve.executor.engine.kv_cache import BlockUse, CacheKey
from trtserve.executor.engine.limits import Limits
from trtserve.executor.engine.logits_processing import LogitsProcessor
from trtserve.executor.engine.lora import AdapterCache
from trtserve.executor.engine.model import Model
from trtserve.executor.engine.ngram_drafts import NgramDrafter
from trtserve.executor.engine.post_processing import PostProcessors
from trtserve.executor.engine.sampling import SamplingParameters
from trtserve.executor.engine.sequence import (
    Logits,
    RequestGroup,
    Sequence,
    as_tokens,
)
from trtserve.executor.engine.stop_words import StopWords
from trtserve.executor.interface.configs import ExecutorConfig
from trtserve.executor.interface.enums import BatchingType
from trtserve.executor.interface.requests import Request
from trtserve.executor.interface.results import RequestPerfMetrics, TimingMetrics
from trtserve.executor.interface.unsupported import refuse_unsupported


class Admission:
    """Turns requests into sequences for one executor."""

    def __init__(
        self,
        model: Model,
        limits: Limits,
        config: ExecutorConfig,
        *,
        adapters: AdapterCache,
        post_processors: PostProcessors,
    ) -> None:
        self._model = model
        self._limits = limits
        self._drafts = bool(config.ngram_max_draft_len and model.step_costs)
        self._reuse = config.kv_cache_config.enable_block_reuse and limits.paged_context
        self._static = config.batching_type is BatchingType.STATIC
        self._generation_logits = limits.gather_generation_logits or config.gather_generation_logits
        self._adapters = adapters
        # Requests arrive and sequences end on different threads.
        self._adapters_lock = threading.Lock()
        self._guides = GuideFactory(config.guided_decoding_config, limits.vocab_size)
        self._guides.prepare()
        self._post_processors = post_processors

    def guide(self, request: Request) -> CompiledGuide | None:
        """Return the guide of `request`, also when it has none. None: it has to be compiled first."""
        guided = request.guided_decoding_params
        return UNGUIDED if guided is None else self._guides.ready(guided)

    def compile_guide(self, request: Request, done: Done, wanted: Wanted) -> None:
        """Compile the guide of `request` in the background. Raises RuntimeError when too many guides wait."""
        assert request.guided_decoding_params is not None
        self._guides.compile(request.guided_decoding_params, done, wanted)

    def close(self) -> None:
        """End the compilation of guides."""
        self._guides.close()

    def admit(
        self,
        request: Request,
        id: int,  # noqa: A002 - the interface's name
        guide: CompiledGuide,
        *,
        arrival: float,
    ) -> list[Sequence]:
        """Return the sequences of `request`, which has come at the time `arrival`.

        Raises RuntimeError with the message of its error Response if it is invalid.

        A `max_tokens` that exceeds max_seq_len is reduced with a warning.
        """
        checks.check_sampling(request, self._limits)
        refuse_unsupported(request)
        first = self._first_sequence(request, id, guide, arrival)
        if request.lora_config is not None:
            with self._adapters_lock:
                first.adapter = first.group.adapter = self._adapters.resolve(request.lora_config)
            first.key = replace(first.key, adapter=first.adapter.content)
        return [first, *(self._sibling(first, request, index, guide) for index in range(1, first.group.size))]

    def require_post_processors(self, requests: list[Request]) -> None:
        """Raise RuntimeError if a request names a logits post-processor that the executor does not have."""
        for request in requests:
            self._post_processors.of(request)

    def release(self, sequences: list[Sequence]) -> None:
        """Release the adapters of requests whose last sequence has ended."""
        for sequence in sequences:
            group = sequence.group
            if group.adapter is not None and (group.open == 0 or group.failed):
                adapter, group.adapter = group.adapter, None
                with self._adapters_lock:
                    self._adapters.release(adapter)

    def _first_sequence(self, request: Request, number: int, guide: CompiledGuide, arrival: float) -> Sequence:
        limits, wanted = self._limits, request.output_config
        prompt = as_tokens(request.input_token_ids)
        checks.check_prompt(request, prompt, self._model, limits, reuse=self._reuse)
        checks.check_outputs(request, limits, generation_logits=self._generation_logits)
        draft = checks.allowed_draft(request, limits)
        end_id = checks.allowed_end_id(request.end_id, limits)
        words = tuple(tuple(word) for word in request.stop_words or () if word)
        parameters = SamplingParameters.of(request.sampling_config)
        count = checks.sequence_count(request)
        length = len(request.input_token_ids)
        max_tokens = checks.allowed_max_tokens(request, length, len(draft), self._limits)
        if request.streaming and not self._static:
            self._limits.check_streaming(length, max_tokens)
        if request.external_draft_tokens_config is not None:
            max_tokens = len(draft) + 1  # one step verifies all draft tokens and adds one
        external, tuning = request.external_draft_tokens_config, request.prompt_tuning_config
        draft_logits = None
        if external is not None and external.logits is not None:
            draft_logits = DraftLogits(external.logits.astype(np.float32), external.acceptance_threshold)
        return Sequence(
            id=number,
            prompt=prompt,
            max_tokens=max_tokens,
            end_id=end_id,
            stop_words=StopWords(words, prompt) if words else None,
            parameters=parameters,
            processor=self._processor(request, prompt, parameters, end_id, guide),
            group=RequestGroup(count, count),
            priority=request.priority,
            key=self._key(request, prompt, len(prompt) + max_tokens),
            draft=draft,
            draft_logits=draft_logits,
            drafter=None if external is not None else self._drafter(prompt, parameters),
            single_step=external is not None,
            prompt_table=None if tuning is None else np.ascontiguousarray(tuning.embedding_table, dtype=np.float32),
            positions=None if request.position_ids is None else as_tokens(request.position_ids),
            post_processor=self._post_processors.of(request),
            logits=self._logits(request, len(prompt)),
            metrics=_metrics(arrival) if wanted.return_perf_metrics else None,
            streaming=request.streaming and not self._static,
            return_all=request.return_all_generated_tokens,
            exclude_input=wanted.exclude_input_from_output or (self._static and request.streaming),
            client_id=request.client_id,
            arrival=arrival,
            deadline=None if request.allotted_time_ms is None else arrival + request.allotted_time_ms.total_seconds(),
            log_probs=[] if wanted.return_log_probs else None,
        )

    def _sibling(self, first: Sequence, request: Request, index: int, guide: CompiledGuide) -> Sequence:
        """Return another sequence of the same request, with its own state; everything else is shared."""
        parameters = SamplingParameters.of(request.sampling_config, index=index)
        return replace(
            first,
            index=index,
            parameters=parameters,
            drafter=None if first.drafter is None else self._drafter(first.prompt, parameters),
            processor=self._processor(request, first.prompt, parameters, first.end_id, guide),
            logits=self._logits(request, first.prompt_length),
            metrics=_metrics(first.arrival) if first.metrics is not None else None,
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
        request: Request,
        prompt: npt.NDArray[np.int64],
        parameters: SamplingParameters,
        end_id: int,
        guide: CompiledGuide,
    ) -> LogitsProcessor:
        guided = request.guided_decoding_params
        return LogitsProcessor(
            parameters,
            prompt,
            vocab_size=self._limits.vocab_size,
            end_id=end_id,
            bad_words=[word for word in request.bad_words or () if word],
            bias=checks.allowed_bias(request.embedding_bias, self._limits),
            guide=None
            if guided is None or guide is UNGUIDED
            else self._guides.guide(guided, end_id=end_id, guide=guide),
        )

    def _key(self, request: Request, prompt: npt.NDArray[np.int64], longest: int) -> CacheKey:
        """Return what identifies reusable blocks; none with own positions or a rotation that depends on the length."""
        table, windows = request.prompt_tuning_config, self._limits.windows
        beyond = self._limits.long_rope_beyond
        own_positions = request.position_ids is not None or (beyond is not None and longest > beyond)
        extra_ids = table.input_token_extra_ids if table is not None else None
        return CacheKey(
            tokens=prompt,
            extra_ids=None if extra_ids is None else tuple(extra_ids),
            salt=request.cache_salt_id,
            retention=request.kv_cache_retention_config,
            reusable=not (request.output_config.return_context_logits or own_positions),
            stored=request.sampling_config.beam_width == 1
            and not own_positions
            and not (windows and longest > min(windows)),
        )

    def _logits(self, request: Request, prompt_length: int) -> Logits | None:
        """Return the storage for requested logits; streamed beam search returns no generation logits."""
        wanted = request.output_config
        beams = request.sampling_config.beam_width > 1
        generation = wanted.return_generation_logits and not (beams and request.streaming and not self._static)
        if not (wanted.return_context_logits or generation):
            return None
        context = (
            np.zeros((prompt_length, self._limits.vocab_size), dtype=np.float32)
            if wanted.return_context_logits
            else None
        )
        return Logits(context, [] if generation else None)


def _metrics(arrival: float) -> RequestPerfMetrics:
    return RequestPerfMetrics(TimingMetrics(arrival_time=timedelta(seconds=arrival)))
