"""What a model repository on disk serves, read from its files, and its core models, which run an engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from trtserve.artifacts import ModelRepository
from trtserve.artifacts.engine_config import EngineConfig
from trtserve.errors import RepositoryError
from trtserve.executor.loaders import device_of, is_embedded, merges_ranks
from trtserve.executor.vllm import arguments
from trtserve.executor.vllm.runtime import VllmRuntime
from trtserve.files import LARGEST_YAML, optional_json_object, read_json_object, read_text, whole_number
from trtserve.repository.config import parameter_texts, read_config
from trtserve.repository.profiles import BLS, CORE, DRAFT, ENSEMBLE, read_classes
from trtserve.repository.programs import require_program

_KV_TOKENS = "max_tokens_in_paged_kv_cache"
_WEIGHTS = ("*.bin", "rank*.engine", "rank*.safetensors", "model/*.safetensors", "model/*.bin")


@dataclass(frozen=True, kw_only=True)
class ServedRepository:
    """What a repository will serve, as read from its files."""

    models: tuple[str, ...]
    model: str  # the text model that clients call by default
    backends: frozenset[str]  # the Triton backends that the models need
    streaming: bool  # whether the default model or the core model is decoupled
    engine: EngineConfig = field(default_factory=EngineConfig)
    """The config.json of the first core model's engine, or a config without content."""
    engine_bytes: int = 0  # size of the weights, including the draft model's
    facts: Mapping[str, Any] = field(default_factory=dict)  # the facts of the manifest
    ignored_parameters: tuple[str, ...] = ()
    """Parameters with a value that the runtime ignores; those of the core model without `tensorrt_llm.`."""
    kv_tokens: int | None = None  # size of the KV cache in tokens, if a parameter sets it
    draft: EngineConfig = field(default_factory=EngineConfig)  # the config.json of the draft model's engine
    instances: Mapping[str, int] = field(default_factory=dict)  # model → number of processes
    python_models: frozenset[str] = frozenset()  # models that run in Python stubs
    tokenizer_bytes: int = 0  # size of tokenizer.json
    core_models: tuple[CoreModel, ...] = ()  # the models that run an engine or an LLM, that of `engine` first

    @property
    def runtime(self) -> str | None:
        """Runtime of the first core model, such as `openvino` or `llmapi`, or None without a core model."""
        own = self.engine.trtserve.runtime if "trtserve" in self.engine.content else None
        if own or not self.core_models:
            return own or None
        return "llmapi" if self.uses_llmapi else "tensorrt_llm"

    @property
    def embedded(self) -> bool:
        """Whether the embedded executor serves the first core model."""
        return is_embedded(self.engine)

    @property
    def merges_ranks(self) -> bool:
        """Whether one process serves the merged shards of the first core model, however many ranks it has."""
        return merges_ranks(self.engine)

    @property
    def starts_workers(self) -> bool:
        """Whether the engine is one process that starts workers for its GPUs itself, as vLLM's does."""
        return self.merges_ranks and self.needs_gpus

    @property
    def needs_gpus(self) -> bool:
        """Whether every rank of the first core model needs a GPU of its own."""
        return self.runtime is not None and device_of(self.engine) != "cpu"

    @property
    def uses_llmapi(self) -> bool:
        """Whether the first core model has no engine, because the LLM API loads a Hugging Face model."""
        return bool(self.core_models) and self.core_models[0].uses_llmapi

    @property
    def backend(self) -> Backend | None:
        """Backend of the first core model: `tensorrtllm` (C++), `python`, `llmapi` or `vllm`, or None without one."""
        return self.core_models[0].backend if self.core_models else None

    @property
    def release(self) -> str | None:
        """The TensorRT-LLM release (`0.18`) whose tensors the models have, or None when no manifest says it."""
        found = self.facts.get("release")
        return None if found is None else str(found)

    @property
    def precision(self) -> dict[str, str]:
        """Precision of the engine's weights, arithmetic and KV cache, as far as it is known."""
        return self.engine.precision

    @property
    def world_size(self) -> int:
        """Ranks of one instance of the first core model."""
        return self.core_models[0].world_size if self.core_models else self.engine.mapping.ranks

    @property
    def machine(self) -> Mapping[str, Any]:
        """The machine that the engine was built on, if a manifest describes it."""
        found = self.facts.get("machine")
        return found if isinstance(found, Mapping) else {}

    def cache_warnings(self, kv_blocks: Mapping[str, int]) -> list[str]:
        """Warn of a KV cache, with these gauges, that is smaller than the longest sequence of the engine."""
        tokens = kv_blocks.get("max", 0) * kv_blocks.get("tokens_per", 0)
        longest = self.engine.build.max_seq_len
        if not 0 < tokens < longest:
            return []
        text = (
            f"The KV cache holds {tokens} tokens, so prompt and answer together end there (max_seq_len {tokens} "
            f"instead of the engine's {longest}). Raise max_tokens_in_paged_kv_cache or kv_cache_free_gpu_mem_fraction."
        )
        return [text]


def inspect_repository(repository: ModelRepository) -> ServedRepository:
    """Read every model's config; RepositoryError names the file (and line) that Triton would reject."""
    configs = {path.parent.name: read_config(path) for path in sorted(repository.path.glob("*/config.pbtxt"))}
    if not configs:
        raise RepositoryError(
            f"{repository.path} holds no model: no <model>/config.pbtxt was found.",
            hint="Give the folder that holds the models' folders, or make one with `trtserve import`.",
        )
    for name, config in configs.items():
        require_program(repository.path / name, config)
    facts = repository.manifest.facts if repository.manifest is not None else {}
    preferred = (facts.get("alias"), repository.name, BLS, ENSEMBLE)
    model = next((str(name) for name in preferred if name in configs), next(iter(configs)))
    cores = core_models(repository.path, configs, facts)
    engines = [repository.path / model / "1" for model in (CORE, DRAFT)]
    folders = {engine.resolve() for engine in (*engines, *(core.engine for core in cores if core.engine is not None))}
    text = parameter_texts(configs[CORE]).get(_KV_TOKENS, "") if CORE in configs else ""
    return ServedRepository(
        models=tuple(configs),
        model=model,
        backends=frozenset(config.backend for config in configs.values() if config.backend),
        streaming=any(
            configs[name].model_transaction_policy.decoupled or configs[name].backend == arguments.BACKEND
            for name in (model, CORE)
            if name in configs
        ),
        engine=_engine_config(engines[0]) or (cores[0].config if cores else EngineConfig()),
        engine_bytes=sum(
            path.stat().st_size for folder in folders for pattern in _WEIGHTS for path in folder.glob(pattern)
        ),
        facts=facts,
        ignored_parameters=tuple(_ignored(repository.path, configs)),
        kv_tokens=whole_number(text),
        core_models=cores,
        draft=_engine_config(engines[1]),
        instances={
            name: sum(group.count or 1 for group in config.instance_group) or 1 for name, config in configs.items()
        },
        python_models=frozenset(name for name, config in configs.items() if config.backend == "python"),
        tokenizer_bytes=max(
            (path.stat().st_size for path in repository.path.glob("*/1/tokenizer/tokenizer.json")), default=0
        ),
    )


def _ignored(folder: Path, configs: Mapping[str, Any]) -> Iterator[str]:
    """Yield the ignored parameters that the models log at load, read from the same files."""
    for model, config in configs.items():
        classes = read_classes(folder / model / "1").get("ignored", {})
        given = parameter_texts(config)
        for name, entry in classes.items():
            if given.get(name, "") not in ("", entry["unset"]):
                yield name if model == CORE else f"{model}.{name}"


def _engine_config(folder: Path) -> EngineConfig:
    """Return the config.json of an engine, without any key where there is none."""
    path = folder / "config.json"
    return EngineConfig.of(optional_json_object(path, RepositoryError, hint=_DAMAGED), path, RepositoryError)


Backend = Literal["tensorrtllm", "python", "llmapi", "vllm"]
Groups = tuple[tuple[int, ...], ...]

LLMAPI_FILE = "model.yaml"
_DAMAGED = "Make the repository again (trtserve repo), or correct the file."


@dataclass(frozen=True, kw_only=True)
class CoreModel:
    """One core model, as read from its config.pbtxt and its engine."""

    name: str
    backend: Backend
    engine: Path | None = None
    """The engine's folder, or None when it is not on this machine (a path of another container) or there is none."""
    config: EngineConfig = field(default_factory=EngineConfig)  # the engine's config.json
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The model.yaml of llmapi, or the model.json of NVIDIA's backend `vllm`."""
    world_size: int = 1  # ranks of one instance
    instances: int = 1
    gpu_device_ids: Groups = ()  # one group per instance, or empty when the parameter is not set
    participant_ids: Groups = ()  # one group per instance, or empty when the parameter is not set
    worker: str = ""  # executor_worker_path, or empty when it is not set
    origin: Mapping[str, str] = field(default_factory=dict)
    """Where the engine was built, if a manifest says: versions of `tensorrt_llm`, `tensorrt`, `cuda` and `driver`, and
    the `gpu` with its `sm`."""
    built_with: Mapping[str, Any] | None = None
    """The options of `trtserve build`, or None for an engine that another tool built."""

    @property
    def embedded(self) -> bool:
        """Whether the embedded executor serves it."""
        return is_embedded(self.config)

    @property
    def uses_llmapi(self) -> bool:
        """Whether the LLM API loads a Hugging Face model, instead of an engine."""
        return self.backend == "llmapi"

    @property
    def version(self) -> str | None:
        """The TensorRT-LLM that built the engine, from its config.json or a manifest, or None when it is unknown."""
        found = self.config.version or self.origin.get("tensorrt_llm")
        return None if found is None else str(found)


def core_models(
    repository: Path, configs: Mapping[str, Any], facts: Mapping[str, Any] | None = None
) -> tuple[CoreModel, ...]:
    """Return the core models among `configs` (model → ModelConfig), in the order of the manifest's `facts`.

    Raises RepositoryError for a config.json or model.yaml that cannot be read, and for wrong lists of devices.
    """
    facts = facts or {}
    known = facts.get("core_models") or {}
    found = {model.name: model for model in _found(repository, configs, facts, known)}
    order = [name for name in known if name in found]
    return tuple(found[name] for name in (*order, *(name for name in sorted(found) if name not in order)))


def device_groups(text: str) -> Groups:
    """`0,1;2,3` → ((0, 1), (2, 3)); "" → (). Raises ValueError for other text."""
    return tuple(tuple(int(part) for part in group.split(",")) for group in text.split(";")) if text.strip() else ()


def _found(
    repository: Path, configs: Mapping[str, Any], facts: Mapping[str, Any], known: Mapping[str, Any]
) -> Iterator[CoreModel]:
    for name, config in configs.items():
        instances = sum(group.count or 1 for group in config.instance_group) or 1
        entry = known.get(name) or {}
        origin = entry.get("origin") or {}
        if (yaml := repository / name / "1" / LLMAPI_FILE).is_file() and config.backend == "python":
            yield _llmapi(name, config, yaml, instances)
        elif config.backend == arguments.BACKEND:
            settings = arguments.ModelJson.read(repository / name / "1" / arguments.MODEL_JSON)
            python = _parameter(config, arguments.PYTHON)
            yield CoreModel(
                name=name,
                backend="vllm",
                config=settings.engine_config(repository, VllmRuntime().device(recorded=python), python),
                settings=settings.arguments,
                world_size=settings.sizes[0] * settings.sizes[1],
                instances=instances,
            )
        elif config.backend == "tensorrtllm" or (config.backend == "python" and "gpt_model_type" in config.parameters):
            engine = _engine_folder(repository, _parameter(config, "gpt_model_path"), facts.get("container_paths"))
            config_file = None if engine is None else engine / "config.json"
            content = EngineConfig()
            if config_file is not None and config_file.is_file():
                content = EngineConfig.of(
                    read_json_object(config_file, RepositoryError, hint=_DAMAGED), config_file, RepositoryError
                )
            yield CoreModel(
                name=name,
                backend="python" if config.backend == "python" else "tensorrtllm",
                engine=engine,
                config=content,
                world_size=content.mapping.ranks,
                instances=instances,
                gpu_device_ids=_groups(name, config, "gpu_device_ids"),
                participant_ids=_groups(name, config, "participant_ids"),
                worker=_parameter(config, "executor_worker_path"),
                origin=origin,
                built_with=entry.get("built_with"),
            )


def _llmapi(name: str, config: Any, path: Path, instances: int) -> CoreModel:
    settings = read_model_yaml(path)
    sizes = arguments.parallel_sizes(settings, path)
    return CoreModel(
        name=name,
        backend="llmapi",
        settings=settings,
        world_size=sizes[0] * sizes[1],
        instances=instances,
        gpu_device_ids=_groups(name, config, "gpu_device_ids"),
    )


def read_model_yaml(path: Path) -> dict[str, Any]:
    """Read the model.yaml of an llmapi model. Raises RepositoryError when it names no model."""
    import yaml

    try:
        content = yaml.safe_load(read_text(path, RepositoryError, limit=LARGEST_YAML))
    except FileNotFoundError as error:
        raise RepositoryError(f"{path} does not exist.") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date such as 2001-99-99
        raise RepositoryError(f"{path} is not YAML: {error}.") from error
    if not isinstance(content, dict) or not content.get("model"):
        raise RepositoryError(f"{path} names no model.", hint="It needs a line such as: model: /models/llama")
    return content


def _parameter(config: Any, key: str) -> str:
    return parameter_texts(config).get(key, "")


def _engine_folder(repository: Path, text: str, container: str | None) -> Path | None:
    """Return the folder that gpt_model_path names, or None when it is not on this machine."""
    if not text:
        return None
    if container is not None and Path(text).is_relative_to(container):
        folder = repository / Path(text).relative_to(container)
    else:
        folder = repository / text  # an absolute path replaces `repository`
    return folder if folder.is_dir() else None


def _groups(name: str, config: Any, key: str) -> Groups:
    text = _parameter(config, key)
    try:
        return device_groups(text)
    except ValueError:
        raise RepositoryError(
            f"{name}/config.pbtxt: {key} is {text!r}; expected numbers such as 0,1, or 0,1;2,3 for two instances."
        ) from None
