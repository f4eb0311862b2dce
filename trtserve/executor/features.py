"""Engine features besides limits, under the names of `trtllm-build`: beams, drafts, logits, adapters."""

from __future__ import annotations

import difflib
from dataclasses import asdict, dataclass
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import family
from trtserve.errors import UsageError
from trtserve.executor.engine.lora_modules import HF_MODULES, MODULE_IDS, OTHER_MODULES
from trtserve.specs import BUILDER_FIELDS, BuildSpec

# TensorRT-LLM's SpeculativeDecodingMode; `config.json` holds the number.
_LORA_RANK = BuildSpec().max_lora_rank
_MODES = {"none": 1, "draft_tokens_external": 2}


@dataclass(frozen=True, kw_only=True)
class Features:
    """Features that determine which requests an engine accepts; the fields have their `config.json` names.

    `lora_plugin` is the adapters' weight type, None without adapters; `max_lora_rank` and `lora_target_modules` apply
    only with it.
    """

    max_beam_width: int = 1
    max_draft_len: int = 0
    speculative_decoding_mode: str = "none"
    max_prompt_embedding_table_size: int = 0
    gather_context_logits: bool = False
    gather_generation_logits: bool = False
    use_paged_context_fmha: bool = True
    lora_plugin: str | None = None
    max_lora_rank: int = 64
    lora_target_modules: tuple[str, ...] = ()

    def record(self) -> dict[str, Any]:
        """The fields as JSON."""
        return {**asdict(self), "lora_target_modules": list(self.lora_target_modules)}

    def build_config(self) -> dict[str, Any]:
        """The resulting keys of `build_config`."""
        return {
            "max_beam_width": self.max_beam_width,
            "max_prompt_embedding_table_size": self.max_prompt_embedding_table_size,
            "gather_context_logits": self.gather_context_logits,
            "gather_generation_logits": self.gather_generation_logits,
            "max_draft_len": self.max_draft_len,
            "speculative_decoding_mode": _MODES[self.speculative_decoding_mode],
            "lora_config": {
                "lora_dir": [],
                "lora_ckpt_source": "hf",
                "max_lora_rank": self.max_lora_rank,
                "lora_target_modules": list(self.lora_target_modules),
                "trtllm_modules_to_hf_modules": {name: HF_MODULES[name] for name in self.lora_target_modules},
            },
        }

    def plugin_config(self) -> dict[str, Any]:
        """The resulting keys of `plugin_config`. Context FMHA is always on here."""
        return {
            "lora_plugin": self.lora_plugin,
            "context_fmha": True,
            "use_paged_context_fmha": self.use_paged_context_fmha,
        }

    def words(self) -> str:
        """Describe the features beyond plain decoding, or empty without any."""
        words = [
            (self.max_beam_width > 1, f"{self.max_beam_width} beams"),
            (self.max_draft_len > 0, f"{self.max_draft_len} draft tokens"),
            (self.max_prompt_embedding_table_size > 0, f"prompt tables of {self.max_prompt_embedding_table_size} rows"),
            (self.gather_context_logits, "context logits"),
            (self.gather_generation_logits, "generation logits"),
            (
                self.lora_plugin is not None,
                f"adapters of rank {self.max_lora_rank} on {' '.join(self.lora_target_modules)}",
            ),
            (not self.use_paged_context_fmha, "no reuse of KV blocks"),
        ]
        return ", ".join(text for present, text in words if present)


def resolve_features(config: CheckpointConfig, spec: BuildSpec) -> tuple[Features, tuple[str, ...]]:
    """Return the features that `spec` requests for a checkpoint `config`, and notes about them.

    Rules are those of `trtllm-build`. Raises UsageError where it refuses, or where its engine would fail to load.
    """
    _require_no_builder_options(spec)
    mode, mode_notes = _resolve_mode(spec)
    modules, lora_notes = _resolve_modules(config, spec)
    lora_type = str(config.dtype) if spec.lora_plugin == "auto" else spec.lora_plugin
    context = spec.gather_context_logits or spec.gather_all_token_logits
    if context and spec.max_draft_len:
        raise UsageError(
            f"An engine with draft tokens cannot gather context logits (--max-draft-len {spec.max_draft_len}).",
            hint="Use --gather-generation-logits for the logits of accepted draft tokens.",
        )
    features = Features(
        max_beam_width=spec.max_beam_width,
        max_draft_len=spec.max_draft_len,
        speculative_decoding_mode=mode,
        max_prompt_embedding_table_size=spec.max_prompt_embedding_table_size,
        gather_context_logits=context,
        gather_generation_logits=spec.gather_generation_logits or spec.gather_all_token_logits,
        use_paged_context_fmha=spec.use_paged_context_fmha != "disable",
        lora_plugin=lora_type if modules else None,
        max_lora_rank=spec.max_lora_rank if modules else _LORA_RANK,
        lora_target_modules=modules,
    )
    return features, (*mode_notes, *lora_notes)


def _require_no_builder_options(spec: BuildSpec) -> None:
    """Raise UsageError for options of `trtllm-build` alone; `use_paged_context_fmha` has the same meaning here."""
    given = [name for name in BUILDER_FIELDS if getattr(spec, name) not in (None, ())]
    if given:
        spelled = {"build_workers": "--workers", "builder_flags": "`--`"}
        shown = [spelled.get(name, f"--{name.replace('_', '-')}") for name in given]
        raise UsageError(
            f"{', '.join(shown)} {'is' if len(shown) == 1 else 'are'} for trtllm-build, which does not build this "
            "engine.",
            hint=f"Leave {'it' if len(shown) == 1 else 'them'} out, or choose --runtime tensorrt_llm.",
        )


def _resolve_mode(spec: BuildSpec) -> tuple[str, tuple[str, ...]]:
    mode = spec.speculative_decoding_mode
    if mode is None and spec.max_draft_len:
        note = f"--max-draft-len {spec.max_draft_len} alone: drafts come with the requests (draft_tokens_external)."
        return "draft_tokens_external", (note,)
    if mode not in (None, *_MODES):
        raise UsageError(
            f"--speculative-decoding-mode {mode} needs TensorRT-LLM's GPU engines.",
            hint=f"Choose one of {', '.join(_MODES)}.",
        )
    if mode == "draft_tokens_external" and not spec.max_draft_len:
        raise UsageError(
            "--speculative-decoding-mode draft_tokens_external with --max-draft-len 0 leaves no room for a draft.",
            hint="Set --max-draft-len to the longest draft of a request.",
        )
    if mode == "none" and spec.max_draft_len:
        raise UsageError(
            f"--max-draft-len is {spec.max_draft_len}, but --speculative-decoding-mode none accepts no drafts.",
            hint="Choose --speculative-decoding-mode draft_tokens_external, or omit --max-draft-len.",
        )
    return mode or "none", ()


def _resolve_modules(config: CheckpointConfig, spec: BuildSpec) -> tuple[tuple[str, ...], tuple[str, ...]]:
    names = [name for word in (spec.lora_target_modules or ()) for name in word.replace(",", " ").split()]
    for name in names:
        _require_module(config, name)
    if spec.lora_plugin == "disable":
        given = {"--lora-target-modules": bool(names), "--max-lora-rank": spec.max_lora_rank != _LORA_RANK}
        notes = (
            f"{option} has no effect without --lora-plugin, as in trtllm-build." for option in given if given[option]
        )
        return (), tuple(notes)
    if not names:
        raise UsageError(
            f"--lora-plugin {spec.lora_plugin} needs --lora-target-modules; otherwise the engine accepts no adapter.",
            hint="Add the modules of your adapters, such as --lora-target-modules attn_q,attn_k,attn_v.",
        )
    return tuple(sorted(set(names), key=MODULE_IDS.__getitem__)), ()


def _require_module(config: CheckpointConfig, name: str) -> None:
    mlp = family(config.architecture).decoder(config).mlp
    if mlp == "experts" and name.startswith(("mlp_", "moe_")):
        raise UsageError(
            f"--lora-target-modules {name}: adapters of experts need TensorRT-LLM's GPU engines.",
            hint=f"Choose from {', '.join(module for module in MODULE_IDS if module.startswith('attn_'))}.",
        )
    if name in MODULE_IDS:
        if name == "mlp_gate" and mlp != "gated":
            raise UsageError(
                f"--lora-target-modules mlp_gate: {config.architecture} has no gate.",
                hint="Choose mlp_h_to_4h and mlp_4h_to_h for its MLP.",
            )
        return
    if name in OTHER_MODULES:
        raise UsageError(
            f"--lora-target-modules {name}: {config.architecture} has no such part.",
            hint=f"Choose from {', '.join(MODULE_IDS)}.",
        )
    close = difflib.get_close_matches(name, MODULE_IDS, n=1)
    raise UsageError(
        f"--lora-target-modules {name!r} is not a module; expected {', '.join(MODULE_IDS)}.",
        hint=f"Did you mean {close[0]}?" if close else None,
    )
