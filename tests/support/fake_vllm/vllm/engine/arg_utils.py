"""A few of vLLM's engine arguments; `AsyncEngineArgs` refuses all others, as vLLM's does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class EngineArgs:
    model: str = ""
    dtype: str = "auto"
    max_model_len: int = 64
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 64
    enable_prefix_caching: bool = False
    enable_chunked_prefill: bool = False
    scheduling_policy: str = "fcfs"
    generation_config: str = "auto"
    skip_tokenizer_init: bool = False
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    kv_cache_dtype: str = "auto"
    block_size: int | None = None
    limit_mm_per_prompt: Any = None
    quantization: str | None = None
    model_impl: str = "auto"
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    enable_expert_parallel: bool = False
    structured_outputs_config: dict[str, Any] | None = None
    enable_lora: bool = False
    max_loras: int = 1
    max_cpu_loras: int | None = None
    max_lora_rank: int = 16
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = ""
    master_port: int = 0
    disable_log_stats: bool = False
    runner: str = "auto"
    stream_interval: int = 1

    def create_engine_config(self, *, headless: bool) -> EngineArgs:
        assert headless
        assert self.node_rank > 0
        return self


@dataclass
class AsyncEngineArgs(EngineArgs):
    disable_log_requests: bool = False
