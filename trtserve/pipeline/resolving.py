"""From the options of an import, which name models and engines, to its spec, which holds their folders."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from trtserve.artifacts import Model
from trtserve.executor.runtimes import choose_runtime
from trtserve.pipeline.importing import ImportSpec, engine_destination
from trtserve.progress import SILENT, Progress
from trtserve.repository.adapters import find_adapters
from trtserve.repository.draft import find_draft
from trtserve.specs import (
    BuildSpec,
    CheckSpec,
    ConvertSpec,
    RepositorySpec,
)
from trtserve.store import Store
from trtserve.store.sources import parse_source


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
