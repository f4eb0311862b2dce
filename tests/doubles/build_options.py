"""The command line of trtllm-build per release.

Stricter than the real parser in one point: no abbreviated flags. Everything else is argparse as upstream uses it, so an
unknown or removed flag and a wrong form of a value end with its usage text and code 2.
"""

from __future__ import annotations

import argparse

from tests.doubles.flags import DTYPES, END, FIRST, SWITCHES, Flag, Release, add_flag, choice, flag

# Dates are those of snapshots of tensorrt_llm/commands/build.py and plugin/plugin.py: be9cd719
# (0.12-dev), 0.13-dev of 2024-08-13, 0.14-dev of 2024-09-24, 0.15-dev of 2024-10-15 and 2024-11-12, aaacc9bd
# (0.16-dev). Flags of later files (build.py 65f1d153 and 008b2b8d, plugin.py c20322ff) that no snapshot, build log or
# pull request dates count from 1.0.
LATE: Release = (1, 0)
SPRING: Release = (0, 19)  # a build log of April 2025 shows the new defaults and two new flags

# LoRA module names in the order of their ids.
LORA_MODULES = [
    "attn_qkv",
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_dense",
    "mlp_h_to_4h",
    "mlp_4h_to_h",
    "mlp_gate",
    "cross_attn_qkv",
    "cross_attn_q",
    "cross_attn_k",
    "cross_attn_v",
    "cross_attn_dense",
    "moe_h_to_4h",
    "moe_4h_to_h",
    "moe_gate",
    "moe_router",
    "mlp_router",
]


def _plugin(
    name: str, default: object, extra: str = "", *, only: str = "", since: Release = FIRST, until: Release = END
) -> Flag:
    """A plugin with a data type; `extra` adds choices, `only` replaces all but `disable`."""
    choices = (*only.split(), "disable") if only else (*DTYPES, *extra.split())
    return Flag(names=(name,), kind="choice", default=default, choices=choices, since=since, until=until, plugin=True)


def _feature(name: str, default: str, *, since: Release = FIRST, until: Release = END) -> Flag:
    return Flag(names=(name,), kind="choice", default=default, choices=SWITCHES, since=since, until=until, plugin=True)


_GENERAL = (
    flag("--checkpoint_dir", "text"),
    flag("--model_config", "text"),
    flag("--build_config", "text"),
    flag("--model_cls_file", "text"),
    flag("--model_cls_name", "text"),
    flag("--output_dir", "text", "engine_outputs"),
    flag("--workers", "int", 1),
    flag("--log_level", "text", "info", until=(0, 14)),
    choice("--log_level", "internal_error error warning info verbose debug", "info", since=(0, 14), until=LATE),
    choice("--log_level", "internal_error error warning info verbose debug trace", "info", since=LATE),
    flag("--max_batch_size", "int", 256, until=(0, 14)),
    flag("--max_batch_size", "int", 2048, since=(0, 14)),
    flag("--max_input_len", "int", 1024),
    flag("--max_seq_len --max_decoder_seq_len", "int"),
    flag("--max_beam_width", "int", 1),
    flag("--max_num_tokens", "int", 8192),
    flag("--opt_num_tokens", "int"),
    flag("--max_encoder_input_len", "int", 1024),
    flag("--max_prompt_embedding_table_size --max_multimodal_len", "int", 0),
    flag("--use_fused_mlp", "switch", until=(0, 13)),
    choice("--kv_cache_type", "continuous paged disabled", since=(0, 13)),
    flag("--paged_kv_cache", "text", since=(0, 13)),
    flag("--gather_context_logits", "switch"),
    flag("--gather_generation_logits", "switch"),
    flag("--gather_all_token_logits", "switch"),
    flag("--builder_opt", "int", until=(0, 14)),
    flag("--builder_force_num_profiles", "int", until=(0, 15)),
    choice("--logits_dtype", "float16 float32"),
    flag("--weight_sparsity", "switch"),
    flag("--weight_streaming", "switch"),
    flag("--strip_plan", "switch"),
    flag("--dry_run", "switch"),
    flag("--visualize_network", "switch", until=(0, 17)),
    flag("--visualize_network", "text", since=LATE),
    flag("--fast_build", "switch"),
    flag("--monitor_memory", "switch", since=(0, 15)),
    flag("--input_timing_cache", "text"),
    flag("--output_timing_cache", "text", "model.cache"),
    choice("--profiling_verbosity", "layer_names_only detailed none", "layer_names_only"),
    flag("--enable_debug_output", "switch"),
    flag("--max_draft_len", "int", 0),
    choice(
        "--speculative_decoding_mode",
        "draft_tokens_external lookahead_decoding medusa explicit_draft_tokens",
        until=(0, 15),
    ),
    choice(
        "--speculative_decoding_mode",
        "draft_tokens_external lookahead_decoding medusa explicit_draft_tokens eagle",
        since=(0, 15),
    ),
    flag("--lora_dir", "texts"),
    choice("--lora_ckpt_source", "hf nemo", "hf"),
    Flag(names=("--lora_target_modules",), kind="texts", choices=tuple(LORA_MODULES)),
    flag("--max_lora_rank", "int", 64),
    # Removed in October 2025 (pull request #8329).
    flag("--auto_parallel", "int", 1, until=(1, 2)),
    flag("--gpus_per_node", "int", 8, until=(1, 2)),
    flag("--cluster_key", "text", until=(1, 2)),
)
_PLUGINS = (
    _plugin("--bert_attention_plugin", "auto"),
    _plugin("--gpt_attention_plugin", "auto"),
    _plugin("--moe_plugin", "auto"),
    _plugin("--mamba_conv1d_plugin", "auto"),
    _plugin("--nccl_plugin", "auto"),
    _plugin("--gemm_plugin", "disable", "fp8", until=(0, 17)),
    _plugin("--gemm_plugin", "disable", "fp8 nvfp4", since=(0, 17)),
    _plugin("--gemm_swiglu_plugin", "disable", only="fp8"),
    _plugin("--fp8_rowwise_gemm_plugin", "disable"),
    _plugin("--lookup_plugin", "disable", until=(0, 15)),
    _plugin("--lora_plugin", "disable"),
    _plugin("--low_latency_gemm_plugin", "disable", only="fp8", since=(0, 13)),
    _plugin("--low_latency_gemm_swiglu_plugin", "disable", only="fp8", since=(0, 15)),
    _plugin("--gemm_allreduce_plugin", "disable", only="float16 bfloat16", since=SPRING),
    _feature("--dora_plugin", "disable", since=LATE),
    _feature("--context_fmha", "enable"),
    _feature("--bert_context_fmha_fp32_acc", "disable"),
    _feature("--paged_kv_cache", "enable", until=(0, 13)),
    _feature("--remove_input_padding", "enable"),
    Flag(names=("--tokens_per_block",), kind="int", default=64, until=SPRING, plugin=True),
    Flag(names=("--tokens_per_block",), kind="int", default=32, since=SPRING, plugin=True),
    _feature("--use_paged_context_fmha", "disable", until=SPRING),
    _feature("--use_paged_context_fmha", "enable", since=SPRING),
    _feature("--use_fp8_context_fmha", "disable", until=SPRING),
    _feature("--use_fp8_context_fmha", "enable", since=SPRING),
    _feature("--multiple_profiles", "disable"),
    _feature("--paged_state", "enable"),
    _feature("--streamingllm", "disable"),
    _feature("--enable_xqa", "enable", until=(0, 16)),
    _feature("--reduce_fusion", "disable"),
    # On by default in the release notes of 0.13 , not yet in 0.13-dev.
    _feature("--use_fused_mlp", "enable", since=(0, 13)),
    _feature("--pp_reduce_scatter", "disable", since=(0, 15)),
    _feature("--user_buffer", "disable", since=(0, 16)),
    _feature("--fuse_fp4_quant", "disable", since=LATE),
    _feature("--norm_quant_fusion", "disable", since=SPRING),
)


def flags(release: Release) -> tuple[Flag, ...]:
    """Every flag that this release's trtllm-build knows."""
    return tuple(known for known in (*_GENERAL, *_PLUGINS) if known.valid_in(release))


def _kv_cache_type(text: str) -> str:
    """Upstream accepts any case and names the choices in its error."""
    if text.lower() in {"continuous", "paged", "disabled"}:
        return text.upper()
    raise argparse.ArgumentTypeError(f"Invalid value '{text}'. Expected one of ['continuous', 'paged', 'disabled']")


def build_parser(release: Release) -> argparse.ArgumentParser:
    """The parser of one release."""
    parser = argparse.ArgumentParser(prog="trtllm-build", allow_abbrev=False)
    for known in flags(release):
        if known.names == ("--kv_cache_type",):
            parser.add_argument("--kv_cache_type", type=_kv_cache_type, default=None)
        else:
            add_flag(parser, known)
    return parser


def plugin_config(release: Release, arguments: argparse.Namespace) -> dict[str, object]:
    """The object `plugin_config` of the engine: booleans for features, null for a plugin that is off."""
    config: dict[str, object] = {}
    for known in flags(release):
        if not known.plugin:
            continue
        name = known.names[0].removeprefix("--")
        value = getattr(arguments, name)
        if known.choices == SWITCHES:
            value = value == "enable"
        elif value == "disable":
            value = None
        config[name] = value
    return config
