"""Arguments of TensorRT-LLM's `LLM`, which refuses any other: what model.yaml may name.

Sources: tensorrt_llm/llmapi/llm_args.py and tests/unittest/api_stability of NVIDIA/TensorRT-LLM, from 0.20 to 1.2.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection

from trtserve.releases import order

_ALWAYS = """
model tokenizer tokenizer_mode skip_tokenizer_init trust_remote_code dtype revision tokenizer_revision
tensor_parallel_size pipeline_parallel_size context_parallel_size gpus_per_node cp_config enable_attention_dp
moe_cluster_parallel_size moe_tensor_parallel_size moe_expert_parallel_size
enable_lora lora_config peft_cache_config quant_config calib_config build_config
guided_decoding_backend batched_logits_processor speculative_config decoding_config reasoning_parser
max_batch_size max_input_len max_seq_len max_beam_width max_num_tokens
load_format checkpoint_format checkpoint_loader enable_chunked_prefill kv_cache_config kv_cache_dtype stream_interval
iter_stats_max_iterations request_stats_max_iterations enable_iter_perf_stats enable_iter_req_stats print_iter_log
return_perf_metrics perf_metrics_max_requests scheduler_config cache_transceiver_config kv_connector_config
batching_type normalize_log_probs gather_generation_logits num_postprocess_workers postprocess_tokenizer_dir
garbage_collection_gen0_threshold backend cuda_graph_config attention_dp_config mm_encoder_only
disable_overlap_scheduler moe_config attn_backend sampler_type enable_mixed_sampler enable_trtllm_sampler
batch_wait_timeout_ms batch_wait_timeout_iters batch_wait_max_tokens_ratio torch_compile_config enable_autotuner
enable_layerwise_nvtx_marker enable_min_latency force_dynamic_quantization allreduce_strategy
enable_lm_head_tp_in_adp orchestrator_type sparse_attention_config ray_worker_extension_cls
fail_fast_on_attention_window_too_large model_kwargs custom_tokenizer post_processor_hook pp_partition
max_lora_rank max_loras max_cpu_loras enable_prompt_adapter max_prompt_adapter_token
auto_parallel auto_parallel_world_size enable_tqdm workspace enable_build_cache fast_build embedding_parallel_mode
extended_runtime_perf_knob_config
"""
# Argument → the last release that is known to have it, and what says it now.
_UNTIL = {
    "pytorch_backend_config": ("0.19", "its keys stand at the top now"),
    "use_cuda_graph": ("0.21", "give cuda_graph_config"),
    "cuda_graph_batch_sizes": ("0.21", "it is cuda_graph_config.batch_sizes"),
    "cuda_graph_max_batch_size": ("0.21", "it is cuda_graph_config.max_batch_size"),
    "cuda_graph_padding_enabled": ("0.21", "it is cuda_graph_config.enable_padding"),
    "moe_backend": ("0.21", "it is moe_config.backend"),
    "moe_max_num_tokens": ("0.21", "it is moe_config.max_num_tokens"),
    "moe_load_balancer": ("0.21", "it is moe_config.load_balancer"),
    "mixed_sampler": ("0.21", "it became enable_mixed_sampler, later sampler_type"),
    "autotuner_enabled": ("0.21", "it became enable_autotuner"),
}
LLM_ARGUMENTS = frozenset(_ALWAYS.split())
"""Arguments that some release of 0.20 … 1.2 takes, without those of `dropped_argument`."""


def dropped_argument(name: str, release: str) -> tuple[str, str] | None:
    """The last release with an argument that `release` has no more, and what says it now."""
    found = _UNTIL.get(name)
    return found if found is not None and order(release) > order(found[0]) else None


def unknown_argument(name: str, *, besides: Collection[str] = ()) -> str | None:
    """What to say of an argument that no release has; None for one that some release has."""
    if name in LLM_ARGUMENTS or name in _UNTIL or name in besides:
        return None
    close = difflib.get_close_matches(name, {*LLM_ARGUMENTS, *besides}, n=1, cutoff=0.7)
    return f"Did you mean {close[0]}?" if close else "Leave it out, or check its name."
