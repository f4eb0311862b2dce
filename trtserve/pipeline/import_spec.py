"""The options of an import: resolved from names to folders, and recorded as JSON so that it can be repeated."""

from __future__ import annotations

import datetime
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from trtserve.artifacts import Engine, Model, ModelRepository, load_artifact
from trtserve.errors import ArtifactError, UsageError
from trtserve.executor.runtimes import choose_runtime
from trtserve.nvidia.releases.installed import installed
from trtserve.pipeline.model import ModelPlan
from trtserve.progress import SILENT, Progress
from trtserve.repository.adapters import find_adapters
from trtserve.repository.draft import find_draft
from trtserve.specs import BuildSpec, CheckSpec, ConvertSpec, RepositorySpec
from trtserve.specs.command_line import spec_of
from trtserve.store import NameRecord, Store
from trtserve.store.sources import DEMO, parse_source

ENGINE_DEST_PATH = "ENGINE_DEST_PATH"
# Limits of a build that the LLM has keywords for, under the same names.
_LIMITS = ("max_batch_size", "max_seq_len", "max_num_tokens")
_PARALLEL = ("tp_size", "pp_size", "moe_tp_size", "moe_ep_size")
# These may come from the machine's environment, for the sake of other converters.
_IGNORED = ("gpu_sm", "trtllm_examples", "trtllm_version")


@dataclass(frozen=True, kw_only=True)
class ImportSpec:
    """The options of all stages of an import."""

    source: str
    convert: ConvertSpec
    build: BuildSpec
    repository: RepositorySpec  # its name is used for all artefacts
    tokenizer: Path | None = None  # a Hugging Face folder; None: the model's own
    draft: Engine | None = None  # engine of a draft model
    draft_tokenizer: Path | None = None  # folder of the draft model's tokenizer, if known
    engine_out: Path | None = None  # folder of the engine; None: in the store
    out: Path | None = None  # folder of the repository; None: in the store
    into: Path | None = None  # a repository to add the models to
    discard_intermediate: bool = False  # remove the checkpoint when the repository is complete
    verify: CheckSpec | None = None  # compare the checkpoint with the model before the build, even a reused one

    @property
    def name(self) -> str:
        """Name of all artefacts, and of the served model."""
        return self.repository.name

    @property
    def any_architecture(self) -> bool:
        """Whether NVIDIA's tools convert or load the model, so that our converter need not know it."""
        runtime = choose_runtime(self.build.runtime, container=self.build.container)
        return self.convert.converter == "upstream" or bool(runtime.folder_loader)


def resolve_import(
    source: str,
    *,
    name: str | None = None,
    convert: ConvertSpec,
    build: BuildSpec,
    repository: RepositorySpec,
    tokenizer: str | None = None,
    draft: str | None = None,
    out: Path | None = None,
    into: Path | None = None,
    discard_intermediate: bool = False,
    verify: bool = False,
    store: Store | None = None,
    progress: Progress = SILENT,
) -> ImportSpec:
    """Return the import of `source`, with the folders that its names stand for.

    `tokenizer` is a folder or the name of an imported model, `draft` a folder or the name of an engine. The embedded
    runtimes use no version of TensorRT-LLM, so theirs is removed. Raises ModelNotFoundError for an unknown name.
    """
    store = store or Store()
    name = parse_source(source, name=name).name
    engine, draft_tokenizer = find_draft(draft, store, progress)
    runtime = choose_runtime(build.runtime, container=build.container)
    return ImportSpec(
        source=source,
        convert=runtime.without_unused(convert),
        build=build,
        repository=replace(repository, name=name, lora=find_adapters(repository, store)),
        tokenizer=store.find(Model, tokenizer, progress=progress).path if tokenizer else None,
        draft=engine,
        draft_tokenizer=draft_tokenizer,
        engine_out=engine_destination(name),
        out=out,
        into=into,
        discard_intermediate=discard_intermediate,
        verify=CheckSpec() if verify else None,
    )


def engine_destination(name: str) -> Path | None:
    """Return `$ENGINE_DEST_PATH/<name>`, where engines outlive the store, or None when the variable is not set."""
    folder = os.environ.get(ENGINE_DEST_PATH)
    return (Path(folder).expanduser() / name).absolute() if folder else None


def llmapi_repository_spec(spec: ImportSpec) -> RepositorySpec:
    """Return the repository's spec: limits and expert parallelism become keywords of the LLM.

    Raises UsageError for options that only engines, conversions and repositories of engines have.
    """
    _require_defaults(spec.convert, (*_PARALLEL, *_IGNORED))
    _require_defaults(spec.build, (*_LIMITS, "runtime", "trtllm_version"))
    for name, flag in (("tokenizer", "--tokenizer"), ("draft", "--draft-engine"), ("verify", "--verify")):
        if getattr(spec, name) is not None:
            raise _meaningless(flag)
    keywords = {name: getattr(spec.build, name) for name in _LIMITS}
    keywords["moe_expert_parallel_size"] = spec.convert.moe_ep_size
    keywords["moe_tensor_parallel_size"] = spec.convert.moe_tp_size
    found = installed()
    return replace(
        spec.repository,
        settings={
            **{name: str(value) for name, value in keywords.items() if value is not None},
            **spec.repository.settings,
        },
        trtllm_version=spec.repository.trtllm_version or (None if found is None else found.version),
    )


def vllm_repository_spec(spec: ImportSpec) -> RepositorySpec:
    """Return the repository's spec. Raises UsageError for what a model that is served as it is cannot have."""
    for name, flag in (("draft", "--draft-engine"), ("verify", "--verify")):
        if getattr(spec, name) is not None:
            raise UsageError(f"{flag} has no meaning with --runtime vllm: nothing is converted or built.")
    return spec.repository


def _require_defaults(spec: BuildSpec | ConvertSpec, taken: tuple[str, ...]) -> None:
    default = type(spec)()
    for field in fields(spec):
        if field.name not in taken and getattr(spec, field.name) != getattr(default, field.name):
            raise _meaningless(f"--{field.name.replace('_', '-')}")


def _meaningless(flag: str) -> UsageError:
    return UsageError(
        f"{flag} has no meaning with --runtime llmapi: nothing is converted or built.",
        hint="Keywords of the LLM are given with --set, such as --set max_seq_len=4096.",
    )


# Fields of the stages' specs that hold paths.
_SPEC_PATHS = frozenset({"trtllm_examples"})
_PATHS = ("tokenizer", "draft_tokenizer", "engine_out", "out", "into")


def record_of(
    spec: ImportSpec,
    plan: ModelPlan,
    model: Model,
    repository: ModelRepository,
    *,
    checkpoint: Path | None = None,
    engine: Path | None = None,
) -> NameRecord:
    """Return the record of an import; for the LLM API without checkpoint and engine.

    Its source is pinned to the commit of `plan`, so that repeating the import gives the same model even if a branch
    moves.
    """
    revision = f"@{plan.source.revision}" if plan.source.revision else ""
    return NameRecord(
        name=spec.name,
        source="demo" if plan.source.kind == "demo" else plan.source.location + revision,
        model=str(model.path),
        checkpoint=str(checkpoint or ""),
        engine=_text(engine) or "",
        repository=str(repository.path.absolute()),
        imported=datetime.datetime.now(datetime.timezone.utc).isoformat(),
        spec={**as_json(spec), "source": pinned_source(plan)},
    )


def take_name(record: NameRecord, store: Store, progress: Progress) -> None:
    """Save the record of an import, and report what the name referred to before."""
    # An unreadable record is replaced like any other.
    with suppress(ArtifactError):
        for old in store.recorded():
            if old.name != record.name:
                continue
            if old.source != record.source:
                progress.warn(f"The name {record.name} meant {old.source} before; use --name to keep two models apart.")
            if old.repository != record.repository and Path(old.repository).is_dir():
                progress.step(
                    f"{record.name} now means {record.repository}; `trtserve prune` removes the older build "
                    f"{old.repository}"
                )
    store.record(record)


def as_json(spec: ImportSpec) -> dict[str, Any]:
    """Return `spec` as JSON with absolute paths, without one-time actions (verify, discard)."""
    paths = {key: _text(getattr(spec, key)) for key in _PATHS}
    convert = asdict(spec.convert)
    return {
        "source": spec.source,
        "convert": {**convert, **{key: _text(convert[key]) for key in _SPEC_PATHS}},
        "build": asdict(spec.build),
        "repository": {
            **asdict(spec.repository),
            "lora": {name: _text(folder) for name, folder in spec.repository.lora.items()},
        },
        "draft": None if spec.draft is None else str(spec.draft.path.absolute()),
        **paths,
    }


def recorded_spec(record: NameRecord) -> ImportSpec | None:
    """Return the spec of an import, or None for a record of an older version, or when a draft engine is gone."""
    content = record.spec
    with suppress(ArtifactError, UsageError, KeyError, TypeError):
        draft = content["draft"]
        return ImportSpec(
            source=content["source"],
            convert=spec_of(ConvertSpec, content["convert"]),
            build=spec_of(BuildSpec, content["build"]),
            repository=spec_of(RepositorySpec, content["repository"]),
            draft=None if draft is None else load_artifact(Engine, Path(draft)),
            tokenizer=_path(content["tokenizer"]),
            draft_tokenizer=_path(content["draft_tokenizer"]),
            engine_out=_path(content["engine_out"]),
            out=_path(content["out"]),
            into=_path(content.get("into")),
        )
    return None


def pinned_source(model: ModelPlan) -> str:
    """Return a source that always refers to these files."""
    source = model.source
    if source.kind == "demo":
        return DEMO
    if source.kind == "bucket":
        return source.location
    if model.revision is None:
        return f"local:{source.location}"
    return f"hf:{source.location}@{model.revision.commit}"


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path.expanduser().absolute())


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)
