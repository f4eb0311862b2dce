"""What `build` is asked to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from trtserve.errors import UsageError
from trtserve.specs.fields import require_choice, require_not_negative, require_positive

KvPrecision = Literal["auto", "f32", "f16", "u8"]
RuntimeName = Literal["auto", "tensorrt_llm", "llmapi", "openvino"]
PluginType = Literal["disable", "auto", "float16", "float32", "bfloat16"]
GemmPluginType = Literal["disable", "auto", "float16", "float32", "bfloat16", "fp8", "nvfp4"]
Switch = Literal["enable", "disable"]
KvCacheType = Literal["paged", "continuous", "disabled"]
ProfilingVerbosity = Literal["layer_names_only", "detailed", "none"]
SpeculativeMode = Literal[
    "none", "draft_tokens_external", "lookahead_decoding", "medusa", "explicit_draft_tokens", "eagle"
]

_BUILD_CHOICES = {
    "speculative_decoding_mode": SpeculativeMode,
    "lora_plugin": PluginType,
    **dict.fromkeys(
        (
            "use_paged_context_fmha",
            "use_fp8_context_fmha",
            "context_fmha",
            "remove_input_padding",
            "reduce_fusion",
            "multiple_profiles",
        ),
        Switch,
    ),
    "gemm_plugin": GemmPluginType,
    "gpt_attention_plugin": PluginType,
    "kv_cache_type": KvCacheType,
    "logits_dtype": Literal["float16", "float32"],
    "profiling_verbosity": ProfilingVerbosity,
}


@dataclass(frozen=True, kw_only=True)
class BuildSpec:
    """Limits, features and precision of an engine; None means: derived from the model by the runtime.

    `max_input_len`, `max_seq_len` and `max_num_tokens` count tokens, `max_batch_size` counts requests. From
    `max_beam_width` to `max_lora_rank` the names and defaults are those of `trtllm-build` of TensorRT-LLM 1.2.

    The fields from `use_paged_context_fmha` on are `trtllm-build`'s too, and None leaves its default alone; those of
    BUILDER_FIELDS mean nothing to other runtimes. `build_workers` counts ranks that are built at the same time, None
    takes as many as memory and GPUs allow; `builder_flags` are handed on as they are. `container` is a tag or image.
    """

    max_batch_size: int | None = None
    max_input_len: int | None = None
    max_seq_len: int | None = None
    max_num_tokens: int | None = None
    max_beam_width: int = 1
    max_draft_len: int = 0
    speculative_decoding_mode: SpeculativeMode | None = None
    max_prompt_embedding_table_size: int = 0
    gather_context_logits: bool = False
    gather_generation_logits: bool = False
    gather_all_token_logits: bool = False
    lora_plugin: PluginType = "disable"
    lora_target_modules: Sequence[str] | None = None
    max_lora_rank: int = 64
    kv_precision: KvPrecision = "auto"
    runtime: RuntimeName = "auto"
    trtllm_version: str | None = None
    use_paged_context_fmha: Switch | None = None
    use_fp8_context_fmha: Switch | None = None
    context_fmha: Switch | None = None
    remove_input_padding: Switch | None = None
    reduce_fusion: Switch | None = None
    multiple_profiles: Switch | None = None
    gemm_plugin: GemmPluginType | None = None
    gpt_attention_plugin: PluginType | None = None
    kv_cache_type: KvCacheType | None = None
    tokens_per_block: int | None = None
    opt_num_tokens: int | None = None
    logits_dtype: Literal["float16", "float32"] | None = None
    profiling_verbosity: ProfilingVerbosity | None = None
    build_workers: int | None = None
    builder_flags: tuple[str, ...] = ()
    container: str | None = None
    container_flags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_positive(self, "max_batch_size", "max_input_len", "max_seq_len", "max_num_tokens")
        require_positive(self, "max_beam_width", "max_lora_rank", "tokens_per_block", "opt_num_tokens")
        if self.build_workers is not None and self.build_workers < 1:
            raise UsageError(f"The number of workers is {self.build_workers}; it must be at least 1.")
        require_not_negative(self, "max_draft_len", "max_prompt_embedding_table_size")
        for name, choices in _BUILD_CHOICES.items():
            value = getattr(self, name)
            if value is not None:
                require_choice(f"--{name.replace('_', '-')}", value, get_args(choices))
        require_choice("--kv-precision", self.kv_precision, get_args(KvPrecision))
        require_choice("--runtime", self.runtime, get_args(RuntimeName))


BUILDER_FIELDS = (
    "use_fp8_context_fmha",
    "context_fmha",
    "remove_input_padding",
    "reduce_fusion",
    "multiple_profiles",
    "gemm_plugin",
    "gpt_attention_plugin",
    "kv_cache_type",
    "tokens_per_block",
    "opt_num_tokens",
    "logits_dtype",
    "profiling_verbosity",
    "build_workers",
    "builder_flags",
)
"""Fields of BuildSpec that mean something to `trtllm-build` alone."""
