"""Another number of ranks for an imported model: convert, build and repo again with the same settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from trtserve.artifacts import ModelRepository
from trtserve.errors import UsageError
from trtserve.pipeline import ImportSpec, import_to_repository
from trtserve.pipeline.recorded import recorded_spec
from trtserve.progress import SILENT, Progress
from trtserve.specs import ServerSpec
from trtserve.start import wants_rebuild
from trtserve.store import NameRecord, Store
from trtserve.triton.preflight import inspect_repository


def repository_for(
    repository: ModelRepository,
    spec: ServerSpec,
    *,
    rebuild: bool = True,
    store: Store | None = None,
    progress: Progress = SILENT,
) -> ModelRepository:
    """The repository itself where its engine fits `spec`; else the one of an engine with --world-size ranks.

    That needs a repository that `import` made: its settings are taken again, with another tensor parallelism. What
    exists is reused, and the import's name keeps its meaning. UsageError when `rebuild` is False. Every other
    repository is returned as it is, for `start` to refuse it.
    """
    store = store or Store()
    if spec.world_size is None or not wants_rebuild(served := inspect_repository(repository), spec):
        return repository
    record = next((each for each in store.recorded() if Path(each.repository) == repository.path.absolute()), None)
    made = None if record is None else recorded_spec(record)
    if record is None or made is None:
        return repository
    changed = with_world_size(made, spec.world_size)
    size = f"tp {changed.convert.tp_size}" + (f" × pp {made.convert.pp_size}" if made.convert.pp_size > 1 else "")
    if not rebuild:
        raise UsageError(
            f"{record.name} was imported for {served.world_size} rank(s); --world-size {spec.world_size} needs it "
            f"converted and built again ({size}).",
            hint=f"Leave --no-rebuild and --dry-run out, or do it by hand: {import_command(record, changed)}",
        )
    progress.step(
        f"World size {spec.world_size}: {record.name} was imported for {served.world_size} rank(s), so it is converted "
        f"and built again with {size}; what exists is reused."
    )
    return import_to_repository(changed, store=store, record=False, progress=progress)


def with_world_size(spec: ImportSpec, world_size: int) -> ImportSpec:
    """The import with `world_size` ranks: pipeline stages stay where they divide it, tensor parallelism follows."""
    stages = spec.convert.pp_size if world_size % spec.convert.pp_size == 0 else 1
    convert = replace(spec.convert, tp_size=world_size // stages, pp_size=stages, moe_tp_size=None, moe_ep_size=None)
    # The folders that the user named hold the engine and repository of the import.
    return replace(spec, convert=convert, engine_out=None, out=None, verify=None)


def import_command(record: NameRecord, spec: ImportSpec) -> str:
    """The command that imports the model again with these sizes."""
    stages = f" --pp-size {spec.convert.pp_size}" if spec.convert.pp_size > 1 else ""
    return (
        f"trtserve import {record.source} --name {record.name} --tp-size {spec.convert.tp_size}{stages} (and its flags)"
    )
