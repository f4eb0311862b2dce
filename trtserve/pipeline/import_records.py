"""Records of imports: each keeps its spec as JSON, so that the import can be repeated with one setting changed."""

from __future__ import annotations

import datetime
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trtserve.artifacts import (
    Engine,
    Model,
    ModelRepository,
    load_artifact,
)
from trtserve.errors import ArtifactError, UsageError
from trtserve.pipeline.import_spec import ImportSpec
from trtserve.pipeline.model import ModelPlan
from trtserve.progress import Progress
from trtserve.specs import BuildSpec, ConvertSpec, RepositorySpec
from trtserve.specs.command_line import spec_of
from trtserve.store import NameRecord, Store
from trtserve.store.sources import DEMO

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
                    f"{record.name} now means {record.repository}; the older build {old.repository} is kept until "
                    f"`trtserve remove {record.name}`"
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
            draft=None
            if draft is None
            else Engine(path=Path(draft), manifest=load_artifact(Engine, Path(draft)).manifest),
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
    if model.revision is None:
        return f"local:{source.location}"
    return f"hf:{source.location}@{model.revision.commit}"


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path.expanduser().absolute())


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)
