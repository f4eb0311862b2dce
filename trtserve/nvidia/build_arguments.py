"""`trtllm-build` for a BuildSpec and release: its arguments, the engine's config.json, and its log.

Whatever upstream would correct silently is corrected here and reported.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.errors import UsageError
from trtserve.nvidia.releases import order
from trtserve.nvidia.releases.options import (
    SPECULATIVE_MODES,
    BuildFlag,
    build_flags,
    build_notes,
    check_build_arguments,
)
from trtserve.progress import Progress
from trtserve.specs import BuildSpec
from trtserve.specs.runtime import TRTLLM_LIMITS, Limits, resolve_limits

_MOST = 2**31 - 1
_LORA_RANK = BuildSpec().max_lora_rank
# Requests need context FMHA and packed inputs for these features; both are on by default.
_PACKED = ("remove_input_padding", "context_fmha")
_PLUGIN_SWITCHES = (
    "context_fmha",
    "remove_input_padding",
    "use_paged_context_fmha",
    "use_fp8_context_fmha",
    "reduce_fusion",
    "multiple_profiles",
)
# Options that are flags of the same name; None omits them.
_PASSED_ON = (
    "opt_num_tokens",
    "logits_dtype",
    "kv_cache_type",
    "tokens_per_block",
    "gemm_plugin",
    "gpt_attention_plugin",
    *_PLUGIN_SWITCHES,
    "profiling_verbosity",
)
# Flags not allowed after `--`, and the option to use instead.
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
_TYPED = {field.name for field in fields(BuildSpec)}


@dataclass(frozen=True, kw_only=True)
class BuildArguments:
    """Arguments without folders and workers, and the `limits` and `expected` values of the engine's `build_config`.

    `expected` includes `plugin_config`; `notes` explain the decisions.
    """

    arguments: tuple[str, ...]
    limits: Limits
    expected: Mapping[str, Any]
    notes: tuple[str, ...]


def build_arguments(release: str, config: CheckpointConfig, spec: BuildSpec) -> BuildArguments:
    """Return the arguments that build the engine `spec` requests from a checkpoint `config`, or raise UsageError."""
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
    """Raise UsageError for a flag after `--` that one of our options, or the checkpoint, determines."""
    names = {spelling: flag.name for flag in known.values() for spelling in (flag.name, *flag.also)}
    if flags and not flags[0].startswith("-"):
        raise UsageError(f"{flags[0]} is not an option of trtllm-build; all its arguments have names.")
    for argument in flags:
        typed = argument.partition("=")[0]
        name = names.get(typed, typed)
        if name in _OURS:
            raise UsageError(f"{typed} is not allowed after `--`.", hint=_OURS[name])
        if name.removeprefix("--") in _TYPED:
            raise UsageError(
                f"{typed} is not allowed after `--`: trtserve has an option for it.",
                hint=f"Put it before the `--`, as {name.replace('_', '-')}.",
            )


def _limits(
    known: Mapping[str, BuildFlag], config: CheckpointConfig, spec: BuildSpec
) -> tuple[Limits, tuple[str, ...]]:
    """Return the limits after `trtllm-build`'s own corrections."""
    batch = int(known["--max_batch_size"].default or 1)
    defaults = replace(TRTLLM_LIMITS, max_batch_size=batch, max_input_len=_MOST, max_seq_len=_MOST)
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
    """Return the speculative decoding mode to pass on; draft length alone means external draft tokens."""
    mode = None if spec.speculative_decoding_mode == "none" else spec.speculative_decoding_mode
    if spec.max_draft_len and spec.speculative_decoding_mode == "none":
        raise UsageError(
            f"--max-draft-len is {spec.max_draft_len}, but --speculative-decoding-mode none accepts no drafts.",
            hint="Choose --speculative-decoding-mode draft_tokens_external, or omit --max-draft-len.",
        )
    if mode == "draft_tokens_external" and not spec.max_draft_len:
        raise UsageError(
            "--speculative-decoding-mode draft_tokens_external with --max-draft-len 0 leaves no room for a draft.",
            hint="Set --max-draft-len to the longest draft of a request.",
        )
    if spec.max_draft_len and (spec.gather_context_logits or spec.gather_all_token_logits):
        raise UsageError(
            f"An engine with draft tokens cannot gather context logits (--max-draft-len {spec.max_draft_len}).",
            hint="Use --gather-generation-logits for the logits of accepted draft tokens.",
        )
    return mode or ("draft_tokens_external" if spec.max_draft_len else None)


def _wanted(release: str, spec: BuildSpec, limits: Limits, mode: str | None) -> dict[str, Any]:
    """Return flag (without dashes) → value: True for a switch, None or False to omit it."""
    passed = {name: getattr(spec, name) for name in _PASSED_ON}
    if release == "0.12" and passed["kv_cache_type"] is not None:
        passed.pop("kv_cache_type")
        if spec.kv_cache_type == "disabled":
            raise UsageError("--kv-cache-type disabled needs TensorRT-LLM 0.13; 0.12 always has a KV cache.")
        passed["paged_kv_cache"] = "enable" if spec.kv_cache_type == "paged" else "disable"
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


def _lora(spec: BuildSpec) -> dict[str, Any]:
    modules = [name for word in spec.lora_target_modules or () for name in word.replace(",", " ").split()]
    if spec.lora_plugin == "disable":
        given = (
            ("--lora-target-modules", spec.lora_target_modules),
            ("--max-lora-rank", spec.max_lora_rank != _LORA_RANK),
        )
        for option, value in given:
            if value:
                raise UsageError(f"{option} has no effect without --lora-plugin.", hint="Add --lora-plugin auto.")
        return {}
    if not modules and "--lora_dir" not in spec.builder_flags:
        raise UsageError(
            f"--lora-plugin {spec.lora_plugin} needs --lora-target-modules; otherwise the engine accepts no adapter.",
            hint="Add the modules of your adapters, such as --lora-target-modules attn_q,attn_k,attn_v.",
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
    """Return the `build_config` values, besides limits, that were requested."""
    expected: dict[str, Any] = {
        "max_beam_width": spec.max_beam_width,
        "max_prompt_embedding_table_size": spec.max_prompt_embedding_table_size,
        "gather_context_logits": spec.gather_context_logits or spec.gather_all_token_logits,
        "max_draft_len": spec.max_draft_len,
        "speculative_decoding_mode": 1 << SPECULATIVE_MODES.index(mode or "none"),
    }
    if order(release) < (1, 0):  # deprecated, without effect
        expected["gather_generation_logits"] = spec.gather_generation_logits or spec.gather_all_token_logits
    plugins = {name: getattr(spec, name) == "enable" for name in _PLUGIN_SWITCHES if getattr(spec, name) is not None}
    if spec.tokens_per_block is not None:
        plugins["tokens_per_block"] = spec.tokens_per_block
    return {**expected, "plugin_config": plugins}


_STILL_THERE = 60.0

_BUILDING = re.compile(r"Build TensorRT engine ")
_GENERATED = re.compile(r"Engine generation completed in ([\d.]+) seconds")
_SERIALIZING = re.compile(r"Serializing engine to \S*rank(\d+)\.engine")
_DONE = re.compile(r"Total time of building all engines: (\S+)")
_WARNING = re.compile(r"\[W\] (.+)")


class BuildLog:
    """Reads new log lines and reports to `progress`; `seconds` is the expected total."""

    def __init__(self, path: Path, world_size: int, progress: Progress, *, seconds: float | None) -> None:
        self._path = path
        self._world_size = world_size
        self._progress = progress
        self._seconds = seconds
        self._read = self._building = 0
        self._rest = ""
        self._began = self._said = time.monotonic()
        self.written: set[int] = set()

    def follow(self) -> None:
        """Report new lines; after a long silence, report that the build is still running."""
        for line in self._new_lines():
            self._tell(line)
        if time.monotonic() - self._said >= _STILL_THERE:
            self._say("Still building")

    def _new_lines(self) -> list[str]:
        with self._path.open("rb") as file:
            file.seek(self._read)
            added = file.read()
        self._read += len(added)
        *lines, self._rest = (self._rest + added.decode("utf-8", errors="replace")).split("\n")
        return lines

    def _tell(self, line: str) -> None:
        if _BUILDING.search(line):
            self._building += 1
            self._say(f"Weights are loaded; TensorRT builds engine {self._building} of {self._world_size}")
        elif found := _GENERATED.search(line):
            self._say(f"TensorRT took {duration(float(found[1]))}")
        elif found := _SERIALIZING.search(line):
            self.written.add(int(found[1]))
            self._say(f"Writing rank{found[1]}.engine ({len(self.written)} of {self._world_size})")
        elif found := _DONE.search(line):
            self._progress.step(f"All engines are built ({found[1]})")
        elif found := _WARNING.search(line):
            self._progress.step(f"trtllm-build: {found[1]}")

    def _say(self, text: str) -> None:
        self._said = time.monotonic()
        passed = self._said - self._began
        left = ""
        if self._seconds is not None and passed < self._seconds:
            left = f", about {duration(self._seconds - passed)} left"
        self._progress.step(f"{text} ({duration(passed)}{left})" if "(" not in text else text + left)


def duration(seconds: float) -> str:
    """Format seconds: `45 s`, `3 min`, `1.5 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
