"""The configuration classes of TensorRT-LLM's executor: what is fixed when an executor is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trtserve.executor import enums
from trtserve.executor.enums import (
    BatchingType,
    CapacitySchedulerPolicy,
    CommunicationMode,
    CommunicationType,
    ContextChunkingPolicy,
    DecodingMode,
    DecodingMode010,
)
from trtserve.executor.kinds import (
    ANY,
    BOOL,
    CALLABLE,
    FLOAT,
    INT,
    LONG,
    PATH,
    TEXT,
    UNSIGNED,
    instance,
    listed,
    mapped,
    not_negative,
    optional,
    positive,
)
from trtserve.executor.records import Field, Record

OPT_INT = optional(INT)
OPT_FLOAT = optional(FLOAT)
OPT_INTS = optional(listed(INT))


class DynamicBatchConfig(Record):
    enable_batch_size_tuning = Field[bool](BOOL)
    enable_max_num_tokens_tuning = Field[bool](BOOL, False, "0.16-")
    dynamic_batch_moving_average_window = Field[int](INT, 128)


class SchedulerConfig(Record):
    capacity_scheduler_policy = Field[CapacitySchedulerPolicy](
        instance(CapacitySchedulerPolicy), CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
    )
    context_chunking_policy = Field[ContextChunkingPolicy | None](optional(instance(ContextChunkingPolicy)), None)
    dynamic_batch_config = Field[DynamicBatchConfig | None](optional(instance(DynamicBatchConfig)), None, "0.15-")


class RuntimeDefaults(Record):
    max_attention_window = Field[list[int] | None](OPT_INTS, None)
    sink_token_length = Field[int | None](OPT_INT, None)


def _window_list(value: Any, strict: bool) -> Any:
    """To 0.12 one number, later a list; both pass, and a number means a list of one."""
    single = not isinstance(value, (list, tuple)) and value is not None
    return OPT_INTS.convert([value] if single else value, strict)


class KvCacheConfig(Record, writable="0.13-"):
    enable_block_reuse = Field[bool](BOOL, False, newer=("0.17", True))
    max_tokens = Field[int | None](OPT_INT, None)
    max_attention_window = Field[list[int] | None](OPT_INTS.with_convert(_window_list), None)
    sink_token_length = Field[int | None](OPT_INT, None)
    free_gpu_memory_fraction = Field[float | None](OPT_FLOAT, None)
    host_cache_size = Field[int | None](optional(UNSIGNED), None)
    onboard_blocks = Field[bool](BOOL, True)
    cross_kv_cache_fraction = Field[float | None](OPT_FLOAT, None, "0.15-")
    secondary_offload_min_priority = Field[int | None](OPT_INT, None, "0.15-")
    event_buffer_max_size = Field[int](LONG, 0, "0.15-")
    runtime_defaults = Field[RuntimeDefaults | None](
        optional(instance(RuntimeDefaults)), None, "0.16-", keyword="0.10-"
    )
    enable_partial_reuse = Field[bool](BOOL, True, "0.19-")
    copy_on_partial_reuse = Field[bool](BOOL, True, "0.19-")
    use_uvm = Field[bool](BOOL, False, "1.0-")
    attention_dp_events_gather_period_ms = Field[int](INT, 5, "1.0-")
    max_gpu_total_bytes = Field[int](UNSIGNED, 0, "1.1-")

    def validate(self) -> None:
        if self.runtime_defaults is not None:
            self.fill_empty_fields_from_runtime_defaults(self.runtime_defaults)

    def fill_empty_fields_from_runtime_defaults(self, defaults: RuntimeDefaults) -> None:
        """Take the window list and the sink length from `defaults` where they are unset (0.16 and later)."""
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
    lora_prefetch_dir = Field[str | None](optional(TEXT), None, "0.19-")


class OrchestratorConfig(Record, writable="0.10-"):
    is_orchestrator = Field[bool](BOOL, True)
    worker_executable_path = Field[str](PATH, "")
    orch_leader_comm = Field[Any](ANY, None, "0.15-")
    spawn_processes = Field[bool](BOOL, True, "0.15-")


class ParallelConfig(Record, writable="0.10-"):
    communication_type = Field[CommunicationType](instance(CommunicationType), CommunicationType.MPI)
    communication_mode = Field[CommunicationMode](instance(CommunicationMode), CommunicationMode.LEADER)
    device_ids = Field[list[int] | None](OPT_INTS, None)
    participant_ids = Field[list[int] | None](OPT_INTS, None)
    orchestrator_config = Field[OrchestratorConfig | None](optional(instance(OrchestratorConfig)), None)
    num_nodes = Field[int | None](OPT_INT, None, "0.19-")


class LookaheadDecodingConfig(Record):
    max_window_size = Field[int](INT, check=positive)
    max_ngram_size = Field[int](INT, check=positive)
    max_verification_set_size = Field[int](INT, check=not_negative)


class EagleConfig(Record):
    eagle_choices = Field[list[list[int]] | None](optional(listed(listed(INT))), None)
    greedy_sampling = Field[bool](BOOL, True, "0.16-")
    posterior_threshold = Field[float | None](OPT_FLOAT, None, "0.16-")
    use_dynamic_tree = Field[bool](BOOL, False, "1.0-")
    dynamic_tree_max_topK = Field[int | None](OPT_INT, None, "1.0-")  # noqa: N815 - the interface's name


class DecodingConfig(Record, writable="0.10-"):
    decoding_mode = Field[DecodingMode | None](optional(instance(DecodingMode)), None)
    lookahead_decoding_config = Field[LookaheadDecodingConfig | None](optional(instance(LookaheadDecodingConfig)), None)
    medusa_choices = Field[list[list[int]] | None](optional(listed(listed(INT))), None)
    eagle_config = Field[EagleConfig | None](optional(instance(EagleConfig)), None, "0.15-")


class ExtendedRuntimePerfKnobConfig(Record, writable="0.10-"):
    """The last two are no constructor keywords upstream although its own Triton model passes them: accepted here."""

    multi_block_mode = Field[bool](BOOL, False, newer=("0.14", True))
    enable_context_fmha_fp32_acc = Field[bool](BOOL, False)
    cuda_graph_mode = Field[bool](BOOL, False, "0.14-")
    cuda_graph_cache_size = Field[int](INT, 0, "0.14-")


class LogitsPostProcessorConfig(Record, writable="0.10-"):
    processor_map = Field[dict[str, Callable[..., Any]] | None](optional(mapped(CALLABLE)), None)
    processor_batched = Field[Callable[..., Any] | None](optional(CALLABLE), None)
    replicate = Field[bool](BOOL, True)


class DebugConfig(Record, writable="0.10-"):
    dump_input_tensors = Field[bool](BOOL, False, "0.13-0.13", alias="debug_input_tensors")
    dump_output_tensors = Field[bool](BOOL, False, "0.13-0.13", alias="debug_output_tensors")
    dump_tensor_names = Field[list[str] | None](optional(listed(TEXT)), None, "0.13-0.13", alias="debug_tensor_names")
    debug_input_tensors = Field[bool](BOOL, False, "0.14-")
    debug_output_tensors = Field[bool](BOOL, False, "0.14-")
    debug_tensor_names = Field[list[str] | None](optional(listed(TEXT)), None, "0.14-")
    debug_tensors_max_iterations = Field[int](INT, 0, "0.14-")


class SpeculativeDecodingConfig(Record, writable="0.10-"):
    """The executor-wide class of 0.15 and later; the class of that name in 0.10 belongs to a request."""

    fast_logits = Field[bool](BOOL, False)


class GuidedDecodingConfig(Record, writable="0.10-"):
    GuidedDecodingBackend = enums.GuidedDecodingBackend

    backend = Field[enums.GuidedDecodingBackend](instance(enums.GuidedDecodingBackend))
    encoded_vocab = Field[list[str] | None](optional(listed(TEXT)), None)
    tokenizer_str = Field[str | None](optional(TEXT), None)
    stop_token_ids = Field[list[int] | None](OPT_INTS, None)


class CacheTransceiverConfig(Record, writable="0.10-"):
    backend = Field[Any](ANY, None)
    max_tokens_in_buffer = Field[int | None](OPT_INT, None)
    kv_transfer_timeout_ms = Field[int | None](OPT_INT, None, "1.0-")


class AdditionalModelOutput(Record, writable="0.10-"):
    name = Field[str](TEXT)
    gather_context = Field[bool](BOOL, False)


class ExecutorConfig(Record, writable="0.10-", dynamic=True):
    max_beam_width = Field[int](INT, 1, check=positive)
    scheduler_config = Field[SchedulerConfig](instance(SchedulerConfig), SchedulerConfig)
    kv_cache_config = Field[KvCacheConfig](instance(KvCacheConfig), KvCacheConfig)
    enable_chunked_context = Field[bool](BOOL, False)
    normalize_log_probs = Field[bool](BOOL, True)
    iter_stats_max_iterations = Field[int](INT, 1000, check=not_negative)
    request_stats_max_iterations = Field[int](INT, 0, check=not_negative)
    batching_type = Field[BatchingType](instance(BatchingType), BatchingType.INFLIGHT)
    max_batch_size = Field[int | None](OPT_INT, None, "0.11-", check=positive)
    max_num_tokens = Field[int | None](OPT_INT, None, "0.11-", check=positive)
    parallel_config = Field[ParallelConfig | None](optional(instance(ParallelConfig)), None)
    peft_cache_config = Field[PeftCacheConfig | None](optional(instance(PeftCacheConfig)), PeftCacheConfig)
    logits_post_processor_map = Field[dict[str, Callable[..., Any]] | None](
        optional(mapped(CALLABLE)), None, "0.10-0.12"
    )
    medusa_choices = Field[list[list[int]] | None](optional(listed(listed(INT))), None, "0.10-0.10")
    decoding_mode = Field[DecodingMode010 | None](optional(instance(DecodingMode010)), None, "0.10-0.10")
    logits_post_processor_batched = Field[Callable[..., Any] | None](optional(CALLABLE), None, "0.11-0.12")
    logits_post_processor_config = Field[LogitsPostProcessorConfig | None](
        optional(instance(LogitsPostProcessorConfig)), None, "0.13-"
    )
    decoding_config = Field[DecodingConfig | None](optional(instance(DecodingConfig)), None, "0.11-")
    use_gpu_direct_storage = Field[bool](BOOL, False, "0.19-")
    gpu_weights_percent = Field[float](FLOAT, 1.0, "0.11-")
    max_queue_size = Field[int | None](OPT_INT, None, "0.12-", check=not_negative)
    extended_runtime_perf_knob_config = Field[ExtendedRuntimePerfKnobConfig](
        instance(ExtendedRuntimePerfKnobConfig), ExtendedRuntimePerfKnobConfig, "0.12-"
    )
    debug_config = Field[DebugConfig | None](optional(instance(DebugConfig)), None, "0.13-")
    recv_poll_period_ms = Field[int](INT, 0, "0.13-")
    max_seq_idle_microseconds = Field[int](LONG, 180_000_000, "0.13-", check=positive)
    spec_dec_config = Field[SpeculativeDecodingConfig | None](
        optional(instance(SpeculativeDecodingConfig)), None, "0.15-"
    )
    guided_decoding_config = Field[GuidedDecodingConfig | None](optional(instance(GuidedDecodingConfig)), None, "0.16-")
    additional_model_outputs = Field[list[Any] | None](optional(listed(ANY)), None, "0.17-")
    cache_transceiver_config = Field[CacheTransceiverConfig | None](
        optional(instance(CacheTransceiverConfig)), None, "0.19-"
    )
    gather_generation_logits = Field[bool](BOOL, False, "0.19-")
    use_variable_beam_width_search = Field[bool](BOOL, False, "0.19-0.19")
    prompt_table_offloading = Field[bool](BOOL, False, "0.19-0.21", alias="mm_embedding_offloading")
    mm_embedding_offloading = Field[bool](BOOL, False, "1.0-")
    enable_trt_overlap = Field[bool](BOOL, False, "0.20-")
    fail_fast_on_attention_window_too_large = Field[bool](BOOL, False, "1.0-")
