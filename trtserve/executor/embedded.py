"""What runtimes share whose engines the embedded executor serves: plans, features, and the engines' `config.json`.

It has TensorRT-LLM's keys in its order, and ours under `trtserve`. Features have the names of `trtllm-build`.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.artifacts.engine_config import EngineConfig
from trtserve.checkpoint.architectures import family
from trtserve.errors import BuildError, UsageError, did_you_mean
from trtserve.executor.engine.shapes import HF_MODULES, MODULE_IDS, OTHER_MODULES
from trtserve.host import machine
from trtserve.nvidia.releases import LAST_WITH_ENGINES
from trtserve.nvidia.releases.converters import convertible_family
from trtserve.specs import BUILDER_FIELDS, BuildSpec, ConvertSpec
from trtserve.specs.build import Device
from trtserve.specs.runtime import EngineNeeds, EnginePlan, Limits, Requirement, Runtime

if TYPE_CHECKING:
    from trtserve.executor.engine.model import ModelRunner

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
    if spec.max_prompt_embedding_table_size and config.layer_input_size:
        raise UsageError(
            f"--max-prompt-embedding-table-size {spec.max_prompt_embedding_table_size}: {config.architecture} makes an "
            "input to each layer of the token, which rows of a prompt table are not.",
            hint="Leave it out.",
        )
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
    decoder = family(config.architecture).decoder(config)
    mlp = decoder.mlp
    reasons = {
        "its attention makes keys and values of a latent vector": decoder.latent is not None,
        "its layers have matrices of different sizes": bool(config.full_head_size or decoder.layer_inputs),
        "some of its layers have a state instead of attention": decoder.mixer is not None,
    }
    if reason := next((words for words, holds in reasons.items() if holds), None):
        raise UsageError(
            f"--lora-target-modules {name}: adapters of {config.architecture} are not supported, because {reason}.",
            hint="Leave out --lora-plugin and --lora-target-modules.",
        )
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
    raise UsageError(
        f"--lora-target-modules {name!r} is not a module; expected {', '.join(MODULE_IDS)}.",
        hint=did_you_mean(name, MODULE_IDS) or None,
    )


_CONFIG_RELEASE = f"{LAST_WITH_ENGINES}.0"  # the TensorRT-LLM release whose config.json format is used

# Keys of TensorRT-LLM's plugin_config besides dtype and tokens_per_block: plugins and switches.
_PLUGINS = (
    "bert_attention_plugin", "gpt_attention_plugin", "gemm_plugin", "gemm_swiglu_plugin", "fp8_rowwise_gemm_plugin",
    "nccl_plugin", "lora_plugin", "moe_plugin", "mamba_conv1d_plugin", "low_latency_gemm_plugin",
    "low_latency_gemm_swiglu_plugin", "gemm_allreduce_plugin",
)  # fmt: skip
_FEATURES = (
    "dora_plugin", "context_fmha", "bert_context_fmha_fp32_acc", "paged_kv_cache", "remove_input_padding",
    "reduce_fusion", "use_paged_context_fmha", "use_fp8_context_fmha", "fuse_fp4_quant", "norm_quant_fusion",
    "multiple_profiles", "paged_state", "streamingllm", "use_fused_mlp", "pp_reduce_scatter", "user_buffer",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class EmbeddedPlan(EnginePlan):
    """An engine of the embedded executor; the precisions are those of arithmetic and KV cache."""

    features: Features
    device: Device
    compute_precision: str
    kv_precision: str

    @property
    def needs_gpu(self) -> bool:
        return self.device == "cuda"

    def words(self) -> str:
        return self.features.words()

    def build_config(self) -> dict[str, Any]:
        return {**self.features.build_config(), "plugin_config": self.features.plugin_config()}

    def facts(self) -> dict[str, Any]:
        """The machine, whose kernels determine speed and results, and the precisions."""
        return {"machine": machine.describe(), **self._precisions()}

    def config_outline(self) -> dict[str, Any]:
        """The outline plus the part specific to our engines."""
        return {**super().config_outline(), "trtserve": {"runtime": self.runtime, **self.own(), **self._precisions()}}

    def own(self) -> dict[str, str]:
        """Keys of the runtime alone that `config.json` has under `trtserve`."""
        return {}

    def engine_config(self, *, tokens_per_block: int | None = None) -> dict[str, Any]:
        """Return the engine's `config.json`. OpenVINO chooses `tokens_per_block` of the KV cache when it compiles."""
        decoder = family(self.config.architecture).decoder(self.config)
        return {
            "version": _CONFIG_RELEASE,
            "pretrained_config": dict(self.config.content),
            "build_config": _build_config(
                self.limits,
                self.features.build_config(),
                _plugin_config(self.config.dtype, self.features, tokens_per_block),
            ),
            "trtserve": {
                "runtime": self.runtime,
                **self.versions(),
                **self.own(),
                **self._precisions(),
                "windows": list(decoder.windows),
                "mlp": decoder.mlp,
                "machine": machine.describe(),
            },
        }

    def _precisions(self) -> dict[str, str]:
        return {"compute_precision": self.compute_precision, "kv_precision": self.kv_precision}


class EmbeddedRuntime(Runtime, ABC):
    """A runtime whose engines the embedded executor serves; `executor.loaders.MODELS` says how it loads them."""

    requirements: ClassVar[frozenset[Requirement]] = frozenset({"triton"})

    def require_model(self, hf: Mapping[str, Any]) -> None:
        convertible_family(hf)

    def without_unused(self, spec: ConvertSpec) -> ConvertSpec:
        """Return `spec` without a version of TensorRT-LLM that nothing uses."""
        return spec if spec.upstream else replace(spec, trtllm_version=None)

    @property
    def unused_build_options(self) -> tuple[str, ...]:
        return BUILDER_FIELDS

    @abstractmethod
    def memory_of(self, config: EngineConfig) -> EngineNeeds:
        """Return the memory that the engine with this `config.json` needs on this machine."""


def limits_of(config: EngineConfig) -> Limits:
    """Return the limits of the engine with this `config.json`."""
    return Limits(**{name: getattr(config.build, name) for name in Limits.__dataclass_fields__})


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write `config.json` into an engine's folder."""
    (folder / "config.json").write_text(json.dumps(config, indent=4) + "\n", encoding="utf-8")


def compute_token(model: ModelRunner, started: float) -> dict[str, Any]:
    """Compute one token to show that the model runs, and return facts; `started` is when its loading began.

    The first computation is part of loading: OpenVINO packs the weights in it.
    """
    import numpy as np

    from trtserve.executor.engine.model import single_sequence

    model.allocate(1)
    logits = model.forward(single_sequence([0], [0]))
    seconds = time.monotonic() - started
    if not np.isfinite(logits).all():
        raise BuildError(
            "The engine computes non-finite logits.",
            hint="The weights overflow in this precision or are damaged; convert with another --dtype.",
        )
    return {
        "load_seconds": round(seconds, 3),
        "kv_bytes_per_token": model.bytes_per_block // model.tokens_per_block,
        "tokens_per_block": model.tokens_per_block,
    }


def _build_config(limits: Limits, features: Mapping[str, Any], plugins: Mapping[str, Any]) -> dict[str, Any]:
    """Return TensorRT-LLM's build_config in its key order; options that only TensorRT has are off or empty."""
    return {
        "max_input_len": limits.max_input_len,
        "max_seq_len": limits.max_seq_len,
        "opt_batch_size": min(8, limits.max_batch_size),
        "max_batch_size": limits.max_batch_size,
        "max_beam_width": features["max_beam_width"],
        "max_num_tokens": limits.max_num_tokens,
        "opt_num_tokens": limits.max_batch_size * features["max_beam_width"],
        "max_prompt_embedding_table_size": features["max_prompt_embedding_table_size"],
        "kv_cache_type": "PAGED",
        "gather_context_logits": features["gather_context_logits"],
        "gather_generation_logits": features["gather_generation_logits"],
        "strongly_typed": True,
        "force_num_profiles": None,
        "profiling_verbosity": "layer_names_only",
        "enable_debug_output": False,
        "max_draft_len": features["max_draft_len"],
        "speculative_decoding_mode": features["speculative_decoding_mode"],
        "use_refit": False,
        "input_timing_cache": None,
        "output_timing_cache": None,
        "lora_config": features["lora_config"],
        "auto_parallel_config": {"world_size": 1},
        "weight_sparsity": False,
        "weight_streaming": False,
        "plugin_config": dict(plugins),
        "use_strip_plan": False,
        "max_encoder_input_len": 1024,
        "use_fused_mlp": False,
        "monitor_memory": False,
        "use_mrope": False,
    }


def _plugin_config(dtype: str, features: Features, tokens_per_block: int | None) -> dict[str, Any]:
    """Return the plugin_config: all plugins None except LoRA's, and only paged attention's switches on."""
    switches = dict.fromkeys(_FEATURES, False) | {"remove_input_padding": True, "paged_kv_cache": True}
    return {
        "dtype": dtype,
        **dict.fromkeys(_PLUGINS),
        **switches,
        **features.plugin_config(),
        "tokens_per_block": tokens_per_block,
    }
