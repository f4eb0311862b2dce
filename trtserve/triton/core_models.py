"""The models of a repository that run an engine (or, for llmapi, a Hugging Face model), and what they need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from trtserve.errors import RepositoryError
from trtserve.files import read_json_object

Backend = Literal["tensorrtllm", "python", "llmapi"]
Groups = tuple[tuple[int, ...], ...]

LLMAPI_FILE = "model.yaml"
PARALLEL_SIZES = ("tensor_parallel_size", "pipeline_parallel_size")
"""Keys of model.yaml whose product is the number of ranks."""


@dataclass(frozen=True, kw_only=True)
class CoreModel:
    """One core model, as its config.pbtxt and its engine tell.

    `engine` is the engine's folder on this machine, None where it lies elsewhere (another container's path, llmapi);
    `config` its config.json, `settings` the model.yaml of llmapi. `world_size` counts the ranks of one instance:
    tensor × pipeline parallel. `gpu_device_ids` and `participant_ids` have one group for each instance, and are empty
    when the parameter is not set; `worker` is executor_worker_path, "" when that is not set. `origin` says where the
    engine was built, as far as a manifest tells: versions of `tensorrt_llm`, `tensorrt`, `cuda`, `driver`, and the
    `gpu` with its `sm`. `built_with` are the wishes of `trtserve build`; None for the engine of somebody else's.
    """

    name: str
    backend: Backend
    engine: Path | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    world_size: int = 1
    instances: int = 1
    gpu_device_ids: Groups = ()
    participant_ids: Groups = ()
    worker: str = ""
    origin: Mapping[str, str] = field(default_factory=dict)
    built_with: Mapping[str, Any] | None = None

    @property
    def version(self) -> str | None:
        """The TensorRT-LLM that built the engine, by its config.json, else by a manifest; None when neither says it."""
        found = self.config.get("version") or self.origin.get("tensorrt_llm")
        return None if found is None else str(found)


def core_models(
    repository: Path, configs: Mapping[str, Any], facts: Mapping[str, Any] | None = None
) -> tuple[CoreModel, ...]:
    """Every core model among `configs` (model → ModelConfig), the first one of `facts` (a manifest's) first.

    RepositoryError for a config.json or model.yaml that cannot be read, and for device lists that are none.
    """
    facts = facts or {}
    known = facts.get("core_models") or {}
    found = {model.name: model for model in _found(repository, configs, facts, known)}
    order = [name for name in known if name in found]
    return tuple(found[name] for name in (*order, *(name for name in sorted(found) if name not in order)))


def world_size(config: Mapping[str, Any]) -> int:
    """Ranks of the engine whose config.json is `config`: tensor × pipeline (× context) parallel."""
    mapping = config.get("pretrained_config", {}).get("mapping", {})
    sizes = (int(mapping.get(name) or 1) for name in ("tp_size", "pp_size", "cp_size"))
    total = 1
    for size in sizes:
        total *= size
    return max(total, int(mapping.get("world_size") or 1))


def device_groups(text: str) -> Groups:
    """`0,1;2,3` → ((0, 1), (2, 3)); "" → (). ValueError for other text."""
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
            content = _engine_config(engine)
            yield CoreModel(
                name=name,
                backend="python" if config.backend == "python" else "tensorrtllm",
                engine=engine,
                config=content,
                world_size=world_size(content),
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
    """Tensor and pipeline parallelism of a model.yaml; RepositoryError with every wrong value."""
    found = {key: 1 if settings.get(key) is None else settings[key] for key in PARALLEL_SIZES}
    wrong = [key for key, value in found.items() if type(value) is not int or value < 1]
    if wrong:
        told = " and ".join(f"{key} is {found[key]!r}" for key in wrong)
        raise RepositoryError(
            f"{path}: {told}; expected a whole number of 1 or more.", hint=f"Correct it in {LLMAPI_FILE}."
        )
    return list(found.values())


def read_model_yaml(path: Path) -> dict[str, Any]:
    """The content of an llmapi model's model.yaml; RepositoryError when it is no table with a `model`."""
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise RepositoryError(f"{path} is not YAML: {error}.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise RepositoryError(f"{path} cannot be read: {error}.") from error
    if not isinstance(content, dict) or not content.get("model"):
        raise RepositoryError(f"{path} names no model.", hint="It needs a line such as: model: /models/llama")
    return content


def _parameter(config: Any, key: str) -> str:
    return str(config.parameters[key].string_value).strip() if key in config.parameters else ""


def _engine_folder(repository: Path, text: str, container: str | None) -> Path | None:
    """The folder that gpt_model_path means on this machine; None when there is none here."""
    if not text:
        return None
    if container is not None and Path(text).is_relative_to(container):
        folder = repository / Path(text).relative_to(container)
    else:
        folder = repository / text  # an absolute path stays what it is
    return folder if folder.is_dir() else None


def _engine_config(folder: Path | None) -> Mapping[str, Any]:
    path = None if folder is None else folder / "config.json"
    if path is None or not path.is_file():
        return {}
    return read_json_object(path, RepositoryError)


def _groups(name: str, config: Any, key: str) -> Groups:
    text = _parameter(config, key)
    try:
        return device_groups(text)
    except ValueError:
        raise RepositoryError(
            f"{name}/config.pbtxt: {key} is {text!r}; expected numbers such as 0,1, or 0,1;2,3 for two instances."
        ) from None
