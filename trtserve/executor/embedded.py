"""What runtimes share whose engines the embedded executor serves: their plans, and the engines' `config.json`.

It has TensorRT-LLM's keys in its order, and ours under `trtserve`.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from trtserve.artifacts.engine_config import EngineConfig
from trtserve.checkpoint.architectures import family
from trtserve.errors import BuildError
from trtserve.executor.features import Features
from trtserve.host import machine
from trtserve.nvidia.releases import LAST_WITH_ENGINES
from trtserve.nvidia.releases.converters import convertible_family
from trtserve.specs import BUILDER_FIELDS, ConvertSpec
from trtserve.specs.build import Device
from trtserve.specs.runtime import EngineNeeds, EnginePlan, Limits, Requirement, Runtime

if TYPE_CHECKING:
    from trtserve.executor.engine.model import ModelRunner

# The TensorRT-LLM release whose config.json format is used.
_CONFIG_RELEASE = f"{LAST_WITH_ENGINES}.0"

# Keys of TensorRT-LLM's plugin_config besides dtype and tokens_per_block: plugins and switches.
_PLUGINS = (
    "bert_attention_plugin",
    "gpt_attention_plugin",
    "gemm_plugin",
    "gemm_swiglu_plugin",
    "fp8_rowwise_gemm_plugin",
    "nccl_plugin",
    "lora_plugin",
    "moe_plugin",
    "mamba_conv1d_plugin",
    "low_latency_gemm_plugin",
    "low_latency_gemm_swiglu_plugin",
    "gemm_allreduce_plugin",
)
_FEATURES = (
    "dora_plugin",
    "context_fmha",
    "bert_context_fmha_fp32_acc",
    "paged_kv_cache",
    "remove_input_padding",
    "reduce_fusion",
    "use_paged_context_fmha",
    "use_fp8_context_fmha",
    "fuse_fp4_quant",
    "norm_quant_fusion",
    "multiple_profiles",
    "paged_state",
    "streamingllm",
    "use_fused_mlp",
    "pp_reduce_scatter",
    "user_buffer",
)


@dataclass(frozen=True, kw_only=True)
class EmbeddedPlan(EnginePlan):
    """An engine of the embedded executor; the precisions are those of arithmetic and KV cache."""

    features: Features
    device: Device
    compute_precision: str
    kv_precision: str

    @property
    def needs_gpu(self) -> bool:
        """Whether the engine runs on NVIDIA GPUs."""
        return self.device == "cuda"

    def words(self) -> str:
        """Describe the features beyond plain decoding."""
        return self.features.words()

    def build_config(self) -> dict[str, Any]:
        """The features' keys of `build_config`."""
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
        """Raise UnsupportedModelError for a model that our converter does not know."""
        convertible_family(hf)

    def without_unused(self, spec: ConvertSpec) -> ConvertSpec:
        """Return `spec` without a version of TensorRT-LLM that nothing uses."""
        return spec if spec.upstream else replace(spec, trtllm_version=None)

    @property
    def unused_build_options(self) -> tuple[str, ...]:
        """The options for `trtllm-build`."""
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
