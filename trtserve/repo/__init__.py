"""How a Triton model repository is assembled from an engine and a tokenizer, a draft engine and adapters."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from trtserve.artifacts import Artifact, Engine, Manifest, ModelRepository, fingerprint
from trtserve.import_.sources import parse_source, served_name
from trtserve.progress import SILENT, Progress
from trtserve.repo.adapters import NamedAdapter, resolve_adapters, write_adapters
from trtserve.repo.draft import Draft, resolve_draft
from trtserve.repo.engine import is_embedded, link_engine, read_engine, require_engine_files
from trtserve.repo.facts import draft_facts, repository_facts
from trtserve.repo.group import is_there, publish_models, require_room
from trtserve.repo.listing import tree
from trtserve.repo.models import model_sources, write_model
from trtserve.repo.options import resolve_options, settings_of
from trtserve.repo.placement import VERSION, model_names, placed, root_of
from trtserve.repo.tokenizer import check_tokenizer, require_same_tokens, tokenizer_files
from trtserve.specs import RepositorySpec
from trtserve.store import Store, link_or_copy
from trtserve.triton.config import ConfigOptions
from trtserve.triton.parameters import classes_json
from trtserve.triton.profiles import BLS, CORE, DRAFT, MODELS, PREPROCESSING, Profile

__all__ = [
    "RepositoryPlan",
    "assemble_repository",
    "check_tokenizer",
    "default_name",
    "engine_models",
    "plan_repository",
    "require_fitting",
    "require_room",
    "settings_of",
    "tokenizer_files",
    "tree",
]

SCHEMA = 3


@dataclass(frozen=True, kw_only=True)
class RepositoryPlan:
    """What a repository will hold and where it goes; `manifest` is its own, also where it is added to another one."""

    spec: RepositorySpec
    profile: Profile
    options: ConfigOptions
    manifest: Manifest
    path: Path
    reused: bool
    draft: Draft | None = None
    adapters: tuple[NamedAdapter, ...] = ()
    into: Path | None = None

    @property
    def facts(self) -> Mapping[str, Any]:
        """What its manifest says of it."""
        return self.manifest.facts

    @property
    def fingerprint(self) -> str:
        """Hash of everything that decides its content."""
        return self.manifest.fingerprint

    @property
    def models(self) -> tuple[str, ...]:
        """Names of all its models, the alias last."""
        return engine_models(self.spec, draft=self.draft is not None)


def engine_models(spec: RepositorySpec, *, draft: bool) -> tuple[str, ...]:
    """Names of the models of a repository of an engine, the alias last; `draft`: it has a draft model."""
    names = model_names(spec.suffix)
    return (*(names[model] for model in (*MODELS, *([DRAFT] if draft else []))), spec.name)


def default_name(engine: Artifact) -> str:
    """The alias when none is given: the engine's name, else that of its folder."""
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
) -> RepositoryPlan:
    """Everything that can be known before a file is written; `draft_tokenizer` is the draft model's, where it is known.

    `into` is a repository to which the models are added. UsageError for a name, release or setting that cannot work;
    RepositoryError for an engine or tokenizer folder that is none, for a draft engine or an adapter that does not fit
    the engine, and for names that are taken.
    """
    served_name(spec.name)
    content = _content(engine, tokenizer, spec, draft)
    if draft_tokenizer is not None:
        require_same_tokens(tokenizer, draft_tokenizer)
    place = (out or into or (store or Store()).root) if spec.absolute_paths else None
    digest = _identity(content, engine, tokenizer, spec, place)
    path = (into or out or (store or Store()).destination(ModelRepository, spec.name, digest)).absolute()
    root, second = root_of(spec, path), content.draft
    plan = RepositoryPlan(
        spec=spec,
        profile=content.profile,
        options=placed(content.options, spec.suffix, root),
        manifest=_manifest(spec, digest, engine, draft, content.facts),
        path=path,
        reused=False,
        draft=None if second is None else replace(second, options=placed(second.options, spec.suffix, root)),
        adapters=content.adapters,
        into=None if into is None else path,
    )
    return replace(plan, reused=is_there(path, plan.models, plan.manifest, into=into is not None))


@dataclass(frozen=True, kw_only=True)
class _Content:
    """What a repository says, wherever it lies."""

    profile: Profile
    options: ConfigOptions
    draft: Draft | None
    adapters: tuple[NamedAdapter, ...]
    facts: Mapping[str, Any]


def _content(engine: Engine, tokenizer: Path, spec: RepositorySpec, draft: Engine | None) -> _Content:
    config = read_engine(engine.path)
    tokenizer_files(tokenizer)
    require_engine_files(engine.path, config, embedded=is_embedded(config))
    table, options = resolve_options(spec, config, tokenizer=tokenizer)
    options, second = resolve_draft(spec, table, options, config, draft)
    adapters = resolve_adapters(spec.lora, config)
    facts = repository_facts(spec, table, options, config, engine)
    facts |= {"draft": second.facts if second else None, "adapters": {each.name: each.task_id for each in adapters}}
    if second is not None:
        facts["core_models"] |= draft_facts(spec, second, read_engine(second.engine.path))
    return _Content(profile=table, options=options, draft=second, adapters=adapters, facts=facts)


def _identity(content: _Content, engine: Engine, tokenizer: Path, spec: RepositorySpec, place: Path | None) -> str:
    """Hash of everything that decides the files; `place` where paths are absolute."""
    return fingerprint(
        stage="repo",
        schema=SCHEMA,
        spec=asdict(replace(spec, copy=False, lora={})),
        place=str(place),
        engine=engine.fingerprint,
        draft=content.draft.engine.fingerprint if content.draft else None,
        adapters=content.facts["adapters"],
        tokenizer=_digest(tokenizer_files(tokenizer)),
        models=_digest(model_sources()),
        classes=[classes_json(model, content.profile.release) for model in MODELS],
    )


def _manifest(
    spec: RepositorySpec, digest: str, engine: Engine, draft: Engine | None, facts: Mapping[str, Any]
) -> Manifest:
    return Manifest(
        kind="repository",
        name=spec.name,
        fingerprint=digest,
        inputs={"engine": engine.fingerprint, **({"draft engine": draft.fingerprint} if draft else {})},
        spec={**asdict(spec), "lora": {name: str(folder) for name, folder in spec.lora.items()}},
        facts=facts,
    )


def require_fitting(config: Mapping[str, Any], spec: RepositorySpec, *, draft: Engine | None = None) -> None:
    """Raise what stops the repository of an engine that may not exist yet; `config` is what its config.json will say.

    UsageError for a release or setting that cannot work, RepositoryError for a draft engine or adapter that does not.
    """
    table, options = resolve_options(spec, config)
    resolve_draft(spec, table, options, config, draft)
    resolve_adapters(spec.lora, config)


def assemble_repository(
    engine: Engine,
    tokenizer: Path,
    spec: RepositorySpec,
    *,
    draft: Engine | None = None,
    draft_tokenizer: Path | None = None,
    out: Path | None = None,
    into: Path | None = None,
    store: Store | None = None,
    progress: Progress = SILENT,
) -> ModelRepository:
    """Make the repository of `engine`: the five models and the alias, relocatable as a whole.

    `tokenizer` is a Hugging Face folder, `draft` the engine of a second core model; the models are added to the
    repository `into` where one is given. Engine files are hard links unless `spec.copy`. Raises what `plan_repository`
    raises, and RepositoryError for a tokenizer that does not work.
    """
    plan = plan_repository(
        engine, tokenizer, spec, draft=draft, draft_tokenizer=draft_tokenizer, out=out, into=into, store=store
    )

    def produce(folder: Path) -> None:
        _tell(plan, progress)
        _write_models(folder, plan)
        names = model_names(spec.suffix)
        link_engine(engine.path, folder / names[CORE] / VERSION, copy=spec.copy)
        write_adapters(plan.adapters, folder, spec.suffix)
        own = folder / names[PREPROCESSING] / VERSION / "tokenizer"
        for file in tokenizer_files(tokenizer):
            link_or_copy(file, own / file.name, copy=True)
        check_tokenizer(own, plan.facts["vocab_size"], progress)

    return publish_models(plan.path, plan.models, plan.manifest, produce, into=into is not None)


def _tell(plan: RepositoryPlan, progress: Progress) -> None:
    progress.step(f"Assemble model repository {plan.spec.name}")
    if ignored := plan.facts["without_meaning"]:
        progress.step(f"Without meaning on the {plan.facts['runtime']} runtime: {', '.join(ignored)}")
    if plan.draft and plan.draft.facts["ends_before_target"]:
        longest = plan.draft.facts["limits"]["max_seq_len"]
        progress.warn(f"The draft engine ends at {longest} tokens; what comes after that is generated without drafts.")


def _write_models(folder: Path, plan: RepositoryPlan) -> None:
    embedded, names = plan.facts["runtime"] == "openvino", model_names(plan.spec.suffix)
    for model in MODELS:
        write_model(folder / names[model], model, plan.profile, plan.options, embedded=embedded)
    write_model(folder / plan.spec.name, BLS, plan.profile, plan.options, embedded=embedded)
    if plan.draft is not None:
        write_model(folder / names[DRAFT], CORE, plan.profile, plan.draft.options, embedded=embedded)
        link_engine(plan.draft.engine.path, folder / names[DRAFT] / VERSION, copy=plan.spec.copy)


def _digest(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        content = path.read_bytes()
        digest.update(f"{path.parent.parent.name}/{path.name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()
