"""What an import was asked to do, as JSON beside its name, so that it can be done again with one thing changed."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

from trtserve.artifacts import Engine, load_artifact
from trtserve.errors import ArtifactError, UsageError
from trtserve.pipeline.spec import ImportSpec
from trtserve.specs import BuildSpec, ConvertSpec, RepositorySpec
from trtserve.store import NameRecord

S = TypeVar("S", ConvertSpec, BuildSpec, RepositorySpec)

# Fields of the stages' specs that hold a path.
_SPEC_PATHS = frozenset({"trtllm_examples"})
_PATHS = ("tokenizer", "draft_tokenizer", "engine_out", "out")


def recordable(spec: ImportSpec) -> dict[str, Any]:
    """`spec` in the types of JSON; what a later import cannot repeat (a check, a removal) is left out."""
    paths = {key: None if getattr(spec, key) is None else str(getattr(spec, key)) for key in _PATHS}
    repository = asdict(spec.repository)
    return {
        "source": spec.source,
        "convert": asdict(spec.convert),
        "build": asdict(spec.build),
        "repository": {**repository, "lora": {name: str(folder) for name, folder in spec.repository.lora.items()}},
        "draft": None if spec.draft is None else str(spec.draft.path.absolute()),
        **paths,
    }


def recorded_spec(record: NameRecord) -> ImportSpec | None:
    """What was asked for under this name; None for a record of an older version, or when a draft's engine is gone."""
    content = record.spec
    with suppress(ArtifactError, UsageError, KeyError, TypeError):
        draft = content["draft"]
        repository = content["repository"]
        lora = {name: Path(folder) for name, folder in repository["lora"].items()}
        return ImportSpec(
            source=content["source"],
            convert=_filled(ConvertSpec, content["convert"]),
            build=_filled(BuildSpec, content["build"]),
            repository=_filled(RepositorySpec, {**repository, "lora": lora}),
            draft=None
            if draft is None
            else Engine(path=Path(draft), manifest=load_artifact(Engine, Path(draft)).manifest),
            tokenizer=_path(content["tokenizer"]),
            draft_tokenizer=_path(content["draft_tokenizer"]),
            engine_out=_path(content["engine_out"]),
            out=_path(content["out"]),
        )
    return None


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


def _filled(spec: type[S], content: Mapping[str, Any]) -> S:
    """Fields that a newer version dropped are passed over; those that it added have their defaults."""
    known = {field.name for field in fields(spec)}
    return spec(**{key: _typed(key, value) for key, value in content.items() if key in known})


def _typed(key: str, value: Any) -> Any:
    """JSON has neither tuples nor paths."""
    if key in _SPEC_PATHS and value is not None:
        return Path(value)
    return tuple(value) if isinstance(value, list) else value
