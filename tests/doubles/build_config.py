"""build_config of an engine, and upstream's rules between the limits.

Upstream corrects most contradictions with a warning instead of refusing them; what it wrote into config.json is what
holds afterwards, and that is what the double writes too.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from tests.doubles.build_options import plugin_config
from tests.doubles.checkpoint import LoaderError
from tests.doubles.flags import Release

Warn = Callable[[str], None]
_MODES = ("draft_tokens_external", "medusa", "lookahead_decoding", "explicit_draft_tokens", "eagle")
_UNSCALED = frozenset({"su", "longrope", "llama3"})  # their max_position_embeddings is the stretched one already


def check_arguments(arguments: argparse.Namespace) -> None:
    """Combinations that end the real tool before it reads anything."""
    if arguments.gather_all_token_logits:
        arguments.gather_context_logits = arguments.gather_generation_logits = True
    if arguments.gather_context_logits and arguments.max_draft_len > 0:
        raise LoaderError("RuntimeError", "Gather context logits is not support with draft len > 0.")
    if arguments.multiple_profiles == "enable" and arguments.opt_num_tokens is not None:
        raise LoaderError("RuntimeError", "multiple_profiles is enabled, while opt_num_tokens is set.")
    if arguments.checkpoint_dir is None and arguments.model_config is None:
        raise LoaderError("AttributeError", "'NoneType' object has no attribute 'lower'")
    for name in ("max_batch_size", "max_input_len", "max_beam_width", "max_num_tokens", "workers"):
        if getattr(arguments, name) is not None and getattr(arguments, name) < 1:
            raise LoaderError("ValueError", f"{name} must be positive, got {getattr(arguments, name)}")
    cache, paged = getattr(arguments, "kv_cache_type", None), getattr(arguments, "paged_kv_cache", None)
    if cache and paged and (cache == "PAGED") != (paged == "enable"):
        raise LoaderError("AssertionError", f"kv_cache_type {cache} contradicts --paged_kv_cache {paged}")


def _deduced_length(config: dict[str, Any]) -> int:
    length = int(config.get("max_position_embeddings") or 2048)
    scaling = config.get("rotary_scaling") or {}
    kind = scaling.get("type", scaling.get("rope_type"))
    if scaling and kind not in _UNSCALED:
        length = int(length * scaling.get("factor", 1.0))
    return length


def _correct_tokens(limits: dict[str, Any], plugins: dict[str, Any], warn: Warn) -> None:
    """max_num_tokens and opt_num_tokens against the other limits."""
    most = limits["max_seq_len"] * limits["max_batch_size"]
    if not plugins["remove_input_padding"]:
        warn("remove_input_padding is not enabled, the specified max_num_tokens/opt_num_tokens will be ignored.")
        limits["max_num_tokens"] = most
        return
    if limits["max_num_tokens"] > most:
        warn(f"max_num_tokens ({limits['max_num_tokens']}) shouldn't be greater than {most}, specifying to {most}.")
        limits["max_num_tokens"] = most
    if not plugins["context_fmha"] and limits["max_num_tokens"] < limits["max_input_len"]:
        warn(f"max_num_tokens should be at least max_input_len ({limits['max_input_len']})")
        limits["max_num_tokens"] = limits["max_input_len"]
    elif plugins["context_fmha"] and limits["max_num_tokens"] < plugins["tokens_per_block"]:
        warn(f"max_num_tokens should be at least tokens_per_block ({plugins['tokens_per_block']})")
        limits["max_num_tokens"] = plugins["tokens_per_block"]
    if limits["opt_num_tokens"] is None and not plugins["multiple_profiles"]:
        limits["opt_num_tokens"] = min(limits["max_batch_size"] * limits["max_beam_width"], limits["max_num_tokens"])
    if (limits["opt_num_tokens"] or 0) > limits["max_num_tokens"]:
        warn(f"opt_num_tokens ({limits['opt_num_tokens']}) shouldn't be greater than max_num_tokens")
        limits["opt_num_tokens"] = limits["max_num_tokens"]


def _limits(
    arguments: argparse.Namespace, config: dict[str, Any], plugins: dict[str, Any], warn: Warn
) -> dict[str, Any]:
    deduced = _deduced_length(config)
    limits: dict[str, Any] = {
        "max_input_len": arguments.max_input_len,
        "max_seq_len": arguments.max_seq_len,
        "opt_batch_size": 8,
        "max_batch_size": arguments.max_batch_size,
        "max_beam_width": arguments.max_beam_width,
        "max_num_tokens": arguments.max_num_tokens,
        "opt_num_tokens": arguments.opt_num_tokens,
    }
    if limits["max_seq_len"] is None:
        warn(f"max_seq_len is not specified, using deduced value {deduced}")
        limits["max_seq_len"] = deduced
    elif limits["max_seq_len"] > deduced:
        warn(f"max_seq_len {limits['max_seq_len']} is larger than max_position_embeddings * rotary scaling {deduced}")
    if plugins["remove_input_padding"] and plugins["context_fmha"]:
        if limits["max_input_len"] != limits["max_seq_len"]:
            warn("padding removal and fMHA are both enabled, max_input_len is not required and will be ignored")
        limits["max_input_len"] = limits["max_seq_len"]
    limits["max_input_len"] = min(limits["max_input_len"], limits["max_seq_len"])
    _correct_tokens(limits, plugins, warn)
    return limits


def make_build_config(
    arguments: argparse.Namespace, config: dict[str, Any], release: Release, warn: Warn
) -> dict[str, Any]:
    """The object `build_config` that this command line gives for this checkpoint."""
    plugins = plugin_config(release, arguments)
    plugins = {"dtype": config["dtype"], **{k: config["dtype"] if v == "auto" else v for k, v in plugins.items()}}
    build = _limits(arguments, config, plugins, warn)
    mode = arguments.speculative_decoding_mode
    build |= {
        "max_prompt_embedding_table_size": arguments.max_prompt_embedding_table_size,
        "kv_cache_type": getattr(arguments, "kv_cache_type", None) or "PAGED",
        "gather_context_logits": arguments.gather_context_logits,
        "gather_generation_logits": arguments.gather_generation_logits,
        "strongly_typed": True,
        "profiling_verbosity": arguments.profiling_verbosity,
        "enable_debug_output": arguments.enable_debug_output,
        "max_draft_len": arguments.max_draft_len,
        "speculative_decoding_mode": 1 << (_MODES.index(mode) + 1) if mode else 1,
        "use_refit": False,
        "input_timing_cache": arguments.input_timing_cache,
        "output_timing_cache": arguments.output_timing_cache,
        "lora_config": _lora_config(arguments, plugins),
        "weight_sparsity": arguments.weight_sparsity,
        "weight_streaming": arguments.weight_streaming,
        "plugin_config": plugins,
        "use_strip_plan": arguments.strip_plan,
        "max_encoder_input_len": arguments.max_encoder_input_len,
    }
    if hasattr(arguments, "auto_parallel"):
        build["auto_parallel_config"] = {
            "world_size": arguments.auto_parallel,
            "gpus_per_node": arguments.gpus_per_node,
        }
    _check_model(config, plugins)
    return build


def _lora_config(arguments: argparse.Namespace, plugins: dict[str, Any]) -> dict[str, Any]:
    if plugins["lora_plugin"] is None:
        if arguments.lora_dir or arguments.lora_target_modules:
            # Upstream ignores both in silence; a tool that passes them meant something else.
            raise LoaderError("AssertionError", "(strict double) LoRA flags have no effect without --lora_plugin")
        return {
            "lora_dir": [], "lora_ckpt_source": "hf", "max_lora_rank": 64, "lora_target_modules": [],
            "trtllm_modules_to_hf_modules": {},
        }  # fmt: skip
    if not arguments.lora_dir and not arguments.lora_target_modules:
        raise LoaderError("AssertionError", "(strict double) --lora_plugin without --lora_target_modules or --lora_dir")
    return {
        "lora_dir": arguments.lora_dir or [],
        "lora_ckpt_source": arguments.lora_ckpt_source,
        "max_lora_rank": arguments.max_lora_rank,
        "lora_target_modules": arguments.lora_target_modules or [],
        "trtllm_modules_to_hf_modules": {},
    }


def _check_model(config: dict[str, Any], plugins: dict[str, Any]) -> None:
    architecture = config["architecture"]
    if plugins["streamingllm"] and architecture != "LlamaForCausalLM":
        raise LoaderError("AssertionError", "StreamingLLM is only supported in the llama model.")
    if plugins.get("pp_reduce_scatter") and architecture != "MixtralForCausalLM":
        raise LoaderError("AssertionError", "PP reduce scatter is only supported in the mixtral model.")
    if plugins.get("use_paged_context_fmha") and not plugins["context_fmha"]:
        raise LoaderError("AssertionError", "(strict double) paged context FMHA needs context FMHA")
