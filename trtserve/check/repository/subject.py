"""A repository as its files tell, read once for all rules, and however broken it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from trtserve.artifacts import ModelRepository
from trtserve.errors import RepositoryError, TrtserveError
from trtserve.releases import RELEASES, order, release_of
from trtserve.repo.engine import is_embedded
from trtserve.triton.core_models import LLMAPI_FILE, CoreModel, core_models
from trtserve.triton.engine_match import Installation
from trtserve.triton.preflight import read_config
from trtserve.triton.profiles import (
    BLS,
    CORE,
    ENSEMBLE,
    LLMAPI_SINCE,
    MODELS,
    POSTPROCESSING,
    PREPROCESSING,
    ModelProfile,
    llmapi_model,
    profile,
)

LLMAPI = "llmapi"
"""Role of a model of the LLM API, beside those of `profiles.MODELS`."""

_OWN_PROGRAMS = ("model_parameters.py", "llm_engine.py")


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """The machine that is to serve, where it is to be looked at; `gpu_bytes` is the memory of its largest GPU."""

    installation: Installation
    gpus: int
    version: str | None = None
    gpu_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelFolder:
    """One model: its folder, its ModelConfig message, what it is, and what it runs if it is a core model.

    `role` is a name of `profiles.MODELS`, LLMAPI, or empty for a model of another kind. `fault` is why the core model's
    own files cannot be read.
    """

    name: str
    path: Path
    config: Any
    role: str
    core: CoreModel | None = None
    fault: RepositoryError | None = None

    @property
    def file(self) -> Path:
        """Its config.pbtxt."""
        return self.path / "config.pbtxt"

    @property
    def version(self) -> Path:
        """Folder of its newest version; `1` when there is none."""
        return max(self.versions, key=lambda path: int(path.name), default=self.path / "1")

    @cached_property
    def versions(self) -> tuple[Path, ...]:
        """Folders of its versions."""
        return tuple(path for path in self.path.iterdir() if path.is_dir() and path.name.isdigit())

    @cached_property
    def parameters(self) -> dict[str, str]:
        """Parameter → text."""
        return {key: value.string_value.strip() for key, value in self.config.parameters.items()}

    @property
    def decoupled(self) -> bool:
        """Whether one request may have many answers."""
        return bool(self.config.model_transaction_policy.decoupled)

    @property
    def instances(self) -> int:
        """Number of its instances."""
        return sum(group.count or 1 for group in self.config.instance_group) or 1

    @property
    def own(self) -> bool:
        """Whether its program is trtserve's."""
        return any((self.version / name).is_file() for name in _OWN_PROGRAMS)

    @property
    def engine(self) -> Mapping[str, Any]:
        """The config.json of its engine; empty when there is none."""
        return self.core.config if self.core is not None else {}

    @property
    def build(self) -> Mapping[str, Any]:
        """The build_config of its engine; empty when there is none."""
        found = self.engine.get("build_config")
        return found if isinstance(found, Mapping) else {}

    @property
    def pretrained(self) -> Mapping[str, Any]:
        """The pretrained_config of its engine; empty when there is none."""
        found = self.engine.get("pretrained_config")
        return found if isinstance(found, Mapping) else {}

    @property
    def embedded(self) -> bool:
        """Whether the embedded executor runs it."""
        return is_embedded(self.engine) or self.parameters.get("executor") == "openvino"

    def limit(self, name: str) -> int | None:
        """A limit of its engine; None when that says none."""
        value = self.build.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else None


@dataclass(frozen=True, kw_only=True, eq=False)
class Subject:
    """The repository under check. `models` are those whose config.pbtxt can be read, `unread` why the others cannot."""

    path: Path
    facts: Mapping[str, Any]
    models: Mapping[str, ModelFolder]
    unread: Mapping[str, RepositoryError]
    here: MachineFacts | None = None
    folders: tuple[Path, ...] = field(default=())

    def of(self, *roles: str) -> Iterator[ModelFolder]:
        """The models of some roles, in order of their names."""
        return (model for _, model in sorted(self.models.items()) if model.role in roles)

    @property
    def engines(self) -> Iterator[ModelFolder]:
        """Core models with an engine whose config.json could be read."""
        return (model for model in self.of(CORE) if model.build)

    @property
    def gpu_engines(self) -> Iterator[ModelFolder]:
        """Those of TensorRT-LLM."""
        return (model for model in self.engines if not model.embedded)

    def member(self, model: str) -> Mapping[str, Any]:
        """What the manifest says of the part of the repository that `model` belongs to."""
        entries = [entry["facts"] for entry in (self.facts.get("members") or {}).values()] or [self.facts]
        named = [each for each in entries if each.get("alias") == model]
        ending = [each for each in entries if each.get("suffix") and model.endswith(each["suffix"])]
        plain = [each for each in entries if not each.get("suffix")]
        return next(iter((*named, *ending, *plain)), {})

    def located(self, text: str, model: str) -> Path:
        """Where a path in the configuration of `model` lies on this machine."""
        container = self.member(model).get("container_paths")
        if container and Path(text).is_relative_to(container):
            return self.path / Path(text).relative_to(container)
        return self.path / text  # an absolute path stays what it is

    def inner(self, model: ModelFolder, key: str, default: str) -> str:
        """Name of a model that the BLS model `model` asks."""
        return model.parameters.get(key) or default

    def release(self, model: ModelFolder) -> str | None:
        """The release whose tensors and parameters `model` is to have; None for all releases together, or unknown."""
        facts = self.member(model.name)
        if "release" in facts:
            return None if facts.get("all_releases") else str(facts["release"])
        return None if self._of_all_releases else self._engine_release() or self._likeliest

    def parameter_release(self, model: ModelFolder) -> str | None:
        """The release whose parameters `model` is to have: with the tensors of all releases, the newest one's."""
        facts = self.member(model.name)
        if "release" not in facts and self._of_all_releases:
            return RELEASES[-1]
        return str(facts["release"]) if "release" in facts else self.release(model)

    def table(self, model: ModelFolder) -> ModelProfile | None:
        """What its release says of `model`; None for a model of no role, and where no release is known."""
        facts, release = self.member(model.name), self.release(model)
        together = bool(facts.get("all_releases")) or ("release" not in facts and self._of_all_releases)
        if model.role not in (*MODELS, LLMAPI) or (release is None and not together):
            return None
        return model_table(
            model.role, str(facts["release"]) if model.role == LLMAPI and "release" in facts else release
        )

    @cached_property
    def _of_all_releases(self) -> bool:
        """Whether the models of a repository without a manifest have the tensors of all releases together.

        Only the embedded executor serves such models, and its core model then has tensors that no single release has.
        """
        union = _names_of_all_releases()
        return any(model.embedded and _tensor_names(model.config) & union for model in self.of(CORE))

    def _engine_release(self) -> str | None:
        for model in self.of(CORE):
            version = model.core.version if model.core is not None else None
            release = _release(version)
            if release is not None:
                return release
        return None

    @cached_property
    def _likeliest(self) -> str | None:
        """The release whose table comes nearest to a core model's tensors, the newest of several."""
        model = next(self.of(CORE, LLMAPI), None)
        if model is None:
            return None
        releases = [each for each in RELEASES if model.role == CORE or order(each) >= order(LLMAPI_SINCE)]
        own = _tensor_names(model.config)
        return min(reversed(releases), key=lambda each: len(own ^ _upstream_names(model.role, each)))


def read_subject(repository: ModelRepository, here: MachineFacts | None = None) -> Subject:
    """Read what can be read of `repository`."""
    facts = repository.manifest.facts if repository.manifest is not None else {}
    path = repository.path.absolute()
    configs: dict[str, Any] = {}
    unread: dict[str, RepositoryError] = {}
    for file in sorted(path.glob("*/config.pbtxt")):
        found = _config(file)
        target = unread if isinstance(found, RepositoryError) else configs
        target[file.parent.name] = found
    return Subject(
        path=path,
        facts=facts,
        models={name: _folder(path, name, config, facts) for name, config in configs.items()},
        unread=unread,
        here=here,
        folders=tuple(sorted(each for each in path.iterdir() if each.is_dir() and not each.name.startswith("."))),
    )


def _config(file: Path) -> Any:
    """The ModelConfig message, or the RepositoryError that says why there is none."""
    try:
        return read_config(file)
    except RepositoryError as error:
        return error
    except (OSError, UnicodeDecodeError) as error:
        return RepositoryError(f"{file} cannot be read: {error}.")


def _folder(repository: Path, name: str, config: Any, facts: Mapping[str, Any]) -> ModelFolder:
    core, fault = None, None
    try:
        core = next(iter(core_models(repository, {name: config}, facts)), None)
    except RepositoryError as error:
        fault = error
    except (OSError, ValueError, TypeError, AttributeError) as error:
        fault = RepositoryError(f"The files of the model {name} cannot be read: {error}.")
    role = _role(repository / name, config)
    return ModelFolder(name=name, path=repository / name, config=config, role=role, core=core, fault=fault)


def _role(folder: Path, config: Any) -> str:
    """What a model is, from its name where that is one of NVIDIA's, else from its tensors."""
    if config.platform == "ensemble":
        return ENSEMBLE
    inputs = {tensor.name for tensor in config.input}
    if (folder / "1" / LLMAPI_FILE).is_file() or any(name.startswith("sampling_param_") for name in inputs):
        return LLMAPI
    named = next(
        (name for name in (BLS, PREPROCESSING, POSTPROCESSING, ENSEMBLE) if folder.name.startswith(name)), None
    )
    if named is not None:
        return named
    outputs = {tensor.name for tensor in config.output}
    signs = (
        (PREPROCESSING, {"QUERY"} <= inputs or {"INPUT_ID"} <= outputs),
        (POSTPROCESSING, {"TOKENS_BATCH"} <= inputs),
        (BLS, {"text_input"} <= inputs and {"text_output"} <= outputs),
        (CORE, _is_core(folder, config)),
    )
    return next((role for role, fits in signs if fits), "")


def _is_core(folder: Path, config: Any) -> bool:
    """Whether a model runs an engine; a Python program may have the core model's name and be something else."""
    if config.backend == "tensorrtllm" or {"gpt_model_type", "gpt_model_path"} & set(config.parameters):
        return True
    foreign = config.backend == "python" and not (folder / "1" / "core_settings.py").is_file()
    return folder.name.startswith(CORE) and not foreign


@cache
def model_table(role: str, release: str | None) -> ModelProfile:
    """The model `role` in `release`, or in all releases together."""
    return llmapi_model(release or RELEASES[-1]) if role == LLMAPI else profile(release).models[role]


@cache
def _names_of_all_releases() -> frozenset[str]:
    """Tensors that a core model has only where it has those of all releases."""
    table = model_table(CORE, None)
    together = frozenset(tensor.name for tensor in (*table.inputs, *table.outputs))
    return together.difference(*(_table_names(CORE, release) for release in RELEASES))


def _release(version: str | None) -> str | None:
    try:
        found = None if version is None else release_of(version)
    except TrtserveError:
        return None
    return found if found in RELEASES else None


def _tensor_names(config: Any) -> frozenset[str]:
    return frozenset(tensor.name for tensor in (*config.input, *config.output))


@cache
def _table_names(role: str, release: str) -> frozenset[str]:
    table = model_table(role, release)
    return frozenset(tensor.name for tensor in (*table.inputs, *table.outputs))


@cache
def _upstream_names(role: str, release: str) -> frozenset[str]:
    """Names of NVIDIA's tensors: trtserve's own in the LLM API's model come with other releases, and tell nothing."""
    table = llmapi_model(release, own=False) if role == LLMAPI else model_table(role, release)
    return frozenset(tensor.name for tensor in (*table.inputs, *table.outputs))
