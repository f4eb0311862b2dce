"""A model repository as its files describe it, read once for all rules, however broken it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from trtserve.artifacts import ModelRepository
from trtserve.artifacts.engine_config import EngineConfig
from trtserve.errors import RepositoryError, TrtserveError
from trtserve.executor.loaders import embedded_runtime, is_embedded_runtime
from trtserve.files import whole_number
from trtserve.nvidia.releases import NEWEST, RELEASES, order, release_of
from trtserve.repository.check.rules import Finding
from trtserve.repository.config import parameter_texts, read_config
from trtserve.repository.engines import Installation
from trtserve.repository.profiles import (
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
from trtserve.repository.programs import PACKAGE
from trtserve.repository.served import LLMAPI_FILE, CoreModel, core_models

LLMAPI = "llmapi"  # role of a model of the LLM API, in addition to those of `profiles.MODELS`


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """The machine that will serve the repository."""

    installation: Installation
    gpus: int
    version: str | None = None  # of TensorRT-LLM
    gpu_bytes: int | None = None  # memory of the largest GPU


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelFolder:
    """One model of the repository."""

    name: str
    path: Path
    config: Any  # its ModelConfig message
    role: str  # a name of `profiles.MODELS`, LLMAPI, or empty for a model of another kind
    core: CoreModel | None = None  # what it runs, if it is a core model
    unreadable: RepositoryError | None = None  # why the core model's own files cannot be read

    def finding(self, what: str, fix: str, file: Path | None = None) -> Finding:
        """Return a finding about this model, in its config.pbtxt unless another file is given."""
        return Finding(model=self.name, file=file or self.file, what=what, fix=fix)

    @property
    def file(self) -> Path:
        """Its config.pbtxt."""
        return self.path / "config.pbtxt"

    @property
    def version(self) -> Path:
        """Folder of its newest version; `1` when it has none."""
        return max(self.versions, key=lambda path: int(path.name), default=self.path / "1")

    @cached_property
    def versions(self) -> tuple[Path, ...]:
        return tuple(path for path in self.path.iterdir() if path.is_dir() and whole_number(path.name) is not None)

    @cached_property
    def parameters(self) -> dict[str, str]:
        """Parameter → text; empty where the placeholder of NVIDIA's template is left."""
        return parameter_texts(self.config)

    @property
    def decoupled(self) -> bool:
        """Whether one request may have many responses."""
        return bool(self.config.model_transaction_policy.decoupled)

    @property
    def instances(self) -> int:
        return sum(group.count or 1 for group in self.config.instance_group) or 1

    @property
    def own(self) -> bool:
        """Whether its program is trtserve's."""
        return (self.version / PACKAGE).is_dir()

    @property
    def engine_folder(self) -> Path | None:
        """The folder of its engine on this machine."""
        return self.core.engine if self.core is not None else None

    @property
    def engine(self) -> EngineConfig:
        """The config.json of its engine, without any key where it has none."""
        return self.core.config if self.core is not None else EngineConfig()

    @property
    def engine_described(self) -> bool:
        """Whether its engine's config.json has the parts that one has."""
        return bool(self.engine.build_keys and self.engine.model.content)

    @property
    def embedded(self) -> bool:
        """Whether the embedded executor runs it."""
        return self.executor is not None

    @property
    def executor(self) -> str | None:
        """The runtime whose engine the embedded executor loads, or None for another executor."""
        given = self.parameters.get("executor")
        return embedded_runtime(self.engine) or (given if is_embedded_runtime(given) else None)

    def limit(self, name: str) -> int | None:
        """A limit that its engine was built with, or None if there is none."""
        value = self.engine.build_keys.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def number(self, key: str) -> int | None:
        """A parameter as a number of 0 or more, or None for any other text."""
        return whole_number(self.parameters.get(key, ""))

    def is_true(self, key: str) -> bool:
        """Return whether a parameter is switched on."""
        return self.parameters.get(key, "").lower() in ("true", "1")


@dataclass(frozen=True, kw_only=True, eq=False)
class Repository:
    """The repository under check."""

    path: Path
    facts: Mapping[str, Any]  # of its manifest
    models: Mapping[str, ModelFolder]  # those whose config.pbtxt can be read
    unread: Mapping[str, RepositoryError]  # why the other ones cannot
    here: MachineFacts | None = None
    folders: tuple[Path, ...] = field(default=())

    def of(self, *roles: str) -> Iterator[ModelFolder]:
        """The models of some roles, in order of their names."""
        return (model for _, model in sorted(self.models.items()) if model.role in roles)

    @property
    def engines(self) -> Iterator[tuple[ModelFolder, Path]]:
        """Core models whose engine's config.json could be read, with the engine's folder."""
        for model in self.of(CORE):
            if model.engine.build_keys and model.engine_folder is not None:
                yield model, model.engine_folder

    @property
    def gpu_engines(self) -> Iterator[tuple[ModelFolder, Path]]:
        """Those of TensorRT-LLM."""
        return ((model, folder) for model, folder in self.engines if not model.embedded)

    def core_of(self, bls: ModelFolder) -> ModelFolder | None:
        return self.models.get(bls.parameters.get("tensorrt_llm_model_name") or CORE)

    def core_entry(self, model: ModelFolder) -> Mapping[str, Any]:
        """What the manifest records of a core model, or empty without an entry."""
        return (self.facts.get("core_models") or {}).get(model.name) or {}

    def part(self, model: str) -> Mapping[str, Any]:
        """What the manifest records of the part of the repository that `model` belongs to."""
        entries = [entry["facts"] for entry in (self.facts.get("members") or {}).values()] or [self.facts]
        named = [each for each in entries if each.get("alias") == model]
        ending = [each for each in entries if each.get("suffix") and model.endswith(each["suffix"])]
        plain = [each for each in entries if not each.get("suffix")]
        return next(iter((*named, *ending, *plain)), {})

    def located(self, text: str, model: str) -> Path:
        """Where a path in the configuration of `model` is on this machine."""
        container = self.part(model).get("container_paths")
        if container and Path(text).is_relative_to(container):
            return self.path / Path(text).relative_to(container)
        return self.path / text  # an absolute path is unchanged

    def release(self, model: ModelFolder) -> str | None:
        """The release whose tensors `model` should have, or None for all releases together, or if unknown."""
        part = self.part(model.name)
        if part.get("release") in RELEASES:
            return None if part.get("all_releases") else str(part["release"])
        return None if self._for_all_releases else self._built_release or self._most_similar_release

    def parameter_release(self, model: ModelFolder) -> str | None:
        """The release whose parameters `model` should have: the newest with the tensors of all releases."""
        part = self.part(model.name)
        if part.get("release") in RELEASES:
            return str(part["release"])
        return NEWEST if self._for_all_releases else self.release(model)

    def profile(self, model: ModelFolder) -> ModelProfile | None:
        """What `model` looks like in its release, or None for a model without a role, or if the release is unknown."""
        part, release = self.part(model.name), self.release(model)
        if model.role == LLMAPI:
            chosen = part.get("release", release)
            return None if chosen is None else model_profile(LLMAPI, str(chosen))
        for_all = part.get("all_releases") or ("release" not in part and self._for_all_releases)
        if model.role not in MODELS or (release is None and not for_all):
            return None
        return model_profile(model.role, release)

    @cached_property
    def _for_all_releases(self) -> bool:
        """Whether the models of a repository without a manifest have the tensors of all releases together.

        Only the embedded executor serves such models; their core model has tensors that no single release has.
        """
        union = tensor_names(CORE, None).difference(*(tensor_names(CORE, release) for release in RELEASES))
        return any(model.embedded and _declared(model.config) & union for model in self.of(CORE))

    @cached_property
    def _built_release(self) -> str | None:
        """The release of the first engine that names one.

        An engine of the embedded executor says nothing about a program that imports TensorRT-LLM's bindings.
        """
        for model in self.of(CORE):
            if model.embedded and not model.own:
                continue
            try:
                release = release_of(model.core.version or "") if model.core is not None else None
            except TrtserveError:
                continue
            if release in RELEASES:
                return release
        return None

    @cached_property
    def _most_similar_release(self) -> str | None:
        """The release whose tensors are most like those of a core model, the newest of several."""
        model = next(self.of(CORE, LLMAPI), None)
        if model is None:
            return None
        declared = _declared(model.config)
        releases = reversed(releases_of(model.role))
        return min(releases, key=lambda each: len(declared ^ tensor_names(model.role, each)))


def read_repository(repository: ModelRepository, here: MachineFacts | None = None) -> Repository:
    facts = repository.manifest.facts if repository.manifest is not None else {}
    path = repository.path.absolute()
    found = {file.parent.name: _config(file) for file in sorted(path.glob("*/config.pbtxt"))}
    unread = {name: each for name, each in found.items() if isinstance(each, RepositoryError)}
    return Repository(
        path=path,
        facts=facts,
        models={name: _model(path, name, each, facts) for name, each in found.items() if name not in unread},
        unread=unread,
        here=here,
        folders=tuple(sorted(each for each in path.iterdir() if each.is_dir() and not each.name.startswith("."))),
    )


def _config(file: Path) -> Any:
    """The ModelConfig message, or the RepositoryError that says why it cannot be read."""
    try:
        return read_config(file)
    except RepositoryError as error:
        return error
    except (OSError, UnicodeDecodeError) as error:
        return RepositoryError(f"{file} cannot be read: {error}.")


def _model(repository: Path, name: str, config: Any, facts: Mapping[str, Any]) -> ModelFolder:
    core, unreadable = None, None
    try:
        core = next(iter(core_models(repository, {name: config}, facts)), None)
    except RepositoryError as error:
        unreadable = error
    except (OSError, ValueError, TypeError, AttributeError) as error:
        unreadable = RepositoryError(f"The files of the model {name} cannot be read: {error}.")
    folder = repository / name
    return ModelFolder(
        name=name, path=folder, config=config, role=_role(folder, config), core=core, unreadable=unreadable
    )


def _role(folder: Path, config: Any) -> str:
    """What a model is: by its name if that is one of NVIDIA's, else by its tensors."""
    if config.platform == "ensemble":
        return ENSEMBLE
    inputs = {tensor.name for tensor in config.input}
    if (folder / "1" / LLMAPI_FILE).is_file() or any(name.startswith("sampling_param_") for name in inputs):
        return LLMAPI
    for name in (BLS, PREPROCESSING, POSTPROCESSING, ENSEMBLE):
        if folder.name.startswith(name):
            return name
    outputs = {tensor.name for tensor in config.output}
    signs = (
        (PREPROCESSING, {"QUERY"} <= inputs or {"INPUT_ID"} <= outputs),
        (POSTPROCESSING, {"TOKENS_BATCH"} <= inputs),
        (BLS, {"text_input"} <= inputs and {"text_output"} <= outputs),
        (CORE, _is_core(folder, config)),
    )
    return next((role for role, fits in signs if fits), "")


def _is_core(folder: Path, config: Any) -> bool:
    """Return whether a model runs an engine; a Python program with the core model's name may be something else."""
    if config.backend == "tensorrtllm" or {"gpt_model_type", "gpt_model_path"} & set(config.parameters):
        return True
    foreign = config.backend == "python" and not (folder / "1" / PACKAGE).is_dir()
    return folder.name.startswith(CORE) and not foreign


@cache
def model_profile(role: str, release: str | None) -> ModelProfile:
    """The model `role` in `release`, or in all releases together."""
    return llmapi_model(release or NEWEST) if role == LLMAPI else profile(release).models[role]


@cache
def tensor_names(role: str, release: str | None) -> frozenset[str]:
    """NVIDIA's tensors of a model: those that trtserve adds to the LLM API's model say nothing about the release."""
    found = llmapi_model(release or NEWEST, own=False) if role == LLMAPI else model_profile(role, release)
    return frozenset(tensor.name for tensor in (*found.inputs, *found.outputs))


def releases_of(role: str) -> list[str]:
    """The releases that have a model of this role."""
    return [each for each in RELEASES if role != LLMAPI or order(each) >= order(LLMAPI_SINCE)]


def _declared(config: Any) -> frozenset[str]:
    return frozenset(tensor.name for tensor in (*config.input, *config.output))
