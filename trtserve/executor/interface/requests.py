"""A request of TensorRT-LLM's executor interface and the objects attached to it."""

from __future__ import annotations

from collections.abc import Callable
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
    OPT_BOOL,
    TEXT,
    TOKENS,
    UNSIGNED,
    Field,
    Record,
    above_zero_to_one,
    instance_of,
    list_of,
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


class SamplingConfig(Record, writable="0.13-", checked="0.13-"):
    """How tokens are chosen; `SamplingParameters` resolves the defaults of unset values."""

    beam_width = Field[int](INT, 1, check=within(1, 1024))
    top_k = Field[int | None](OPT_INT, None, keyword="0.13-", check=not_negative)
    top_p = Field[float | None](OPT_FLOAT, None, keyword="0.13-", check=above_zero_to_one)
    top_p_min = Field[float | None](OPT_FLOAT, None, keyword="0.13-", check=within(0, 1))
    top_p_reset_ids = Field[int | None](OPT_INT, None, keyword="0.13-", check=not_negative)
    top_p_decay = Field[float | None](OPT_FLOAT, None, keyword="0.13-", check=above_zero_to_one)
    seed = Field[int | None](optional(UNSIGNED), None, "0.13-", keyword="0.13-")
    random_seed = Field[int | None](optional(UNSIGNED), None, "0.12-0.21", keyword="0.13-", alias="seed")
    temperature = Field[float | None](OPT_FLOAT, None, keyword="0.13-", check=not_negative)
    min_tokens = Field[int | None](OPT_INT, None, "0.13-", keyword="0.13-", check=not_negative)
    min_length = Field[int | None](OPT_INT, None, "0.12-0.21", keyword="0.13-", alias="min_tokens")
    beam_search_diversity_rate = Field[float | None](OPT_FLOAT, None, keyword="0.13-", check=not_negative)
    repetition_penalty = Field[float | None](OPT_FLOAT, None, keyword="0.13-", check=positive)
    presence_penalty = Field[float | None](OPT_FLOAT, None, keyword="0.13-")
    frequency_penalty = Field[float | None](OPT_FLOAT, None, keyword="0.13-")
    length_penalty = Field[float | None](OPT_FLOAT, None, keyword="0.13-", check=not_negative)
    early_stopping = Field[int | None](OPT_INT, None, keyword="0.13-", check=not_negative)
    no_repeat_ngram_size = Field[int | None](OPT_INT, None, keyword="0.13-", check=not_negative)
    num_return_sequences = Field[int | None](OPT_INT, None, "0.15-", keyword="0.13-", check=positive)
    min_p = Field[float | None](OPT_FLOAT, None, "0.19-", keyword="0.13-", check=within(0, 1))
    beam_width_array = Field[list[int] | None](optional(list_of(INT)), None, "0.19-", keyword="0.13-")
    prompt_ignore_length = Field[int | None](OPT_INT, None, "1.1-", keyword="0.13-", check=not_negative)

    def validate(self) -> None:
        count = self.num_return_sequences  # None in the releases that do not check it here
        if count is not None and 1 < self.beam_width < count:
            raise RuntimeError(f"num_return_sequences ({count}) must not exceed beam_width ({self.beam_width})")


class OutputConfig(Record, writable="0.12-"):
    return_log_probs = Field[bool](OPT_BOOL, False)
    return_context_logits = Field[bool](OPT_BOOL, False)
    return_generation_logits = Field[bool](OPT_BOOL, False)
    exclude_input_from_output = Field[bool](OPT_BOOL, False)
    return_encoder_output = Field[bool](OPT_BOOL, False)
    return_perf_metrics = Field[bool](OPT_BOOL, False, "0.16-")
    additional_model_outputs = Field[list[Any] | None](optional(list_of(ANY)), None, "0.17-")


class ExternalDraftTokensConfig(Record):
    tokens = Field[list[int]](TOKENS, check=not_empty)
    logits = Field[Array | None](OPT_ARRAY, None)
    acceptance_threshold = Field[float | None](OPT_FLOAT, None, check=above_zero_to_one)
    fast_logits = Field[bool | None](optional(BOOL), None, "0.15-")

    def validate(self) -> None:
        shape = None if self.logits is None else self.logits.shape
        if shape is not None and (len(shape) != 2 or shape[0] != len(self.tokens)):
            raise RuntimeError(f"draft logits have shape {shape}; expected [{len(self.tokens)}, vocab_size]")


class PromptTuningConfig(Record):
    embedding_table = Field[Array](ARRAY, check=lambda table: None if table.ndim == 2 else "a tensor of two dimensions")
    input_token_extra_ids = Field[list[int] | None](optional(list_of(UNSIGNED)), None, "0.13-")


class LoraConfig(Record):
    task_id = Field[int](UNSIGNED)
    weights = Field[Array | None](OPT_ARRAY, None)
    config = Field[Array | None](OPT_ARRAY, None)

    def validate(self) -> None:
        if (self.weights is None) != (self.config is None):
            raise RuntimeError("LoRA weights and config must be given together")


class MropeConfig(Record):
    mrope_rotary_sin_cos = Field[Array](ARRAY, None, "0.16-0.16", alias="mrope_rotary_cos_sin")
    mrope_rotary_cos_sin = Field[Array](ARRAY, None, "0.17-")
    mrope_position_deltas = Field[int](INT)


class TokenRange(Record, writable="0.12-"):
    token_start = Field[int](INT)
    token_end = Field[int | None](OPT_INT, None)
    priority = Field[int](INT, 35, check=within(0, 100))
    duration_ms = Field[timedelta | None](optional(DURATION), None)


class KvCacheRetentionConfig(Record):
    TokenRangeRetentionConfig = TokenRange

    token_range_retention_configs = Field[list[TokenRange]](list_of(instance_of(TokenRange)))
    decode_retention_priority = Field[int](INT, 35, check=within(0, 100))
    decode_duration_ms = Field[timedelta | None](optional(DURATION), None)
    transfer_mode = Field[KvCacheTransferMode](instance_of(KvCacheTransferMode), KvCacheTransferMode.DRAM, "1.0-")
    directory = Field[str | None](optional(TEXT), None, "1.0-")

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


class Request(Record, writable="0.12-", dynamic=True):
    """One generation request; `max_tokens` counts new tokens."""

    BATCHED_POST_PROCESSOR_NAME = "batched"
    top_log_probs = 0
    """Most likely tokens to return with the log-probability of each token. No release has this attribute."""

    input_token_ids = Field[list[int]](TOKENS, check=not_empty, readonly=True)
    max_tokens = Field[int](INT, None, "0.13-", check=positive, keyword="0.13-0.21", readonly=True)
    max_new_tokens = Field[int](INT, None, "0.12-0.21", keyword="0.13-", alias="max_tokens")
    streaming = Field[bool](BOOL, False, keyword="0.13-")
    sampling_config = Field[SamplingConfig](instance_of(SamplingConfig), SamplingConfig, keyword="0.13-")
    output_config = Field[OutputConfig](instance_of(OutputConfig), OutputConfig, keyword="0.13-")
    end_id = Field[int | None](OPT_INT, None, keyword="0.13-")
    pad_id = Field[int | None](OPT_INT, None, keyword="0.13-")
    position_ids = Field[list[int] | None](OPT_TOKENS, None, "0.13-", keyword="0.13-")
    bad_words = Field[list[list[int]] | None](OPT_WORDS, None, keyword="0.13-")
    stop_words = Field[list[list[int]] | None](OPT_WORDS, None, keyword="0.13-")
    embedding_bias = Field[Array | None](
        OPT_ARRAY, None, keyword="0.13-", check=lambda bias: None if bias.ndim == 1 else "a tensor of one dimension"
    )
    external_draft_tokens_config = Field[ExternalDraftTokensConfig | None](
        optional(instance_of(ExternalDraftTokensConfig)), None, keyword="0.13-"
    )
    prompt_tuning_config = Field[PromptTuningConfig | None](
        optional(instance_of(PromptTuningConfig)), None, keyword="0.13-"
    )
    multimodal_input = Field[MultimodalInput | None](
        optional(instance_of(MultimodalInput)), None, "1.0-", keyword="0.13-"
    )
    multimodal_embedding = Field[Array | None](OPT_ARRAY, None, "1.0-", keyword="0.13-")
    mrope_config = Field[MropeConfig | None](optional(instance_of(MropeConfig)), None, "0.16-", keyword="0.13-")
    lora_config = Field[LoraConfig | None](optional(instance_of(LoraConfig)), None, keyword="0.13-")
    lookahead_config = Field[LookaheadDecodingConfig | None](
        optional(instance_of(LookaheadDecodingConfig)), None, "0.13-", keyword="0.13-"
    )
    kv_cache_retention_config = Field[KvCacheRetentionConfig | None](
        optional(instance_of(KvCacheRetentionConfig)), None, "0.15-", keyword="0.13-"
    )
    logits_post_processor_name = Field[str | None](optional(TEXT), None, keyword="0.13-")
    logits_post_processor = Field[Callable[..., Any] | None](optional(CALLABLE), None, "0.19-", keyword="0.13-")
    encoder_input_token_ids = Field[list[int] | None](OPT_TOKENS, None, keyword="0.13-")
    client_id = Field[int | None](optional(UNSIGNED), None, keyword="0.13-")
    return_all_generated_tokens = Field[bool](BOOL, False, keyword="0.13-")
    priority = Field[float](FLOAT, 0.5, "0.13-", keyword="0.13-")
    type = Field[RequestType](
        instance_of(RequestType), RequestType.REQUEST_TYPE_CONTEXT_AND_GENERATION, "0.13-", keyword="0.13-"
    )
    context_phase_params = Field[ContextPhaseParams | None](
        optional(instance_of(ContextPhaseParams)), None, "0.13-", keyword="0.13-"
    )
    encoder_input_features = Field[Array | None](OPT_ARRAY, None, "0.13-", keyword="0.13-")
    encoder_output_length = Field[int | None](OPT_INT, None, "0.13-", keyword="0.13-")
    num_return_sequences = Field[int](INT, 1, "0.14-0.15,1.0-", keyword="0.13-", check=positive)
    cross_attention_mask = Field[Array | None](OPT_ARRAY, None, "0.15-", keyword="0.13-")
    eagle_config = Field[EagleConfig | None](optional(instance_of(EagleConfig)), None, "0.15-", keyword="0.13-")
    skip_cross_attn_blocks = Field[Array | None](OPT_ARRAY, None, "0.15-", keyword="0.13-")
    guided_decoding_params = Field[GuidedDecodingParams | None](
        optional(instance_of(GuidedDecodingParams)), None, "0.16-", keyword="0.13-"
    )
    allotted_time_ms = Field[timedelta | None](optional(DURATION), None, "0.19-", keyword="0.13-")
    language_adapter_uid = Field[int | None](OPT_LONG, None, "0.19-", keyword="0.13-")
    cache_salt_id = Field[int | None](optional(UNSIGNED), None, "1.1-", keyword="0.13-")

    @property
    def request_type(self) -> RequestType:
        """The property of the `type` parameter."""
        return self.type

    @request_type.setter
    def request_type(self, value: RequestType) -> None:
        self.type = value

    def validate(self) -> None:
        if self.__dict__["max_tokens"] is None:
            if self.release is not None and self.release.startswith("0.") and self.release > "0.12":
                raise RuntimeError("missing required argument max_tokens")
            self.refuse_missing("max_tokens")
        if self.guided_decoding_params is not None and self.sampling_config.beam_width > 1:
            raise RuntimeError("guided decoding is not supported with beam search")
