"""Results of a request: responses, results and performance metrics of TensorRT-LLM's executor interface."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np

from trtserve.executor.interface.enums import FinishReason


@dataclass(slots=True)
class TimingMetrics:
    """Times of the steady clock."""

    arrival_time: timedelta = timedelta()
    first_scheduled_time: timedelta = timedelta()
    first_token_time: timedelta = timedelta()
    last_token_time: timedelta = timedelta()
    kv_cache_transfer_start: timedelta = timedelta()
    kv_cache_transfer_end: timedelta = timedelta()
    kv_cache_size: int = 0


@dataclass(slots=True)
class KvCacheMetrics:
    num_total_allocated_blocks: int = 0
    num_new_allocated_blocks: int = 0
    num_reused_blocks: int = 0
    num_missed_blocks: int = 0
    kv_cache_hit_rate: float = 0.0


@dataclass(slots=True)
class SpeculativeDecodingMetrics:
    acceptance_rate: float = 0.0
    total_accepted_draft_tokens: int = 0
    total_draft_tokens: int = 0


@dataclass(slots=True)
class RequestPerfMetrics:
    timing_metrics: TimingMetrics = field(default_factory=TimingMetrics)
    kv_cache_metrics: KvCacheMetrics = field(default_factory=KvCacheMetrics)
    speculative_decoding: SpeculativeDecodingMetrics = field(default_factory=SpeculativeDecodingMetrics)
    first_iter: int | None = None
    last_iter: int | None = None
    iter: int | None = None


@dataclass(slots=True)
class Result:
    """The content of one response: tokens per beam, and what the request's OutputConfig asks for."""

    is_final: bool = False
    output_token_ids: list[list[int]] = field(default_factory=list)
    cum_log_probs: list[float] | None = None
    log_probs: list[list[float]] | None = None
    context_logits: np.ndarray[Any, Any] | None = None
    generation_logits: np.ndarray[Any, Any] | None = None
    encoder_output: np.ndarray[Any, Any] | None = None
    finish_reasons: list[FinishReason] = field(default_factory=list)
    sequence_index: int = 0
    is_sequence_final: bool = False
    decoding_iter: int = 0
    context_phase_params: Any = None
    spec_dec_fast_logits_info: Any = None
    request_perf_metrics: RequestPerfMetrics | None = None
    additional_outputs: list[Any] = field(default_factory=list)


class Response:
    """A result or an error of one request, built from (request_id, error_msg) or (request_id, result)."""

    __slots__ = ("_error", "_result", "client_id", "request_id")

    def __init__(
        self,
        request_id: int,
        content: str | Result | None = None,
        client_id: int | None = None,
        *,
        error_msg: str | None = None,
        result: Result | None = None,
    ) -> None:
        given = [value for value in (content, error_msg, result) if value is not None]
        if len(given) != 1 or not isinstance(given[0], (str, Result)):
            raise TypeError("Response() takes a request id and either an error message or a Result")
        self.request_id = request_id
        self.client_id = client_id
        self._error = given[0] if isinstance(given[0], str) else None
        self._result = given[0] if isinstance(given[0], Result) else None

    def has_error(self) -> bool:
        """True if the request failed; then there is no result."""
        return self._error is not None

    @property
    def error_msg(self) -> str:
        """Why the request failed. Raises RuntimeError if it did not."""
        if self._error is None:
            raise RuntimeError("The response holds a result, not an error")
        return self._error

    @property
    def result(self) -> Result:
        """The tokens. Raises RuntimeError if the request failed."""
        if self._result is None:
            raise RuntimeError(f"The response holds an error, not a result: {self._error}")
        return self._result

    def clear_context_logits(self) -> None:
        """Drop the context logits to save memory."""
        self.result.context_logits = None

    def clear_generation_logits(self) -> None:
        """Drop the generation logits to save memory."""
        self.result.generation_logits = None
