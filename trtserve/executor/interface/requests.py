"""A request of TensorRT-LLM's executor interface and the objects attached to it."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from datetime import timedelta
from typing import Any

import numpy as np

from trtserve.executor.engine.requests import GuideType
from trtserve.executor.interface.configs import EagleConfig, KvCacheTransferMode, LookaheadDecodingConfig, RequestType
from trtserve.executor.interface.records import (
    ANY,
    ARRAY,
    BOOL,
    CALLABLE,
    DURATION,
    FLOAT,
    INT,
    LONG,
    TEXT,
    TOKENS,
    UNSIGNED,
    Field,
    Record,
    above_zero_to_one,
    addend,
    divisor,
    instance_of,
    list_of,
    made,
    maybe,
    not_empty,
    not_negative,
    optional,
    positive,
    within,
)

Array = np.ndarray[Any, Any]

OPT_INT = optional(INT)
OPT_LONG = optional(LONG)
OPT_FLOAT = optional(FLOAT)
OPT_ARRAY = optional(ARRAY)
OPT_TOKENS = optional(TOKENS)
OPT_WORDS = optional(list_of(TOKENS))


class SamplingConfig(Record, writable=True):
    """How tokens are chosen; `SamplingParameters` resolves the defaults of unset values."""

    beam_width = Field[int](INT, 1, check=within(1, 1024))
    top_k = Field[int | None](OPT_INT, None, check=not_negative)
    top_p = Field[float | None](OPT_FLOAT, None, check=above_zero_to_one)
    top_p_min = Field[float | None](OPT_FLOAT, None, check=within(0, 1))
    top_p_reset_ids = Field[int | None](OPT_INT, None, check=not_negative)
    top_p_decay = Field[float | None](OPT_FLOAT, None, check=above_zero_to_one)
    seed = Field[int | None](optional(UNSIGNED), None)
    random_seed = Field[int | None](optional(UNSIGNED), None, alias="seed")
    temperature = Field[float | None](OPT_FLOAT, None, check=not_negative)
    min_tokens = Field[int | None](OPT_INT, None, check=not_negative)
    min_length = Field[int | None](OPT_INT, None, alias="min_tokens")
    beam_search_diversity_rate = Field[float | None](OPT_FLOAT, None, check=not_negative)
    repetition_penalty = Field[float | None](OPT_FLOAT, None, check=divisor)
    presence_penalty = Field[float | None](OPT_FLOAT, None, check=addend)
    frequency_penalty = Field[float | None](OPT_FLOAT, None, check=addend)
    length_penalty = Field[float | None](OPT_FLOAT, None, check=not_negative)
    early_stopping = Field[int | None](OPT_INT, None, check=not_negative)
    no_repeat_ngram_size = Field[int | None](OPT_INT, None, check=not_negative)
    num_return_sequences = Field[int | None](OPT_INT, None, check=positive)
    min_p = Field[float | None](OPT_FLOAT, None, check=within(0, 1))
    beam_width_array = Field[list[int] | None](optional(list_of(INT)), None)
    prompt_ignore_length = Field[int | None](OPT_INT, None, check=not_negative)

    def validate(self) -> None:
        count = self.num_return_sequences  # None in the releases that do not check it here
        if count is not None and 1 < self.beam_width < count:
            raise RuntimeError(f"num_return_sequences ({count}) must not exceed beam_width ({self.beam_width})")


class OutputConfig(Record, writable=True):
    return_log_probs = Field[bool](BOOL, False)
    return_context_logits = Field[bool](BOOL, False)
    return_generation_logits = Field[bool](BOOL, False)
    exclude_input_from_output = Field[bool](BOOL, False)
    return_encoder_output = Field[bool](BOOL, False)
    return_perf_metrics = Field[bool](BOOL, False)
    additional_model_outputs = Field[list[Any] | None](optional(list_of(ANY)), None)


class ExternalDraftTokensConfig(Record):
    tokens = Field[list[int]](TOKENS, check=not_empty)
    logits = Field[Array | None](OPT_ARRAY, None)
    acceptance_threshold = Field[float | None](OPT_FLOAT, None, check=above_zero_to_one)
    fast_logits = Field[bool | None](optional(BOOL), None)

    def validate(self) -> None:
        shape = None if self.logits is None else self.logits.shape
        if shape is not None and (len(shape) != 2 or shape[0] != len(self.tokens)):
            raise RuntimeError(f"draft logits have shape {shape}; expected [{len(self.tokens)}, vocab_size]")


class PromptTuningConfig(Record):
    embedding_table = Field[Array](ARRAY, check=lambda table: None if table.ndim == 2 else "a tensor of two dimensions")
    input_token_extra_ids = Field[list[int] | None](optional(list_of(UNSIGNED)), None)


class LoraConfig(Record):
    task_id = Field[int](UNSIGNED)
    weights = Field[Array | None](OPT_ARRAY, None)
    config = Field[Array | None](OPT_ARRAY, None)

    def validate(self) -> None:
        if (self.weights is None) != (self.config is None):
            raise RuntimeError("LoRA weights and config must be given together")


class MropeConfig(Record):
    mrope_rotary_sin_cos = Field[Array](ARRAY, None, alias="mrope_rotary_cos_sin")
    mrope_rotary_cos_sin = Field[Array](ARRAY, None)
    mrope_position_deltas = Field[int](INT)


class TokenRange(Record, writable=True):
    token_start = Field[int](INT)
    token_end = Field[int | None](OPT_INT, None)
    priority = Field[int](INT, 35, check=within(0, 100))
    duration_ms = Field[timedelta | None](optional(DURATION), None)


class KvCacheRetentionConfig(Record):
    TokenRangeRetentionConfig = TokenRange

    token_range_retention_configs = Field[list[TokenRange]](list_of(instance_of(TokenRange)))
    decode_retention_priority = Field[int](INT, 35, check=within(0, 100))
    decode_duration_ms = Field[timedelta | None](optional(DURATION), None)
    transfer_mode = Field[KvCacheTransferMode](instance_of(KvCacheTransferMode), KvCacheTransferMode.DRAM)
    directory = Field[str | None](optional(TEXT), None)

    def validate(self) -> None:
        """Check that ranges are sorted by start and do not overlap; only the last may be open."""
        end: int | None = 0
        for item in self.token_range_retention_configs:
            if item.token_start < 0:
                raise ValueError(f"token range starts at {item.token_start}; expected 0 or more")
            if end is None or item.token_start < end:
                raise ValueError(
                    "token ranges must be sorted by start, must not overlap, and only the last may be open"
                )
            if item.token_end is not None and item.token_end <= item.token_start:
                raise ValueError(f"token range {item.token_start} … {item.token_end} is empty")
            end = item.token_end


_GuideType = GuideType


class GuidedDecodingParams(Record):
    GuideType = GuideType

    guide_type = Field[_GuideType](instance_of(_GuideType))
    guide = Field[str | None](optional(TEXT), None)

    def validate(self) -> None:
        if self.guide is None and self.guide_type is not _GuideType.JSON:
            raise RuntimeError(f"guide_type {self.guide_type.name} needs a guide")


class ContextPhaseParams(Record):
    first_gen_tokens = Field[list[int]](TOKENS)
    req_id = Field[int](UNSIGNED)
    opaque_state = Field[bytes | None](ANY, None)
    draft_tokens = Field[list[int] | None](OPT_TOKENS, None)


class MultimodalInput(Record):
    multimodal_hashes = Field[list[list[int]]](list_of(list_of(INT)))
    multimodal_positions = Field[list[int]](list_of(INT))
    multimodal_lengths = Field[list[int]](list_of(INT))


class Request(Record, writable=True, dynamic=True):
    """One generation request; `max_tokens` counts new tokens."""

    BATCHED_POST_PROCESSOR_NAME = "batched"
    # No release has these attributes, which only the vllm runtime reads.
    top_log_probs = 0  # most likely tokens to return with the log-probability of each token
    prompt_log_probs = False
    images: SequenceOf[bytes] = ()  # files of the images that the prompt has places for

    input_token_ids = Field[list[int]](TOKENS, check=not_empty, readonly=True)
    max_tokens = Field[int](INT, check=positive, readonly=True)
    max_new_tokens = Field[int](INT, None, alias="max_tokens")
    streaming = Field[bool](BOOL, False)
    sampling_config = made(SamplingConfig)
    output_config = made(OutputConfig)
    end_id = Field[int | None](OPT_INT, None)
    pad_id = Field[int | None](OPT_INT, None)
    position_ids = Field[list[int] | None](OPT_TOKENS, None)
    bad_words = Field[list[list[int]] | None](OPT_WORDS, None)
    stop_words = Field[list[list[int]] | None](OPT_WORDS, None)
    embedding_bias = Field[Array | None](
        OPT_ARRAY, None, check=lambda bias: None if bias.ndim == 1 else "a tensor of one dimension"
    )
    external_draft_tokens_config = maybe(ExternalDraftTokensConfig)
    prompt_tuning_config = maybe(PromptTuningConfig)
    multimodal_input = maybe(MultimodalInput)
    multimodal_embedding = Field[Array | None](OPT_ARRAY, None)
    mrope_config = maybe(MropeConfig)
    lora_config = maybe(LoraConfig)
    lookahead_config = maybe(LookaheadDecodingConfig)
    kv_cache_retention_config = maybe(KvCacheRetentionConfig)
    logits_post_processor_name = Field[str | None](optional(TEXT), None)
    logits_post_processor = Field[Callable[..., Any] | None](optional(CALLABLE), None)
    encoder_input_token_ids = Field[list[int] | None](OPT_TOKENS, None)
    client_id = Field[int | None](optional(UNSIGNED), None)
    return_all_generated_tokens = Field[bool](BOOL, False)
    priority = Field[float](FLOAT, 0.5)
    type = Field[RequestType](instance_of(RequestType), RequestType.REQUEST_TYPE_CONTEXT_AND_GENERATION)
    context_phase_params = maybe(ContextPhaseParams)
    encoder_input_features = Field[Array | None](OPT_ARRAY, None)
    encoder_output_length = Field[int | None](OPT_INT, None)
    num_return_sequences = Field[int](INT, 1, check=positive)
    cross_attention_mask = Field[Array | None](OPT_ARRAY, None)
    eagle_config = maybe(EagleConfig)
    skip_cross_attn_blocks = Field[Array | None](OPT_ARRAY, None)
    guided_decoding_params = maybe(GuidedDecodingParams)
    allotted_time_ms = Field[timedelta | None](optional(DURATION), None)
    language_adapter_uid = Field[int | None](OPT_LONG, None)
    cache_salt_id = Field[int | None](optional(UNSIGNED), None)

    @property
    def request_type(self) -> RequestType:
        """The property of the `type` parameter."""
        return self.type

    @request_type.setter
    def request_type(self, value: RequestType) -> None:
        self.type = value

    def validate(self) -> None:
        if self.guided_decoding_params is not None and self.sampling_config.beam_width > 1:
            raise RuntimeError("guided decoding is not supported with beam search")
