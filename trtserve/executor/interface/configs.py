"""The enumerations and the configuration classes of TensorRT-LLM's executor, with its names and values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from trtserve.executor.engine.limits import CapacitySchedulerPolicy, ContextChunkingPolicy
from trtserve.executor.interface.records import (
    ANY,
    BOOL,
    CALLABLE,
    FLOAT,
    INT,
    LONG,
    PATH,
    TEXT,
    UNSIGNED,
    Field,
    Record,
    ValueType,
    dict_of,
    instance_of,
    list_of,
    made,
    maybe,
    not_negative,
    optional,
    positive,
)


class ModelType(Enum):
    DECODER_ONLY = 0
    ENCODER_ONLY = 1
    ENCODER_DECODER = 2


class BatchingType(Enum):
    STATIC = 0
    INFLIGHT = 1


class CommunicationType(Enum):
    MPI = 0


class CommunicationMode(Enum):
    LEADER = 0
    ORCHESTRATOR = 1


class RequestType(Enum):
    REQUEST_TYPE_CONTEXT_AND_GENERATION = 0
    REQUEST_TYPE_CONTEXT_ONLY = 1
    REQUEST_TYPE_GENERATION_ONLY = 2


class GuidedDecodingBackend(Enum):
    XGRAMMAR = 0
    LLGUIDANCE = 1


class KvCacheTransferMode(Enum):
    DRAM = 0
    GDS = 1
    POSIX_DEBUG_FALLBACK = 2


def _mode(name: str) -> Callable[[], DecodingMode]:
    return staticmethod(lambda: DecodingMode(name))


@dataclass(frozen=True)
class DecodingMode:
    """How tokens are chosen. Unlike upstream, equal modes compare equal."""

    name: str

    Auto = _mode("Auto")
    TopK = _mode("TopK")
    TopP = _mode("TopP")
    TopKTopP = _mode("TopKTopP")
    BeamSearch = _mode("BeamSearch")
    Medusa = _mode("Medusa")
    Lookahead = _mode("Lookahead")
    ExplicitDraftTokens = _mode("ExplicitDraftTokens")
    Eagle = _mode("Eagle")

    def isAuto(self) -> bool:  # noqa: N802 - the interface's names
        return self.name == "Auto"

    def isTopK(self) -> bool:  # noqa: N802
        return self.name in ("TopK", "TopKTopP")

    def isTopP(self) -> bool:  # noqa: N802
        return self.name in ("TopP", "TopKTopP")

    def isTopKorTopP(self) -> bool:  # noqa: N802
        return self.isTopK() or self.isTopP()

    def isTopKandTopP(self) -> bool:  # noqa: N802
        return self.name == "TopKTopP"

    def isBeamSearch(self) -> bool:  # noqa: N802
        return self.name == "BeamSearch"


OPT_INT = optional(INT)
OPT_FLOAT = optional(FLOAT)
OPT_INTS = optional(list_of(INT))


class DynamicBatchConfig(Record):
    enable_batch_size_tuning = Field[bool](BOOL)
    enable_max_num_tokens_tuning = Field[bool](BOOL, False)
    dynamic_batch_moving_average_window = Field[int](INT, 128)


class SchedulerConfig(Record):
    capacity_scheduler_policy = Field[CapacitySchedulerPolicy](
        instance_of(CapacitySchedulerPolicy), CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
    )
    context_chunking_policy = maybe(ContextChunkingPolicy)
    dynamic_batch_config = maybe(DynamicBatchConfig)


class RuntimeDefaults(Record):
    max_attention_window = Field[list[int] | None](OPT_INTS, None)
    sink_token_length = Field[int | None](OPT_INT, None)


def _window_list(value: Any) -> Any:
    """Convert max_attention_window: 0.12 has a number, later releases a list; both are accepted."""
    single = not isinstance(value, (list, tuple)) and value is not None
    return OPT_INTS.convert([value] if single else value)


class KvCacheConfig(Record, writable=True):
    enable_block_reuse = Field[bool](BOOL, True)
    max_tokens = Field[int | None](OPT_INT, None)
    max_attention_window = Field[list[int] | None](ValueType(_window_list, OPT_INTS.fresh), None)
    sink_token_length = Field[int | None](OPT_INT, None)
    free_gpu_memory_fraction = Field[float | None](OPT_FLOAT, None)
    host_cache_size = Field[int | None](optional(UNSIGNED), None)
    onboard_blocks = Field[bool](BOOL, True)
    cross_kv_cache_fraction = Field[float | None](OPT_FLOAT, None)
    secondary_offload_min_priority = Field[int | None](OPT_INT, None)
    event_buffer_max_size = Field[int](LONG, 0)
    runtime_defaults = maybe(RuntimeDefaults)
    enable_partial_reuse = Field[bool](BOOL, True)
    copy_on_partial_reuse = Field[bool](BOOL, True)
    use_uvm = Field[bool](BOOL, False)
    attention_dp_events_gather_period_ms = Field[int](INT, 5)
    max_gpu_total_bytes = Field[int](UNSIGNED, 0)

    def validate(self) -> None:
        if self.runtime_defaults is not None:
            self.fill_empty_fields_from_runtime_defaults(self.runtime_defaults)

    def fill_empty_fields_from_runtime_defaults(self, defaults: RuntimeDefaults) -> None:
        """Copy the windows and the sink length from `defaults` if they are unset (0.16 and later)."""
        for name in ("max_attention_window", "sink_token_length"):
            if self.__dict__[name] is None:
                self.__dict__[name] = getattr(defaults, name)


class PeftCacheConfig(Record):
    num_host_module_layer = Field[int](INT, 0)
    num_device_module_layer = Field[int](INT, 0)
    optimal_adapter_size = Field[int](INT, 8)
    max_adapter_size = Field[int](INT, 64)
    num_put_workers = Field[int](INT, 1)
    num_ensure_workers = Field[int](INT, 1)
    num_copy_streams = Field[int](INT, 1)
    max_pages_per_block_host = Field[int](INT, 24)
    max_pages_per_block_device = Field[int](INT, 8)
    device_cache_percent = Field[float | None](OPT_FLOAT, None)
    host_cache_size = Field[int | None](optional(UNSIGNED), None)
    lora_prefetch_dir = Field[str | None](optional(TEXT), None)


class OrchestratorConfig(Record, writable=True):
    is_orchestrator = Field[bool](BOOL, True)
    worker_executable_path = Field[str](PATH, "")
    orch_leader_comm = Field[Any](ANY, None)
    spawn_processes = Field[bool](BOOL, True)


class ParallelConfig(Record, writable=True):
    communication_type = Field[CommunicationType](instance_of(CommunicationType), CommunicationType.MPI)
    communication_mode = Field[CommunicationMode](instance_of(CommunicationMode), CommunicationMode.LEADER)
    device_ids = Field[list[int] | None](OPT_INTS, None)
    participant_ids = Field[list[int] | None](OPT_INTS, None)
    orchestrator_config = maybe(OrchestratorConfig)
    num_nodes = Field[int | None](OPT_INT, None)


class LookaheadDecodingConfig(Record):
    max_window_size = Field[int](INT, check=positive)
    max_ngram_size = Field[int](INT, check=positive)
    max_verification_set_size = Field[int](INT, check=not_negative)


class EagleConfig(Record):
    eagle_choices = Field[list[list[int]] | None](optional(list_of(list_of(INT))), None)
    greedy_sampling = Field[bool](BOOL, True)
    posterior_threshold = Field[float | None](OPT_FLOAT, None)
    use_dynamic_tree = Field[bool](BOOL, False)
    dynamic_tree_max_topK = Field[int | None](OPT_INT, None)  # noqa: N815 - the interface's name


class DecodingConfig(Record, writable=True):
    decoding_mode = maybe(DecodingMode)
    lookahead_decoding_config = maybe(LookaheadDecodingConfig)
    medusa_choices = Field[list[list[int]] | None](optional(list_of(list_of(INT))), None)
    eagle_config = maybe(EagleConfig)


class ExtendedRuntimePerfKnobConfig(Record, writable=True):
    """Upstream's constructor lacks the last two although its own Triton model passes them; accepted here."""

    multi_block_mode = Field[bool](BOOL, True)
    enable_context_fmha_fp32_acc = Field[bool](BOOL, False)
    cuda_graph_mode = Field[bool](BOOL, False)
    cuda_graph_cache_size = Field[int](INT, 0)


class LogitsPostProcessorConfig(Record, writable=True):
    processor_map = Field[dict[str, Callable[..., Any]] | None](optional(dict_of(CALLABLE)), None)
    processor_batched = Field[Callable[..., Any] | None](optional(CALLABLE), None)
    replicate = Field[bool](BOOL, True)


class DebugConfig(Record, writable=True):
    dump_input_tensors = Field[bool](BOOL, False, alias="debug_input_tensors")
    dump_output_tensors = Field[bool](BOOL, False, alias="debug_output_tensors")
    dump_tensor_names = Field[list[str] | None](optional(list_of(TEXT)), None, alias="debug_tensor_names")
    debug_input_tensors = Field[bool](BOOL, False)
    debug_output_tensors = Field[bool](BOOL, False)
    debug_tensor_names = Field[list[str] | None](optional(list_of(TEXT)), None)
    debug_tensors_max_iterations = Field[int](INT, 0)


class SpeculativeDecodingConfig(Record, writable=True):
    fast_logits = Field[bool](BOOL, False)


_Backend = GuidedDecodingBackend


class GuidedDecodingConfig(Record, writable=True):
    GuidedDecodingBackend = GuidedDecodingBackend

    backend = Field[_Backend](instance_of(_Backend))
    encoded_vocab = Field[list[str] | None](optional(list_of(TEXT)), None)
    tokenizer_str = Field[str | None](optional(TEXT), None)
    stop_token_ids = Field[list[int] | None](OPT_INTS, None)


class CacheTransceiverConfig(Record, writable=True):
    backend = Field[Any](ANY, None)
    max_tokens_in_buffer = Field[int | None](OPT_INT, None)
    kv_transfer_timeout_ms = Field[int | None](OPT_INT, None)


class AdditionalModelOutput(Record, writable=True):
    name = Field[str](TEXT)
    gather_context = Field[bool](BOOL, False)


class ExecutorConfig(Record, writable=True, dynamic=True):
    ngram_max_draft_len = 0
    """Most draft tokens that a step guesses from the text of a request. No release has this attribute."""

    max_beam_width = Field[int](INT, 1, check=positive)
    scheduler_config = made(SchedulerConfig)
    kv_cache_config = made(KvCacheConfig)
    enable_chunked_context = Field[bool](BOOL, False)
    normalize_log_probs = Field[bool](BOOL, True)
    iter_stats_max_iterations = Field[int](INT, 1000, check=not_negative)
    request_stats_max_iterations = Field[int](INT, 0, check=not_negative)
    batching_type = Field[BatchingType](instance_of(BatchingType), BatchingType.INFLIGHT)
    max_batch_size = Field[int | None](OPT_INT, None, check=positive)
    max_num_tokens = Field[int | None](OPT_INT, None, check=positive)
    parallel_config = maybe(ParallelConfig)
    peft_cache_config = Field[PeftCacheConfig | None](optional(instance_of(PeftCacheConfig)), PeftCacheConfig)
    logits_post_processor_map = Field[dict[str, Callable[..., Any]] | None](optional(dict_of(CALLABLE)), None)
    logits_post_processor_batched = Field[Callable[..., Any] | None](optional(CALLABLE), None)
    logits_post_processor_config = maybe(LogitsPostProcessorConfig)
    decoding_config = maybe(DecodingConfig)
    use_gpu_direct_storage = Field[bool](BOOL, False)
    gpu_weights_percent = Field[float](FLOAT, 1.0)
    max_queue_size = Field[int | None](OPT_INT, None, check=not_negative)
    extended_runtime_perf_knob_config = made(ExtendedRuntimePerfKnobConfig)
    debug_config = maybe(DebugConfig)
    recv_poll_period_ms = Field[int](INT, 0)
    max_seq_idle_microseconds = Field[int](LONG, 180_000_000, check=positive)
    spec_dec_config = maybe(SpeculativeDecodingConfig)
    guided_decoding_config = maybe(GuidedDecodingConfig)
    additional_model_outputs = Field[list[Any] | None](optional(list_of(ANY)), None)
    cache_transceiver_config = maybe(CacheTransceiverConfig)
    gather_generation_logits = Field[bool](BOOL, False)
    use_variable_beam_width_search = Field[bool](BOOL, False)
    prompt_table_offloading = Field[bool](BOOL, False, alias="mm_embedding_offloading")
    mm_embedding_offloading = Field[bool](BOOL, False)
    enable_trt_overlap = Field[bool](BOOL, False)
    fail_fast_on_attention_window_too_large = Field[bool](BOOL, False)
