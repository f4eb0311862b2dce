"""The arguments of `trtllm-build` for what a BuildSpec asks of a release, and what its engine's config.json says then.

Rules: convert-and-build, section 4. Everything that upstream would correct in silence is corrected here and told.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from trtserve.errors import UsageError
from trtserve.releases import order
from trtserve.releases.build_flags import BuildFlag, build_flags, build_notes, check_build_arguments
from trtserve.releases.engine_config import SPECULATIVE_MODES
from trtserve.runtimes.base import CheckpointConfig, Limits, resolve_limits
from trtserve.specs import BuildSpec

_MAX_NUM_TOKENS = 8192
_MOST = 2**31 - 1
_LORA_RANK = BuildSpec().max_lora_rank
# What requests need context FMHA and packed inputs for: both are on unless somebody switches them off.
_PACKED = ("remove_input_padding", "context_fmha")
# Options of ours that are flags of the same name; None leaves them out.
_PASSED_ON = (
    "opt_num_tokens",
    "logits_dtype",
    "kv_cache_type",
    "tokens_per_block",
    "gemm_plugin",
    "gpt_attention_plugin",
    "context_fmha",
    "remove_input_padding",
    "use_paged_context_fmha",
    "use_fp8_context_fmha",
    "reduce_fusion",
    "multiple_profiles",
    "profiling_verbosity",
)
_PLUGIN_SWITCHES = (
    "context_fmha",
    "remove_input_padding",
    "use_paged_context_fmha",
    "use_fp8_context_fmha",
    "reduce_fusion",
    "multiple_profiles",
)
# Flags that stand behind `--` in vain: what decides the same here.
_OURS = {
    "--checkpoint_dir": "The checkpoint is the argument of `trtserve build`.",
    "--model_config": "The checkpoint is the argument of `trtserve build`.",
    "--output_dir": "It is --out here.",
    "--build_config": "Give its settings as options, so that they can be checked.",
    "--workers": "Give `--workers N` before the `--` (`import`: --build-workers).",
    "--dry_run": "`trtserve build --dry-run` says what would be built.",
    "--auto_parallel": "Parallelism is a property of the checkpoint: `trtserve convert --tp-size`.",
    "--gather_all_token_logits": "Give it before the `--`.",
}
_TYPED = (
    "max_batch_size",
    "max_input_len",
    "max_seq_len",
    "max_num_tokens",
    "max_beam_width",
    "max_draft_len",
    "speculative_decoding_mode",
    "max_prompt_embedding_table_size",
    "gather_context_logits",
    "gather_generation_logits",
    "lora_plugin",
    "lora_target_modules",
    "max_lora_rank",
    *_PASSED_ON,
)


@dataclass(frozen=True, kw_only=True)
class BuildArguments:
    """Arguments without folders and workers; `limits` and `expected` are what `build_config` of the engine will say.

    `expected` has `plugin_config` as a part of its own; `notes` say what was decided.
    """

    arguments: tuple[str, ...]
    limits: Limits
    expected: Mapping[str, Any]
    notes: tuple[str, ...]


def build_arguments(release: str, config: CheckpointConfig, spec: BuildSpec) -> BuildArguments:
    """What builds the engine that `spec` asks for from a checkpoint with `config`; UsageError when nothing can."""
    known = build_flags(release)
    _require_behind(known, spec.builder_flags)
    limits, limit_notes = _limits(known, config, spec)
    mode = _mode(spec)
    wanted = _wanted(release, spec, limits, mode)
    arguments = (*(part for name, value in wanted.items() for part in _typed(name, value)), *spec.builder_flags)
    check_build_arguments(release, arguments)
    return BuildArguments(
        arguments=arguments,
        limits=limits,
        expected=_expected(release, spec, mode),
        notes=(*limit_notes, *build_notes(release, arguments)),
    )


def _require_behind(known: Mapping[str, BuildFlag], flags: tuple[str, ...]) -> None:
    """UsageError for a flag behind `--` that an option of ours, or the checkpoint, decides."""
    names = {spelling: flag.name for flag in known.values() for spelling in (flag.name, *flag.also)}
    if flags and not flags[0].startswith("-"):
        raise UsageError(f"{flags[0]} is no option of trtllm-build: every argument of it has a name.")
    for argument in flags:
        typed = argument.partition("=")[0]
        name = names.get(typed, typed)
        if name in _OURS:
            raise UsageError(f"{typed} cannot stand behind `--`.", hint=_OURS[name])
        if name.removeprefix("--") in _TYPED:
            raise UsageError(
                f"{typed} cannot stand behind `--`: it is an option of ours.",
                hint=f"Give it before the `--`, as {name.replace('_', '-')}.",
            )


def _limits(
    known: Mapping[str, BuildFlag], config: CheckpointConfig, spec: BuildSpec
) -> tuple[Limits, tuple[str, ...]]:
    """The limits as `trtllm-build` will have them after its own corrections."""
    batch = int(known["--max_batch_size"].default or 1)
    defaults = Limits(max_batch_size=batch, max_input_len=_MOST, max_seq_len=_MOST, max_num_tokens=_MAX_NUM_TOKENS)
    limits, notes = resolve_limits(config, spec, defaults), []
    packed = all(getattr(spec, name) != "disable" for name in _PACKED)
    if packed and limits.max_input_len != limits.max_seq_len:
        notes.append(
            f"--max-input-len {limits.max_input_len} has no effect with packed inputs and context FMHA: prompts may "
            f"have {limits.max_seq_len} tokens."
        )
        limits = replace(limits, max_input_len=limits.max_seq_len)
    tokens = _max_num_tokens(known, spec, limits)
    if spec.max_num_tokens not in (None, tokens):
        notes.append(f"--max-num-tokens {spec.max_num_tokens} becomes {tokens}, as trtllm-build corrects it.")
    return replace(limits, max_num_tokens=tokens), tuple(notes)


def _max_num_tokens(known: Mapping[str, BuildFlag], spec: BuildSpec, limits: Limits) -> int:
    most = limits.max_batch_size * limits.max_seq_len
    if spec.remove_input_padding == "disable":
        return most
    if spec.context_fmha == "disable":
        return max(min(limits.max_num_tokens, most), limits.max_input_len)
    block = spec.tokens_per_block or int(known["--tokens_per_block"].default or 1)
    return max(min(limits.max_num_tokens, most), block)


def _mode(spec: BuildSpec) -> str | None:
    """The speculative decoding mode that is passed on; drafts alone mean drafts that come with the requests."""
    mode = None if spec.speculative_decoding_mode == "none" else spec.speculative_decoding_mode
    if spec.max_draft_len and spec.speculative_decoding_mode == "none":
        raise UsageError(
            f"--max-draft-len is {spec.max_draft_len}, but --speculative-decoding-mode none takes no drafts.",
            hint="Choose --speculative-decoding-mode draft_tokens_external, or leave --max-draft-len out.",
        )
    if mode == "draft_tokens_external" and not spec.max_draft_len:
        raise UsageError(
            "--speculative-decoding-mode draft_tokens_external with --max-draft-len 0 leaves no room for a draft.",
            hint="Give --max-draft-len N, the longest draft of a request.",
        )
    if spec.max_draft_len and (spec.gather_context_logits or spec.gather_all_token_logits):
        raise UsageError(
            f"Context logits cannot be gathered by an engine for draft tokens (--max-draft-len {spec.max_draft_len}).",
            hint="The logits of accepted draft tokens come with --gather-generation-logits alone.",
        )
    return mode or ("draft_tokens_external" if spec.max_draft_len else None)


def _wanted(release: str, spec: BuildSpec, limits: Limits, mode: str | None) -> dict[str, Any]:
    """Flag without dashes → value: True for a switch, None or False for one that is left out."""
    passed = {name: getattr(spec, name) for name in _PASSED_ON}
    if release == "0.12" and passed["kv_cache_type"] is not None:
        passed.pop("kv_cache_type")
        passed["paged_kv_cache"] = _paged_kv_cache(spec)
    return {
        "max_batch_size": limits.max_batch_size,
        "max_input_len": limits.max_input_len,
        "max_seq_len": limits.max_seq_len,
        "max_num_tokens": limits.max_num_tokens,
        "max_beam_width": spec.max_beam_width,
        "max_draft_len": spec.max_draft_len or None,
        "speculative_decoding_mode": mode,
        "max_prompt_embedding_table_size": spec.max_prompt_embedding_table_size or None,
        "gather_context_logits": spec.gather_context_logits or spec.gather_all_token_logits,
        "gather_generation_logits": spec.gather_generation_logits or spec.gather_all_token_logits,
        **passed,
        **_lora(spec),
    }


def _paged_kv_cache(spec: BuildSpec) -> str:
    if spec.kv_cache_type == "disabled":
        raise UsageError("--kv-cache-type disabled came with TensorRT-LLM 0.13; 0.12 always has a KV cache.")
    return "enable" if spec.kv_cache_type == "paged" else "disable"


def require_no_adapters(spec: BuildSpec) -> None:
    """UsageError for what means nothing without --lora-plugin."""
    given = (("--lora-target-modules", spec.lora_target_modules), ("--max-lora-rank", spec.max_lora_rank != _LORA_RANK))
    for option, value in given:
        if value:
            raise UsageError(f"{option} does nothing without --lora-plugin.", hint="Add --lora-plugin auto.")


def _lora(spec: BuildSpec) -> dict[str, Any]:
    modules = [name for word in spec.lora_target_modules or () for name in word.replace(",", " ").split()]
    if spec.lora_plugin == "disable":
        require_no_adapters(spec)
        return {}
    if not modules and "--lora_dir" not in spec.builder_flags:
        raise UsageError(
            f"--lora-plugin {spec.lora_plugin} without --lora-target-modules: the engine would take no adapter.",
            hint="Give the modules of your adapters, such as --lora-target-modules attn_q,attn_k,attn_v.",
        )
    return {
        "lora_plugin": spec.lora_plugin,
        "lora_target_modules": modules or None,
        "max_lora_rank": spec.max_lora_rank,
    }


def _typed(name: str, value: Any) -> Iterator[str]:
    if value is None or value is False:
        return
    yield f"--{name}"
    if isinstance(value, list):
        yield from value
    elif value is not True:
        yield str(value)


def _expected(release: str, spec: BuildSpec, mode: str | None) -> dict[str, Any]:
    """What `build_config` must say beside the limits, as far as it was asked for."""
    expected: dict[str, Any] = {
        "max_beam_width": spec.max_beam_width,
        "max_prompt_embedding_table_size": spec.max_prompt_embedding_table_size,
        "gather_context_logits": spec.gather_context_logits or spec.gather_all_token_logits,
        "max_draft_len": spec.max_draft_len,
        "speculative_decoding_mode": 1 << SPECULATIVE_MODES.index(mode or "none"),
    }
    if order(release) < (1, 0):  # deprecated since, and without meaning
        expected["gather_generation_logits"] = spec.gather_generation_logits or spec.gather_all_token_logits
    plugins = {name: getattr(spec, name) == "enable" for name in _PLUGIN_SWITCHES if getattr(spec, name) is not None}
    if spec.tokens_per_block is not None:
        plugins["tokens_per_block"] = spec.tokens_per_block
    return {**expected, "plugin_config": plugins}
