"""Options of `build`: how an engine is built from a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Literal

from trtserve.specs.options import InContainer, option, panel_of

KvPrecision = Literal["auto", "f32", "f16", "u8", "fp8"]
RuntimeName = Literal["auto", "tensorrt_llm", "llmapi", "torch", "vllm", "openvino"]
Device = Literal["cpu", "cuda"]  # where an engine keeps its weights: in main memory, or on NVIDIA GPUs
DeviceName = Literal["cpu", "cuda", "gpu", "npu", "auto"]
PluginType = Literal["disable", "auto", "float16", "float32", "bfloat16"]
Switch = Literal["enable", "disable"]
SpeculativeMode = Literal[
    "none", "draft_tokens_external", "lookahead_decoding", "medusa", "explicit_draft_tokens", "eagle"
]

_engine = partial(option, panel="Engine")
_features = partial(option, panel="Features that requests may use")
TRTLLM_BUILD = "trtllm-build (--runtime tensorrt_llm)"
_trtllm_build = partial(option, panel=TRTLLM_BUILD)


@dataclass(frozen=True, kw_only=True)
class BuildSpec(InContainer):
    """Limits, features and precision of an engine; None leaves a value to the runtime, which derives it from the model.

    Names and defaults are those of `trtllm-build` of TensorRT-LLM 1.2 where it has the option.
    """

    max_batch_size: int | None = option(
        None,
        metavar="REQUESTS",
        help="Requests served at the same time.",
        minimum=1,
        unset="16 on CPUs, 256 with torch, trtllm-build's with tensorrt_llm",
        common=True,
    )
    max_input_len: int | None = option(
        None, metavar="TOKENS", help="Longest prompt.", minimum=1, unset="--max-seq-len", common=True
    )
    max_seq_len: int | None = option(
        None,
        metavar="TOKENS",
        help="Longest prompt and answer together.",
        minimum=1,
        unset="the model's limit, on CPUs at most 4096",
        common=True,
    )
    runtime: RuntimeName = option(
        "auto",
        help="tensorrt_llm builds engines for NVIDIA GPUs, llmapi serves on GPUs without an engine, torch on GPUs "
        "without TensorRT-LLM, vllm serves what vLLM knows, openvino runs on CPUs; auto: what this machine has.",
        common=True,
    )
    device: DeviceName | None = _engine(
        None, help="Device: cpu or cuda; an Intel gpu or auto with openvino.", unset="cpu with openvino, else cuda"
    )
    max_num_tokens: int | None = _engine(
        None,
        metavar="TOKENS",
        help="Tokens of all requests in one step.",
        minimum=1,
        unset="2048 on CPUs, 8192 on GPUs",
    )
    kv_precision: KvPrecision = _engine(
        "auto",
        help="Type of the KV cache: fp8 with torch, others with openvino; auto: the model's, u8 with openvino (f32 for "
        "float32 weights).",
    )
    use_paged_context_fmha: Switch | None = _engine(
        None,
        help="Attention of prompts over a paged KV cache; blocks of other requests are reused only with it.",
        unset="enable; disable up to TensorRT-LLM 0.18",
    )
    max_beam_width: int = _features(1, metavar="BEAMS", help="Most beams of a beam search.", minimum=1)
    max_draft_len: int = _features(
        0, metavar="TOKENS", help="Draft tokens per request; above 0 requests may bring drafts.", minimum=0
    )
    speculative_decoding_mode: SpeculativeMode | None = _features(
        None, help="CPUs have none and draft_tokens_external.", unset="what --max-draft-len needs"
    )
    max_prompt_embedding_table_size: int = _features(
        0,
        "--max-prompt-embedding-table-size",
        "--max-multimodal-len",
        metavar="ROWS",
        help="Rows of the prompt tables (p-tuning) of all requests in a step.",
        minimum=0,
    )
    gather_context_logits: bool = _features(False, help="Requests may ask for the logits of their prompts.")
    gather_generation_logits: bool = _features(False, help="Requests may ask for the logits of their answers.")
    gather_all_token_logits: bool = _features(False, help="Same as --gather-context-logits --gather-generation-logits.")
    lora_plugin: PluginType = _features(
        "disable", help="Serve LoRA adapters with weights of this type; auto: the model's."
    )
    lora_target_modules: Sequence[str] | None = _features(
        None,
        metavar="NAME,…",
        help="Modules that adapters may change: attn_qkv, attn_q, attn_k, attn_v, attn_dense, mlp_h_to_4h, "
        "mlp_4h_to_h, mlp_gate; repeatable.",
        separator=",",
    )
    max_lora_rank: int = _features(64, metavar="RANK", help="Largest rank of an adapter.", minimum=1)
    gemm_plugin: Literal["disable", "auto", "float16", "float32", "bfloat16", "fp8", "nvfp4"] | None = _trtllm_build(
        None, help="Type of the GEMM plugin; auto: the model's.", unset="disable"
    )
    gpt_attention_plugin: PluginType | None = _trtllm_build(
        None, help="Type of the attention plugin; auto: the model's.", unset="auto"
    )
    context_fmha: Switch | None = _trtllm_build(None, help="Fused attention over prompts.", unset="enable")
    use_fp8_context_fmha: Switch | None = _trtllm_build(
        None, help="Fused attention over prompts in FP8.", unset="enable from 0.19 on"
    )
    remove_input_padding: Switch | None = _trtllm_build(
        None, help="Packed inputs, which in-flight batching needs.", unset="enable"
    )
    reduce_fusion: Switch | None = _trtllm_build(
        None, help="Fuse the layers after an all-reduce into it.", unset="disable"
    )
    multiple_profiles: Switch | None = _trtllm_build(
        None, help="Tune kernels for several step sizes; building takes longer.", unset="disable"
    )
    kv_cache_type: Literal["paged", "continuous", "disabled"] | None = _trtllm_build(
        None, help="Layout of the KV cache.", unset="paged"
    )
    tokens_per_block: int | None = _trtllm_build(
        None, metavar="TOKENS", help="Size of a KV cache block.", minimum=1, unset="32; 64 up to 0.18"
    )
    opt_num_tokens: int | None = _trtllm_build(
        None, metavar="TOKENS", help="Tokens per step to tune kernels for.", minimum=1, unset="trtllm-build's"
    )
    logits_dtype: Literal["float16", "float32"] | None = _trtllm_build(
        None, help="Type of the logits.", unset="the checkpoint's"
    )
    profiling_verbosity: Literal["layer_names_only", "detailed", "none"] | None = _trtllm_build(
        None, help="Details that profilers see.", unset="layer_names_only"
    )
    build_workers: int | None = _trtllm_build(
        None,
        "--build-workers",
        "--workers",
        metavar="N",
        help="Ranks to build at the same time.",
        minimum=1,
        unset="as many as memory and GPUs allow",
    )
    builder_flags: tuple[str, ...] = _trtllm_build(
        (),
        "--builder-flag",
        metavar="FLAG",
        help="Pass FLAG to trtllm-build unchanged, for example --builder-flag=--moe_plugin=auto; repeatable.",
    )


BUILDER_FIELDS = tuple(field.name for field in fields(BuildSpec) if panel_of(field) == TRTLLM_BUILD)
"""Fields that only `trtllm-build` uses."""
