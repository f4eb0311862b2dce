"""Every flag of `trtllm-build` in every release: its form, its default, since when and until when.

Source: tensorrt_llm/commands/build.py and tensorrt_llm/plugin/plugin.py. Read in full: the last snapshots of main
before 0.12 … 0.16 left it, the start of 0.17, 1.0 and 1.2. Release 0.18 is 0.17 with newer dependencies, by its release
notes. Which of 0.17, 0.19 and 0.20 first had a flag that 0.17's start lacks and 1.0 has is taken from logs and release
notes. A flag whose form or default changed has one row for each.

use_fused_mlp: a snapshot before 0.13 (2024-08-13) still has the switch, the next one (2024-09-24, before 0.14) the
value. 0.13 counts as the latter: its release notes say that it is on by default, which a switch cannot be.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from trtserve.errors import UsageError
from trtserve.releases import Row, normalize_release
from trtserve.releases.retired import retired_in

Kind = Literal["int", "switch", "choice", "enable", "text", "list"]

TOOL = "trtllm-build"


@dataclass(frozen=True, kw_only=True)
class BuildFlag(Row):
    """One flag; `default` as its value is typed, None when there is none.

    `kind`: `switch` takes no value, `enable` takes enable or disable, `list` takes one value or more, `choice` one of
    `choices` (so does a `list` that has any). `also` are further spellings. `deprecated` says what to use instead.
    """

    name: str
    kind: Kind
    choices: tuple[str, ...] = ()
    default: str | None = None
    also: tuple[str, ...] = ()
    plugin: bool = False
    deprecated: str = ""


# Name, kind, default (- for none), since, until (- for still there), choices or the name of a list of choices.
_FLAGS = """
checkpoint_dir                   text    -                 0.12 -
model_config                     text    -                 0.12 -
build_config                     text    -                 0.12 -
model_cls_file                   text    -                 0.12 -
model_cls_name                   text    -                 0.12 -
output_dir                       text    engine_outputs    0.12 -
workers                          int     1                 0.12 -
log_level                        text    info              0.12 0.13
log_level                        choice  info              0.14 0.21  LEVELS
log_level                        choice  info              1.0  -     LEVELS,trace
max_batch_size                   int     256               0.12 0.13
max_batch_size                   int     2048              0.14 -
max_input_len                    int     1024              0.12 -
max_seq_len                      int     -                 0.12 -
max_beam_width                   int     1                 0.12 -
max_num_tokens                   int     8192              0.12 -
opt_num_tokens                   int     -                 0.12 -
max_encoder_input_len            int     1024              0.12 -
max_prompt_embedding_table_size  int     0                 0.12 -
use_fused_mlp                    switch  -                 0.12 0.12
kv_cache_type                    choice  -                 0.13 -     continuous,paged,disabled
gather_context_logits            switch  -                 0.12 -
gather_generation_logits         switch  -                 0.12 0.21
gather_generation_logits         switch  -                 1.0  -
gather_all_token_logits          switch  -                 0.12 -
builder_opt                      int     -                 0.12 0.13
builder_force_num_profiles       int     -                 0.12 0.14
logits_dtype                     choice  -                 0.12 -     float16,float32
weight_sparsity                  switch  -                 0.12 -
weight_streaming                 switch  -                 0.12 -
strip_plan                       switch  -                 0.12 -
dry_run                          switch  -                 0.12 -
visualize_network                switch  -                 0.12 0.18
visualize_network                text    -                 0.19 -
fast_build                       switch  -                 0.12 -
monitor_memory                   switch  -                 0.15 -
input_timing_cache               text    -                 0.12 -
output_timing_cache              text    model.cache       0.12 -
profiling_verbosity              choice  layer_names_only  0.12 -     layer_names_only,detailed,none
enable_debug_output              switch  -                 0.12 -
max_draft_len                    int     0                 0.12 -
speculative_decoding_mode        choice  -                 0.12 0.14  DRAFTS
speculative_decoding_mode        choice  -                 0.15 -     DRAFTS,eagle
lora_dir                         list    -                 0.12 -
lora_ckpt_source                 choice  hf                0.12 -     hf,nemo
lora_target_modules              list    -                 0.12 0.19  LORA
lora_target_modules              list    -                 0.20 -     LORA,mlp_gate_up
max_lora_rank                    int     64                0.12 -
auto_parallel                    int     1                 0.12 1.1
gpus_per_node                    int     8                 0.12 1.1
cluster_key                      text    -                 0.12 1.1
"""

_PLUGINS = """
bert_attention_plugin            choice  auto              0.12 -     TYPES
gpt_attention_plugin             choice  auto              0.12 -     TYPES
moe_plugin                       choice  auto              0.12 -     TYPES
mamba_conv1d_plugin              choice  auto              0.12 -     TYPES
nccl_plugin                      choice  auto              0.12 -     TYPES
gemm_plugin                      choice  disable           0.12 0.16  TYPES,fp8
gemm_plugin                      choice  disable           0.17 -     TYPES,fp8,nvfp4
gemm_swiglu_plugin               choice  disable           0.12 -     FP8
fp8_rowwise_gemm_plugin          choice  disable           0.12 -     TYPES
lookup_plugin                    choice  disable           0.12 0.14  TYPES
lora_plugin                      choice  disable           0.12 -     TYPES
dora_plugin                      enable  disable           0.19 -
low_latency_gemm_plugin          choice  disable           0.13 -     FP8
low_latency_gemm_swiglu_plugin   choice  disable           0.15 -     FP8
gemm_allreduce_plugin            choice  disable           0.19 -     float16,bfloat16,disable
context_fmha                     enable  enable            0.12 -
bert_context_fmha_fp32_acc       enable  disable           0.12 -
paged_kv_cache                   enable  enable            0.12 0.12
paged_kv_cache                   text    -                 0.13 -
remove_input_padding             enable  enable            0.12 -
reduce_fusion                    enable  disable           0.12 -
norm_quant_fusion                enable  disable           0.19 -
user_buffer                      enable  disable           0.16 -
tokens_per_block                 int     64                0.12 0.18
tokens_per_block                 int     32                0.19 -
use_paged_context_fmha           enable  disable           0.12 0.18
use_paged_context_fmha           enable  enable            0.19 -
use_fp8_context_fmha             enable  disable           0.12 0.18
use_fp8_context_fmha             enable  enable            0.19 -
fuse_fp4_quant                   enable  disable           0.20 -
multiple_profiles                enable  disable           0.12 -
paged_state                      enable  enable            0.12 -
streamingllm                     enable  disable           0.12 -
enable_xqa                       enable  enable            0.12 0.15
use_fused_mlp                    enable  enable            0.13 -
pp_reduce_scatter                enable  disable           0.15 -
"""

_CHOICES = {
    "LEVELS": "internal_error,error,warning,info,verbose,debug",
    "LORA": "attn_qkv,attn_q,attn_k,attn_v,attn_dense,mlp_h_to_4h,mlp_4h_to_h,mlp_gate,cross_attn_qkv,cross_attn_q,"
    "cross_attn_k,cross_attn_v,cross_attn_dense,moe_h_to_4h,moe_4h_to_h,moe_gate,moe_router,mlp_router",
    "DRAFTS": "draft_tokens_external,lookahead_decoding,medusa,explicit_draft_tokens",
    "TYPES": "auto,float16,float32,bfloat16,int32,disable",
    "FP8": "fp8,disable",
}
_KINDS: dict[str, Kind] = {kind: kind for kind in get_args(Kind)}
_ALSO = {
    "max_seq_len": ("--max_decoder_seq_len",),
    "max_prompt_embedding_table_size": ("--max_multimodal_len",),
}
# By name and first release.
_DEPRECATED = {
    ("paged_kv_cache", "0.13"): "use --kv_cache_type paged (the default) or --kv_cache_type disabled",
    ("gather_generation_logits", "1.0"): "leave it out, requests may ask for the logits of their answers without it",
}


def _rows(table: str, *, plugin: bool) -> Iterator[BuildFlag]:
    for line in table.strip().splitlines():
        name, kind, default, since, until, *choices = line.split()
        named = [_CHOICES.get(each, each) for each in (choices[0].split(",") if choices else ())]
        yield BuildFlag(
            name=f"--{name}",
            kind=_KINDS[kind],
            default=None if default == "-" else default,
            since=since,
            until=None if until == "-" else until,
            choices=("enable", "disable") if kind == "enable" else tuple(",".join(named).split(",")) if named else (),
            also=_ALSO.get(name, ()),
            plugin=plugin,
            deprecated=_DEPRECATED.get((name, since), ""),
        )


BUILD_FLAGS = (*_rows(_FLAGS, plugin=False), *_rows(_PLUGINS, plugin=True))
"""Every form of every flag."""


def build_flags(release: str) -> dict[str, BuildFlag]:
    """The flags of a release by name ("--max_batch_size"), those of the plugins last."""
    wanted = normalize_release(release)
    return {flag.name: flag for flag in BUILD_FLAGS if flag.within(wanted)}


def check_build_arguments(release: str, arguments: Sequence[str]) -> None:
    """Check arguments for `trtllm-build` as it would; UsageError says what is wrong and what would be right."""
    known = {spelling: flag for flag in build_flags(release).values() for spelling in (flag.name, *flag.also)}
    left = list(arguments)
    while left:
        name, sign, value = left.pop(0).partition("=")
        flag = known.get(name)
        if flag is None:
            raise _unknown(name, release, known)
        values = [value] if sign else _take(left)
        _require_form(flag, name, values)


def build_notes(release: str, arguments: Sequence[str]) -> tuple[str, ...]:
    """What to say about arguments that the release takes but calls deprecated."""
    flags = build_flags(release)
    given = [flags.get(argument.partition("=")[0]) for argument in arguments]
    return tuple(f"{flag.name} is deprecated: {flag.deprecated}." for flag in given if flag and flag.deprecated)


def _take(left: list[str]) -> list[str]:
    """The values that follow a flag, removed from `left`."""
    values: list[str] = []
    while left and not left[0].startswith("--"):
        values.append(left.pop(0))
    return values


def _unknown(name: str, release: str, known: dict[str, BuildFlag]) -> UsageError:
    message = f"{TOOL} of TensorRT-LLM {release} has no option {name}."
    if not name.startswith("-"):
        return UsageError(message, hint=f"Every argument of {TOOL} has a name: `{TOOL} --help` lists them.")
    gone = retired_in("build", name)
    if gone is not None:
        return UsageError(message, hint=gone.answer)
    later = [flag for flag in BUILD_FLAGS if name in (flag.name, *flag.also)]
    if later:
        return UsageError(message, hint=f"Releases that have it: {', '.join(map(_span, later))}.")
    spelled = "--" + name.lstrip("-").replace("-", "_")
    close = difflib.get_close_matches(spelled, known, n=3, cutoff=0.6)
    hint = f"Did you mean {' or '.join(close)}?" if close else f"`{TOOL} --help` lists its options."
    return UsageError(message, hint=hint)


def _span(flag: BuildFlag) -> str:
    return f"{flag.since} – {flag.until or ''}".rstrip()


def _require_form(flag: BuildFlag, name: str, values: list[str]) -> None:
    given = " ".join([name, *values])
    if flag.kind == "switch" and values:
        raise UsageError(f"{given}: {name} takes no value.", hint=f"Write {name} alone.")
    if flag.kind != "switch" and not values:
        raise UsageError(f"{name} needs a value.", hint=_expected(flag))
    if flag.kind != "list" and len(values) > 1:
        raise UsageError(f"{given}: {name} takes one value.", hint=_expected(flag))
    for value in values:
        if not _accepts(flag, value):
            raise UsageError(f"{given}: {_expected(flag)}")


def _accepts(flag: BuildFlag, value: str) -> bool:
    if flag.kind == "int":
        return value.lstrip("-").isascii() and value.removeprefix("-").isdigit()
    # Of all choices only those of the KV cache are an enumeration, which upstream reads in any case.
    return not flag.choices or (value.lower() if flag.name == "--kv_cache_type" else value) in flag.choices


def _expected(flag: BuildFlag) -> str:
    if flag.kind == "int":
        return "It takes a whole number."
    return f"It takes one of {', '.join(flag.choices)}." if flag.choices else "It takes a text."
