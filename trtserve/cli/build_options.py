"""Options of `trtllm-build` that `build` and `import` share, beside those that every runtime has."""

from __future__ import annotations

from typing import Annotated, Any

import typer

PANEL = "trtllm-build (runtime tensorrt_llm)"


def _option(*names: str, help: str, **more: Any) -> Any:  # noqa: A002 - Typer's own name
    return typer.Option(*names, help=help, rich_help_panel=PANEL, **more)


_SWITCH = "enable or disable"
GemmPluginOption = Annotated[
    str | None,
    _option("--gemm-plugin", help="auto, float16, bfloat16, float32, fp8, nvfp4 or disable; auto: the model's type."),
]
AttentionPluginOption = Annotated[
    str | None, _option("--gpt-attention-plugin", help="auto, float16, bfloat16, float32 or disable.")
]
ContextFmhaOption = Annotated[
    str | None, _option("--context-fmha", help=f"{_SWITCH}: fused attention over prompts (enable).")
]
Fp8ContextOption = Annotated[
    str | None, _option("--use-fp8-context-fmha", help=f"{_SWITCH}: the same in FP8; enable from 0.19 on.")
]
InputPaddingOption = Annotated[
    str | None, _option("--remove-input-padding", help=f"{_SWITCH}: packed inputs, which in-flight batching needs.")
]
ReduceFusionOption = Annotated[
    str | None, _option("--reduce-fusion", help=f"{_SWITCH}: what follows an all-reduce becomes a part of it.")
]
ProfilesOption = Annotated[
    str | None, _option("--multiple-profiles", help=f"{_SWITCH}: kernels for several sizes of a step; builds longer.")
]
KvCacheTypeOption = Annotated[str | None, _option("--kv-cache-type", help="paged, continuous or disabled (paged).")]
TokensPerBlockOption = Annotated[
    int | None, _option("--tokens-per-block", help="Tokens of a KV cache block; 64 until 0.18, 32 since.")
]
OptNumTokensOption = Annotated[
    int | None, _option("--opt-num-tokens", help="Tokens of a step that kernels are chosen for.")
]
LogitsDtypeOption = Annotated[str | None, _option("--logits-dtype", help="float16 or float32 (the checkpoint's).")]
VerbosityOption = Annotated[str | None, _option("--profiling-verbosity", help="layer_names_only, detailed or none.")]
BuildWorkersOption = Annotated[
    int | None,
    _option("--workers", metavar="N", help="Ranks that are built at once; default: as many as memory and GPUs allow."),
]
ImportWorkersOption = Annotated[
    int | None,
    _option("--build-workers", metavar="N", help="Ranks that are built at once; default: what memory and GPUs allow."),
]
BuilderFlagOption = Annotated[
    list[str] | None,
    _option("--builder-flag", metavar="FLAG", help="Handed to trtllm-build as it is: =--moe_plugin=auto; repeatable."),
]
