"""Flags of trtllm-build per release: spot checks from sources and release notes."""

from __future__ import annotations

import pytest

from trtserve.errors import UsageError
from trtserve.nvidia.releases.options import (
    SPECULATIVE_MODES,
    build_notes,
    check_build_arguments,
    speculative_mode,
)

TAKEN = [
    ("0.12", "--max_batch_size 8 --max_input_len 1024 --max_seq_len 2048 --gemm_plugin float16 --workers 2"),
    ("0.12", "--paged_kv_cache enable --use_fused_mlp --builder_opt 4 --lookup_plugin float16"),
    ("0.13", "--kv_cache_type paged --use_fused_mlp enable"),
    ("0.13", "--paged_kv_cache enable"),
    ("0.15", "--enable_xqa disable --speculative_decoding_mode eagle --monitor_memory"),
    ("0.16", "--visualize_network --gather_all_token_logits --remove_input_padding enable --multiple_profiles enable"),
    ("0.18", "--gemm_plugin nvfp4 --reduce_fusion enable"),
    ("1.0", "--auto_parallel 2 --cluster_key H100-SXM --visualize_network /tmp/onnx"),
    ("1.2", "--max_batch_size=8 --max_decoder_seq_len=64 --max_multimodal_len 10 --kv_cache_type DISABLED"),
    ("1.2", "--lora_plugin auto --lora_target_modules attn_q attn_k attn_v --lora_dir ./a ./b --max_lora_rank 8"),
    ("1.2", "--use_paged_context_fmha enable --tokens_per_block 32 --context_fmha disable --log_level verbose"),
    ("1.2", "--norm_quant_fusion enable --gemm_allreduce_plugin float16 --fuse_fp4_quant enable --dora_plugin disable"),
]

REFUSED = [
    ("1.2", "--max_output_len 64", "--max_seq_len"),
    ("0.12", "--max-output-len=64", "--max_seq_len"),
    ("0.12", "--tp_size 4", "trtserve convert --tp-size"),
    ("1.1", "--world_size 4", "trtserve convert --tp-size"),
    ("1.2", "--use_custom_all_reduce disable", "Leave it out"),
    ("1.2", "--multi_block_mode enable", "--set multi_block_mode=true"),
    ("1.2", "--context_fmha_fp32_acc enable", "--set enable_context_fmha_fp32_acc=true"),
    ("0.12", "--weight_only_precision int8", "trtserve convert --quantize"),
    ("0.12", "--strongly_typed", "Leave it out"),
    ("0.14", "--builder_opt 3", "0.13"),
    ("0.15", "--builder_force_num_profiles 1", "BUILDER_FORCE_NUM_PROFILES"),
    ("0.15", "--lookup_plugin float16", "0.14"),
    ("0.16", "--enable_xqa enable", "0.15"),
    ("1.2", "--auto_parallel 2", "1.1"),
    ("0.12", "--kv_cache_type paged", "0.13"),
    ("0.14", "--monitor_memory", "0.15"),
    ("0.12", "--norm_quant_fusion enable", "0.19"),
    ("1.2", "--max-batch-size 4", "Did you mean --max_batch_size"),
    ("1.2", "--max_batch_sizes 4", "Did you mean --max_batch_size"),
    ("1.2", "engine", "trtllm-build --help"),
    ("1.2", "--checkpoint-dir c", "is the argument"),
    ("1.2", "--use_inflight_batching", "in-flight batching"),
    ("1.2", "--use_gpt_attention_plugin float16", "--gpt_attention_plugin"),
    ("1.2", "--enable_context_fmha", "--context_fmha"),
]

WRONG_FORM = [
    ("1.2", "--context_fmha true", "enable, disable"),
    ("1.2", "--context_fmha", "needs a value"),
    ("1.2", "--max_batch_size 8 9", "takes one value"),
    ("1.2", "--gather_context_logits true", "takes no value"),
    ("1.2", "--max_batch_size 1.5", "whole number"),
    ("1.2", "--max_batch_size many", "whole number"),
    ("1.2", "--gemm_plugin float64", "float16"),
    ("0.16", "--gemm_plugin nvfp4", "fp8"),
    ("1.2", "--gemm_swiglu_plugin float16", "fp8"),
    ("0.14", "--speculative_decoding_mode eagle", "medusa"),
    ("0.12", "--use_fused_mlp enable", "takes no value"),
    ("0.13", "--use_fused_mlp", "needs a value"),
    ("0.16", "--visualize_network onnx", "takes no value"),
    ("1.2", "--visualize_network", "needs a value"),
    ("1.2", "--lora_target_modules q_proj", "attn_q"),
    ("1.2", "--kv_cache_type contiguous", "continuous"),
]


@pytest.mark.parametrize(("release", "arguments"), TAKEN)
def test_valid_arguments_pass(release: str, arguments: str) -> None:
    check_build_arguments(release, arguments.split())


@pytest.mark.parametrize(("release", "arguments", "answer"), REFUSED)
def test_unknown_arguments_are_refused_with_advice(release: str, arguments: str, answer: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_build_arguments(release, arguments.split())
    assert answer in str(caught.value.hint)
    assert arguments.split(maxsplit=1)[0].partition("=")[0] in caught.value.message
    assert release in caught.value.message


@pytest.mark.parametrize(("release", "arguments", "answer"), WRONG_FORM)
def test_invalid_values_are_refused(release: str, arguments: str, answer: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_build_arguments(release, arguments.split())
    assert answer in f"{caught.value.message} {caught.value.hint}"


def test_deprecated_flags_pass_with_a_note() -> None:
    assert build_notes("0.12", ["--paged_kv_cache", "enable"]) == ()
    assert "--kv_cache_type paged" in build_notes("1.0", ["--paged_kv_cache=enable", "--max_batch_size", "8"])[0]
    assert "without it" in build_notes("1.2", ["--gather_generation_logits"])[0]


def test_unsupported_releases_are_refused() -> None:
    with pytest.raises(UsageError, match=r"0\.12 … 1\.2"):
        check_build_arguments("0.11", [])


def test_speculative_decoding_modes_are_bits() -> None:
    assert [speculative_mode(1 << place) for place in range(len(SPECULATIVE_MODES))] == list(SPECULATIVE_MODES)
    assert [speculative_mode(number) for number in (0, 64, None, "medusa")] == [None] * 4
