"""The `config.json` of the embedded executor's engines: TensorRT-LLM's keys in its order, ours under `trtserve`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trtserve.executor.features import Features
from trtserve.nvidia.releases import LAST_WITH_ENGINES
from trtserve.specs.runtime import CheckpointConfig, Limits

# The TensorRT-LLM release whose config.json format is used.
_CONFIG_RELEASE = f"{LAST_WITH_ENGINES}.0"

# Keys of TensorRT-LLM's plugin_config besides dtype and tokens_per_block: plugins and switches.
_PLUGINS = (
    "bert_attention_plugin",
    "gpt_attention_plugin",
    "gemm_plugin",
    "gemm_swiglu_plugin",
    "fp8_rowwise_gemm_plugin",
    "nccl_plugin",
    "lora_plugin",
    "moe_plugin",
    "mamba_conv1d_plugin",
    "low_latency_gemm_plugin",
    "low_latency_gemm_swiglu_plugin",
    "gemm_allreduce_plugin",
)
_FEATURES = (
    "dora_plugin",
    "context_fmha",
    "bert_context_fmha_fp32_acc",
    "paged_kv_cache",
    "remove_input_padding",
    "reduce_fusion",
    "use_paged_context_fmha",
    "use_fp8_context_fmha",
    "fuse_fp4_quant",
    "norm_quant_fusion",
    "multiple_profiles",
    "paged_state",
    "streamingllm",
    "use_fused_mlp",
    "pp_reduce_scatter",
    "user_buffer",
)


def embedded_config(
    config: CheckpointConfig,
    limits: Limits,
    features: Features,
    *,
    tokens_per_block: int | None,
    own: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the content of `config.json`; `config` is the checkpoint's, `own` goes under `trtserve`."""
    plugins = _plugin_config(config["dtype"], features, tokens_per_block)
    return {
        "version": _CONFIG_RELEASE,
        "pretrained_config": dict(config),
        "build_config": _build_config(limits, features.build_config(), plugins),
        "trtserve": dict(own),
    }


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write `config.json` into an engine's folder."""
    (folder / "config.json").write_text(json.dumps(config, indent=4) + "\n", encoding="utf-8")


def _build_config(limits: Limits, features: Mapping[str, Any], plugins: Mapping[str, Any]) -> dict[str, Any]:
    """Return TensorRT-LLM's build_config in its key order; options that only TensorRT has are off or empty."""
    return {
        "max_input_len": limits.max_input_len,
        "max_seq_len": limits.max_seq_len,
        "opt_batch_size": min(8, limits.max_batch_size),
        "max_batch_size": limits.max_batch_size,
        "max_beam_width": features["max_beam_width"],
        "max_num_tokens": limits.max_num_tokens,
        "opt_num_tokens": limits.max_batch_size * features["max_beam_width"],
        "max_prompt_embedding_table_size": features["max_prompt_embedding_table_size"],
        "kv_cache_type": "PAGED",
        "gather_context_logits": features["gather_context_logits"],
        "gather_generation_logits": features["gather_generation_logits"],
        "strongly_typed": True,
        "force_num_profiles": None,
        "profiling_verbosity": "layer_names_only",
        "enable_debug_output": False,
        "max_draft_len": features["max_draft_len"],
        "speculative_decoding_mode": features["speculative_decoding_mode"],
        "use_refit": False,
        "input_timing_cache": None,
        "output_timing_cache": None,
        "lora_config": features["lora_config"],
        "auto_parallel_config": {"world_size": 1},
        "weight_sparsity": False,
        "weight_streaming": False,
        "plugin_config": dict(plugins),
        "use_strip_plan": False,
        "max_encoder_input_len": 1024,
        "use_fused_mlp": False,
        "monitor_memory": False,
        "use_mrope": False,
    }


def _plugin_config(dtype: str, features: Features, tokens_per_block: int | None) -> dict[str, Any]:
    """Return the plugin_config: all plugins None except LoRA's, and only paged attention's switches on."""
    switches = dict.fromkeys(_FEATURES, False) | {"remove_input_padding": True, "paged_kv_cache": True}
    return {
        "dtype": dtype,
        **dict.fromkeys(_PLUGINS),
        **switches,
        **features.plugin_config(),
        "tokens_per_block": tokens_per_block,
    }
