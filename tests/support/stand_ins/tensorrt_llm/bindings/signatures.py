"""Constructors of `tensorrt_llm.bindings.executor` by release, checked as strictly as the compiled ones do.

Written from NVIDIA's documentation, not from trtserve's own tables. A row is: parameter, type (`?` before it: None is
allowed), first release, last release. `!` after the name marks a required parameter, `@` a property.
"""

from __future__ import annotations

import datetime
from typing import Any

import numpy as np
import torch

TABLES = {
    "SchedulerConfig": """
        capacity_scheduler_policy CapacitySchedulerPolicy 0.12
        context_chunking_policy ?ContextChunkingPolicy 0.12
        dynamic_batch_config ?DynamicBatchConfig 0.15""",
    "KvCacheConfig": """
        enable_block_reuse bool 0.12
        max_tokens ?int 0.12
        max_attention_window ?int 0.12 0.12
        max_attention_window ?ints 0.13
        sink_token_length ?int 0.12
        free_gpu_memory_fraction ?float 0.12
        host_cache_size ?int 0.12
        onboard_blocks bool 0.12
        cross_kv_cache_fraction ?float 0.15
        secondary_offload_min_priority ?int 0.15
        event_buffer_max_size int 0.15
        enable_partial_reuse bool 0.19
        copy_on_partial_reuse bool 0.19""",
    "PeftCacheConfig": """
        num_host_module_layer int 0.12
        num_device_module_layer int 0.12
        optimal_adapter_size int 0.12
        max_adapter_size int 0.12
        num_put_workers int 0.12
        num_ensure_workers int 0.12
        num_copy_streams int 0.12
        max_pages_per_block_host int 0.12
        max_pages_per_block_device int 0.12
        device_cache_percent ?float 0.12
        host_cache_size ?int 0.12
        lora_prefetch_dir ?str 0.19""",
    "ParallelConfig": """
        communication_type CommunicationType 0.12
        communication_mode CommunicationMode 0.12
        device_ids ?ints 0.12
        participant_ids ?ints 0.12
        orchestrator_config ?OrchestratorConfig 0.12
        num_nodes ?int 0.19""",
    "OrchestratorConfig": """
        is_orchestrator bool 0.12
        worker_executable_path str 0.12
        orch_leader_comm ?object 0.15
        spawn_processes bool 0.15""",
    "DecodingConfig": """
        decoding_mode ?DecodingMode 0.12
        lookahead_decoding_config ?LookaheadDecodingConfig 0.12
        medusa_choices ?lists 0.12
        eagle_config ?EagleConfig 0.15""",
    "LookaheadDecodingConfig": """
        max_window_size! int 0.12
        max_ngram_size! int 0.12
        max_verification_set_size! int 0.12""",
    "EagleConfig": """
        eagle_choices ?lists 0.15
        greedy_sampling bool 0.16
        posterior_threshold ?float 0.16""",
    "ExtendedRuntimePerfKnobConfig": """
        multi_block_mode bool 0.12
        enable_context_fmha_fp32_acc bool 0.12
        cuda_graph_mode@ bool 0.14
        cuda_graph_cache_size@ int 0.14""",
    "GuidedDecodingConfig": """
        backend! GuidedDecodingBackend 0.16
        encoded_vocab ?strings 0.16
        tokenizer_str ?str 0.16
        stop_token_ids ?ints 0.16""",
    "ExecutorConfig": """
        max_beam_width int 0.12
        scheduler_config SchedulerConfig 0.12
        kv_cache_config KvCacheConfig 0.12
        enable_chunked_context bool 0.12
        normalize_log_probs bool 0.12
        iter_stats_max_iterations int 0.12
        request_stats_max_iterations int 0.12
        batching_type BatchingType 0.12
        max_batch_size ?int 0.12
        max_num_tokens ?int 0.12
        parallel_config ?ParallelConfig 0.12
        peft_cache_config PeftCacheConfig 0.12
        decoding_config ?DecodingConfig 0.12
        use_gpu_direct_storage bool 0.19
        gpu_weights_percent float 0.12
        max_queue_size ?int 0.12
        extended_runtime_perf_knob_config ExtendedRuntimePerfKnobConfig 0.12
        recv_poll_period_ms int 0.13
        max_seq_idle_microseconds int 0.13
        guided_decoding_config ?GuidedDecodingConfig 0.16
        gather_generation_logits bool 0.19
        enable_trt_overlap bool 0.20
        fail_fast_on_attention_window_too_large bool 1.0""",
    "SamplingConfig": """
        beam_width int 0.12
        top_k ?int 0.12
        top_p ?float 0.12
        top_p_min ?float 0.12
        top_p_reset_ids ?int 0.12
        top_p_decay ?float 0.12
        random_seed ?int 0.12 0.21
        seed ?int 0.13
        temperature ?float 0.12
        min_length ?int 0.12 0.21
        min_tokens ?int 0.13
        beam_search_diversity_rate ?float 0.12
        repetition_penalty ?float 0.12
        presence_penalty ?float 0.12
        frequency_penalty ?float 0.12
        length_penalty ?float 0.12
        early_stopping ?int 0.12
        no_repeat_ngram_size ?int 0.12
        num_return_sequences ?int 0.15
        min_p ?float 0.19""",
    "OutputConfig": """
        return_log_probs bool 0.12
        return_context_logits bool 0.12
        return_generation_logits bool 0.12
        exclude_input_from_output bool 0.12
        return_encoder_output bool 0.12
        return_perf_metrics bool 0.16""",
    "ExternalDraftTokensConfig": """
        tokens! ints 0.12
        logits ?tensor 0.12
        acceptance_threshold ?float 0.12
        fast_logits ?bool 0.15""",
    "PromptTuningConfig": """
        embedding_table! tensor 0.12
        input_token_extra_ids ?ints 0.13""",
    "LoraConfig": """
        task_id! int 0.12
        weights ?tensor 0.12
        config ?tensor 0.12""",
    "MropeConfig": """
        mrope_rotary_cos_sin! tensor 0.17
        mrope_position_deltas! int 0.17""",
    "TokenRangeRetentionConfig": """
        token_start! int 0.15
        token_end! ?int 0.15
        priority! int 0.15
        duration_ms ?duration 0.15""",
    "KvCacheRetentionConfig": """
        token_range_retention_configs! objects 0.15
        decode_retention_priority int 0.15
        decode_duration_ms ?duration 0.15""",
    "GuidedDecodingParams": """
        guide_type! GuideType 0.16
        guide ?str 0.16""",
    "Request": """
        input_token_ids! ints 0.12
        max_new_tokens! int 0.12 0.12
        max_tokens! int 0.13
        streaming bool 0.12
        sampling_config SamplingConfig 0.12
        output_config OutputConfig 0.12
        end_id ?int 0.12
        pad_id ?int 0.12
        bad_words ?lists 0.12
        stop_words ?lists 0.12
        embedding_bias ?tensor 0.12
        external_draft_tokens_config ?ExternalDraftTokensConfig 0.12
        prompt_tuning_config ?PromptTuningConfig 0.12
        mrope_config ?MropeConfig 0.16
        lora_config ?LoraConfig 0.12
        lookahead_config ?LookaheadDecodingConfig 0.13
        kv_cache_retention_config ?KvCacheRetentionConfig 0.15
        client_id ?int 0.12
        return_all_generated_tokens bool 0.12
        encoder_input_features ?tensor 0.13
        encoder_output_length ?int 0.13
        num_return_sequences int 0.14 0.15
        cross_attention_mask ?tensor 0.15
        skip_cross_attn_blocks ?tensor 0.15
        guided_decoding_params ?GuidedDecodingParams 0.16""",
}


def order(release: str) -> tuple[int, ...]:
    """`0.18` → (0, 18)."""
    return tuple(int(part) for part in release.split(".")[:2])


class Signature:
    """Parameters of one constructor in one release."""

    def __init__(self, owner: str, release: str) -> None:
        self._owner = owner
        self._kinds: dict[str, str] = {}
        self._needed: list[str] = []
        self._properties: set[str] = set()
        for line in filter(None, (row.split() for row in TABLES[owner].splitlines())):
            name, kind, since, *until = line
            if order(since) > order(release) or (until and order(release) > order(until[0])):
                continue
            plain = name.rstrip("!@")
            self._kinds[plain] = kind
            if name.endswith("!"):
                self._needed.append(plain)
            if name.endswith("@"):
                self._properties.add(plain)

    def bind(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
        """Every parameter with its value, None where nothing was given; TypeError as the compiled class has it."""
        names = [name for name in self._kinds if name not in self._properties]
        if len(arguments) > len(names):
            raise TypeError(f"{self._owner}(): incompatible constructor arguments")
        given = {**dict(zip(names, arguments, strict=False)), **keywords}
        for name, value in given.items():
            if name not in names:
                raise TypeError(f"{self._owner}(): incompatible constructor arguments: {name} is unknown")
            self.check(name, value)
        if lacking := [name for name in self._needed if name not in given]:
            raise TypeError(f"{self._owner}(): missing {lacking[0]}")
        return {**dict.fromkeys(self._kinds), **given}

    def check(self, name: str, value: Any) -> None:
        """TypeError for a value of another type."""
        kind = self._kinds[name]
        if value is None and kind.startswith("?"):
            return
        if not _is(value, kind.removeprefix("?")):
            raise TypeError(f"{self._owner}(): {name} is {value!r} of {type(value).__name__}; expected {kind}")


def _is_int(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, (bool, np.bool_))


def _is(value: Any, kind: str) -> bool:
    checks: dict[str, Any] = {
        "int": _is_int,
        "bool": lambda given: isinstance(given, (bool, np.bool_)),
        "float": lambda given: isinstance(given, (float, np.floating)) or _is_int(given),
        "str": lambda given: isinstance(given, str),
        "ints": lambda given: isinstance(given, list) and all(map(_is_int, given)),
        "lists": lambda given: isinstance(given, list) and all(_is(each, "ints") for each in given),
        "strings": lambda given: isinstance(given, list) and all(isinstance(each, str) for each in given),
        "tensor": lambda given: isinstance(given, torch.Tensor),
        "duration": lambda given: isinstance(given, datetime.timedelta),
        "objects": lambda given: isinstance(given, list),
        "object": lambda _: True,
    }
    check = checks.get(kind, lambda given: type(given).__name__ == kind)
    return bool(check(value))
