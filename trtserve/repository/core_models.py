"""The core models of a repository: those that run an engine or, for llmapi, a Hugging Face model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from trtserve.artifacts.engine_config import EngineConfig
from trtserve.errors import RepositoryError
from trtserve.executor.loaders import is_embedded
from trtserve.files import read_json_object
from trtserve.repository.config import parameter_texts

Backend = Literal["tensorrtllm", "python", "llmapi"]
Groups = tuple[tuple[int, ...], ...]

LLMAPI_FILE = "model.yaml"
PARALLEL_SIZES = ("tensor_parallel_size", "pipeline_parallel_size")
"""Keys of model.yaml whose product is the number of ranks."""


@dataclass(frozen=True, kw_only=True)
class CoreModel:
    """One core model, as read from its config.pbtxt and its engine."""

    name: str
    backend: Backend
    engine: Path | None = None
    """The engine's folder, or None when it is not on this machine (a path of another container) and for llmapi."""
    config: EngineConfig = field(default_factory=EngineConfig)
    """The engine's config.json."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The model.yaml of llmapi."""
    world_size: int = 1
    """Ranks of one instance: tensor × pipeline parallel."""
    instances: int = 1
    gpu_device_ids: Groups = ()
    """One group per instance, or empty when the parameter is not set."""
    participant_ids: Groups = ()
    """One group per instance, or empty when the parameter is not set."""
    worker: str = ""
    """executor_worker_path, or empty when it is not set."""
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
        elif config.backend == "tensorrtllm" or (config.backend == "python" and "gpt_model_type" in config.parameters):
            engine = _engine_folder(repository, _parameter(config, "gpt_model_path"), facts.get("container_paths"))
            config_file = None if engine is None else engine / "config.json"
            content = EngineConfig()
            if config_file is not None and config_file.is_file():
                content = EngineConfig.of(read_json_object(config_file, RepositoryError), config_file, RepositoryError)
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
    sizes = _parallel_sizes(settings, path)
    return CoreModel(
        name=name,
        backend="llmapi",
        settings=settings,
        world_size=sizes[0] * sizes[1],
        instances=instances,
        gpu_device_ids=_groups(name, config, "gpu_device_ids"),
    )


def _parallel_sizes(settings: Mapping[str, Any], path: Path) -> list[int]:
    """Return tensor and pipeline parallelism of a model.yaml; RepositoryError names every wrong value."""
    found = {key: 1 if settings.get(key) is None else settings[key] for key in PARALLEL_SIZES}
    wrong = [key for key, value in found.items() if type(value) is not int or value < 1]
    if wrong:
        given = " and ".join(f"{key} is {found[key]!r}" for key in wrong)
        raise RepositoryError(
            f"{path}: {given}; expected a whole number of 1 or more.", hint=f"Correct it in {LLMAPI_FILE}."
        )
    return list(found.values())


def read_model_yaml(path: Path) -> dict[str, Any]:
    """Read the model.yaml of an llmapi model. Raises RepositoryError when it names no model."""
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise RepositoryError(f"{path} cannot be read: {error}.") from error
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
