"""Triton model repositories: planned from an engine, a tokenizer, a draft engine and adapters, then written."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from trtserve.artifacts import (
    Artifact,
    Engine,
    Manifest,
    ModelRepository,
    fingerprint,
)
from trtserve.executor.loaders import is_embedded_runtime
from trtserve.progress import Progress
from trtserve.repository.adapters import NamedAdapter, resolve_adapters, write_adapters
from trtserve.repository.config import ConfigOptions
from trtserve.repository.draft import Draft, resolve_draft
from trtserve.repository.engine import (
    link_engine,
    own_files,
    read_engine,
    require_engine_files,
)
from trtserve.repository.manifest import draft_facts, repository_facts
from trtserve.repository.names import (
    VERSION,
    model_names,
    placed,
    root_of,
)
from trtserve.repository.options import resolve_options, settings_of
from trtserve.repository.parameters import classes_json
from trtserve.repository.profiles import (
    BLS,
    CORE,
    DRAFT,
    MODELS,
    PREPROCESSING,
    Profile,
)
from trtserve.repository.programs import program_digest, write_model
from trtserve.repository.publishing import (
    RepositoryPlan,
    assemble_repository,
    exists,
    require_addable_spec,
)
from trtserve.repository.tokenizer import check_tokenizer, own_tokenizer_files, require_same_tokens
from trtserve.repository.tree import tree
from trtserve.specs import RepositorySpec
from trtserve.store import Store, link_or_copy
from trtserve.store.sources import parse_source, served_name

__all__ = [
    "EngineRepositoryPlan",
    "RepositoryPlan",
    "assemble_repository",
    "check_tokenizer",
    "default_name",
    "engine_models",
    "own_tokenizer_files",
    "plan_repository",
    "require_addable_spec",
    "require_fitting",
    "settings_of",
    "tree",
]

SCHEMA = 4


@dataclass(frozen=True, kw_only=True)
class EngineRepositoryPlan(RepositoryPlan):
    """The repository of an engine: the five models and the alias, relocatable as a unit."""

    engine: Engine
    tokenizer: Path  # a Hugging Face folder
    profile: Profile
    options: ConfigOptions
    draft: Draft | None = None
    adapters: tuple[NamedAdapter, ...] = ()

    @property
    def models(self) -> tuple[str, ...]:
        return engine_models(self.spec, draft=self.draft is not None)

    def write(self, folder: Path, progress: Progress) -> None:
        """Write the models; engine files are hard links unless `spec.copy`."""
        progress.step(f"Assembling model repository {self.spec.name}")
        if ignored := self.facts["ignored_parameters"]:
            progress.step(f"Ignored by the {self.facts['runtime']} runtime: {', '.join(ignored)}")
        if self.draft and self.draft.facts["ends_before_target"]:
            longest = self.draft.facts["limits"]["max_seq_len"]
            progress.warn(f"The draft engine ends at {longest} tokens; later tokens are generated without drafts.")
        embedded, names = is_embedded_runtime(self.facts["runtime"]), model_names(self.spec.suffix)
        for model in MODELS:
            write_model(folder / names[model], model, self.profile, self.options, embedded=embedded)
        write_model(folder / self.spec.name, BLS, self.profile, self.options, embedded=embedded)
        link_engine(self.engine.path, folder / names[CORE] / VERSION, copy=self.spec.copy)
        if self.draft is not None:
            write_model(folder / names[DRAFT], CORE, self.profile, self.draft.options, embedded=embedded)
            link_engine(self.draft.engine.path, folder / names[DRAFT] / VERSION, copy=self.spec.copy)
        write_adapters(self.adapters, folder, self.spec.suffix)
        own = folder / names[PREPROCESSING] / VERSION / "tokenizer"
        for file in own_tokenizer_files(self.tokenizer):
            link_or_copy(file, own / file.name, copy=True)
        check_tokenizer(own, self.facts["vocab_size"], progress)


def engine_models(spec: RepositorySpec, *, draft: bool) -> tuple[str, ...]:
    """Return the names of the models of an engine's repository, the alias last."""
    names = model_names(spec.suffix)
    return (*(names[model] for model in (*MODELS, *([DRAFT] if draft else []))), spec.name)


def default_name(engine: Artifact) -> str:
    """Return the alias when none is given: the engine's name, else that of its folder."""
    if engine.manifest is not None:
        return served_name(engine.manifest.name)
    return parse_source(f"local:{engine.path}").name


def plan_repository(
    engine: Engine,
    tokenizer: Path,
    spec: RepositorySpec,
    *,
    draft: Engine | None = None,
    draft_tokenizer: Path | None = None,
    out: Path | None = None,
    into: Path | None = None,
    store: Store | None = None,
) -> EngineRepositoryPlan:
    """Plan the repository of `engine`: its configurations, manifest and destination.

    `tokenizer` is a Hugging Face folder, `draft` the engine of a second core model, and `draft_tokenizer` the folder of
    its tokenizer, if known. `into` is a repository to add the models to. Raises UsageError for a name, release or
    setting that cannot work, and for links to files elsewhere. Raises RepositoryError for a folder without an engine or
    tokenizer, for a draft engine or an adapter that does not fit the engine, and for names that are taken.
    """
    served_name(spec.name)
    config = read_engine(engine.path)
    tokens = own_tokenizer_files(tokenizer)
    require_engine_files(engine.path, config)
    for each in (engine, *([draft] if draft else [])):
        own_files(each.path)
    profile, options = resolve_options(spec, config, tokenizer=tokenizer)
    options, second = resolve_draft(spec, profile, options, config, draft)
    adapters = resolve_adapters(spec.lora, config)
    facts = repository_facts(spec, profile, options, config, engine)
    facts |= {"draft": second.facts if second else None, "adapters": {each.name: each.task_id for each in adapters}}
    if second is not None:
        facts["core_models"] |= draft_facts(spec, second, read_engine(second.engine.path))
    if draft_tokenizer is not None:
        require_same_tokens(tokenizer, draft_tokenizer)
    place = (out or into or (store or Store()).root) if spec.absolute_paths else None
    digest = fingerprint(
        stage="repo",
        schema=SCHEMA,
        spec=asdict(replace(spec, copy=False, lora={})),
        place=str(place),  # part of the content where paths are absolute
        engine=engine.fingerprint,
        draft=second.engine.fingerprint if second else None,
        adapters=facts["adapters"],
        tokenizer=_digest(tokens),
        models=program_digest(MODELS),
        classes=[classes_json(model, profile.release) for model in MODELS],
    )
    manifest = Manifest(
        kind="repository",
        name=spec.name,
        fingerprint=digest,
        inputs={"engine": engine.fingerprint, **({"draft engine": draft.fingerprint} if draft else {})},
        spec={**asdict(spec), "lora": {name: str(folder) for name, folder in spec.lora.items()}},
        facts=facts,
    )
    path = (into or out or (store or Store()).destination(ModelRepository, spec.name, digest)).absolute()
    root = root_of(spec, path)
    models = engine_models(spec, draft=second is not None)
    return EngineRepositoryPlan(
        spec=spec,
        manifest=manifest,
        path=path,
        reused=exists(path, models, manifest, added=into is not None),
        added=into is not None,
        engine=engine,
        tokenizer=tokenizer,
        profile=profile,
        options=placed(options, spec.suffix, root),
        draft=None if second is None else replace(second, options=placed(second.options, spec.suffix, root)),
        adapters=adapters,
    )


def require_fitting(config: Mapping[str, Any], spec: RepositorySpec, *, draft: Engine | None = None) -> None:
    """Check the settings against an engine that need not exist yet; `config` is the config.json that it will have.

    Raises UsageError for a release or setting that cannot work and RepositoryError for a draft engine or adapter that
    does not.
    """
    table, options = resolve_options(spec, config)
    resolve_draft(spec, table, options, config, draft)
    resolve_adapters(spec.lora, config)


def _digest(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()
