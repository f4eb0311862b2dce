"""Describes an engine from its folder: model, limits, ranks, plugins, versions. Needs no GPU and no runtime."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trtserve.artifacts import Checkpoint, Engine, Manifest, ModelRepository, looks_like
from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.artifacts.engine_config import BuildConfig, EngineConfig
from trtserve.checkpoint.architectures import parameter_count
from trtserve.checkpoint.memory import kv_bytes_per_token
from trtserve.errors import ArtifactError, CorruptFileError, ModelNotFoundError, UnsupportedModelError
from trtserve.executor.loaders import embedded_runtime, engine_files
from trtserve.files import is_weights, read_json_object
from trtserve.nvidia.engine_files import tensorrt_version
from trtserve.nvidia.releases.options import speculative_mode
from trtserve.progress import SILENT, Progress
from trtserve.repository.config import read_config
from trtserve.repository.served import CoreModel, core_models
from trtserve.specs.runtime import weights_precision
from trtserve.store import Store

_LIMITS = ("max_batch_size", "max_input_len", "max_seq_len", "max_num_tokens", "max_beam_width", "opt_num_tokens")
_MODEL = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_size",
    "vocab_size",
    "max_position_embeddings",
)
_PARALLEL = ("world_size", "tp_size", "pp_size", "cp_size", "moe_tp_size", "moe_ep_size")
_TOOLS = ("tensorrt_llm", "tensorrt", "cuda", "driver", "openvino")
# Algorithms with one scale per matrix, output or token instead of one per group.
_UNGROUPED = frozenset({"W8A16", "W4A16", "FP8", "FP8_PER_CHANNEL_PER_TOKEN"})
_SMOOTHED = "W8A8_SQ"
_ITEM_BITS = {"float32": 32, "float16": 16, "bfloat16": 16, "FP8": 8, "INT8": 8, "NVFP4": 4}


@dataclass(frozen=True, kw_only=True)
class File:
    name: str
    size: int | None  # bytes; None when it is missing


@dataclass(frozen=True, kw_only=True)
class Description:
    """An engine or checkpoint, as far as its config.json and manifest describe it."""

    kind: Literal["engine", "checkpoint"]
    path: Path
    runtime: str | None
    model: Mapping[str, Any]
    precision: str
    quantization: Mapping[str, Any]
    parallel: Mapping[str, int]
    limits: Mapping[str, int]  # tokens and requests
    features: tuple[str, ...]  # beyond plain decoding, in words
    plugins: Mapping[str, Any]
    kv_cache: Mapping[str, Any]  # `bytes_per_token` is for all ranks together
    arguments: Mapping[str, Any]  # of vLLM's engine
    versions: Mapping[str, str]
    built_on: Mapping[str, Any]  # `gpu` and its `sm`, or the `machine` of a CPU engine
    created: str | None
    files: tuple[File, ...]

    @property
    def missing(self) -> tuple[str, ...]:
        """Files of ranks that are missing or empty."""
        return tuple(file.name for file in self.files if not file.size)


def describe(text: str, *, store: Store | None = None, progress: Progress = SILENT) -> tuple[Description, ...]:
    """Describe the engine or checkpoint in the folder `text`, all engines of a repository there, or an imported name.

    Raises ArtifactError for a folder of another kind and CorruptFileError for a config.json that cannot be read, and
    ModelNotFoundError for an unknown name.
    """
    folder = Path(text).expanduser()
    known = any(looks_like(kind, folder) for kind in (Engine, Checkpoint, ModelRepository))
    if folder.is_dir() and (folder.name != text or known):
        return tuple(_described(each) for each in _engines(folder.absolute()))
    store = store or Store()
    try:
        folder = store.find(Engine, text, progress=progress).path
    except ModelNotFoundError:
        if text in (made := store.by_name(ModelRepository)):  # a Hugging Face model that is served as it is
            folder = made[text].path
        elif not folder.is_dir():
            raise
    return tuple(_described(each) for each in _engines(folder.absolute()))


def _engines(folder: Path) -> list[Path]:
    """Return the folder itself, or the engine folders of the Triton model or repository that it is."""
    if (folder / "config.json").is_file():
        return [folder]
    if any(folder.glob("*/config.pbtxt")):
        return _engines_of(folder, f"{folder} is a model repository", None)
    for model in (folder, folder.parent):  # a model, or one of its versions
        if (model / "config.pbtxt").is_file():
            return _engines_of(model.parent, f"{folder} is the model {model.name} of a repository", model.name)
    return [folder]


def _engines_of(repository: Path, what: str, model: str | None) -> list[Path]:
    """Return the engine folders of a repository's core models, or of one `model`; `what` describes it in the error."""
    folders = [repository / model] if model else [path.parent for path in repository.glob("*/config.pbtxt")]
    configs = {each.name: read_config(each / "config.pbtxt") for each in folders}
    cores = core_models(repository, configs)
    found = {core.engine.resolve() for core in cores if core.engine is not None and core.config}
    for each in folders:  # including engines that no configuration names
        found |= {path.parent.resolve() for path in each.glob("*/config.json") if looks_like(Engine, path.parent)}
    if not found:
        raise ArtifactError(f"{what}, without an engine.", hint=_hint_without_engine(repository, cores))
    return sorted(found)


def _hint_without_engine(repository: Path, cores: Sequence[CoreModel]) -> str:
    hugging_face = next((core for core in cores if core.settings), None)
    if hugging_face is not None:
        loader = "the LLM API" if hugging_face.uses_llmapi else "vLLM"
        return f"{hugging_face.name} loads the model {hugging_face.settings.get('model')} with {loader}."
    if cores:
        return f"gpt_model_path of {cores[0].name} names a folder that is not an engine on this machine."
    return f"Inspect the repository to find the models that run an engine: trtserve inspect {repository}"


def _described(folder: Path) -> Description:
    try:
        config = read_json_object(folder / "config.json", CorruptFileError, hint="Build the engine again.")
    except FileNotFoundError:
        raise _no_engine(folder) from None
    if "build_config" in config and "pretrained_config" in config:
        return _engine(folder, EngineConfig.of(config, folder / "config.json"))
    if "architecture" in config:
        return _checkpoint(folder, CheckpointConfig.of(config, folder / "config.json"))
    raise _no_engine(folder, config)


def _no_engine(folder: Path, config: Mapping[str, Any] | None = None) -> ArtifactError:
    what = "it has no config.json"
    hint = "Give the folder that `trtserve build` or `trtllm-build` wrote, or the name of an import."
    if config is not None:
        what = "its config.json has no build_config"
        if "builder_config" in config:
            what = "its config.json is of a TensorRT-LLM before 0.9"
            hint = "Build it again with a release from 0.12 on."
        elif "model_type" in config or "architectures" in config:
            what = "it holds a Hugging Face model"
            hint = f"Make an engine of it: trtserve import {folder}"
    return ArtifactError(f"{folder} is not an engine: {what}.", hint=hint)


def _engine(folder: Path, config: EngineConfig) -> Description:
    model, manifest = config.model, _manifest(folder)
    build: Mapping[str, Any] = config.content["build_config"]
    plugins: Mapping[str, Any] = build.get("plugin_config") or {}
    if (runtime := embedded_runtime(config)) is not None:
        names = engine_files(config, runtime)
        if config.trtserve.weights_bytes:  # those of a Hugging Face model
            names += sorted(f"model/{path.name}" for path in (folder / "model").iterdir() if is_weights(path.name))
    else:
        names = [f"rank{rank}.engine" for rank in range(model.mapping.ranks)]
    files = _files(folder, [*names, *sorted(path.name for path in folder.glob("*_managed_weights.safetensors"))])
    return Description(
        kind="engine",
        path=folder,
        runtime=config.trtserve.runtime,
        model=_model(model, manifest),
        precision=_precision(config),
        quantization=_quantization(model),
        parallel=_parallel(model),
        limits={name: build[name] for name in _LIMITS if build.get(name) is not None},
        features=tuple(_features(config.build)),
        plugins=_set({name: value for name, value in plugins.items() if name not in ("dtype", "tokens_per_block")}),
        kv_cache=_kv_cache(config, manifest),
        arguments=config.trtserve.engine_arguments,
        versions=_versions(config, manifest, folder / names[0]),
        built_on=_built_on(config.trtserve.machine, manifest),
        created=manifest.created if manifest else None,
        files=files,
    )


def _checkpoint(folder: Path, model: CheckpointConfig) -> Description:
    manifest, ranks = _manifest(folder), model.mapping.ranks
    return Description(
        kind="checkpoint",
        path=folder,
        runtime=None,
        model=_model(model, manifest),
        precision=_precision(EngineConfig(model=model)),
        quantization=_quantization(model),
        parallel=_parallel(model),
        limits={},
        features=(),
        plugins={},
        kv_cache=_kv_cache(EngineConfig(model=model), None),
        arguments={},
        versions=dict(manifest.tools) if manifest else {},
        built_on={},
        created=manifest.created if manifest else None,
        files=_files(folder, [f"rank{rank}.safetensors" for rank in range(ranks)]),
    )


def _manifest(folder: Path) -> Manifest | None:
    """Return the engine's manifest; for an engine in a repository (MODEL/1) one made from the repository's facts."""
    with suppress(ArtifactError):
        return Manifest.read(folder)
    with suppress(ArtifactError):
        outer = Manifest.read(folder.parent.parent)
        core = outer.facts.get("core_models", {}).get(folder.parent.name, {})
        origin = dict(core.get("origin") or {})
        gpu = {"name": origin.pop("gpu", None), "sm": origin.pop("sm", None)}
        facts = {"parameters": core.get("parameters"), **({"gpu": gpu} if gpu["name"] else {})}
        return Manifest(
            kind="engine", name=outer.name, fingerprint="", tools=origin, facts=facts, created=outer.created
        )
    return None


def _model(config: CheckpointConfig, manifest: Manifest | None) -> dict[str, Any]:
    model: dict[str, Any] = {"architecture": config.architecture or None}
    model |= {name: size for name in _MODEL if (size := getattr(config, name))}
    # Config files do not tell whether matrices are tied; the manifest has the model's own count.
    if manifest is not None and manifest.facts.get("parameters"):
        model["parameters"] = manifest.facts["parameters"]
        return model
    if config.head_size and config.num_key_value_heads:
        with suppress(UnsupportedModelError, KeyError, TypeError):
            model["parameters"] = parameter_count(config)
    return model


def _precision(config: EngineConfig) -> str:
    own, dtype, words = config.trtserve, config.model.dtype, f"{weights_precision(config.model)} weights"
    if own.compute_precision:
        return f"{words}, {own.compute_precision} arithmetic, {own.kv_precision} KV cache"
    return f"{words}, {dtype} arithmetic, {config.model.quantization.kv_cache_quant_algo or dtype} KV cache"


def _quantization(model: CheckpointConfig) -> dict[str, Any]:
    """Return the settings that the algorithm uses, without the defaults of other algorithms."""
    found = _set(model.content.get("quantization") or {})
    algorithm = str(found.get("quant_algo"))
    smoothed = algorithm.startswith(_SMOOTHED)
    unused = {"group_size": smoothed or algorithm in _UNGROUPED, "smoothquant_val": not smoothed}
    return {name: value for name, value in found.items() if not unused.get(name)}


def _set(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value not in (None, False, "disable", [], {})}


def _parallel(model: CheckpointConfig) -> dict[str, int]:
    mapping = model.content.get("mapping") or {}
    found = {name: int(mapping[name]) for name in _PARALLEL if mapping.get(name) not in (None, -1)}
    return {"tp_size": 1, "pp_size": 1, **found, "world_size": model.mapping.ranks}


def _features(build: BuildConfig) -> Iterator[str]:
    if build.max_beam_width > 1:
        yield f"{build.max_beam_width} beams"
    if build.max_draft_len:
        mode = build.speculative_decoding_mode
        yield f"{build.max_draft_len} draft tokens ({speculative_mode(mode) or f'mode {mode}'})"
    if build.max_prompt_embedding_table_size:
        yield f"prompt tables of {build.max_prompt_embedding_table_size} rows"
    if build.gather_context_logits:
        yield "context logits"
    if build.gather_generation_logits:
        yield "generation logits"
    if build.plugin_config.lora_plugin:
        modules = " ".join(build.lora_config.lora_target_modules)
        yield f"adapters of rank {build.lora_config.max_lora_rank} on {modules}".removesuffix(" on ")
    if build.plugin_config.use_paged_context_fmha:
        yield "reuse of KV blocks"
        yield "chunked context"


def _kv_cache(config: EngineConfig, manifest: Manifest | None) -> dict[str, Any]:
    plugins, kind, precision = config.build.plugin_config, config.build.kv_cache_type, config.trtserve.kv_precision
    if kind is None and plugins.paged_kv_cache is not None:  # 0.12
        kind = "PAGED" if plugins.paged_kv_cache else "CONTINUOUS"
    found: dict[str, Any] = {"type": kind, "tokens_per_block": plugins.tokens_per_block}
    if config.model.num_hidden_layers:
        found["bytes_per_token"] = kv_bytes_per_token(config.model, precision) if precision else _kv_bytes(config.model)
    if manifest is not None and manifest.facts.get("kv_bytes_per_token"):
        found["bytes_per_token"] = manifest.facts["kv_bytes_per_token"]
    return {name: value for name, value in found.items() if value is not None}


def _kv_bytes(model: CheckpointConfig) -> int | None:
    """Return the bytes of one token's keys and values in all layers and ranks; ranks may share copies of a KV head."""
    heads = max(model.num_key_value_heads, model.mapping.tp_size)
    bits = _ITEM_BITS.get(model.quantization.kv_cache_quant_algo or model.dtype)
    return bits and model.num_hidden_layers * heads * model.head_size * 2 * bits // 8


def _versions(config: EngineConfig, manifest: Manifest | None, first: Path) -> dict[str, str]:
    # The release in the config.json of a CPU engine names its format, not the tool that built it.
    if (runtime := embedded_runtime(config)) is not None:
        return {runtime: str(config.content["trtserve"].get(runtime))}
    tools = {name: manifest.tools[name] for name in _TOOLS if manifest and name in manifest.tools}
    found = {"tensorrt_llm": config.version} if config.version else {}
    written = tensorrt_version(first) if first.is_file() else None
    return {**found, **({"tensorrt": written} if written else {}), **tools}


def _built_on(machine: Mapping[str, Any] | None, manifest: Manifest | None) -> dict[str, Any]:
    facts = manifest.facts if manifest else {}
    gpu = facts.get("gpu") or {}
    if gpu:
        return {"gpu": gpu.get("name"), "sm": gpu.get("sm")}
    machine = machine or facts.get("machine")
    return {"machine": machine} if machine else {}


def _files(folder: Path, names: list[str]) -> tuple[File, ...]:
    return tuple(
        File(name=name, size=(folder / name).stat().st_size if (folder / name).is_file() else None) for name in names
    )
