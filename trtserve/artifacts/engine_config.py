"""`config.json` of an engine folder, typed: TensorRT-LLM's keys, and ours under `trtserve` for embedded runtimes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from msgspec import Meta

from trtserve.artifacts.checkpoint_config import CheckpointConfig, ParallelMapping, without_nulls
from trtserve.errors import CorruptFileError, TrtserveError
from trtserve.files import decode_as

_AGAIN = "Build the engine again."
Limit = Annotated[int, Meta(ge=-1, lt=1 << 62)]


@dataclass(frozen=True, kw_only=True)
class PluginConfig:
    """`build_config.plugin_config`: the kernels that were built in. None: not said."""

    lora_plugin: str | None = None
    use_paged_context_fmha: bool | None = None
    paged_kv_cache: bool | None = None
    multiple_profiles: bool | None = None
    tokens_per_block: Limit | None = None


@dataclass(frozen=True, kw_only=True)
class LoraBuildConfig:
    """`build_config.lora_config`: the adapters that fit the engine."""

    lora_target_modules: tuple[str, ...] = ()
    max_lora_rank: Limit = 64  # as in TensorRT-LLM


@dataclass(frozen=True, kw_only=True)
class BuildConfig:
    """`build_config`: limits and features. A limit is 0, or None, where an engine of another tool does not say it."""

    max_batch_size: Limit = 0
    max_input_len: Limit | None = None
    max_seq_len: Limit = 0
    max_num_tokens: Limit = 0
    max_beam_width: Limit = 1
    opt_num_tokens: Limit | None = None
    max_prompt_embedding_table_size: Limit = 0
    max_draft_len: Limit = 0
    speculative_decoding_mode: int | str | None = None
    gather_context_logits: bool = False
    gather_generation_logits: bool = False
    kv_cache_type: str | None = None
    weight_streaming: bool = False
    profiling_verbosity: str | None = None
    lora_config: LoraBuildConfig = field(default_factory=LoraBuildConfig)
    plugin_config: PluginConfig = field(default_factory=PluginConfig)


@dataclass(frozen=True, kw_only=True)
class EmbeddedKeys:
    """`trtserve`: what an embedded runtime records in its engines."""

    runtime: str = "tensorrt_llm"
    device: Literal["cpu", "cuda"] = "cpu"
    plugin: str = "CPU"  # OpenVINO's name of the device
    compute_precision: str = ""
    kv_precision: str = ""
    mlp: str | None = None
    machine: Mapping[str, Any] | None = None
    windows: tuple[int | None, ...] = ()
    weights_bytes: int = 0  # of a Hugging Face model that the engine's folder has, like the following keys
    vllm_python: str = ""  # the interpreter with vLLM; empty: the one that serves
    engine_arguments: Mapping[str, Any] = field(default_factory=dict)  # arguments of vLLM's engine that the user gave
    reads_images: bool = False


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The parts of the file. `content` is the file as it is: what is written again is written from it."""

    version: str | None = None  # of TensorRT-LLM
    model: CheckpointConfig = field(default_factory=CheckpointConfig)  # `pretrained_config`
    build: BuildConfig = field(default_factory=BuildConfig)
    trtserve: EmbeddedKeys = field(default_factory=EmbeddedKeys)
    content: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls,
        content: Mapping[str, Any],
        source: object = "config.json",
        error: type[TrtserveError] = CorruptFileError,
        *,
        hint: str | None = _AGAIN,
    ) -> EngineConfig:
        """Return the content of `source` as a config; `error` names a key of another type."""
        known = without_nulls(content)
        parts = {"version": known.get("version"), "build": known.get("build_config", {})}
        parts["trtserve"] = known.get("trtserve", {})
        model = known.get("pretrained_config", {})
        if not isinstance(model, Mapping):
            raise error(f"{source} has a pretrained_config that is not an object.", hint=hint)
        decoded = decode_as(parts, cls, "the config of an engine", source, error, hint=hint)
        checkpoint = CheckpointConfig.of(content.get("pretrained_config") or {}, source, error, hint=hint)
        return replace(decoded, model=checkpoint, content=content)

    @property
    def runtime(self) -> str | None:
        """What the engine was built for, such as `openvino`; None without a file."""
        return self.trtserve.runtime if self.content else None

    @property
    def precision(self) -> dict[str, str]:
        """Precision of the weights, of the arithmetic and of the KV cache, as far as it is known."""
        weights = self.model.quantization.algorithm or self.model.dtype
        # W8A16 and W4A16 are TensorRT-LLM's names of integer weights.
        found = {"weights_precision": {"W8A16": "int8", "W4A16": "int4"}.get(weights, weights)}
        found |= {name: getattr(self.trtserve, name) for name in ("compute_precision", "kv_precision")}
        return {name: value for name, value in found.items() if value}

    @property
    def build_keys(self) -> Mapping[str, Any]:
        """All of `build_config`, as the file has it."""
        found: Mapping[str, Any] = self.content.get("build_config") or {}
        return found

    @property
    def plugin_keys(self) -> Mapping[str, Any]:
        """All of `build_config.plugin_config`, as the file has it."""
        found: Mapping[str, Any] = self.build_keys.get("plugin_config") or {}
        return found

    def with_build(self, **keys: object) -> EngineConfig:
        """Return the config with other values for some keys of `build_config`."""
        return self.of({**self.content, "build_config": {**self.build_keys, **keys}})

    @property
    def mapping(self) -> ParallelMapping:
        """How ranks share the engine."""
        return self.model.mapping

    def __bool__(self) -> bool:
        """Return whether there is a file: a model may have no engine on this machine."""
        return bool(self.content)
