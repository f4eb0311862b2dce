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
from trtserve.repo.engine import is_embedded, limits_of, link_engine, read_engine, require_engine_files
from trtserve.repo.listing import tree
from trtserve.repo.models import model_sources, write_model
from trtserve.repo.options import TOKENIZER, VERSION, resolve_options, settings_of
from trtserve.repo.tokenizer import check_tokenizer, require_same_tokens, tokenizer_files
from trtserve.specs import RepositorySpec
from trtserve.store import Store, link_or_copy, publish, reusable
from trtserve.triton.config import ConfigOptions
from trtserve.triton.parameters import classes_json, set_without_meaning
from trtserve.triton.profiles import BLS, CORE, DRAFT, MODELS, Profile

__all__ = [
    "RepositoryPlan",
    "assemble_repository",
    "check_tokenizer",
    "default_name",
    "plan_repository",
    "require_fitting",
    "settings_of",
    "tokenizer_files",
    "tree",
]

SCHEMA = 2


@dataclass(frozen=True, kw_only=True)
class RepositoryPlan:
    """What a repository will hold and where it goes; `facts` end in its manifest."""

    spec: RepositorySpec
    profile: Profile
    options: ConfigOptions
    facts: dict[str, Any]
    fingerprint: str
    path: Path
    reused: bool
    draft: Draft | None = None
    adapters: tuple[NamedAdapter, ...] = ()

    @property
    def models(self) -> tuple[str, ...]:
        """Names of all its models, the alias last."""
        return (*MODELS, *([DRAFT] if self.draft else []), self.spec.name)


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
    store: Store | None = None,
) -> RepositoryPlan:
    """Everything that can be known before a file is written; `draft_tokenizer` is the draft model's, where it is known.

    UsageError for a name, release or setting that cannot work; RepositoryError for an engine or tokenizer folder
    that is none, and for a draft engine or an adapter that does not fit the engine.
    """
    served_name(spec.name)
    config = read_engine(engine.path)
    files = tokenizer_files(tokenizer)
    require_engine_files(engine.path, config, embedded=is_embedded(config))
    table, options = resolve_options(spec, config, tokenizer=tokenizer)
    if draft_tokenizer is not None:
        require_same_tokens(tokenizer, draft_tokenizer)
    options, second = resolve_draft(spec, table, options, config, draft)
    adapters = resolve_adapters(spec.lora, config)
    built = engine.manifest.facts if engine.manifest is not None else {}
    facts = {**_facts(spec, table, options, config), "machine": built.get("machine", {})}
    facts |= {"draft": second.facts if second else None, "adapters": {each.name: each.task_id for each in adapters}}
    digest = fingerprint(
        stage="repo",
        schema=SCHEMA,
        spec=asdict(replace(spec, copy=False, lora={})),
        engine=engine.fingerprint,
        draft=draft.fingerprint if draft else None,
        adapters=facts["adapters"],
        tokenizer=_digest(files),
        models=_digest(model_sources()),
        classes=[classes_json(model, table.release) for model in MODELS],
    )
    path = (out or (store or Store()).destination(ModelRepository, spec.name, digest)).absolute()
    return RepositoryPlan(
        spec=spec,
        profile=table,
        options=options,
        facts=facts,
        fingerprint=digest,
        path=path,
        reused=reusable(ModelRepository, path, digest) is not None,
        draft=second,
        adapters=adapters,
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
    store: Store | None = None,
    progress: Progress = SILENT,
) -> ModelRepository:
    """Make the repository of `engine`: the five models and the alias, relocatable as a whole.

    `tokenizer` is a Hugging Face folder, `draft` the engine of a second core model. Engine files are hard links unless
    `spec.copy`. Raises what `plan_repository` raises, and RepositoryError for a tokenizer that does not work.
    """
    plan = plan_repository(engine, tokenizer, spec, draft=draft, draft_tokenizer=draft_tokenizer, out=out, store=store)
    manifest = Manifest(
        kind="repository",
        name=spec.name,
        fingerprint=plan.fingerprint,
        inputs={"engine": engine.fingerprint, **({"draft engine": draft.fingerprint} if draft else {})},
        spec={**asdict(spec), "lora": {name: str(folder) for name, folder in spec.lora.items()}},
        facts=plan.facts,
    )

    def produce(folder: Path) -> None:
        _tell(plan, progress)
        _write_models(folder, plan)
        link_engine(engine.path, folder / CORE / VERSION, copy=spec.copy)
        write_adapters(plan.adapters, folder)
        for file in tokenizer_files(tokenizer):
            link_or_copy(file, folder / TOKENIZER / file.name, copy=True)
        check_tokenizer(folder / TOKENIZER, plan.facts["vocab_size"], progress)

    return publish(ModelRepository, plan.path, manifest, produce)


def _tell(plan: RepositoryPlan, progress: Progress) -> None:
    progress.step(f"Assemble model repository {plan.spec.name}")
    if ignored := plan.facts["without_meaning"]:
        progress.step(f"Without meaning on the {plan.facts['runtime']} runtime: {', '.join(ignored)}")
    if plan.draft and plan.draft.facts["ends_before_target"]:
        longest = plan.draft.facts["limits"]["max_seq_len"]
        progress.warn(f"The draft engine ends at {longest} tokens; what comes after that is generated without drafts.")


def _write_models(folder: Path, plan: RepositoryPlan) -> None:
    embedded = plan.facts["runtime"] == "openvino"
    for model in (*MODELS, plan.spec.name):
        template = BLS if model == plan.spec.name else model
        write_model(folder / model, template, plan.profile, plan.options, embedded=embedded)
    if plan.draft is not None:
        write_model(folder / DRAFT, CORE, plan.profile, plan.draft.options, embedded=embedded)
        link_engine(plan.draft.engine.path, folder / DRAFT / VERSION, copy=plan.spec.copy)


def _facts(spec: RepositorySpec, table: Profile, options: ConfigOptions, config: Mapping[str, Any]) -> dict[str, Any]:
    own = config.get("trtserve", {})
    model = config.get("pretrained_config", {})
    return {
        "alias": spec.name,
        "streaming": spec.streaming,
        "release": table.release,
        "all_releases": table.union,
        "without_meaning": _without_meaning(table, options) if is_embedded(config) else [],
        "runtime": own.get("runtime", "tensorrt_llm"),
        "triton_max_batch_size": options.max_batch_size,
        "limits": limits_of(config),
        "dtype": model.get("dtype"),
        "compute_precision": own.get("compute_precision", model.get("dtype")),
        "kv_precision": own.get("kv_precision"),
        "max_tokens_in_paged_kv_cache": options.parameters[CORE].get("max_tokens_in_paged_kv_cache"),
        "kv_cache_free_gpu_mem_fraction": options.parameters[CORE].get("kv_cache_free_gpu_mem_fraction"),
        "vocab_size": model.get("vocab_size"),
        "mapping": model.get("mapping", {}),
    }


def _without_meaning(table: Profile, options: ConfigOptions) -> list[str]:
    """Parameters that are set and that the embedded executor ignores, those of the core model by their bare names."""
    found = {model: set_without_meaning(model, given, table.release) for model, given in options.parameters.items()}
    return [name if model == CORE else f"{model}.{name}" for model, names in found.items() for name in names]


def _digest(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        content = path.read_bytes()
        digest.update(f"{path.parent.parent.name}/{path.name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()
